"""The base class of rule models: trained on clients, merged on the server, readable by people.

A rule gives the output where its conditions hold. Its firing strength for an input says how well
they hold: 0 or 1 for crisp rules, and any value between for fuzzy rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedsim.data import DataSpec
from fedsim.data.encoding import OfCategory
from fedsim.errors import DataError
from fedsim.models.arrays import ArrayModel, Arrays

Array = NDArray[np.float64]
ROUNDING = 1e-12  # relative errors up to this size are rounding
Rules = Arrays  # of a rule base, with one row per rule


@dataclass(frozen=True)
class Prediction:
    """Predictions of R rules for n inputs."""

    values: Array  # (n,) predictions of the rule base
    deciding: NDArray[np.int64]  # (n,) the rule that decides, or that has the largest weight
    firing: Array  # (n, R) firing strengths
    outputs: Array  # (n, R) each rule's own output
    # (n, R) each rule's weight: the values are Σ shares·outputs. None if only one rule decides.
    shares: Array | None = None


@dataclass(frozen=True)
class Condition:
    """One condition of a rule, on one feature."""

    feature: int  # its index
    words: str  # "x3 is LOW"
    term: str  # "LOW", if features share their terms; otherwise the same as `words`
    membership: Callable[[Array], Array]  # of values of any shape: how well it holds, 0 to 1
    # Of an entry that is 0 or 1, `ward=north`: the feature, and whether it must be that category.
    category: tuple[str, bool] | None = None
    # (low, high) if it holds for low < x ≤ high, None for an open side; None if no interval.
    bounds: tuple[float | None, float | None] | None = None


def of_category(name: OfCategory, holds: bool) -> tuple[str, tuple[str, bool]]:
    """A condition on an entry that is 0 or 1 in words, and its `Condition.category`.

    >>> of_category(OfCategory.of("ward", "north"), False)
    ('ward is not north', ('ward', False))
    """
    return f"{name.feature} is {'' if holds else 'not '}{name.category}", (name.feature, holds)


@dataclass(frozen=True)
class Rule:
    """A rule in readable form."""

    conditions: tuple[Condition, ...]  # that must all hold
    consequent: Array  # (F + 1,) the output: constant first, then a coefficient for each feature
    weight: float


class RuleModel(ArrayModel, ABC):
    """A kind of rules: how they are trained, merged, applied and explained.

    Your own rule model subclasses this class and is named `package.module:Name`. It predicts a
    number from a table with inputs in [0, 1]; the method `openfl_xai` trains it in a federation.
    Each array of a rule base has one row per rule. Arrays are sent, and passed to `merge`, as
    float32.
    """

    kind: ClassVar[str] = "rule model"
    explainer: ClassVar[str] = "rules"

    @abstractmethod
    def train(self, x: Array, y: Array, rng: np.random.Generator) -> Rules:
        """Learn a client's own rules.

        Args:
            x: (n, F) inputs in [0, 1].
            y: (n,) targets.
            rng: source of randomness.

        Raises:
            DataError: rules cannot be learnt from these data; see `check_table`.
        """

    @abstractmethod
    def merge(self, bases: Sequence[Rules]) -> tuple[Rules, NDArray[np.int64]]:
        """Merge rule bases into the global rules, and (R,) from how many bases each of them comes.

        Args:
            bases: the clients' rule bases, in the order of the clients.
        """

    @abstractmethod
    def predict(self, rules: Rules, x: Array) -> Prediction:
        """Apply rules to (n, F) inputs."""

    @abstractmethod
    def explain(self, rules: Rules, names: Sequence[str]) -> list[Rule]:
        """The rules in readable form, with the names of the F features."""

    def outputs(self, arrays: Rules, x: NDArray[np.float32]) -> Array:
        return self.predict(arrays, x.astype(np.float64)).values[:, None]

    def build_for(self, data: DataSpec, outputs: int) -> nn.Module:
        """A placeholder, for any data: `train` says of which it cannot learn."""
        return self.build(data.shape, outputs)


def count(rules: Rules) -> int:
    """R, the number of rules of a rule base."""
    return len(next(iter(rules.values())))


def check_table(x: NDArray[Any], y: NDArray[Any], names: Sequence[str]) -> None:
    """Reject data from which rules cannot be learnt."""
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise DataError(
            f"rules are learnt from a table of inputs (n, features) and targets (n,); these have "
            f"shapes {x.shape} and {y.shape}"
        )
    if len(x) == 0:
        raise DataError("rules cannot be learnt without examples")
    for column, name in enumerate(names):
        values = x[:, column]
        wrong = np.flatnonzero(~np.isfinite(values))
        if len(wrong):
            raise DataError(f"input '{name}' is {values[wrong[0]]} in example {wrong[0]}")
        wrong = np.flatnonzero((values < 0) | (values > 1))
        if len(wrong):
            raise DataError(
                f"input '{name}' is {values[wrong[0]]:g} in example {wrong[0]}; rules are learnt "
                "from inputs in [0, 1] (data.scale=minmax scales a table)"
            )
    wrong = np.flatnonzero(~np.isfinite(y))
    if len(wrong):
        raise DataError(f"the target is {y[wrong[0]]} in example {wrong[0]}")


def quality(firing: Array, outputs: Array, y: Array) -> tuple[Array, Array]:
    """Support and confidence of each rule on n examples: (R,) each, between 0 and 1.

    With the firing strengths w_ij (n, R) and m_ij = 1 - |ŷ_ij - y_i|, the error of each rule's own
    output min-max normalised over all examples and rules: support = Σ_i w_ij·m_ij / n, confidence
    = Σ_i w_ij·m_ij / Σ_i w_ij (0 for a rule that never fires). If all errors are equal up to
    rounding, m = 1.
    """
    errors = np.abs(outputs - y[:, None])
    spread = errors.max() - errors.min()
    exact = spread <= ROUNDING * np.abs(y).max()
    m = np.ones_like(errors) if exact else 1 - (errors - errors.min()) / spread
    total, fitting = firing.sum(axis=0), (firing * m).sum(axis=0)
    confidence = np.divide(fitting, total, out=np.zeros_like(total), where=total > 0)
    return fitting / len(y), confidence
