"""Analyses of finished runs: replay, explanations, comparisons and privacy attacks."""
