"""Objectives: what is minimised and what is scored."""

from fedsim.objectives.objective import (
    Batch,
    Metric,
    Objective,
    Totals,
    evaluate,
    merged,
    objectives,
)

__all__ = ["Batch", "Metric", "Objective", "Totals", "evaluate", "merged", "objectives"]
