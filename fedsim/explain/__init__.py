"""Explanations of models, and what they are worth."""

from fedsim.explain import attribution as _attribution  # they fill the registry
from fedsim.explain import mimic as _mimic
from fedsim.explain import rationales as _rationales
from fedsim.explain import rules as _rules
from fedsim.explain import sage as _sage
from fedsim.explain import shared_images as _shared_images
from fedsim.explain import tasks as _tasks
from fedsim.explain.explainer import (
    ExplainedData,
    ExplainedModel,
    Explainer,
    Explanation,
    explainers,
)

__all__ = ["ExplainedData", "ExplainedModel", "Explainer", "Explanation", "explainers"]
del _attribution, _mimic, _rationales, _rules, _sage, _shared_images, _tasks
