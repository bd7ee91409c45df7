"""Robust aggregation, and adversaries that forge their updates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.conditions.adversaries import Attack
from fedsim.conditions.aggregators import Aggregator
from fedsim.conditions.privacy import reference
from fedsim.data import ClientSplits
from fedsim.errors import ExperimentError, FedsimWarning, RunError
from fedsim.federation.cohort import Cohort, cohort_size
from fedsim.federation.condition import Condition, ConditionOnMeans, Round
from fedsim.federation.context import RunSpec, WorkerContext
from fedsim.federation.reduction import InvalidUpdate, Mean, TooFewUpdates, Update, WeightedMean
from fedsim.federation.wire import to_arrays
from fedsim.objectives import Metric, Totals


class RobustAggregation(ConditionOnMeans):
    """Means by a robust rule, of updates that adversaries may have forged.

    Args:
        rule: by which updates are aggregated; None for the weighted mean.
        attack: by which adversaries forge updates; None if they do not.
        adversaries: which clients.
        share: of all clients, as the experiment has it.
    """

    name: str = "aggregation"
    rule: Aggregator | None = None
    attack: Attack | None = None
    adversaries: frozenset[int] = frozenset()
    share: float = 0.0

    def check(self, spec: RunSpec, splits: ClientSplits, network: nn.Module) -> None:
        """Refuse a rule for which a round has too few updates, or too many of adversaries."""
        rule, K = self.rule, len(splits)
        if rule is None:
            return
        cohort = min(cohort_size(spec.train.participation, K), int(splits.present.sum()))
        n = spec.functions.updates_per_round(cohort)
        try:
            rule.check(n)
        except ValueError as error:
            raise ExperimentError(f"aggregation.name={rule.name}: {error}") from None
        expected = -(-len(self.adversaries) * n // K)
        if expected > (most := rule.max_adversaries(n)):
            raise ExperimentError(
                f"adversaries.share={self.share:g}: about {expected} of the {n} "
                f"clients of a cohort are adversaries, and aggregation.name={rule.name} "
                f"withstands {most} ({rule.bound})"
            )
        if rule.weighted:
            _warn_of_weights(rule.name, splits)

    def mean(self, round: Round, cohort: Cohort) -> WeightedMean:
        colluding = self.adversaries.intersection(cohort.tolist())
        attack = self.attack if colluding else None
        rng = round.rng(f"attack/{round.note(self.name, None)}")
        trained = {n: sum(map(math.prod, shapes)) for n, shapes in round.runner.layers.items()}
        return GatheredMean(self.rule, attack, colluding, trained, rng)


def _warn_of_weights(rule: str, splits: ClientSplits) -> None:
    """Warn if few clients hold so many examples that a rule that follows weights follows them."""
    held = splits.train.lengths
    most, hostile = int(held.argmax()), held[list(splits.adversaries)].sum() / held.sum()
    share = held[most] / held.sum()
    who = f"the adversaries hold {hostile:.0%}" if hostile >= 0.5 else ""
    if not who and share >= 0.5:
        who = f"client {most} holds {share:.0%}"
    if who:
        warnings.warn(
            f"aggregation.name={rule} follows the weights of updates, and {who} of the training "
            "examples: they decide alone where a method weighs clients by them; "
            "aggregation.name=median counts clients",
            FedsimWarning,
            stacklevel=2,
        )


class AdversaryRecords(Condition):
    """Records who is an adversary, and whether the global model takes triggers as they wish."""

    name: str = "adversaries/records"
    order: ClassVar[int] = 95  # rows of clients that dropped out as well
    client_columns: ClassVar[tuple[str, ...]] = ("adversary",)
    attack: Attack
    adversaries: frozenset[int]

    def close(self, round: Round, ledger: dict[str, Any]) -> dict[str, float]:
        for k, row in round.runner.rows.items():
            row["adversary"] = k in self.adversaries
        return {}

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return () if self.attack.success is None else (self.attack.success,)

    @torch.no_grad()
    def totals(self, context: WorkerContext, network: nn.Module, part: slice) -> Totals:
        if self.attack.success is None:
            return {}
        found = context.prepare(*self.attack.triggered(context.dataset, part))
        if not len(found):
            return {}
        objective = context.spec.objective
        predicted = objective.predictions(objective.outputs(network, found.x)).argmax(dim=1)
        return {"hits": int((predicted == found.y).sum()), "tried": len(found)}

    def scores(self, totals: Totals) -> dict[str, float]:
        (metric,) = self.metrics
        return {metric.column: totals["hits"] / totals["tried"]}


class GatheredMean(WeightedMean):
    """A mean for which the server sees each client's own update.

    It is computed on all that a client sends for it, in one vector: the change from what the
    server sent under each vector's name, or the vector itself if there is nothing of its size.
    Adversaries forge their changes first, all together and knowing those of the others. Clients
    with weight 0 have no say in it. Single numbers (vectors of one entry), whose unit is another,
    are averaged as without a rule, and never forged.

    Args:
        trained: how many entries of a vector of weights are trained, by its length; the others
            are batch norm's statistics.
    """

    stays: ClassVar[bool] = False

    def __init__(
        self,
        rule: Aggregator | None,
        attack: Attack | None,
        adversaries: frozenset[int],
        trained: Mapping[int, int],
        rng: np.random.Generator,
    ) -> None:
        super().__init__()
        self.rule, self.attack, self.adversaries = rule, attack, adversaries
        self.trained = trained
        self.sent: dict[int, NDArray[Any]] = {}
        self._rng = rng

    def add(self, id: int, weight: float, vectors: Mapping[str, Tensor]) -> None:
        self.weights[id] = weight
        self.lengths[id] = {name: vectors[name].numel() for name in sorted(vectors)}
        parts = [to_arrays(vectors[name].detach().reshape(-1)) for name in sorted(vectors)]
        self.wide |= {name for name in vectors if vectors[name].dtype == torch.float64}
        self.sent[id] = np.concatenate(parts)

    def merge(self, other: WeightedMean) -> None:
        assert isinstance(other, GatheredMean)
        super().merge(other)
        self.sent.update(other.sent)

    def result(self, arguments: Mapping[str, Any], failures: Mapping[int, str]) -> Mean:
        self.check_alike()
        clients = [k for k in sorted(self.weights) if self.weights[k] > 0]
        if not clients:
            return super().result(arguments, failures)  # of nothing, or why that is an error
        lengths = self.lengths[clients[0]]
        before = np.concatenate(
            [
                np.broadcast_to(reference(to_arrays(arguments.get(name)), length), length)
                for name, length in lengths.items()
            ]
        ).astype(np.float64)
        self._forge(clients, before)
        if self.rule is None:
            return self._exact_mean(clients, arguments, failures)
        try:
            self.rule.check(len(clients))
        except ValueError as error:
            raise TooFewUpdates(f"aggregation.name={self.rule.name}: {error}") from None
        changes = np.stack([self.sent[k] - before for k in clients])
        weights = np.array([self.weights[k] for k in clients])
        numbers = np.concatenate([np.full(n, n == 1) for n in lengths.values()])
        change = np.empty_like(before)
        change[numbers] = np.average(changes[:, numbers], axis=0, weights=weights)
        by_rule = self.rule.aggregate(changes[:, ~numbers], weights)
        _check(f"aggregation.name={self.rule.name}", by_rule, change[~numbers].shape)
        change[~numbers] = by_rule
        found = self._named(before + change)
        return Mean(found, len(self.weights), self.weights, self.messages)

    def _forge(self, clients: Sequence[int], before: NDArray[np.float64]) -> None:
        """Replace the updates of adversaries."""
        adversary = np.isin(clients, sorted(self.adversaries))
        if self.attack is None or not adversary.any():
            return
        trained = self._trained()
        changes = np.stack([(self.sent[k] - before)[trained] for k in clients])
        what = f"adversaries.attack.name={self.attack.name}"
        forged = self.attack.forge(changes, adversary, self._rng)
        _check(what, forged, (int(adversary.sum()), changes.shape[1]))
        for k, change in zip(np.array(clients)[adversary].tolist(), forged, strict=True):
            false = self.sent[k].copy()
            with np.errstate(over="ignore"):  # becomes infinite, which is refused below
                false[trained] = before[trained] + change
            self.sent[k] = false
            try:
                self.check(Update(weight=self.weights[k], **self._tensors(k)))
            except InvalidUpdate as invalid:
                raise InvalidUpdate(f"{what} forges {invalid}", k) from None

    def _trained(self) -> NDArray[np.bool_]:
        """(P,) which entries are not statistics of batch norm, nor single numbers."""
        lengths = next(iter(self.lengths.values())).values()
        parts = [np.full(length, length > 1) for length in lengths]
        for part in parts:
            part[self.trained.get(len(part), len(part)) :] = False
        return np.concatenate(parts)

    def _exact_mean(
        self, clients: Sequence[int], arguments: Mapping[str, Any], failures: Mapping[int, str]
    ) -> Mean:
        mean = WeightedMean()
        for k in self.weights:
            mean.add(k, self.weights[k], self._tensors(k))
            mean.end_block()
        mean.messages = self.messages
        return mean.result(arguments, failures)

    def _tensors(self, k: int) -> dict[str, Tensor]:
        return {name: torch.tensor(part) for name, part in self._named(self.sent[k]).items()}

    def _named(self, flat: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """The vectors of an update by name, in the bits in which clients send them."""
        lengths = next(iter(self.lengths.values()))
        ends = np.cumsum(list(lengths.values()))[:-1]
        parts = zip(lengths, np.split(flat, ends), strict=True)
        return {name: self.as_sent(name, part) for name, part in parts}


def _check(what: str, found: Any, shape: tuple[int, ...]) -> None:
    """Refuse what a rule or an attack of the user's own should not return."""
    if not isinstance(found, np.ndarray) or found.shape != shape:
        kind = getattr(found, "shape", type(found).__name__)
        raise RunError(f"{what}: must return an array of shape {shape}, not {kind}")
    if not np.isfinite(found).all():
        raise RunError(f"{what}: returns numbers that are NaN or infinite")
