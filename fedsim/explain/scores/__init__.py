"""Scores of relevances."""
