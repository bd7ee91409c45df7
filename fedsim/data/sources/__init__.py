"""Data sets by name, and their files."""
