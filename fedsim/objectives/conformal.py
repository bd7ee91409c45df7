"""Conformal prediction: sets and intervals that contain the truth with a given probability.

Every class or number gets a score of how little it conforms to the model's outputs. What is
predicted is all of it that scores at most q, the ⌈(n + 1)·level⌉-th smallest score of the truth on
n validation examples, which nobody trains on. If test examples are exchangeable with these, the
truth is in the prediction with a probability of at least `level`, whatever the model.

Sources: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World (2005); Lei et al.,
Distribution-Free Predictive Inference for Regression (JASA 2018), Algorithm 2; Sadinle, Lei and
Wasserman, Least Ambiguous Set-Valued Classifiers With Bounded Error Levels (JASA 2019); Romano,
Sesia and Candès, Classification with Valid and Adaptive Coverage (NeurIPS 2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedsim.config.registry import Config
from fedsim.data import Dataset
from fedsim.data.encoding import UNSCALED
from fedsim.errors import ExperimentError
from fedsim.objectives.metrics import probabilities
from fedsim.objectives.objective import FurtherMetric, HeldOut, Metric
from fedsim.support.rng import keyed_rng

Scores = NDArray[np.float64]


class Conformal(Config):
    """Prediction sets of a classifier, or intervals of a regression, by split conformal inference.

    Each model is calibrated on the validation set (`evaluate.validation`), and scored on test
    examples: `coverage` is the share of them whose class is in the set, and `set_size` the mean
    number of classes in it; of a regression, `interval_coverage` and `interval_width`. The level
    is a promise for examples like those of the validation set: for the central test set, not for
    a single client's (`evaluate.clients`), nor if rounds are chosen by the same validation set.

    Args:
        level: 1 − α, probability with which the truth is to be in the prediction.
        kind: `split`, classes of a probability of at least 1 − q, the smallest sets on average; or
            `adaptive`, the most probable classes up to a total of q, larger where the model is
            less certain, the last of them at random, so that a set may be empty. A regression has
            intervals ŷ ± q of one width.
    """

    level: float = Field(0.9, gt=0, lt=1)
    kind: Literal["split", "adaptive"] = "split"

    def check(self, data: Dataset, outputs: int, held_out: int) -> None:
        """Refuse data without such predictions, and too few validation examples.

        Raises:
            ExperimentError: one line that names the key.
        """
        classes = len(data.classes)
        if outputs != (classes or 1) or data.y.ndim > 1:
            raise ExperimentError(
                "evaluate.conformal needs an output for each class, or a single number to predict"
            )
        if self.kind == "adaptive" and not classes:
            raise ExperimentError(
                "evaluate.conformal.kind=adaptive needs classes, and the target here is a number; "
                "set kind=split"
            )
        if rank(held_out, self.level) > held_out:
            fewest = math.ceil(1 / (1 - Fraction(str(self.level)))) - 1
            raise ExperimentError(
                f"evaluate.conformal.level={self.level:g} needs {fewest:,} validation examples or "
                f"more, and evaluate.validation holds out {held_out:,}"
            )

    def metrics(self, data: Dataset, seed: int) -> tuple[FurtherMetric, ...]:
        """The scores of predictions at this level, for the experiment's objective."""
        if data.classes:
            score = partial(sets, self.level, self.kind, seed)
            names = (
                ("coverage", "coverage of prediction sets"),
                ("set_size", "size of prediction sets"),
            )
        else:
            score = partial(intervals, self.level)
            scaled = " (of the scaled target)" * (data.target_scaling is not UNSCALED)
            names = (
                ("interval_coverage", "coverage of prediction intervals"),
                ("interval_width", f"width of prediction intervals{scaled}"),
            )
        (covered, called), (size, size_called) = names
        shown = (
            Metric(covered, called, calibrated=True),
            Metric(size, size_called, best="min", calibrated=True),
        )
        return tuple(
            FurtherMetric(metric.column, partial(_one, score, which), metric)
            for which, metric in enumerate(shown)
        )


def _one(score: Callable[..., tuple[float, float]], which: int, *given: Any) -> float:
    return score(*given)[which]


def rank(n: int, level: float) -> int:
    """⌈(n + 1)·level⌉ of the level as it is written, not as it is rounded to binary digits."""
    return math.ceil((n + 1) * Fraction(str(level)))


def quantile(scores: Scores, level: float) -> float:
    """The ⌈(n + 1)·level⌉-th smallest of n scores; infinite if there are too few."""
    k = rank(len(scores), level)
    return float(np.partition(scores, k - 1)[k - 1]) if k <= len(scores) else math.inf


def sets(
    level: float, kind: str, seed: int, outputs: NDArray[Any], y: NDArray[Any], held_out: HeldOut
) -> tuple[float, float]:
    """The coverage and the mean size of prediction sets.

    Args:
        outputs: (n, C) logits of the test examples, of classes y (n,).
        held_out: logits (m, C) and classes (m,) of the validation examples.
    """

    def scored(logits: NDArray[Any], which: str) -> Scores:
        p = probabilities(logits)
        if kind == "split":
            return 1 - p
        return adaptive_scores(p, keyed_rng(seed, f"conformal/{which}").random(len(p)))

    logits, labels = held_out
    q = quantile(scored(logits, "validation")[np.arange(len(labels)), labels], level)
    inside = scored(outputs, "test") <= q
    return float(inside[np.arange(len(y)), y].mean()), float(inside.sum(axis=1).mean())


def adaptive_scores(p: Scores, u: Scores) -> Scores:
    """(n, C) the total probability of all classes before a class, and u times its own.

    Args:
        p: (n, C) probabilities; classes are in descending order, of equal ones the first first.
        u: (n,) uniform in [0, 1[, one for each example.

    Source:
        Romano et al. (2020), Eqs. 5 and 7.
    """
    order = np.argsort(-p, axis=1, kind="stable")
    own = np.take_along_axis(p, order, axis=1)
    found = np.empty_like(p)
    np.put_along_axis(found, order, own.cumsum(axis=1) - (1 - u[:, np.newaxis]) * own, axis=1)
    return found


def intervals(
    level: float, outputs: NDArray[Any], y: NDArray[Any], held_out: HeldOut
) -> tuple[float, float]:
    """The coverage and the width 2q of intervals ŷ ± q, q a quantile of |y − ŷ|.

    Args:
        outputs: (n, 1) or (n,) predictions of the test examples, of targets y (n,).
        held_out: the same of the validation examples.
    """

    def errors(predicted: NDArray[Any], truth: NDArray[Any]) -> Scores:
        distances: Scores = np.abs(predicted.reshape(-1).astype(np.float64) - truth)
        return distances

    q = quantile(errors(*held_out), level)
    return float((errors(outputs, y) <= q).mean()), 2 * q
