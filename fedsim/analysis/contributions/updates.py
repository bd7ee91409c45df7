"""What clients sent in each round of a finished run, from which contributions are estimated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsim.analysis.replay import Replay, Trained, replay, trained_models
from fedsim.errors import BadInput, ExperimentError, RunFolderError
from fedsim.experiment import Experiment
from fedsim.federation import Vector
from fedsim.results.run import Run
from fedsim.training import FlatModel

MOST = 12  # clients of a cohort, of which all subsets are taken
NEAR = 1e-4  # relative distance up to which a mean of clients' models is the server's next one

Wide = NDArray[np.float64]
Columns = dict[int, dict[str, float]]  # of an estimate: `value` and others, by client


@dataclass(frozen=True)
class RoundUpdates:
    """A round of a run whose server averages what clients train.

    Attributes:
        t: its number.
        before, after: (size,) the server's weights before and after it.
        changes: (size,) by how much each client of the cohort changed the weights.
        samples: their weights in the mean: n_k, or 1 for all.
        by_class: where the weights of each class's output lie, by the class's name; empty for
            networks whose last layer has other outputs.
    """

    t: int
    before: Vector
    after: Vector
    changes: Mapping[int, Wide]
    samples: Mapping[int, int]
    by_class: Mapping[str, NDArray[np.int64]]

    @property
    def cohort(self) -> list[int]:
        """The clients that trained, in ascending order."""
        return sorted(self.changes)

    def insist_on_few(self, how: str, instead: str) -> None:
        """Refuse a cohort of which not all subsets can be taken."""
        if len(self.changes) > MOST:
            raise BadInput(
                f"how={how}: evaluates all subsets of a cohort, and round {self.t} has "
                f"{len(self.changes)} clients, more than {MOST}; take how={instead}"
            )

    def change(self, clients: Collection[int]) -> Wide:
        """(size,) Σ n_k Δ_k / Σ n_k of some clients: the change if they alone had trained."""
        total = sum(self.samples[k] for k in clients)
        found = np.zeros(len(self.before))
        for k in clients:
            found += self.samples[k] / total * self.changes[k]
        return found

    def model(self, clients: Collection[int]) -> Vector:
        """(size,) the weights after the round if these clients alone had trained in it.

        Those before it if nobody had.
        """
        if not clients:
            return self.before
        changed: Vector = (self.before + self.change(clients)).astype(np.float32)
        return changed


Score = Callable[[Vector], float]  # of weights (size,)
# Of the rounds of a run: `value` and other columns by client.
Estimator = Callable[[Iterator[RoundUpdates], Score, np.random.Generator], Columns]


def updates_of(
    run: Run, tell: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[RoundUpdates, Replay]]:
    """Each round in which clients trained, and the run after it.

    Raises:
        BadInput: the run cannot be replayed; or its server does not average clients' models, so
            that the model of some clients is not known from what they sent.
    """
    try:
        check_network(run.experiment)
        again = replay(run, 0)
        by_class = places_by_class(again.dataset.classes, again.fed.server.model)
        for before, trained in trained_models(again, lambda t: tell(f"recomputing round {t}")):
            after, method = again.state.weights, run.experiment.method
            found = averaged(again.after, before, trained, after, by_class, method.name)
            if found is not None:
                yield found, again
    except ExperimentError as refusal:
        raise RunFolderError(f"{run.path}: {refusal}") from None


def check_network(experiment: Experiment) -> None:
    """Refuse an experiment without a global network."""
    method = experiment.method
    if not (experiment.model.builds_network and method.has_global_model):
        raise ExperimentError(
            "estimates are made of updates of a global network, which "
            f"method.name={method.name} has not; take how=permutations or leave_one_out"
        )


def averaged(
    t: int,
    before: Vector,
    trained: Trained,
    after: Vector,
    by_class: Mapping[str, NDArray[np.int64]],
    method: str,
) -> RoundUpdates | None:
    """A round in which clients `trained`; refuses one whose server did not average that.

    None if nobody answered.

    Args:
        method: its name, for the message.
    """
    wide = before.astype(np.float64)
    changes = {k: own.astype(np.float64) - wide for k, (own, _) in trained.items()}
    moved = after.astype(np.float64) - wide
    rounding = np.finfo(np.float32).eps * float(np.linalg.norm(wide))
    near = NEAR * float(np.linalg.norm(moved)) + rounding
    if not trained and not moved.any():
        return None
    for weights in ({k: n for k, (_, n) in trained.items()}, dict.fromkeys(trained, 1)):
        found = RoundUpdates(t, before, after, changes, weights, by_class)
        if np.linalg.norm(found.change(found.cohort) - moved) <= near:
            return found
    raise ExperimentError(
        f"in round {t} the server did not average what its clients trained "
        f"(method.name={method}, or a section that changes updates), as estimates assume; take "
        "how=permutations or leave_one_out"
    )


def places_by_class(classes: Sequence[str], model: FlatModel) -> dict[str, NDArray[np.int64]]:
    """The places of the last layer's weights and biases, by class."""
    start, last = 0, dict[str, NDArray[np.int64]]()
    for name, shape in itertools.islice(model.shapes.items(), len(model.leaves)):
        size = math.prod(shape)
        last = {n: at for n, at in last.items() if n.rpartition(".")[0] == name.rpartition(".")[0]}
        last[name] = np.arange(start, start + size).reshape(shape)
        start += size
    rows = [at.reshape(len(at), -1) for at in last.values() if at.shape[:1] == (len(classes),)]
    if not rows:
        return {}
    return dict(zip(classes, np.concatenate(rows, axis=1), strict=True))


def scores_of_models(again: Replay, score: str) -> Score:
    """A score of weights on the central test set, as the run evaluates them."""

    def worth(weights: Vector) -> float:
        found = again.fed.evaluate(weights)
        check_score(score, found)
        return float(found[score])

    return worth


def check_score(score: str, known: Mapping[str, float]) -> None:
    """Refuse a score that is none of those of a model."""
    if score not in known or math.isnan(known[score]):
        raise BadInput(
            f"score={score}: is no score of a model on the test set, as estimates need; "
            f"known: {', '.join(known)}"
        )
