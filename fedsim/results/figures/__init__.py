"""Figures of results: for reports, notebooks and papers."""
