"""Explanations of models, and what they are worth."""
