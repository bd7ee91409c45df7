"""Objectives: the training loss and the scores."""

from fedsim.data import Dataset
from fedsim.objectives.classification import Classification
from fedsim.objectives.concepts import ConceptRegression, Concepts
from fedsim.objectives.objective import (
    VALIDATION,
    Batch,
    FurtherMetric,
    HeldOut,
    Metric,
    Objective,
    Slice,
    Totals,
    evaluate,
    evaluate_slices,
    merged,
    objectives,
    of_validation,
    scores_of,
)
from fedsim.objectives.rationales import Rationales
from fedsim.objectives.regression import Regression

__all__ = [
    "VALIDATION",
    "Batch",
    "Classification",
    "ConceptRegression",
    "Concepts",
    "FurtherMetric",
    "HeldOut",
    "Metric",
    "Objective",
    "Rationales",
    "Regression",
    "Slice",
    "Totals",
    "default_objective",
    "evaluate",
    "evaluate_slices",
    "merged",
    "objectives",
    "of_validation",
    "scores_of",
]


def default_objective(data: Dataset) -> Objective:
    """What networks learn from data unless the experiment or the model says otherwise."""
    return Classification() if data.classes else Regression()
