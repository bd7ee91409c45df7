"""Runs: prepared, launched, followed and extended."""
