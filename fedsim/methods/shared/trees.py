"""What methods of boosted trees have in common."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import nn

from fedsim.data import ClientSplits, Dataset
from fedsim.errors import DataError, ExperimentError, FedsimWarning
from fedsim.federation import Client, Federation, NotCounted, Server
from fedsim.federation.context import scaled
from fedsim.federation.wire import as_arrays, same
from fedsim.methods.learns import Learns, Problem
from fedsim.methods.method import Method, State
from fedsim.models.arrays import Arrays, ArraysNetwork
from fedsim.models.bins import Array, Floats, lost
from fedsim.models.boosted_trees import (
    TREES,
    BoostedTrees,
    Gradients,
    raw_scores,
    rows_of,
    to_step,
    unit_of,
)
from fedsim.objectives import Classification, Objective, Regression
from fedsim.support.words import in_short
from fedsim.training import Train

LOOKED_AT = 1000  # examples, to see whether bounds fit them
USED = ("rounds", "participation", "on_client_error")  # of `train`
MOST_APART = 2.0**16  # class weights: gradients are rounded to 2^-26 of the largest


@dataclass(frozen=True)
class TreeState(State):
    """The trees of the global ensemble; see `BoostedTrees`."""

    trees: Arrays


S = TypeVar("S", bound=TreeState)


class TreeMethod(Method[S]):
    """Base class of methods that learn boosted trees."""

    learns: ClassVar[Learns] = Learns(
        models="tree ensemble",
        objectives=(Classification, Regression),
        task_sequences="no",
        asks=("messages",),
        averages=False,
    )
    exchanges_models: ClassVar[bool] = False
    stackable: ClassVar[bool] = False

    def check(self, train: Train) -> None:
        usual = Train()
        for key in Train.model_fields:
            if key not in USED and getattr(train, key) != getattr(usual, key):
                raise ExperimentError(
                    f"train.{key}: method.name={self.name} has no use for it, as trees are not "
                    "trained by SGD; leave it out"
                )

    def check_fit(self, problem: Problem) -> None:
        super().check_fit(problem)
        if type(problem.objective) not in (type(None), Classification, Regression):
            raise ExperimentError(
                f"method.name={self.name} has the gradients of classification and regression "
                f"alone; leave out objective.name={problem.objective.name}"  # type: ignore[union-attr]
            )
        given = getattr(problem.objective, "class_weights", None)
        positive = [w for w in given if w > 0] if isinstance(given, tuple) else []
        if positive and max(positive) > MOST_APART * min(positive):
            raise ExperimentError(
                f"objective.class_weights: {max(positive):g} is more than {MOST_APART:g} times "
                f"{min(positive):g}, beside which method.name={self.name} would round the "
                "gradients of that class to 0"
            )

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        if dataset.y.ndim != 1:
            raise DataError(
                f"method.name={self.name} learns one class or number for each example; the "
                f"targets have shape {dataset.y.shape}"
            )
        assert isinstance(network, ArraysNetwork)
        assert isinstance(network.section, BoostedTrees)
        C, F = len(dataset.classes), int(np.prod(dataset.shape))
        needed = network.section.histogram_bytes(C, F, len(splits.train.values))
        free = psutil.virtual_memory().available
        if needed > free:
            raise DataError(
                f"model.name={network.section.name}: histograms of {F:,} features"
                f"{f' for {C} classes' if C > 2 else ''} take about {needed / 1e9:,.1f} GB of "
                f"memory, and {free / 1e9:.1f} GB are free; lower model.bins or model.depth"
            )

    def evaluate(self, fed: Federation, state: S) -> None:
        T, C, _ = state.trees["feature"].shape
        fed.log(**fed.evaluate(state.trees), trees=T * C)

    def for_own_models(self, fed: Federation, state: S) -> dict[str, Any]:
        return {"weights": NotCounted(state.trees)}

    def global_model(self, fed: Federation, state: S) -> Mapping[str, NDArray[Any]]:
        return state.trees


def check_bounds(low: float, high: float, dataset: Dataset, splits: ClientSplits) -> None:
    """Warn if known bounds (`method.range`) lose features; refuse those that lose the target."""
    unit, size = unit_of(max(-low, high)), float(np.abs(dataset.y).max())
    if not dataset.classes and not unit / 1024 <= size <= 16 * unit:
        raise DataError(
            f"method.range=[{low:g}, {high:g}]: a regression's gradients are rounded to 2^-26 of "
            f"it, and the target goes up to {size:.3g}; scale the target"
        )
    known = torch.as_tensor(dataset.x[splits.train.values[:LOOKED_AT]])
    bad = np.flatnonzero(lost(rows_of(scaled(dataset, known).numpy()), low, high))
    if len(bad):
        names = dict(enumerate(dataset.entry_names))
        warnings.warn(
            f"method.range=[{low:g}, {high:g}] does not fit "
            f"{in_short([names.get(f, f'input {f}') for f in bad.tolist()])}: more than a tenth "
            "of the values lie outside, or all of them in one bin or two",
            FedsimWarning,
            stacklevel=2,
        )


def tree_model(of: Server | Client) -> BoostedTrees:
    """The experiment's model (checked before the run)."""
    assert isinstance(of.learner, BoostedTrees)
    return of.learner


def rows(client: Client) -> Floats:
    """(client) (n, F) its labelled examples."""
    return rows_of(client.data.x.cpu().numpy())


def targets(client: Client) -> NDArray[Any]:
    """(client) (n,) the classes of its labelled examples; or numbers, float64."""

    def make() -> NDArray[Any]:
        y = client.data.y.cpu().numpy()
        return y if client.num_classes else y.astype(np.float64)

    return client.once("targets", make)


def class_weights(objective: Objective, classes: int) -> Array:
    """(classes,) the factor of each class's loss."""
    given = objective.class_weights if isinstance(objective, Classification) else None
    return np.ones(classes) if given is None else np.array(given, np.float64)


def units_of(objective: Objective, classes: int, size: float) -> tuple[float, float]:
    """The units of gradients and hessians; of a regression, for targets up to a size."""
    if not classes:
        return unit_of(size), 1.0
    unit = unit_of(class_weights(objective, classes).max())
    return unit, unit


def own_totals(client: Client, unit: float | None = None) -> Array:
    """(client) Its number of examples of each class; or the sum of its targets / `unit`, and n."""
    y = targets(client)
    if client.num_classes:
        return np.bincount(y, minlength=client.num_classes).astype(np.float64)
    return np.array([(to_step(y / unit) if unit else y).sum(), len(y)])


def base_of(totals: Array, objective: Objective, classes: int) -> Array:
    """(C,) the scores with which sums begin: the mean, or those of the classes' shares.

    From the sum of `own_totals`. Shares are as if there were an example more of each class.
    """
    if not classes:
        base: Array = totals[:1] / max(totals[1], 1)
        return base
    w = class_weights(objective, classes)
    p = totals * w + (w.max() or 1)
    f: Array = np.log(p / p.sum())
    return f[1:] - f[:1] if classes == 2 else f


def own_scores(client: Client, trees: Arrays) -> Array:
    """(client) (C, n) the ensemble's scores of its examples.

    They are kept with the last round that they are of, which tells whether the ensemble goes on
    from there.
    """
    kept = client.once("scores", dict[str, Any], trees["base"])
    T, known = len(trees["feature"]), kept.get("rounds")  # of an unknown ensemble None

    def last(rounds: int) -> Arrays:
        return {name: trees[name][max(rounds - 1, 0) : rounds] for name in TREES}

    if known is not None and (known > T or not same(kept["last"], last(known))):
        known = None
    if known != T:
        f = raw_scores(trees, rows(client), kept["f"] if known else None, known or 0)
        kept.update(rounds=T, last={name: a.copy() for name, a in last(T).items()}, f=f)
    found: Array = kept["f"]
    return found


def gradients(client: Client, units: tuple[float, float]) -> Gradients:
    """(client) The gradients of its examples' loss."""
    y, classes = targets(client), client.num_classes
    weights = class_weights(client.objective, classes)[y] if classes else None
    return Gradients(y, classes, weights, units)


def own_gradients(
    client: Client, trees: Arrays, units: tuple[float, float]
) -> tuple[Array, Array]:
    """(client) (C, n) g and h of its examples, which are kept as long as the ensemble stays."""
    f = own_scores(client, trees)
    kept = client.once("gradients", dict[str, Any])
    if kept.get("of") is not f:
        kept.update(of=f, found=gradients(client, units)(f))
    found: tuple[Array, Array] = kept["found"]
    return found


def arrays_of(sent: Mapping[str, Any]) -> Arrays:
    """(client) Arrays as the server sent them."""
    found: Arrays = as_arrays(dict(sent))
    return found
