"""Cosine of a client's update and the mean of all: contributions without any evaluation.

The cosine gradient Shapley value of Xu et al., Gradient driven rewards to guarantee fairness in
collaborative machine learning, NeurIPS 2021, in the form that they compute (their Theorem 1).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedsim.analysis.contributions.updates import Columns, RoundUpdates, Score, Wide


def cosine(rounds: Iterator[RoundUpdates], worth: Score, rng: np.random.Generator) -> Columns:
    """The mean over a client's rounds of cos(Δ_k, Σ_j n_j Δ_j / Σ_j n_j), times the rounds' share.

    Not in units of a score; `worth` and `rng` are not used.
    """
    found: dict[int, float] = {}
    count = 0
    for round in rounds:
        mean, count = round.change(round.cohort), count + 1
        for k, own in round.changes.items():
            found[k] = found.get(k, 0.0) + cos(own, mean)
    return {k: {"value": total / count} for k, total in found.items()}


def cos(a: Wide, b: Wide) -> float:
    """0 if either is 0."""
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size else 0.0
