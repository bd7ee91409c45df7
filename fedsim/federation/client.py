"""The client, as client functions see it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.data import ClientSplits
from fedsim.federation.context import Examples, WorkerContext
from fedsim.federation.wire import PROTOCOL_COLUMNS, same
from fedsim.models import Model
from fedsim.objectives import Batch, Objective, evaluate, of_validation, scores_of
from fedsim.support.rng import keyed_rng
from fedsim.training import (
    Context,
    Draw,
    FlatModel,
    Hooks,
    Loss,
    Perturbation,
    Prepare,
    Train,
    Trained,
    TrainingJob,
)

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def client_function(rng: str) -> Callable[[F], F]:
    """Set the name of a client function's random streams, so that renaming it changes no result.

    Without this decorator, the streams are named after the function.

    Example:
        >>> @client_function("local_update")
        ... def train_locally(self, client, weights): ...
    """

    def mark(function: F) -> F:
        function.rng = rng  # type: ignore[attr-defined]
        return function

    return mark


# Tables other than rounds and clients, to which methods add rows.
RECORDED = ("explanations", "tasks", "confusion", "adapters")

# Columns of clients.parquet that are filled for every client.
RESERVED = frozenset(
    {"round", "client", "samples", "seconds", "error"}
    | {"bytes_up", "bytes_down", "one_off_up", "one_off_down", "lost", "dropped"}
    | PROTOCOL_COLUMNS
)


def plain(scalars: Mapping[str, Any], reserved: Set[str]) -> dict[str, Any]:
    """Scalars as plain numbers and strings.

    Raises:
        ValueError: a name is reserved, or a value is something else.
    """
    taken = sorted(reserved & scalars.keys())
    if taken:
        raise ValueError(f"'{taken[0]}' is a built-in column; choose another name")
    found = {}
    for name, value in scalars.items():
        found[name] = value.item() if isinstance(value, Tensor | np.generic) else value
        if not isinstance(found[name], bool | int | float | str | None):
            raise ValueError(
                f"'{name}' is a {type(value).__name__}; only numbers and strings can be recorded"
            )
    return found


def check_free(names: Iterable[str], taken: Mapping[str, str]) -> None:
    """Refuse names of conditions' columns.

    Args:
        taken: the columns, and whose they are.

    Raises:
        ValueError: one is taken.
    """
    for name in names:
        if name in taken:
            raise ValueError(f"'{name}' is a column of `{taken[name]}`; choose another name")


def check_table(table: str) -> None:
    """Refuse an unknown table.

    Raises:
        ValueError: there is no such table.
    """
    if table not in RECORDED:
        raise ValueError(f"there is no table '{table}'; known: {', '.join(RECORDED)}")


class Trainer(Protocol):
    """Carries out a client's local training, alone or in a stack."""

    def train(self, job: TrainingJob) -> Trained: ...


class Client:
    """One client in one round, in the process that does its work.

    Attributes:
        id: the client's number, 0 ≤ id < K.
        round: t.
        state: the client's state kept between rounds, by name: tensors, numbers, and lists and
            dicts of them. It is committed when the server accepts the client's work.
        model: the network, with the weights that were last loaded or trained.
        settings: the experiment's `train` section.
        lr: η, the learning rate of this round.
        steps: τ, local steps of the latest `train`.
        trained: the model after the latest training; None before any. A client function that
            trains without `train` sets it.
        examples: number of examples trained on in this call, each pass counted; it determines
            simulated time. A client function that trains without `train` calls `visit`.
        told: what conditions tell their side at this client, by their names.
        notes: what conditions note of this call for the server, by their names.
        lost: whether its message never arrives.
        rehearses: whether its function ran without training, to see what it takes.
        context: the network and the data of the process, for conditions.
        row: its columns of clients.parquet so far.
        records: its rows of further tables.
        splits: the examples that each client holds in this round.
    """

    def __init__(
        self,
        context: WorkerContext,
        id: int,
        round: int,
        rng: str,
        state: Mapping[str, Any],
        trainer: Trainer,
        told: Mapping[str, Any],
    ) -> None:
        self.id, self.round = id, round
        self.state = dict(state)
        self.lr = context.spec.train.lr(round)
        self.steps = 0
        self.trained: Any = None
        self.examples = 0
        self.told = told
        self.notes: dict[str, Any] = {}
        self.lost = self.rehearses = False
        self.row: dict[str, Any] = {}
        self.records: dict[str, list[dict[str, Any]]] = {}
        self.splits: ClientSplits = context.splits_at(round)
        self.context = context
        self._trainer = trainer
        self._rng = rng
        self._asked: Counter[str] = Counter()

    @property
    def model(self) -> FlatModel:
        return self.context.model

    def network(self, name: str, build: Callable[[], nn.Module]) -> FlatModel:
        """A further network by name, such as a generator, kept in the process that does the work.

        Its weights may have been left by another client, so load weights first.
        """
        return self.context.network(name, build)

    @property
    def learner(self) -> Model:
        """The experiment's `model` section, which builds networks or learns rules."""
        return self.context.spec.model

    @property
    def objective(self) -> Objective:
        """The objective: the training loss and the scores."""
        return self.context.spec.objective

    @property
    def settings(self) -> Train:
        return self.context.spec.train

    @property
    def device(self) -> Any:
        """The device on which it computes."""
        return self.context.device

    @property
    def num_samples(self) -> int:
        """n_k, the number of labelled training examples of the client."""
        return len(self.splits.train[self.id])

    @property
    def num_classes(self) -> int:
        """C, the number of classes; 0 for regression."""
        return self.context.spec.data.num_classes

    @property
    def parts(self) -> NDArray[np.int64] | None:
        """(W,) the feature of each entry of a table's row, if features take several."""
        return self.context.spec.data.parts

    @property
    def labels(self) -> tuple[int, ...] | None:
        """The classes among which its model chooses in this round; None for all."""
        return None if self.splits.labels is None else self.splits.labels[self.id]

    @cached_property
    def data(self) -> Examples:
        """The client's labelled training examples."""
        return self.context.examples(self.splits.train[self.id])

    @cached_property
    def unlabelled(self) -> Tensor:
        """The inputs (n, ...) of the client's examples whose labels it does not know."""
        return self.context.examples(self.splits.unlabelled[self.id]).x

    @cached_property
    def test(self) -> Examples:
        """The client's own test examples."""
        rows = self.splits.test[self.id]
        if self.splits.test_is_central:
            return self.context.test_examples(rows)
        return self.context.examples(rows)

    @cached_property
    def validation(self) -> Examples:
        """Validation examples of this round's training examples, if the partition has any."""
        if self.splits.validation is None:
            return self.context.examples(self.splits.train[self.id][:0])
        return self.context.examples(self.splits.validation[self.id])

    @property
    def central_test(self) -> Examples:
        """The central test set, which a real client would not have; for diagnostics."""
        return self.context.central_test

    @property
    def central_validation(self) -> Examples:
        """The validation set, which a real client would not have either."""
        return self.context.examples(self.splits.held_out)

    def once(self, name: str, make: Callable[[], T], *of: Any) -> T:
        """What the client makes once in this process of its labelled examples, by name.

        A cache: recomputed in another process, or when the examples or `of` change.

        Args:
            make: makes it.
            of: the arrays of which it is made.
        """
        given = [self.splits.train[self.id], *of]
        kept = self.context.once(f"client {self.id}/{name}", dict[str, Any])
        if "given" not in kept or not same(kept["given"], given):
            kept.update(given=given, made=make())
        made: T = kept["made"]
        return made

    def rng(self, purpose: str) -> np.random.Generator:
        """A random stream for this client, this round and one purpose.

        A second request for the same purpose within one call returns another stream.
        """
        self._asked[purpose] += 1
        again = f"/{self._asked[purpose]}" if self._asked[purpose] > 1 else ""
        seed = self.context.spec.seed
        return keyed_rng(seed, f"{self._rng}/{purpose}{again}", self.round, self.id)

    def train(
        self,
        weights: Tensor,
        loss: Loss | None = None,
        linear: Tensor | None = None,
        quadratic: float = 0.0,
        perturb: Perturbation | None = None,
        part: slice | None = None,
        draw: Draw | None = None,
        prepare: Prepare | None = None,
        context: Context | None = None,
        data: Examples | None = None,
        epochs: int | None = None,
        on_record: bool = True,
    ) -> Tensor:
        """Train locally, starting from `weights`, with a new optimiser.

        Minimises the mean loss + ⟨linear, w⟩ + (quadratic/2)·‖w‖², over the trainable parameters
        w. For example, a proximal term (a/2)·‖w − u‖² is linear=-a·u, quadratic=a.

        Several clients are trained at once (`engine.clients_per_step`) if `loss` and `perturb` are
        the same functions for all of them, usually methods of the Method (or `functools.partial`
        of them with the same arguments), and take client-specific values from the context. The
        calling client function may then be run again from its start up to this call.

        Args:
            weights: (size,) initial weights.
            loss: (network, x, y, context) -> (B,), the loss of each example, which must depend
                only on that example (except through batch norm); by default the objective's. The
                mean over the batch is minimised.
            linear: v (P,), added to each step's gradient.
            quadratic: a; a·w is added to each step's gradient.
            perturb: (g, w, context) -> ε: the gradient is taken at w + ε, and the step made from
                w.
            part: range of the flat vector that is trained, by default all; see `FlatModel.part`.
            draw: (x, y) -> (rows, whole): what the loss finds in its context for this batch, by
                name: tensors with a row for each example, and tensors for the whole batch. Random
                draws, and counts of batches, belong here: it is called once for each batch, while
                the loss is called for each of its parts (`train.accumulate`). Its clients are
                trained one by one.
            prepare: (network, x, context) -> rows: what the loss needs of each example in all
                epochs, such as the outputs of a frozen model: by name, tensors with a row for
                each of the examples x (n, ...), which must depend only on that example. It is
                called once, when the network has the weights from which training starts; the loss
                finds the rows of its batch in its context.
            context: vectors that these functions need, (P,) or (size,) each.
            data: examples to train on; by default the client's labelled examples.
            epochs: passes over the examples; by default those of `train.local_epochs`, or
                `train.local_steps`.
            on_record: report loss and steps as columns of clients.parquet.

        Returns:
            (size,) the trained weights.
        """
        examples = self.data if data is None else data
        hooks = Hooks(loss or self.objective.loss, perturb, part or slice(None), draw, prepare)
        rng = self.rng("batches")
        most_steps = None
        if epochs is None:
            epochs, most_steps = self.settings.most_epochs, self.settings.local_steps
        context = {name: self._apart(vector) for name, vector in (context or {}).items()}
        start = self._apart(weights)
        linear = None if linear is None else self._apart(linear)
        x, y, eta = examples.x, examples.y, self.lr
        job = TrainingJob(
            *(start, x, y, eta, epochs, rng, hooks, context, linear, quadratic, most_steps),
            facts=examples.facts,
        )
        for condition in self.context.spec.conditions:
            job = condition.training(self, job)
        trained = self._trainer.train(job)
        self.steps, self.trained = trained.steps, trained.weights
        self.visit(trained.visited)
        for condition in self.context.spec.conditions:
            condition.trained(self, job, trained)
        if on_record:
            self.report(loss=trained.loss, steps=trained.steps)
        return trained.weights

    def visit(self, examples: int) -> None:
        """Count examples that the client has trained on."""
        self.examples += examples
        for condition in self.context.spec.conditions:
            condition.visited(self)

    def _apart(self, vector: Tensor) -> Tensor:
        """The vector, copied if it shares memory with the network, which training changes."""
        network = self.context.model.vector.untyped_storage().data_ptr()
        return vector.clone() if vector.untyped_storage().data_ptr() == network else vector

    def evaluate(self, model: Tensor | Mapping[str, Any]) -> None:
        """Report the scores of a model on the client's test examples, as `test_<score>`.

        A client without test examples reports nothing.

        Args:
            model: weights (size,), or the arrays of a model of arrays.
        """
        if len(self.test) == 0:
            return
        batch = Batch(self.test.x, self.test.y, facts=self.test.facts)
        totals = evaluate(self.objective, self.context.as_network(model), batch)
        calibrates = self.objective.calibrates
        held_out = self.context.validated(model, self.round) if calibrates else None
        self.report_test(scores_of(self.objective, totals, held_out))

    def report_test(self, scores: Mapping[str, float]) -> None:
        """Report scores on the client's own test examples, except undefined ones."""
        defined = {name: score for name, score in scores.items() if not math.isnan(score)}
        self.report(**{f"test_{name}": score for name, score in defined.items()})

    def score(self, weights: Tensor) -> dict[str, float]:
        """The scores of a network on the central test set, for diagnostics.

        If there is a validation set, also the scores on it, as `validation_<score>`.

        In continual learning, the scores of each of the client's tasks are recorded in
        tasks.parquet instead.
        """
        slices, model = self.context.slices, self.model
        model.load(weights)
        model.restrict_classes(None)
        totals = slices.totals(model.module, self.context.central_batch, 0, self.id)
        model.restrict_classes(self.labels)
        held_out = None
        if len(self.splits.held_out):
            batch = self.context.validation_batch(slice(None))
            held_out = evaluate(self.objective, model.module, batch)
        scores, rows = slices.scores(totals, self.splits.task, self.id, held_out)
        for table, added in rows.items():
            for row in added:
                self.record(table, **row)
        if held_out is not None:
            scores = {**scores, **of_validation(scores_of(self.objective, held_out))}
        return scores

    def report(self, **scalars: float | int) -> None:
        """Record scalars of this client and round in clients.parquet.

        Raises:
            ValueError: a name is reserved for what is recorded for every client, or a condition's.
        """
        check_free(scalars, self.context.spec.client_columns)
        self.row.update(plain(scalars, RESERVED))

    def record(self, table: str, **scalars: float | int | str | None) -> None:
        """Record a row in a further table; the round is added.

        Raises:
            ValueError: there is no such table.
        """
        check_table(table)
        self.records.setdefault(table, []).append(plain(scalars, {"round"}))

    def parameters(self, weights: Tensor) -> Tensor:
        """(P,) the trainable parameters among (size,) weights, to which gradients refer."""
        return weights[: self.context.model.num_parameters]
