"""The base class of objectives: the loss that training minimises, and the scores of a model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PrivateAttr
from torch import Tensor, nn

from fedsim.config.registry import Component, Registry
from fedsim.data import Dataset
from fedsim.data.dataset import frozen

EVALUATION_BATCH = 500  # fixed, so that scores do not depend on the worker

Context = Mapping[str, Tensor]  # vectors of a method, by name: (P,) or (size,) each

# The inputs of scores, by name: numbers, which are added over batches, shards and clients, and
# arrays, which are concatenated.
Totals = dict[str, Any]

# (outputs (B, ...), y (B, ...)) -> losses (B,), and the gradient of their mean at the outputs.
OutputGradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# (outputs (n, ...), targets (n, ...)) -> a score, or several by name.
ScoreFunction = Callable[..., Any]
HeldOut = tuple[NDArray[Any], NDArray[Any]]  # outputs and targets of the validation set
VALIDATION = "validation_"  # prefix of columns of scores on the validation set
_OUTPUTS, _TARGETS = "further/outputs", "further/targets"  # keys of totals


@dataclass(frozen=True)
class Metric:
    """A score that tables, reports, grids and searches show.

    Args:
        column: column in rounds.parquet, and `test_<column>` in clients.parquet.
        label: its name as written within a sentence.
        best: whether `max` or `min` is better.
        primary: whether models are compared by this metric; each objective has one such metric.
        sliced: also record it for each slice, as `<column>/<slice>`.
        calibrated: computed with the validation set as well, so that it has no score on that set.
        chance: what is scored by chance, which figures mark, if it is known.
    """

    column: str
    label: str
    best: Literal["max", "min"] = "max"
    primary: bool = False
    sliced: bool = False
    calibrated: bool = False
    chance: float | None = None

    @property
    def of_clients(self) -> bool:
        """Whether its mean and its worst over clients' own test examples are recorded."""
        return self.primary or self.calibrated


@dataclass(frozen=True)
class FurtherMetric:
    """An additional metric: a function of all outputs and their targets."""

    name: str  # of its column; several scores have columns `<name>/<score>`
    # It gets all outputs (n, ...); where a model predicts only some classes, others' are −inf. Of
    # a `calibrated` metric, it also gets the outputs and targets of the validation set, as a pair.
    score: ScoreFunction
    shown: Metric | None = None  # how reports show it, if they do
    is_table: bool = False  # whether it returns rows of the run's table of that name

    @property
    def calibrated(self) -> bool:
        return self.shown is not None and self.shown.calibrated

    def columns(
        self, outputs: NDArray[Any], targets: NDArray[Any], held_out: HeldOut | None = None
    ) -> dict[str, float]:
        """Its scores, by column; empty for a table, and on the validation set if calibrated on it.

        Args:
            held_out: the outputs and targets of the validation set.
        """
        if self.is_table or (self.calibrated and held_out is None):
            return {}
        found = self.score(outputs, targets, *((held_out,) if self.calibrated else ()))
        if isinstance(found, Mapping):
            return {f"{self.name}/{name}": score for name, score in found.items()}
        return {self.name: found}


@dataclass(frozen=True)
class Batch:
    """Examples on which a model is scored.

    Args:
        x: (n, ...) inputs.
        y: (n, ...) labels or targets.
        labels: the classes among which the model chooses; None for all.
        facts: further facts about the examples, (n, ...) each, by name: the objective's own
            (`Objective.facts`), and which parts of the inputs are of a kind.
    """

    x: Tensor
    y: Tensor
    labels: tuple[int, ...] | None = None
    facts: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.y)

    def at(self, rows: Tensor | slice) -> Batch:
        """Some of the examples."""
        facts = {name: fact[rows] for name, fact in self.facts.items()}
        return replace(self, x=self.x[rows], y=self.y[rows], facts=facts)


class Objective(Component, ABC):
    """The training loss and the scores: a component of the `objective` section.

    By default the model and the data choose the objective (`Model.objective`). Your own objective
    subclasses this class, is named `package.module:Name`, and works with every method whose
    `learns` admits it; its metrics appear in tables, reports, grids and searches.

    Example:
        >>> class MultiLabel(Objective):
        ...     name: str = "my_module:MultiLabel"
        ...     def num_outputs(self, data):
        ...         return data.y.shape[1]
        ...     def metrics(self, data):
        ...         return (Metric("hamming", "Hamming loss", best="min", primary=True),)
        ...     def loss(self, network, x, y, context):
        ...         loss = nn.functional.binary_cross_entropy_with_logits
        ...         return loss(network(x), y, reduction="none").mean(dim=1)
        ...     def totals(self, outputs, batch):
        ...         wrong = (outputs > 0) != (batch.y > 0.5)
        ...         return {"wrong": int(wrong.sum()), "of": wrong.numel()}
        ...     def scores(self, totals):
        ...         return {"hamming": totals["wrong"] / totals["of"]}
    """

    name: str
    _further: tuple[FurtherMetric, ...] = PrivateAttr(())

    def fitted(self, data: Dataset) -> Self:
        """The objective with everything filled in that depends on the data."""
        return self

    @property
    def further(self) -> tuple[FurtherMetric, ...]:
        """The additional metrics that the experiment requests in `evaluate.metrics`."""
        return self._further

    @property
    def calibrates(self) -> bool:
        """Whether a score of test examples needs the validation set."""
        return any(further.calibrated for further in self._further)

    def with_further(self, further: Sequence[FurtherMetric]) -> Self:
        """The same objective with additional metrics."""
        measuring = self.model_copy()
        measuring._further = tuple(further)
        return measuring

    def shown(self, data: Dataset) -> tuple[Metric, ...]:
        """All displayed metrics: the objective's own and the additional ones."""
        return *self.metrics(data), *(f.shown for f in self._further if f.shown is not None)

    def facts(
        self, columns: Mapping[str, NDArray[Any]], rows: NDArray[np.int64] | slice
    ) -> dict[str, NDArray[Any]]:
        """What losses and scores need of examples beside x and y, (n, ...) each, by name.

        Losses find it in their context, scores in `Batch.facts`. By default nothing.

        Args:
            columns: attributes of all training examples, or of all test examples.
            rows: which of them.
        """
        return {}

    @abstractmethod
    def num_outputs(self, data: Dataset) -> int:
        """The number of outputs of a network for one input."""

    @abstractmethod
    def metrics(self, data: Dataset) -> tuple[Metric, ...]:
        """The displayed scores; one of them is the primary metric."""

    @abstractmethod
    def loss(self, network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
        """(B,) the loss of each example; training minimises their mean.

        Args:
            network: takes x.
            x: (B, ...) inputs; images may be in channels-last memory format, so use `reshape`
                instead of `view`.
            y: (B, ...) labels or targets.
            context: the method's own vectors, see `Client.train`, and the examples' `facts`.
        """

    def output_gradient(self) -> OutputGradient | None:
        """The losses and their gradient as functions of a network's outputs, if known.

        Training by plain SGD then needs less of autograd. Only valid if `loss` runs the network
        once and uses nothing of it but its outputs.
        """
        return None

    def outputs(self, network: nn.Module, x: Tensor) -> Any:
        """The outputs of a network in evaluation mode that `totals` needs, (B, ...) each."""
        return network(x)

    def predictions(self, outputs: Any) -> Tensor:
        """The predictions (B, ...), logits or numbers, from what `outputs` returned.

        Used by the metrics of `evaluate.metrics` and by `fedsim.predictions`.
        """
        return outputs

    @abstractmethod
    def totals(self, outputs: Any, batch: Batch) -> Totals:
        """The totals from which scores are computed, for a batch; see `Totals`."""

    @abstractmethod
    def scores(self, totals: Totals) -> dict[str, float]:
        """Compute the scores from totals, by column: the metrics, and further scores if any."""

    def weight_scores(self, weights: Callable[[], Mapping[str, NDArray[Any]]]) -> dict[str, float]:
        """Scores that depend only on the global model's weights, recorded after every round.

        Args:
            weights: returns the weights by layer; not called if there are no such scores.
        """
        return {}

    def check(self, data: Dataset) -> None:
        """Reject data that do not suit the objective.

        Raises:
            ExperimentError: they do not; the message says what does.
        """


objectives: Registry[Objective] = Registry("objective", Objective)  # type: ignore[type-abstract]


def merged(parts: Iterable[Totals]) -> Totals:
    """The merged totals of batches. Sums are exactly rounded, so independent of the order."""
    found: Totals = {}
    parts = list(parts)
    if any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError("all batches must have totals of the same names")
    for name in parts[0] if parts else ():
        values = [part[name] for part in parts]
        joined = isinstance(values[0], np.ndarray)
        found[name] = np.concatenate(values) if joined else math.fsum(values)
    return found


def scores_of(
    objective: Objective, totals: Totals, held_out: Totals | None = None
) -> dict[str, float]:
    """The scores of an objective and additional metrics from totals.

    Args:
        held_out: the totals of the same model on the validation set, by which metrics are
            calibrated; without, these are left out.
    """
    found = objective.scores({name: frozen(value) for name, value in totals.items()})
    for further in objective.further:
        calibration = None if held_out is None else (held_out[_OUTPUTS], held_out[_TARGETS])
        added = further.columns(totals[_OUTPUTS], totals[_TARGETS], calibration)
        if taken := sorted(found.keys() & added.keys()):
            raise ValueError(f"'{taken[0]}' is a score of the objective; choose another name")
        found = {**found, **added}
    for name, score in found.items():
        if not isinstance(score, int | float | np.number | Tensor):
            raise TypeError(f"scores: '{name}' is {score!r}, not a number")
    return found


def of_validation(scores: Mapping[str, float]) -> dict[str, float]:
    return {f"{VALIDATION}{name}": score for name, score in scores.items()}


def tables_of(objective: Objective, totals: Totals) -> dict[str, list[dict[str, Any]]]:
    return {
        further.name: list(further.score(totals[_OUTPUTS], totals[_TARGETS]))
        for further in objective.further
        if further.is_table
    }


def totals_of(objective: Objective, outputs: Any, batch: Batch) -> Totals:
    """The totals for the objective's scores and additional metrics.

    Raises:
        ValueError: computing them changes the batch, which is scored again.
    """
    given = (batch.x, batch.y)
    versions = [tensor._version for tensor in given]
    found = objective.totals(outputs, batch)
    if [tensor._version for tensor in given] != versions:
        raise ValueError("totals changes its batch in place; copy it first: y = batch.y.clone()")
    if not objective.further:
        return found
    predicted = objective.predictions(outputs)
    if batch.labels is not None:
        known = torch.zeros(predicted.shape[1], dtype=torch.bool, device=predicted.device)
        known[list(batch.labels)] = True
        predicted = predicted.masked_fill(~known, -math.inf)
    return {**found, _OUTPUTS: predicted.cpu().numpy(), _TARGETS: batch.y.cpu().numpy()}


@dataclass(frozen=True)
class Slice:
    """Some of a batch's examples, scored separately, and the classes the model can predict."""

    name: str
    rows: Tensor
    labels: tuple[int, ...] | None = None


@torch.no_grad()
def evaluate(objective: Objective, network: nn.Module, batch: Batch) -> Totals:
    """The totals of a network on a non-empty batch. The network stays in evaluation mode."""
    return evaluate_slices(objective, network, batch, None)[""]


@torch.no_grad()
def evaluate_slices(
    objective: Objective, network: nn.Module, batch: Batch, slices: Sequence[Slice] | None
) -> dict[str, Totals]:
    """The totals of each non-empty slice, by name; the network runs once.

    Without slices those of the whole batch, under the empty name.
    """
    network.eval()
    found: dict[str, list[Totals]] = {}
    for start in range(0, len(batch), EVALUATION_BATCH):
        part = batch.at(slice(start, start + EVALUATION_BATCH))
        outputs = objective.outputs(network, part.x)
        if slices is None:
            found.setdefault("", []).append(totals_of(objective, outputs, part))
            continue
        for one in slices:
            inside = (one.rows >= start) & (one.rows < start + len(part))
            rows = one.rows[inside] - start
            if not len(rows):
                continue
            own = replace(part.at(rows), labels=one.labels)
            several = isinstance(outputs, tuple)
            of_these = tuple(each[rows] for each in outputs) if several else outputs[rows]
            found.setdefault(one.name, []).append(totals_of(objective, of_these, own))
    return {name: merged(parts) for name, parts in found.items()}
