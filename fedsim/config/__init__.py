"""Experiment files: reading, checking, and components by name."""
