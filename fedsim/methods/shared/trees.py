"""What methods of boosted trees have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedsim.data import ClientSplits, Dataset
from fedsim.errors import DataError, ExperimentError
from fedsim.federation import Client, Federation, NotCounted, Server
from fedsim.federation.wire import as_arrays
from fedsim.methods.learns import Learns, Problem
from fedsim.methods.method import Method, State
from fedsim.models.arrays import Arrays
from fedsim.models.bins import Array, Floats
from fedsim.models.boosted_trees import (
    STEP,
    TREES,
    BoostedTrees,
    Gradients,
    raw_scores,
    rows_of,
)
from fedsim.objectives import Classification, Regression


@dataclass(frozen=True)
class TreeState(State):
    """The global ensemble.

    Attributes:
        trees: see `BoostedTrees`.
    """

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

    def check_fit(self, problem: Problem) -> None:
        super().check_fit(problem)
        if type(problem.objective) not in (type(None), Classification, Regression):
            raise ExperimentError(
                f"method.name={self.name} has the gradients of classification and regression "
                f"alone; leave out objective.name={problem.objective.name}"  # type: ignore[union-attr]
            )

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        if dataset.y.ndim != 1:
            raise DataError(
                f"method.name={self.name} learns one class or number for each example; the "
                f"targets have shape {dataset.y.shape}"
            )

    def evaluate(self, fed: Federation, state: S) -> None:
        T, C, _ = state.trees["feature"].shape
        fed.log(**fed.evaluate(state.trees), trees=T * C)

    def for_own_models(self, fed: Federation, state: S) -> dict[str, Any]:
        return {"weights": NotCounted(state.trees)}

    def global_model(self, fed: Federation, state: S) -> Mapping[str, NDArray[Any]]:
        return state.trees


def tree_model(of: Server | Client) -> BoostedTrees:
    """The experiment's model (checked before the run)."""
    assert isinstance(of.learner, BoostedTrees)
    return of.learner


def rows(client: Client) -> Floats:
    """(client) (n, F) its labelled examples."""
    return client.once("rows", lambda: rows_of(client.data.x.cpu().numpy()))


def gradients(client: Client, step: float = STEP) -> Gradients:
    """(client) The gradients of its examples' loss."""
    y = targets(client)
    objective, weights = client.objective, None
    if isinstance(objective, Classification) and objective.class_weights is not None:
        weights = np.array(objective.class_weights, np.float64)[y]
    return Gradients(y, client.num_classes, weights, step)


def targets(client: Client) -> NDArray[Any]:
    """(client) (n,) the classes of its labelled examples; or numbers, float64."""

    def make() -> NDArray[Any]:
        y = client.data.y.cpu().numpy()
        return y if client.num_classes else y.astype(np.float64)

    return client.once("targets", make)


def own_scores(client: Client, trees: Arrays) -> Array:
    """(client) (C, n) the ensemble's scores of its examples.

    They are kept, with those of the rounds before the ensemble's last.
    """
    kept = client.once("scores", dict[str, Any], trees["base"])
    known, since = kept.get("trees"), 0
    if known is not None and len(known["feature"]) <= len(trees["feature"]):
        first = len(known["feature"])
        if all(np.array_equal(known[name], trees[name][:first]) for name in TREES):
            since = first
    if not since or since < len(trees["feature"]):
        f = raw_scores(trees, rows(client), kept["f"] if since else None, since)
        kept.update(trees=trees, f=f)
    found: Array = kept["f"]
    return found


def own_gradients(client: Client, trees: Arrays, step: float) -> tuple[Array, Array]:
    """(client) (C, n) g and h of its examples, which are kept as long as the ensemble stays."""
    f = own_scores(client, trees)
    kept = client.once("gradients", dict[str, Any])
    if kept.get("of") is not f:
        kept.update(of=f, found=gradients(client, step)(f))
    found: tuple[Array, Array] = kept["found"]
    return found


def arrays_of(sent: Mapping[str, Any]) -> Arrays:
    """(client) Arrays as the server sent them."""
    found: Arrays = as_arrays(dict(sent))
    return found
