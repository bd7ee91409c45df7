"""Slices: parts of the central test set that are scored separately."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedsim.data import ClientSplits, Dataset, TaskSequence
from fedsim.data.task_sequence import task_row
from fedsim.objectives.objective import (
    Batch,
    Objective,
    Slice,
    Totals,
    evaluate,
    evaluate_slices,
    merged,
    scores_of,
    tables_of,
)

Rows = dict[str, list[dict[str, Any]]]  # rows of further tables, by table
Scored = tuple[dict[str, float], Rows]


class Slices(ABC):
    """The slices of the central test set, for scoring."""

    # Whether the model predicts only some classes, depending on the slice.
    restricts = False
    columns: Sequence[str] = ()  # of scores recorded only for slices

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    @abstractmethod
    def totals(
        self, network: nn.Module, batch: Batch, start: int, client: int | None = None
    ) -> dict[str, Totals]:
        """The totals of a network, by slice, on a batch that starts at this row of the test set.

        With a client, of its slices only.
        """

    @abstractmethod
    def scores(
        self,
        totals: Mapping[str, Totals],
        task: int,
        client: int | None = None,
        held_out: Totals | None = None,
    ) -> Scored:
        """The columns computed from totals of the whole test set, and rows of further tables.

        Args:
            held_out: the totals of the validation set, if there is one.
        """


class Whole(Slices):
    """One slice: the whole test set."""

    def totals(
        self, network: nn.Module, batch: Batch, start: int, client: int | None = None
    ) -> dict[str, Totals]:
        return {"": evaluate(self.objective, network, batch)}

    def scores(
        self,
        totals: Mapping[str, Totals],
        task: int,
        client: int | None = None,
        held_out: Totals | None = None,
    ) -> Scored:
        found = scores_of(self.objective, totals[""], held_out)
        return found, _tables(self.objective, totals[""], client)


class ByColumn(Slices):
    """A slice for each value of a column of the test examples, with columns `<column>/<value>`."""

    def __init__(self, objective: Objective, values: NDArray[Any], sliced: Sequence[str]) -> None:
        super().__init__(objective)
        names, self._numbers = np.unique(values, return_inverse=True)
        self._names, self._sliced = [str(name) for name in names], sliced
        if len(self._names) > 1:
            self.columns = [f"{column}/{name}" for name in self._names for column in sliced]

    def totals(
        self, network: nn.Module, batch: Batch, start: int, client: int | None = None
    ) -> dict[str, Totals]:
        found = {}
        for k, name in enumerate(self._names):
            if len(rows := np.flatnonzero(self._numbers[start : start + len(batch)] == k)):
                own = batch.at(torch.from_numpy(rows).to(batch.x.device))
                found[name] = evaluate(self.objective, network, own)
        return found

    def scores(
        self,
        totals: Mapping[str, Totals],
        task: int,
        client: int | None = None,
        held_out: Totals | None = None,
    ) -> Scored:
        whole = merged(totals.values())
        found = scores_of(self.objective, whole, held_out)
        if len(totals) > 1:
            for name, own in totals.items():
                scores = scores_of(self.objective, own)
                found |= {f"{c}/{name}": scores[c] for c in self._sliced if c in scores}
        return found, _tables(self.objective, whole, client)


def _tables(objective: Objective, totals: Totals, client: int | None) -> Rows:
    return {
        table: [{"client": client, **row} for row in rows]
        for table, rows in tables_of(objective, totals).items()
    }


class ByTask(Slices):
    """A slice for each task's set of classes, to which predictions are restricted.

    Scores are the mean over learnt tasks of all clients; those of each task are rows of the table
    `tasks`.
    """

    restricts = True

    def __init__(self, objective: Objective, y: NDArray[Any], sequence: TaskSequence) -> None:
        super().__init__(objective)
        self._sequence = sequence
        self._rows = [np.flatnonzero(np.isin(y, labels)) for labels in sequence.label_sets]
        self._numbers = {labels: str(i) for i, labels in enumerate(sequence.label_sets)}

    def totals(
        self, network: nn.Module, batch: Batch, start: int, client: int | None = None
    ) -> dict[str, Totals]:
        wanted = self._sequence.label_sets if client is None else self._sequence.labels[client]
        slices = []
        for labels in dict.fromkeys(wanted):
            number = self._numbers[labels]
            inside = self._rows[int(number)]
            inside = inside[(inside >= start) & (inside < start + len(batch))] - start
            own = torch.from_numpy(inside).to(batch.x.device)
            slices.append(Slice(number, own, labels))
        return evaluate_slices(self.objective, network, batch, slices)

    def scores(
        self,
        totals: Mapping[str, Totals],
        task: int,
        client: int | None = None,
        held_out: Totals | None = None,
    ) -> Scored:
        found = {name: scores_of(self.objective, own) for name, own in totals.items()}
        clients = range(len(self._sequence.labels)) if client is None else [client]
        rows = [
            task_row(self._sequence, k, i, task, found[self._numbers[labels]])
            for k in clients
            for i, labels in enumerate(self._sequence.labels[k])
        ]
        return mean_over_tasks(rows) if client is None else {}, {"tasks": rows}


def mean_over_tasks(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each score over learnt tasks of all clients, of rows of the table `tasks`.

    Empty if nobody has learnt a task.
    """
    seen = [row for row in rows if row["seen"]]
    names = [name for row in seen[:1] for name in row if name not in TaskSequence.COLUMNS]
    return {name: math.fsum(row[name] for row in seen) / len(seen) for name in names}


def slices_of(objective: Objective, data: Dataset, splits: ClientSplits) -> Slices:
    if splits.sequence is not None:
        return ByTask(objective, data.test_y, splits.sequence)
    if data.sliced_by:
        sliced = [metric.column for metric in objective.metrics(data) if metric.sliced]
        return ByColumn(objective, data.test_columns[data.sliced_by], sliced)
    return Whole(objective)
