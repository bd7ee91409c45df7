"""What a client-side function sees of its client, and what it sends back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Set
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.data import TaskSequence
from fedsim.federation.context import Examples, Table, WorkerContext
from fedsim.models import RuleModel, Rules
from fedsim.models.rules import count
from fedsim.rng import keyed_rng
from fedsim.training import (
    Context,
    FlatModel,
    Gradient,
    Hooks,
    Loss,
    Task,
    Train,
    Trained,
    default_loss,
    evaluate,
    evaluate_among,
    regression_scores,
    scores,
)


class Update:
    """One client's contribution to a mean: named vectors and the weight that they count with.

    One without vectors leaves the client out of the mean: it has nothing to send.

    Args:
        weight: share in the mean, before normalisation; usually the number of samples.
        vectors: float tensors of any shape, the same names and shapes from every client.
    """

    def __init__(self, *, weight: float = 1.0, **vectors: Tensor) -> None:
        self.weight = float(weight)
        self.vectors = vectors


F = TypeVar("F", bound=Callable[..., Any])


def client_function(rng: str) -> Callable[[F], F]:
    """Name the random streams of a client function, so that renaming it changes no result.

    Without this decorator they go by the function's own name.

    Example:
        >>> @client_function("local_update")
        ... def train_locally(self, client, weights): ...
    """

    def mark(function: F) -> F:
        function.rng = rng  # type: ignore[attr-defined]
        return function

    return mark


# Columns of clients.parquet that are filled for every client.
RESERVED = frozenset(
    {"round", "client", "samples", "seconds", "error"}
    | {"bytes_up", "bytes_down", "one_off_up", "one_off_down"}
)


def record(scalars: Mapping[str, Any], reserved: Set[str]) -> dict[str, Any]:
    """Scalars as plain numbers and words.

    Raises:
        ValueError: a name is reserved, or a value is something else.
    """
    taken = sorted(reserved & scalars.keys())
    if taken:
        raise ValueError(f"'{taken[0]}' is a column that is filled anyway; take another name")
    plain = {}
    for name, value in scalars.items():
        plain[name] = value.item() if isinstance(value, Tensor | np.generic) else value
        if not isinstance(plain[name], bool | int | float | str | None):
            raise ValueError(
                f"'{name}' is a {type(value).__name__}; numbers and words go on record, no more"
            )
    return plain


def task_row(
    stream: TaskSequence, client: int, task: int, now: int, scalars: Mapping[str, float | int]
) -> dict[str, Any]:
    """A row of tasks.parquet, but for the round.

    Args:
        now: the task under way.
    """
    classes = len(stream.labels[client][task])
    known = {"client": client, "task": task, "seen": task <= now, "classes": classes}
    return {**known, **record(scalars, known.keys() | {"round"})}


class Client:
    """One client in one round, where its work is carried out.

    Attributes:
        id: the client's number, 0 ≤ id < K.
        round: t.
        state: what the client keeps from round to round, by name: tensors, numbers, and lists and
            dicts of them. It is committed when the server accepts the work.
        model: the network; its weights are whatever was loaded or trained last.
        settings: the experiment's `train` section.
        lr: η, the learning rate of this round.
        steps: τ, local steps of the latest `train`.
        trained: what the client's latest training came to.
        task: of a stream, the one that is learnt in this round, 0 ≤ task < T.
        tasks: what was reported of tasks.
    """

    def __init__(
        self,
        host: WorkerContext,
        id: int,
        round: int,
        rng: str,
        state: Mapping[str, Any],
        carry_out: Callable[[Task], Trained],
    ) -> None:
        self.id, self.round = id, round
        self.state = dict(state)
        self.lr = host.spec.train.lr(round)
        self.steps = 0
        self.trained: Tensor | Rules | None = None
        self.row: dict[str, Any] = {}
        self.task = host.task(round)
        self.tasks: list[dict[str, Any]] = []
        self._host = host
        self._held = host.held_in(round)
        self._carry_out = carry_out
        self._rng = rng
        self._asked: Counter[str] = Counter()

    @property
    def model(self) -> FlatModel:
        return self._host.model

    def network(self, name: str, build: Callable[[], nn.Module]) -> FlatModel:
        """A further network, such as a generator: kept where the work is carried out, by name.

        Its weights are whatever was left in it, perhaps by another client: load some first.
        """
        return self._host.network(name, build)

    @property
    def settings(self) -> Train:
        return self._host.spec.train

    @property
    def device(self) -> torch.device:
        return self._host.device

    @property
    def num_samples(self) -> int:
        """n_k, how many labelled training examples the client holds."""
        return len(self._held.train[self.id])

    @property
    def num_classes(self) -> int:
        """C."""
        return self._host.spec.classes

    @cached_property
    def data(self) -> Examples:
        """The client's labelled training examples."""
        return self._host.examples(self._held.train[self.id])

    @property
    def table(self) -> Table:
        """The client's labelled training examples as rows of a table."""
        return self._host.table(self._held.train[self.id])

    @cached_property
    def unlabelled(self) -> Tensor:
        """Inputs of the client's examples whose labels it does not know, (n, ...)."""
        return self._host.examples(self._held.unlabelled[self.id]).x

    @cached_property
    def test(self) -> Examples:
        """The client's own test examples; of a stream, those of the task under way."""
        if self._held.stream is not None:
            return self.task_test(self.task)
        return self._host.examples(self._held.test[self.id])

    @cached_property
    def validation(self) -> Examples:
        """Of a stream: examples of the task under way that are kept aside."""
        stream = self.stream
        return self._host.examples(stream.validation[self.id * stream.tasks + self.task])

    @property
    def stream(self) -> TaskSequence:
        """The tasks of all clients.

        Raises:
            ValueError: there is no stream of tasks.
        """
        if self._held.stream is None:
            raise ValueError("the partition is no stream of tasks")
        return self._held.stream

    def labels(self, task: int) -> tuple[int, ...]:
        """The classes of one of the client's tasks, in ascending order."""
        return self.stream.labels[self.id][task]

    def task_test(self, task: int) -> Examples:
        """The central test set's examples of the classes of one of the client's tasks."""
        return self._host.task_test(self.labels(task))

    @property
    def test_table(self) -> Table:
        """The client's own test examples as rows of a table."""
        return self._host.table(self._held.test[self.id])

    @property
    def central_test(self) -> Examples:
        """The central test set, which a real client would not have: for diagnostics."""
        return self._host.central_test

    @property
    def central_table(self) -> Table:
        """The central test set as rows of a table, for diagnostics."""
        return self._host.test_table

    @property
    def rules(self) -> RuleModel:
        """The experiment's rule model."""
        return self._host.spec.rules

    def rng(self, purpose: str) -> np.random.Generator:
        """A random stream of this client's own, for one purpose in this round.

        Asked again for the same purpose within one call, it is another stream.
        """
        self._asked[purpose] += 1
        again = f"/{self._asked[purpose]}" if self._asked[purpose] > 1 else ""
        seed = self._host.spec.seed
        return keyed_rng(seed, f"{self._rng}/{purpose}{again}", self.round, self.id)

    def train(
        self,
        weights: Tensor,
        loss: Loss = default_loss,
        gradient: Gradient | None = None,
        perturb: Gradient | None = None,
        part: slice | None = None,
        context: Context | None = None,
        data: Examples | None = None,
        epochs: int | None = None,
        on_record: bool = True,
    ) -> Tensor:
        """Local training from `weights`, with a new optimiser.

        Clients are trained many at once (`engine.clients_per_step`) if `loss`, `gradient` and
        `perturb` are the same functions for all of them, usually methods of the Method, and take
        what is a client's own from the context. The function that calls this one may then be run
        again from its start, up to here.

        Args:
            weights: (size,) where to start.
            loss: (network, x, y, context) -> (B,), the loss of each example, which depends on
                that example alone (but for batch norm). Their mean over the batch is minimised.
            gradient: (g, w, context) -> g, changes each step's gradient.
            perturb: (g, w, context) -> ε: the gradient is taken at w + ε, the step made from w.
            part: range of the flat vector that is trained, if not all; see `FlatModel.part`.
            context: vectors that these functions need, (P,) or (size,) each.
            data: what to train on, if not the client's labelled examples.
            epochs: passes over them, if not `train.local_epochs`.
            on_record: report loss and steps, as columns of clients.parquet.

        Returns:
            (size,) the trained weights.
        """
        examples = self.data if data is None else data
        hooks = Hooks(loss, gradient, perturb, part or slice(None))
        rng = self.rng("batches")
        epochs = self.settings.local_epochs if epochs is None else epochs
        context = {name: self._apart(vector) for name, vector in (context or {}).items()}
        start = self._apart(weights)
        task = Task(start, examples.x, examples.y, self.lr, epochs, rng, hooks, context)
        trained = self._carry_out(task)
        self.steps, self.trained = trained.steps, trained.weights
        if on_record:
            self.report(loss=trained.loss, steps=trained.steps)
        return trained.weights

    def _apart(self, vector: Tensor) -> Tensor:
        """The vector, or a copy if it is part of the network's own, which training changes."""
        network = self._host.model.vector.untyped_storage().data_ptr()
        return vector.clone() if vector.untyped_storage().data_ptr() == network else vector

    def evaluate(self, weights: Tensor) -> None:
        """Report test_loss and test_accuracy (or test_r2) on the client's own test examples.

        A client without test examples reports nothing.
        """
        if len(self.test) == 0:
            return
        self.model.load(weights)
        totals = evaluate(self.model, self.test.x, self.test.y)
        self._report_test(scores(totals, self.test.y.cpu().numpy()))

    def evaluate_tasks(self, weights: Tensor) -> None:
        """Report what a network makes of the test examples of each of the client's tasks."""
        self.model.load(weights)
        tasks, test = self.stream.labels[self.id], self.central_test
        found = evaluate_among(self.model, test.x, test.y, tasks)
        self.model.restrict_classes(self.labels(self.task))
        y = test.y.cpu().numpy()
        for task, (labels, totals) in enumerate(zip(tasks, found, strict=True)):
            self.report_task(task, **scores(totals, y[np.isin(y, labels)]))

    def report_task(self, task: int, **scalars: float | int) -> None:
        """Put scalars of one of the client's tasks on record, in tasks.parquet."""
        self.tasks.append(task_row(self.stream, self.id, task, self.task, scalars))

    def train_rules(self) -> Rules:
        """The client's own rules, learnt from its labelled examples; reports how many they are."""
        table = self.table
        found = self.rules.train(table.x, table.y, self.rng("rules"))
        self.report(rules=count(found))
        self.trained = found
        return found

    def evaluate_rules(self, rules: Rules) -> None:
        """Report test_loss and test_r2 of a rule base on the client's own test examples."""
        test = self.test_table
        if len(test):
            self._report_test(regression_scores(self.rules.predict(rules, test.x).values, test.y))

    def _report_test(self, found: Mapping[str, float]) -> None:
        for name in ("loss", "accuracy", "r2"):
            if not math.isnan(found.get(name, math.nan)):  # R² of equal targets is none
                self.report(**{f"test_{name}": found[name]})

    def report(self, **scalars: float | int) -> None:
        """Put scalars of this client and round on record, in clients.parquet.

        Raises:
            ValueError: a name is taken by what is recorded of every client.
        """
        self.row.update(record(scalars, RESERVED))

    def parameters(self, weights: Tensor) -> Tensor:
        """(P,) the trainable parameters among (size,) weights: what gradients refer to."""
        return weights[: self._host.model.num_parameters]
