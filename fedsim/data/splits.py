"""The examples that each client holds, and stratified draws of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
NONE = np.empty(0, dtype=np.int64)


def take_stratified(
    share: Indices, labels: NDArray[np.int64], fraction: float, rng: np.random.Generator
) -> tuple[Indices, Indices]:
    """Draw round(fraction·n) of `share`, each class in proportion (largest remainders).

    Returns:
        (taken, rest), both sorted.
    """
    share = np.sort(share)
    present, inverse, counts = np.unique(labels[share], return_inverse=True, return_counts=True)
    exact = fraction * counts
    quota = np.floor(exact + 1e-9).astype(np.int64)
    missing = round(fraction * len(share)) - int(quota.sum())
    quota[np.argsort(quota - exact, kind="stable")[:missing]] += 1
    chosen = np.zeros(len(share), dtype=bool)
    for c in range(len(present)):
        chosen[rng.permutation(np.flatnonzero(inverse == c))[: quota[c]]] = True
    return share[chosen], share[~chosen]


@dataclass(frozen=True)
class Ragged:
    """A list of index arrays as two flat arrays, so that 100,000 clients share memory cheaply."""

    values: Indices  # (sum of lengths,) all index arrays, one after another
    offsets: Indices  # (K + 1,) array k is `values[offsets[k] : offsets[k + 1]]`

    @classmethod
    def of(cls, arrays: Iterable[Indices]) -> Ragged:
        arrays = [np.asarray(array, dtype=np.int64) for array in arrays]
        offsets = np.cumsum([0] + [len(array) for array in arrays])
        values = np.concatenate(arrays) if arrays else NONE
        return cls(values, offsets.astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, k: int) -> Indices:
        return self.values[self.offsets[k] : self.offsets[k + 1]]

    def __iter__(self) -> Iterator[Indices]:
        return (self[k] for k in range(len(self)))

    @property
    def lengths(self) -> Indices:
        """(K,) how many indices each array holds."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class TaskSequence:
    """The tasks that each client learns one after another, T of them."""

    # Columns of the table of tasks besides scores.
    COLUMNS: ClassVar[frozenset[str]] = frozenset({"round", "client", "task", "seen", "classes"})

    train: Ragged  # K·T arrays, client by client: training examples of each task
    validation: Ragged  # K·T arrays: validation examples of each task
    order: tuple[tuple[tuple[int, ...], ...], ...]  # classes of each client's tasks, as defined
    test: dict[tuple[int, ...], Indices]  # of the central test set, for each of `label_sets`

    @cached_property
    def labels(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The same as `order`, each task's classes in ascending order."""
        return tuple(tuple(tuple(sorted(task)) for task in own) for own in self.order)

    @property
    def num_tasks(self) -> int:
        """T."""
        return len(self.order[0])

    @property
    def label_sets(self) -> list[tuple[int, ...]]:
        """The distinct sets of classes of all tasks."""
        return sorted({labels for own in self.labels for labels in own})

    def arrays(self) -> list[NDArray[Any]]:
        """The arrays that a partition's hash covers."""
        order = np.frombuffer(json.dumps(self.order).encode(), dtype=np.uint8)
        parts = (self.train, self.validation)
        return [*(array for part in parts for array in (part.values, part.offsets)), order]

    def task(self, t: int, rounds: int) -> int:
        """The task learnt in round t = 1, 2, ..., rounds: 0 ≤ i < T."""
        return max(0, t - 1) * self.num_tasks // rounds


@dataclass(frozen=True)
class ClientSplits:
    """The examples that each client holds."""

    train: Ragged  # examples whose label the client may use, as indices into `Dataset.x`
    unlabelled: Ragged  # examples whose label it may not (empty unless `labelled_fraction` < 1)
    test: Ragged  # examples held out to evaluate a model on the client's own distribution
    server: Indices = field(default_factory=lambda: NONE)  # that only the server holds
    held_out: Indices = field(default_factory=lambda: NONE)  # for `evaluate.validation`
    sequence: TaskSequence | None = None  # into which `train` is divided, in continual learning
    task: int = 0  # the current one, 0 ≤ task < T; see `at`
    labels: tuple[tuple[int, ...], ...] | None = None  # the task's, by client; None for all
    validation: Ragged | None = None  # examples of the task
    test_is_central: bool = False  # `test` holds indices into `Dataset.test_x`
    change: Change | None = None  # what clients hold instead from a given round on
    names: tuple[str, ...] = ()  # of clients in the data, for example hospitals; may be none
    adversaries: tuple[int, ...] = ()  # ids of clients, in ascending order
    absent: tuple[int, ...] = ()  # ids of clients that never take part, in ascending order

    def __len__(self) -> int:
        return len(self.train)

    def leaving_out(self, clients: Iterable[int]) -> ClientSplits:
        """The same of a federation in which exactly these clients take no part."""
        absent, change = tuple(sorted(clients)), self.change
        if change is not None:
            change = replace(change, splits=replace(change.splits, absent=absent))
        return replace(self, absent=absent, change=change)

    @cached_property
    def present(self) -> NDArray[np.bool_]:
        """(K,) whether a client takes part in the federation."""
        present = np.ones(len(self), dtype=np.bool_)
        present[list(self.absent)] = False
        return present

    @property
    def training_rows(self) -> Indices:
        """The labelled training examples of all clients that take part, one after another."""
        return self.train.values[np.repeat(self.present, self.train.lengths)]

    def held(self, t: int) -> ClientSplits:
        """What clients hold in round t; all tasks of a sequence together."""
        return self if self.change is None or t < self.change.round else self.change.splits

    def at(self, t: int, rounds: int) -> ClientSplits:
        """What clients hold in round t of `rounds`; of a sequence, the current task."""
        if self.sequence is None:
            return self.held(t)
        return self._of_task[self.sequence.task(t, rounds)]

    @cached_property
    def _of_task(self) -> list[ClientSplits]:
        sequence = self.sequence
        assert sequence is not None
        found = []
        for task in range(sequence.num_tasks):
            places = range(task, len(self) * sequence.num_tasks, sequence.num_tasks)
            labels = tuple(own[task] for own in sequence.labels)
            found.append(
                replace(
                    self,
                    train=Ragged.of([sequence.train[i] for i in places]),
                    validation=Ragged.of([sequence.validation[i] for i in places]),
                    test=Ragged.of([sequence.test[own] for own in labels]),
                    task=task,
                    labels=labels,
                    test_is_central=True,
                )
            )
        return found


@dataclass(frozen=True)
class Change:
    """Changed inputs of some clients from a given round on."""

    round: int  # the first with the changed inputs
    clients: tuple[int, ...]  # in ascending order
    features: tuple[str, ...]  # names of the changed columns of a table
    splits: ClientSplits  # what all clients hold from that round on

    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        return {"round": self.round, "clients": [*self.clients], "features": [*self.features]}
