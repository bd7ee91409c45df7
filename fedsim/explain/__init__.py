"""Explanations of models, and what they are worth."""

from fedsim.explain.explainer import ExplainedData, ExplainedModel, Explainer, Explanation

__all__ = ["ExplainedData", "ExplainedModel", "Explainer", "Explanation"]
