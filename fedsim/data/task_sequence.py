"""Partitions for continual learning, in which clients learn tasks one after another."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, model_validator

from fedsim.config.registry import nearest, unfit
from fedsim.data.dataset import Dataset, split_off
from fedsim.data.partition import MOST_CLIENTS, Partition, partitions
from fedsim.data.splits import NONE, ClientSplits, Indices, Ragged, TaskSequence
from fedsim.errors import DataError
from fedsim.support.rng import keyed_rng

Labels = list[int]
Drawn = tuple[list[Labels], list[list[int]]]  # see `TaskPartition.draw`


class TaskPartition(Partition):
    """Base class of partitions over both clients and time.

    The examples of a class that belongs to several tasks are divided into equally long slices, one
    per task, in the order of the data set; the last slice has the remainder. Thus no example is in
    two tasks. Some of each task's examples are held out for validation, drawn with the run's seed;
    they are stratified if every class has two or more examples and both parts have room for every
    class.

    Args:
        validation_fraction: share of each task's training examples held out for validation.
    """

    niche: ClassVar[bool] = True
    overview: ClassVar[str | None] = "tasks"
    validation_fraction: float = Field(0.125, ge=0, lt=1)

    @model_validator(mode="after")
    def _deals_by_task(self) -> TaskPartition:
        if self.test_fraction or self.server_fraction or self.labelled_fraction < 1:
            raise unfit(
                "a stream of tasks has test_fraction 0, server_fraction 0 and labelled_fraction "
                "1: a task is tested on the central test set's examples of its classes"
            )
        return self

    @property
    def tests_clients(self) -> bool:
        return True

    def draw(self, data: Dataset, rows: Indices, seed: int) -> Drawn:
        """The classes of each task, and the tasks of each client, in the order of learning.

        Of the training rows `rows`. It is a DataError if there are no such classes, or too few.
        """
        raise NotImplementedError

    def deal(self, data: Dataset, seed: int, held_out: Indices = NONE) -> ClientSplits:
        if len(held_out):
            raise DataError(
                f"evaluate.validation: partition.kind={self.kind} has its own validation "
                "examples for each task (partition.validation_fraction); leave it out"
            )
        if not data.classes:
            raise DataError(
                f"partition.kind={self.kind} divides examples by class, and the target here is a "
                "number"
            )
        rows = self.taking_part(data, seed)
        tasks, clients = self.draw(data, rows, seed)
        slices = _slices(data.y, rows, tasks, data.classes)
        train, validation = [], []
        for k, own in enumerate(clients):
            for i, task in enumerate(own):
                rng = keyed_rng(seed, "validation", client=k * len(own) + i)
                aside, rest = _aside(slices[task], data.y, self.validation_fraction, rng)
                if not len(rest):
                    raise DataError(
                        f"client {k}, task {i}: {len(slices[task])} examples, which leaves none "
                        "to train on; use fewer tasks or a smaller validation_fraction"
                    )
                train.append(rest)
                validation.append(aside)
        order = tuple(tuple(tuple(tasks[i]) for i in own) for own in clients)
        T = len(clients[0])
        everything = [np.concatenate(train[k * T : k * T + T]) for k in range(len(clients))]
        nothing = Ragged.of([NONE] * len(clients))
        test = {
            labels: np.flatnonzero(np.isin(data.test_y, labels))
            for labels in {tuple(sorted(task)) for own in order for task in own}
        }
        sequence = TaskSequence(Ragged.of(train), Ragged.of(validation), order, test)
        return ClientSplits(Ragged.of(everything), nothing, nothing, sequence=sequence)


def task_row(
    sequence: TaskSequence, client: int, task: int, under_way: int, scores: Mapping[str, float]
) -> dict[str, Any]:
    """A row of tasks.parquet, without the round: a model's scores for a task, of which none may be
    named like a built-in column, while the task `under_way` is learnt.
    """
    taken = sorted(TaskSequence.COLUMNS & scores.keys())
    if taken:
        raise ValueError(f"'{taken[0]}' is a built-in column; choose another name")
    classes = len(sequence.labels[client][task])
    seen = task <= under_way
    return {"client": client, "task": task, "seen": seen, "classes": classes, **scores}


def _slices(
    y: Indices, rows: Indices, tasks: list[Labels], classes: tuple[str, ...]
) -> list[Indices]:
    """The examples of each task, in the order of the data set."""
    uses = Counter(label for task in tasks for label in task)
    cut = {}
    for label, count in uses.items():
        found = rows[y[rows] == label]
        if len(found) < count:
            raise DataError(
                f"partition: class '{classes[label]}' has {len(found)} training examples for its "
                f"{count} tasks; use it in fewer tasks"
            )
        size = len(found) // count
        cut[label] = [found[i * size : (i + 1) * size] for i in range(count - 1)]
        cut[label].append(found[(count - 1) * size :])
    return [np.sort(np.concatenate([cut[label].pop(0) for label in task])) for task in tasks]


def _aside(
    share: Indices, y: Indices, fraction: float, rng: np.random.Generator
) -> tuple[Indices, Indices]:
    """The validation examples and the rest, both sorted."""
    count = int(np.ceil(fraction * len(share))) if fraction else 0
    if count == 0 or len(share) == 1:
        return share[:0], share
    if count >= len(share):
        return share, share[:0]
    present, sizes = np.unique(y[share], return_counts=True)
    fits = sizes.min() >= 2 and min(count, len(share) - count) >= len(present)
    seed = int(rng.integers(2**31))
    rest, aside = split_off(count, len(share), y[share] if fits else None, seed)
    return share[aside], share[rest]


@partitions.register
class Tasks(TaskPartition):
    """Random tasks, drawn as in FedSeIT's released code (EMNLP Findings 2022).

    The classes of the test set, sorted by name, are shuffled with seed 42; task i is a sample of
    `classes` of them with seed 42 + i. (Classes with fewer training examples than tasks are left
    out, and tasks drawn again.) Client k goes through the names of all tasks in an order shuffled
    with seed k·seed + 5, where seed is the run's, and takes the first ones that no client before
    it has taken. So the set of tasks is the same for all seeds, and so are the tasks of client 0.

    Args:
        clients: K, number of clients.
        tasks: T, number of tasks that each client learns.
        classes: number of classes of a task.
    """

    kind: str = "tasks"
    clients: int = Field(3, ge=1, le=MOST_CLIENTS)
    tasks: int = Field(5, ge=1, le=MOST_CLIENTS)
    classes: int = Field(4, ge=2)

    def draw(self, data: Dataset, rows: Indices, seed: int) -> Drawn:
        count = self.clients * self.tasks
        if count > len(rows):
            raise DataError(
                f"partition: {self.clients} clients with {self.tasks} tasks each are more tasks "
                f"than the data set has training examples ({len(rows)})"
            )
        if self.classes > len(data.classes):
            raise DataError(
                f"partition.classes={self.classes}: the data set has {len(data.classes)} classes"
            )
        examples = np.bincount(data.y[rows], minlength=len(data.classes))
        tested = np.bincount(data.test_y, minlength=len(data.classes))
        by_name = sorted(range(len(data.classes)), key=lambda label: data.classes[label])
        usable = [label for label in by_name if examples[label] and tested[label]]
        tasks: list[Labels] = []
        while not tasks:
            if len(usable) < self.classes:
                raise DataError(
                    f"partition: {count} tasks of {self.classes} classes; only {len(usable)} "
                    "classes have at least one training example per task and one test example"
                )
            # Python's generator reproduces the published sequences.
            shuffled = list(usable)
            random.Random(42).shuffle(shuffled)
            tasks = [random.Random(42 + i).sample(shuffled, self.classes) for i in range(count)]
            uses = Counter(label for task in tasks for label in task)
            scarce = {label for label in usable if examples[label] < uses[label]}
            if scarce:
                usable, tasks = [label for label in usable if label not in scarce], []
        names = sorted(str(i) for i in range(count))
        taken: set[str] = set()
        clients = []
        for k in range(self.clients):
            order = list(names)
            random.Random(k * seed + 5).shuffle(order)
            own = [name for name in order if name not in taken][: self.tasks]
            taken.update(own)
            clients.append([int(name) for name in own])
        return tasks, clients


@partitions.register
class OwnTasks(TaskPartition):
    """Your own tasks: for each client the list of its tasks, each a list of class names.

    Args:
        tasks: [[[sport, health], [world, us]], ...], with the same number of tasks for every
            client.
    """

    kind: str = "own_tasks"
    tasks: Annotated[
        list[Annotated[list[Annotated[list[str], Field(min_length=1)]], Field(min_length=1)]],
        Field(min_length=1),
    ]

    @model_validator(mode="after")
    def _as_many(self) -> OwnTasks:
        T = len(self.tasks[0])
        for k, own in enumerate(self.tasks):
            if len(own) != T:
                raise unfit(
                    f"client {k} has {len(own)} tasks, client 0 {T}; all clients need the same "
                    "number"
                )
            for i, task in enumerate(own):
                if len(set(task)) < len(task):
                    raise unfit(f"client {k}, task {i} names a class twice")
        return self

    def draw(self, data: Dataset, rows: Indices, seed: int) -> Drawn:
        number = {name: label for label, name in enumerate(data.classes)}
        tasks: list[Labels] = []
        clients = []
        for k, own in enumerate(self.tasks):
            clients.append(list(range(len(tasks), len(tasks) + len(own))))
            for i, names in enumerate(own):
                for name in names:
                    if name not in number:
                        raise DataError(
                            f"partition.tasks: client {k}, task {i}: there is no class "
                            f"'{name}'{nearest(name, data.classes)}"
                        )
                    if not (data.test_y == number[name]).any():
                        raise DataError(
                            f"partition.tasks: client {k}, task {i}: the test set has no example "
                            f"of '{name}'"
                        )
                tasks.append([number[name] for name in names])
        return tasks, clients
