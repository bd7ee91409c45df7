"""The federation, as methods see it: sample a cohort, run a client function, collect results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedsim.conditions.devices import CLOCK, RETRY, Devices, Fleet, Selection, planned_examples
from fedsim.data import ClientSplits, Dataset
from fedsim.errors import ClientError, Diverged, NobodyAnswers, RunError
from fedsim.explain.compare import Key, recorded
from fedsim.explain.scores.measure import Explained
from fedsim.explain.section import PREFIXES, Explain, Whose
from fedsim.explain.share import Share
from fedsim.federation.client import RECORDED, check_table, plain
from fedsim.federation.cohort import Cohort, cohort_size, cut_blocks, draw_cohort
from fedsim.federation.condition import Asked, Condition, Exchange, Layers, Round
from fedsim.federation.context import TEST_SHARD, Examples, RunSpec, WorkerContext
from fedsim.federation.engine import Engine, Handle, Outcome
from fedsim.federation.reduction import (
    Discard,
    Gather,
    InvalidUpdate,
    Mean,
    MergeTotals,
    NothingToReduce,
    Reduction,
    TooFewUpdates,
    Update,
    WeightedMean,
)
from fedsim.federation.sums import ExactSum, check_block
from fedsim.federation.wire import (
    PROTOCOL,
    PROTOCOL_COLUMNS,
    NotCounted,
    PerClient,
    freeze,
    nbytes,
)
from fedsim.federation.worker import TRIGGERED, Call
from fedsim.models import Model
from fedsim.objectives import Batch, Metric, Objective, Totals, of_validation, scores_of
from fedsim.support.rng import keyed_rng
from fedsim.training import FlatModel

Vector = NDArray[np.float32]
CPU = torch.device("cpu")
WAYS: tuple[Literal["down", "up"], ...] = ("down", "up")

# Columns of rounds.parquet that are filled for every round.
RESERVED = frozenset(
    {"round", "clients", "adversaries", "failed", "seconds", "explain_seconds", *CLOCK}
    | {f"{kind}_{way}" for kind in ("bytes", "one_off", "total_bytes") for way in ("up", "down")}
    | PROTOCOL_COLUMNS
)


class Federation:
    """The clients, as a method sees them.

    A method's client functions are its own methods `f(self, client, **arguments)`. They usually
    run in another process. Their arguments, except for `PerClient` ones, are shared by all clients
    and must not be changed. State that a client keeps goes into `client.state`.

    An engine does the work in blocks: a block is a list of clients that one worker processes in
    order, and the unit that is repeated if it is lost.

    Args:
        spec: model, training settings and seed.
        dataset, splits: the data, and the examples that each client holds.
        engine: carries out the clients' work.
        clients_per_step: V, number of clients trained at once.
        device: the server's device.

    Attributes:
        num_clients: K.
        settings: the experiment's `train` section.
        round: t.
        clients_per_step: V, for the following calls.
        model: the network in this process, for its layout and for training on the server.
        device: the device of `model` and of the server's examples.
        clock: simulated seconds of all rounds so far; 0 without `devices`.
    """

    def __init__(
        self,
        spec: RunSpec,
        dataset: Dataset,
        splits: ClientSplits,
        engine: Engine,
        clients_per_step: int = 1,
        device: torch.device = CPU,
    ) -> None:
        self.num_clients = len(splits)
        self.settings = spec.train
        self.seed = spec.seed
        self.device = device
        self.round = 0
        self.clients_per_step = clients_per_step
        self._data = dataset
        self._context = WorkerContext(spec, dataset, splits, device)
        self._initial = self._context.model.weights()
        self._shards = {
            "evaluate": range(math.ceil(len(dataset.test_y) / TEST_SHARD)),
            "validate": range(math.ceil(len(splits.held_out) / TEST_SHARD)),
        }
        self._engine = engine
        self._states: dict[int, Handle] = {}
        self._serial = 0
        self._setup_traffic = False
        self._conditions = spec.conditions
        self._acted = set[str]()  # sections of conditions that have changed something
        self._answered = False
        self._this_round = self._new_round()
        self._record: dict[str, Any] = {}
        self._rows: dict[int, dict[str, Any]] = {}
        self._tables: dict[str, list[dict[str, Any]]] = {}
        self._of_cohort: Explain | None = None  # explains models that clients train
        self._explained: dict[Key, dict[str, Explained]] = {}
        self._in_round = False  # evaluation takes no simulated time
        self._fleet = None
        if spec.devices is not None:
            self._fleet = Fleet(spec.devices, self.num_clients, self.seed)
        self._selection: Selection | None = None
        self._elapsed: float | None = None  # set by the method
        self._ended: dict[int, float] = {}  # seconds of the round, when clients' calls ended
        self._late: dict[int, tuple[int, int]] = {}  # examples and bytes down of those too slow
        # What clients did in this round: examples that they trained on, and bytes down and up.
        self._worked: dict[int, NDArray[np.float64]] = {}
        # As learnt from the round before: examples, as a multiple of plain training, and bytes.
        self._expected: list[float] | None = None
        self.clock = 0.0

    # -- for methods ---------------------------------------------------------------------------

    def initial_weights(self) -> Vector:
        """(size,) the run's initial weights, the same for every method with the same seed."""
        return self._initial.copy()

    @property
    def model(self) -> FlatModel:
        return self._context.model

    @property
    def learner(self) -> Model:
        """The experiment's `model` section, which builds networks or learns rules."""
        return self._context.spec.model

    @property
    def objective(self) -> Objective:
        """The objective: the training loss and the scores."""
        return self._context.spec.objective

    @cached_property
    def primary_metric(self) -> Metric:
        """The score by which models are compared."""
        metrics = self.objective.metrics(self._data)
        return next(metric for metric in metrics if metric.primary)

    @property
    def data(self) -> Dataset:
        """The data set: its test set, the names of its classes and features, and all examples."""
        self._check_asked("data", "reads the data set")
        return self._data

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return self._data.shape

    @property
    def num_classes(self) -> int:
        """C, the number of classes; 0 for regression."""
        return len(self._data.classes)

    @property
    def splits(self) -> ClientSplits:
        """The examples that each client holds in this round; a real server would not know them."""
        self._check_asked("data", "reads the clients' splits")
        return self._splits

    @property
    def _splits(self) -> ClientSplits:
        return self._context.splits_at(self.round)

    def network(self, name: str, build: Callable[[], nn.Module]) -> FlatModel:
        """A further network on the server, such as a generator, initialised with the run's seed.

        It keeps the weights that were left in it; store what a round trains in the state.
        """
        return self._context.network(name, build)

    @property
    def server_data(self) -> Examples:
        """The server's own examples (`partition.server_fraction`)."""
        return self._context.examples(self._splits.server)

    @property
    def labelled_data(self) -> Examples:
        """All clients' labelled examples together, for baselines beyond any real federation."""
        self._check_asked("data", "reads the clients' examples")
        return self._context.examples(np.sort(self._context.splits.held(self.round).train.values))

    @property
    def test_data(self) -> Examples:
        """The central test set."""
        return self._context.central_test

    @property
    def validation_data(self) -> Examples:
        """The validation set, held out of the training examples (`evaluate.validation`)."""
        return self._context.examples(self._splits.held_out)

    def test_batch(self, part: slice) -> Batch:
        """A part of the central test set to score models on."""
        return self._context.test_batch(part)

    def tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        """Copy an array to a tensor on the server's device."""
        return torch.tensor(array, device=self.device)

    def prepare(self, x: NDArray[np.generic], y: NDArray[np.int64]) -> Examples:
        """Scale and normalise further examples (of another data set) like the run's data."""
        return self._context.prepare(x, y)

    def rng(self, purpose: str) -> np.random.Generator:
        """The server's random stream for one purpose in this round."""
        return keyed_rng(self.seed, f"server/{purpose}", self.round)

    @contextmanager
    def setup_traffic(self) -> Iterator[None]:
        """Context in which traffic is also recorded separately, as sent only once per run."""
        self._setup_traffic = True
        try:
            yield
        finally:
            self._setup_traffic = False

    @property
    def num_samples(self) -> NDArray[np.int64]:
        """(K,) n_k, the number of labelled training examples of each client."""
        self._check_asked("sizes", "reads each client's number of examples")
        return self._samples

    @property
    def num_unlabelled(self) -> NDArray[np.int64]:
        """(K,) the number of examples of each client whose labels it does not know."""
        self._check_asked("sizes", "reads each client's number of examples")
        return self._splits.unlabelled.lengths

    def sample(self, t: int) -> Cohort:
        """The clients that take part in round t, drawn without replacement.

        With `privacy` each client is drawn independently, so their number varies. With `devices`
        only clients that are online are drawn, and those are left out that drop out, miss the
        deadline, or are surplus.

        Raises:
            NobodyAnswers: no client is left, so the round changes nothing.
        """
        if self._fleet is None:
            return self._draw(t)
        if self._selection is None or t != self.round:
            self._selection = self._select(self._fleet, t)
        if self._in_round and not len(self._selection.kept):
            raise NobodyAnswers(t, "no online client finishes before the deadline")
        return self._selection.kept

    @property
    def devices(self) -> Devices:
        """The experiment's `devices` section.

        Raises:
            RunError: there is none.
        """
        return self._devices.settings

    @property
    def has_devices(self) -> bool:
        """Whether devices are simulated, so that nobody may take part in a round."""
        return self._fleet is not None

    @property
    def _devices(self) -> Fleet:
        if self._fleet is None:
            raise RunError("simulated time needs a section `devices`")
        return self._fleet

    def planned_seconds(self, clients: Sequence[int] | Cohort) -> NDArray[np.float64]:
        """(n,) how long clients' devices need for a round: the model both ways, and training."""
        k = np.asarray(clients, dtype=np.int64)
        return self._devices.seconds(k, self._planned_examples(k), *self._planned_bytes)

    def online(self, clock: float) -> NDArray[np.bool_]:
        """(K,) whether each client is online in this round, and at that simulated time."""
        return self._devices.online(self.round, clock)

    def take(self, seconds: float) -> None:
        """Set the simulated time of this round; by default that of its slowest clients."""
        self._elapsed = seconds

    def reduce(
        self,
        function: Callable[..., Any],
        cohort: Sequence[int] | Cohort,
        reduction: Reduction,
        **arguments: Any,
    ) -> Any:
        """Run a client function on a cohort and reduce the clients' messages.

        Args:
            function: a method of the running Method, which takes a client and the arguments.
            cohort: client ids.
            reduction: how the messages are reduced.
            arguments: values that the server sends to every client of the cohort, or a part to
                each client (`PerClient`); counted as downlink unless wrapped in `NotCounted`.
                Arrays arrive as tensors on the client's device.

        Raises:
            ClientError: a client failed (`train.on_client_error: stop`).
            RunError: the reduction needs messages (`NothingToReduce`), and every client was
                skipped.
        """
        self._check_asked("messages", f"receives what each client sends ({function.__name__})")
        return self._reduce(function, cohort, reduction, arguments)

    def mean(
        self, function: Callable[..., Update], cohort: Sequence[int] | Cohort, **arguments: Any
    ) -> Mean:
        """Run a client function on a cohort and average the updates: Σ weight·vector / Σ weight.

        The result is the same to the bit in any order; see `WeightedMean`. Conditions of the
        experiment may make another mean of it: with noise, by a robust rule, of forged updates.
        For the arguments see `reduce`.

        Raises:
            ClientError: a client failed (`train.on_client_error: stop`).
            RunError: every client of the cohort was skipped, or their weights sum to 0.
        """
        mean: Mean = self._reduce(function, cohort, WeightedMean(), arguments)
        return mean

    def gather(
        self, function: Callable[..., Any], cohort: Sequence[int] | Cohort, **arguments: Any
    ) -> dict[int, Any]:
        """Run a client function on a cohort and return each client's own message, by client.

        Messages are arrays, tensors or numbers, or dicts and lists of them; tensors come back as
        arrays. Clients are in ascending order; skipped clients are missing.
        """
        self._check_asked("messages", f"gathers each client's message ({function.__name__})")
        messages: dict[int, Any] = self._reduce(function, cohort, Gather(), arguments)
        return messages

    def average(
        self, models: Mapping[int, Vector], factors: Mapping[int, float] | None = None
    ) -> Vector:
        """Σ_k n_k·w_k / Σ_k n_k of gathered models by client, as `mean` would compute it.

        Equal to the bit if each block has one client, otherwise up to rounding.

        Args:
            factors: factor of each n_k, by client.

        Raises:
            RunError: there are no models, because every client was skipped.
            Diverged: a model is out of range.
        """
        self._check_asked("sizes", "averages models by each client's number of examples")
        if not models:
            raise RunError(f"round {self.round}: no client of the cohort sent a model")
        total = ExactSum.zeros(self.model.size)
        counted = {k: self._samples[k] * (factors[k] if factors else 1) for k in models}
        for k, w in models.items():
            try:
                block = counted[k] * w.astype(np.float64)
                check_block(block)
            except OverflowError:
                what = f"the weights of client {k}'s model are out of range"
                raise Diverged(self.round, what) from None
            total.add(block)
        weight = math.fsum(counted.values())
        mean: Vector = (total.value() / weight).astype(np.float32)
        return mean

    def each(
        self, function: Callable[..., None], cohort: Sequence[int] | Cohort, **arguments: Any
    ) -> None:
        """Run a client function that sends nothing back: it keeps state, or reports scalars."""
        self._reduce(function, cohort, Discard(), arguments)

    def evaluate(self, weights: Vector) -> dict[str, float]:
        """The scores of a network on the central test set, by the run's objective.

        If there is a validation set, also the scores on it, as `validation_<score>`. The sets are
        cut into shards of a fixed size, which the engine distributes. In continual learning, the
        scores of each task are also recorded in tasks.parquet.
        """
        totals = self._totals("evaluate", weights)
        triggered = totals.pop(TRIGGERED, None)
        scores, rows = self._context.slices.scores(totals, self._splits.task)
        attack = self._context.spec.attack
        if triggered is not None and attack is not None and attack.success is not None:
            scores = {**scores, attack.success.column: triggered["hits"] / triggered["tried"]}
        for table, added in rows.items():
            self.record(table, added)
        if self._shards["validate"]:
            found = scores_of(self.objective, self._totals("validate", weights)[""])
            scores = {**scores, **of_validation(found)}
        return scores

    def _totals(
        self, function: Literal["evaluate", "validate"], weights: Vector
    ) -> dict[str, Totals]:
        call = self._next_call(function, MergeTotals(), "shards")
        arguments = {"weights": weights}
        freeze(arguments)
        blocks = [[shard] for shard in self._shards[function]]
        totals: dict[str, Totals] = self._engine.run(call, blocks, arguments, {}).partial.result(
            {}, {}
        )
        return totals

    def log(self, **scalars: float | int | str) -> None:
        """Record scalars of this round in rounds.parquet.

        Raises:
            ValueError: a name is reserved for what is recorded for every round.
        """
        self._record.update(plain(scalars, RESERVED))

    def record(self, table: str, rows: Iterable[Mapping[str, float | int | str | None]]) -> None:
        """Record rows of this round in a further table; the round is added.

        Raises:
            ValueError: there is no such table.
        """
        check_table(table)
        self._tables.setdefault(table, []).extend(plain(row, {"round"}) for row in rows)

    def recorded(self, table: str) -> list[dict[str, Any]]:
        """The rows of a further table recorded in this round so far."""
        self._check_asked("messages", "reads clients' records")
        return list(self._tables.get(table, []))

    def explain(
        self, explainer: str, rows: Iterable[Mapping[str, float | int | str | None]]
    ) -> None:
        """Record explanations of this round in explanations.parquet.

        Args:
            explainer: name of the explainer; a column, like `round`.
            rows: the columns of each explanation, as numbers and text.
        """
        rows = (plain(row, {"round", "explainer", "model"}) for row in rows)
        self.record("explanations", ({"explainer": explainer, **row} for row in rows))

    # -- for the loop of a run -----------------------------------------------------------------

    def begin_round(self, t: int) -> None:
        """Start the records of round t."""
        self.round, self._record, self._rows = t, {}, {}
        self._tables, self._this_round = {}, self._new_round()
        self._explained = {}
        self._selection, self._elapsed, self._ended = None, None, {}
        self._late, self._worked = {}, {}

    def go_on_from(self, ledger: Mapping[str, Any]) -> None:
        """Take over the simulated time, and what was learnt of it, from a checkpoint's ledger."""
        self.clock = ledger.get("simulated_seconds", 0.0)
        self._expected = ledger.get("work")

    @contextmanager
    def during_round(self) -> Iterator[None]:
        """Context in which models that clients train are explained, and simulated time passes."""
        section = self._section_due()
        self._of_cohort = section if section and "cohort" in (section.of or ()) else None
        self._in_round = True
        try:
            yield
        finally:
            self._of_cohort = None
            self._in_round = False
        if self._fleet is not None:
            self.clock += self._took

    def notice(self, line: str) -> None:
        """Show the user a line, once per run."""
        self._engine.notice([line])

    def explain_models(self, model: Any, for_own_models: Callable[[], Mapping[str, Any]]) -> None:
        """Explain the global model and clients' personal models, if due in this round.

        Args:
            model: weights (size,), or the arrays of rules.
            for_own_models: returns what clients make their personal models from.

        Raises:
            RunError: an explainer fails.
        """
        section = self._section_due()
        if section is None:
            return
        if "global" in (section.of or ()):
            numbers = range(len(section.explainers))
            self._explained["global", None] = self._explain(section, numbers, model=model)
        if "personal" in (section.of or ()):
            # Of those that keep a state: without, a model has not been trained yet. If nobody
            # does, models are made anew.
            among = self._states or range(self.num_clients)
            chosen = section.choose(among, self.num_clients, self.seed)
            call = self._next_call("_keep", Discard(), explained=frozenset(chosen))
            given = for_own_models()
            freeze(given)
            outcome = self._engine.run(call, [[k] for k in chosen], given, self._states)
            self._engine.notice(why.partition("\n")[0] for why in outcome.failures.values())
            self._take_explained("personal", outcome)
        if section.share is not None and (sent := self._share(section, section.share)):
            self._explained["shared", None] = self._explain(
                section, list(sent), model=model, given=sent
            )

    def _explain(
        self, section: Explain, numbers: Sequence[int], **arguments: Any
    ) -> dict[str, Explained]:
        """Explanations of a model by explainers (by their numbers), by name."""
        call = self._next_call("explain", Gather(), "explainers")
        freeze(arguments)
        blocks = [[number] for number in numbers]
        found = self._engine.run(call, blocks, arguments, {}).partial.result({}, {})
        return {section.explainers[number].name: one for number, one in found.items()}

    def _share(self, section: Explain, share: Share) -> dict[int, NDArray[np.float64]]:
        """The server's aggregates of clients' explanations, (m, P) by the explainer's number."""
        poisoners = share.poisoners(self.num_clients, self.seed)
        cohort = {
            k: own
            for (whose, k), own in self._explained.items()
            if whose == "cohort" and k is not None
        }
        lost = frozenset[int]() if self._selection is None else self._selection.lost
        found = {}
        for number, explainer in enumerate(section.explainers):
            purpose = f"explain/share/{explainer.name}"
            sent, quality = {}, {}
            for k, own in sorted(cohort.items()):
                one = own[explainer.name]
                rng = keyed_rng(self.seed, purpose, self.round, k)
                maps = share.sent(one.relevance, one.present, k in poisoners, rng)
                # Not finite: its model cannot predict the class.
                if k not in lost and np.isfinite(maps).all():
                    sent[k], quality[k] = maps, share.quality(one.scores, k in poisoners)
            together = share.aggregate(sent, quality)
            if together is not None:
                found[number] = together
        return found

    def _section_due(self) -> Explain | None:
        section = self._context.spec.explain
        last = self.settings.rounds
        return section if section is not None and section.due(self.round, last) else None

    def records(
        self, ledger: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
        """What was recorded since `begin_round`: the round's columns, and the rows of each table.

        Args:
            ledger: carried from round to round by what spends a budget.

        Raises:
            RunError: the method has no use for a section of the experiment.
        """
        acted = ledger["acted"] = sorted(self._acted.union(ledger.get("acted", ())))
        for condition in self._conditions:
            due = self.round == self.settings.rounds or not condition.patient
            if condition.idle and due and self._answered and condition.name not in acted:
                raise RunError(
                    f"round {self.round}: {condition.idle}, which are all that "
                    f"`{condition.name}` is about; leave it out, or take another method"
                )
        record = dict(self._record)
        for condition in self._conditions:
            own = ledger.setdefault("conditions", {}).setdefault(condition.name, {})
            columns = condition.close(self._this_round, own)
            if again := sorted(columns.keys() & record.keys()):
                raise RunError(
                    f"round {self.round}: {condition.name}: the method has a column '{again[0]}' "
                    "as well"
                )
            if unknown := sorted(columns.keys() - set(condition.columns)):
                raise RunError(
                    f"round {self.round}: {condition.name}: the column '{unknown[0]}' is not "
                    "among its `columns`"
                )
            record |= columns
        record |= self._record_explanations(ledger)
        if self._fleet is not None:
            record |= self._record_devices(self._fleet, ledger)
        rows = [{"round": self.round, "client": k, **self._rows[k]} for k in sorted(self._rows)]
        if adversaries := frozenset(self._context.splits.adversaries):
            rows = [{**row, "adversary": row["client"] in adversaries} for row in rows]
        further = {
            table: [{"round": self.round, **row} for row in self._tables.get(table, [])]
            for table in (*RECORDED, "maps")
        }
        return record, {"clients": rows, **further}

    def _record_explanations(self, ledger: dict[str, Any]) -> dict[str, float]:
        """Record the explanations; returns the columns of the round."""
        section = self._context.spec.explain
        if section is None or not self._explained:
            return {}
        keys = sorted(self._explained, key=_in_order)
        found = {
            name: {k: self._explained[k][name] for k in keys if name in self._explained[k]}
            for name in (explainer.name for explainer in section.explainers)
        }
        added = recorded(section, found, ledger.get("maps", {}))
        self.record("explanations", added.rows)
        self._tables["maps"] = added.maps
        for name in sorted(
            {str(row["explainer"]) for row in added.rows if "uninformative" in row}
        ):
            self.notice(
                f"warning: explainer {name} says nothing about some inputs, which have no scores: "
                "all their parts are equally relevant, or not finite; see `uninformative` in "
                "explanations.parquet"
            )
        ledger["maps"] = added.last
        of_all = [one.seconds for own in self._explained.values() for one in own.values()]
        return {**added.columns, "explain_seconds": math.fsum(of_all)}

    def _record_devices(self, fleet: Fleet, ledger: dict[str, Any]) -> dict[str, float]:
        """Add rows of clients that dropped out; returns simulated time and energy of the round."""
        dropped: dict[int, str] = {} if self._selection is None else {**self._selection.dropped}
        clients = np.array(list(dropped), dtype=np.int64)
        planned = self._planned_examples(clients).tolist()
        wasted = {k: (n, self._planned_bytes[0]) for k, n in zip(dropped, planned, strict=True)}
        wasted |= self._late
        dropped |= dict.fromkeys(self._late, "deadline")
        for k, reason in dropped.items():
            examples, moved = wasted[k]
            joules = float(fleet.joules([k], examples, moved, 0)[0])
            row = self._rows.setdefault(k, {})  # it may have been evaluated
            costs = {"bytes_up": 0, "bytes_down": moved, "seconds": 0.0, "energy_joules": joules}
            row |= {name: row.get(name, 0) + cost for name, cost in costs.items()}
            row["dropped"] = reason
        energy = math.fsum(row.get("energy_joules", 0.0) for row in self._rows.values())
        ledger["simulated_seconds"] = self.clock
        if self._worked:
            done = np.stack(list(self._worked.values()))
            plain = self._planned_examples(np.array(list(self._worked), dtype=np.int64)).sum()
            ratio = float(done[:, 0].sum() / plain) if plain else 0.0
            self._expected = ledger["work"] = [ratio, *done[:, 1:].mean(axis=0).tolist()]
        ledger["energy_joules"] = ledger.get("energy_joules", 0.0) + energy
        return {
            "dropped": len(dropped),
            "simulated_seconds": self._took,
            "total_simulated_seconds": self.clock,
            "energy_joules": energy,
            "total_energy_joules": ledger["energy_joules"],
        }

    @property
    def _took(self) -> float:
        """Simulated seconds of this round."""
        if self._elapsed is not None:
            return self._elapsed
        waited = 0.0 if self._selection is None else self._selection.waited
        if self._late:
            waited = self._devices.settings.deadline or waited
        elif self._selection is not None and not len(self._selection.kept):
            waited = waited or RETRY
        took = max([waited, *self._ended.values()])
        return min(took, self._devices.settings.deadline or took)

    def states(self) -> dict[int, Handle]:
        """Handles of all kept client states. A changed state gets a new handle."""
        return dict(self._states)

    def fetch(self, handle: Handle) -> dict[str, Any]:
        """A kept state as arrays."""
        return self._engine.fetch(handle)

    def restore(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace the kept client states by those of a checkpoint."""
        self._states = {id: self._engine.keep(state) for id, state in states.items()}

    # -- within --------------------------------------------------------------------------------

    def _check_asked(self, asked: Asked, what: str) -> None:
        """Refuse a method what a condition hides; scoring models is no part of the protocol."""
        if not self.round or self._in_round:
            for condition in self._conditions:
                if asked in condition.hides:
                    raise RunError(
                        f"the method {what}, which `{condition.name}` hides from the server"
                    )

    def _new_round(self) -> Round:
        K, share = self.num_clients, self.settings.participation
        return Round(
            *(self.round, self.seed, K, share),
            layers=lambda: self.trained_layers,
            sample=lambda: self.sample(self.round),
            rows=lambda: self._rows,
        )

    def _draw(self, t: int, among: Cohort | None = None, over_selection: float = 1.0) -> Cohort:
        share, K = self.settings.participation, self.num_clients
        independent = self._draws_independently
        return draw_cohort(self.seed, share, K, t, independent, among, over_selection)

    @property
    def _draws_independently(self) -> bool:
        return any(condition.independent_draws for condition in self._conditions)

    def _select(self, fleet: Fleet, t: int) -> Selection:
        """The clients of round t, selected by their devices."""
        online = np.flatnonzero(fleet.online(t, self.clock))
        sampled = self._draw(t, online, fleet.settings.over_selection)
        wanted = cohort_size(self.settings.participation, self.num_clients)
        if self._draws_independently:
            wanted = len(sampled)
        examples = self._planned_examples(sampled)
        if self._expected is not None:
            ratio, *moved = self._expected
            return fleet.select(sampled, wanted, t, ratio * examples, *moved)
        return fleet.select(sampled, wanted, t, examples, *self._planned_bytes)

    def _planned_examples(self, clients: Cohort) -> NDArray[np.float64]:
        """(n,) number of examples that clients train on in a round, each pass counted."""
        return planned_examples(self.settings, self._samples[clients])

    @property
    def trained_layers(self) -> Layers:
        """The shapes of the trained layers in vectors of weights, by the length of the vector."""
        return self._context.layers

    @cached_property
    def _planned_bytes(self) -> tuple[int, int]:
        """Bytes of the model as the server sends it, and of a client's update."""
        drawn = keyed_rng(self.seed, "planned bytes").standard_normal(self.model.size)
        vector = drawn.astype(np.float32)
        found = {"down": vector.nbytes, "up": vector.nbytes}
        for way, condition in itertools.product(WAYS, self._conditions):
            rng = keyed_rng(self.seed, "planned bytes/codec")
            size = condition.planned(way, vector, self.trained_layers, rng)
            found[way] = found[way] if size is None else size
        return found["down"], found["up"]

    @property
    def _samples(self) -> NDArray[np.int64]:
        """(K,) labelled training examples that each client holds in this round."""
        return self._splits.train.lengths

    def _next_call(
        self,
        function: str,
        reduction: Reduction,
        unit: Literal["clients", "shards", "explainers"] = "clients",
        explained: frozenset[int] = frozenset(),
    ) -> Call:
        self._serial += 1
        V = self.clients_per_step
        call = Call(function, reduction, self.round, self._serial, V, unit, explained)
        selection = self._selection if self._in_round and unit == "clients" else None
        if selection is None:
            return call
        lost = frozenset[int]() if isinstance(reduction, Discard) else selection.lost
        return replace(call, lost=lost)

    def _reduce(
        self,
        function: Callable[..., Any],
        cohort: Sequence[int] | Cohort,
        reduction: Reduction,
        arguments: Mapping[str, Any],
    ) -> Any:
        """Run a call, commit changed states, merge its records; returns the reduced messages."""
        cohort = np.asarray(cohort, dtype=np.int64)
        if len(np.unique(cohort)) < len(cohort):
            raise ValueError(
                "a client occurs twice in the cohort: it can answer only once per call"
            )
        if self._in_round and self._late:  # they take no further part
            cohort = cohort[~np.isin(cohort, list(self._late))]
        explained: list[int] = []
        if self._of_cohort is not None:
            explained = self._of_cohort.choose(cohort.tolist(), self.num_clients, self.seed)
        freeze(arguments)
        exchange = Exchange(function.__name__, cohort, arguments, reduction)
        passed = list[tuple[Condition, Exchange, Exchange]]()
        for condition in self._conditions:
            before, exchange = exchange, condition.outgoing(self._this_round, exchange)
            if exchange.cohort is not cohort or exchange.function != function.__name__:
                raise RunError(
                    f"round {self.round}: {condition.name}: outgoing must leave the cohort and "
                    "the function as they are"
                )
            passed.append((condition, before, exchange))
            if self._in_round and exchange is not before:
                self._acted.add(condition.name)
        arguments, reduction = exchange.arguments, exchange.reduction
        call = self._next_call(exchange.function, reduction, explained=frozenset(explained))
        if len(cohort) or not reduction.probes:
            blocks = cut_blocks(cohort, self._samples[cohort], self.clients_per_step)
            down = _bytes_down(arguments, exchange.saved)
            fleet = self._fleet if self._in_round else None
            if fleet is not None and fleet.settings.deadline is not None:
                moved = [down(k) for k in cohort.tolist()]
                allowances = fleet.allowances(cohort.tolist(), self._begun(cohort), moved)
                call = replace(call, allowances=allowances)
            outcome = self._engine.run(call, blocks, arguments, self._states)
            self._commit(outcome, down, cohort)
            self._answered |= self._in_round and bool(outcome.rows)
            if self._lost_all(cohort, call, outcome):
                late = "no client finishes before the deadline"
                lost = "the uploads of all clients are lost"
                raise NobodyAnswers(self.round, lost if outcome.rows else late)
        else:
            outcome = self._engine.run(call, [[0]], arguments, self._states)
            outcome.partial.forget()
        try:
            result = outcome.partial.result(exchange.to_all, outcome.failures)
        except NothingToReduce as nothing:
            if self._fleet is not None and isinstance(nothing, TooFewUpdates):
                raise NobodyAnswers(self.round, str(nothing)) from None
            raise RunError(f"round {self.round}: {nothing}{_first(outcome)}") from None
        except InvalidUpdate as invalid:
            raise ClientError(invalid.client, self.round, call.function, str(invalid)) from None
        for condition, before, after in reversed(passed):
            result = condition.incoming(self._this_round, before, after, result)
        return result

    def _lost_all(self, cohort: Cohort, call: Call, outcome: Outcome) -> bool:
        """Whether the uploads of all clients that take part in the round are lost."""
        gone = call.lost | outcome.late.keys()
        answers = outcome.rows.keys() | outcome.failures.keys()
        if isinstance(call.reduction, Discard) or not gone or not answers <= call.lost:
            return False
        kept = cohort if self._selection is None else self._selection.kept
        return bool(np.isin(kept, [*cohort.tolist(), *self._late]).all())

    def _take_explained(self, whose: Whose, outcome: Outcome) -> None:
        """Take over explanations; a client's latest model of the round counts."""
        self._explained |= {(whose, k): own for k, own in outcome.explained.items() if own}

    def _begun(self, cohort: Cohort) -> float:
        """When a call of these clients begins: all wait for each other since their last one."""
        return max((self._ended.get(k, 0.0) for k in cohort.tolist()), default=0.0)

    def _commit(self, outcome: Outcome, down: Callable[[int], int], cohort: Cohort) -> None:
        """Take over kept states and records of a call.

        Args:
            down: the bytes of the arguments that a client receives.
            cohort: whom the server has called.
        """
        self._states.update(outcome.states)
        self._acted |= outcome.acted
        self._take_explained("cohort", outcome)
        for id, notes in outcome.notes.items():
            for name, note in notes.items():
                self._this_round.note(name, (id, note))
        for id in sorted(outcome.records):
            for table, rows in outcome.records[id].items():
                self.record(table, rows)
        self._late |= {id: (examples, down(id)) for id, examples in outcome.late.items()}
        failed = {id: {"error": why} for id, why in outcome.failures.items()}
        answers, costs = {**outcome.rows, **failed}, dict[int, dict[str, float]]()
        for id, row in answers.items():
            added = dict(zip(("up", "down"), outcome.partial.overhead(id), strict=True))
            costs[id], protocol = {}, {}
            for way, plain_bytes in {"up": row.get("bytes_up", 0), "down": down(id)}.items():
                for kind in ("bytes", "one_off") if self._setup_traffic else ("bytes",):
                    costs[id][f"{kind}_{way}"] = plain_bytes + added[way]
                    protocol[PROTOCOL[f"{kind}_{way}"]] = added[way]
            costs[id] |= protocol if any(added.values()) else {}
            costs[id]["seconds"] = row.get("seconds", 0.0)
        if self._fleet is not None and self._in_round and costs:
            self._add_simulated(self._fleet, costs, outcome.examples, cohort)
        for id, row in answers.items():
            known = self._rows.setdefault(id, {})
            # A client may work several times in a round: costs add up, the rest is the latest.
            added_up = {name: known.get(name, 0) + cost for name, cost in costs[id].items()}
            known.update({**row, **added_up})

    def _add_simulated(
        self,
        fleet: Fleet,
        costs: dict[int, dict[str, float]],
        examples: Mapping[int, int],
        cohort: Cohort,
    ) -> None:
        """Add simulated time and energy to the costs of a call; the slowest client's time passes.

        Args:
            costs: of each client, with its bytes.
            examples: that clients trained on.
        """
        work = [
            np.array([examples.get(id, 0) for id in costs]),
            *(np.array([own[f"bytes_{way}"] for own in costs.values()]) for way in ("down", "up")),
        ]
        seconds, joules = fleet.seconds(list(costs), *work), fleet.joules(list(costs), *work)
        for own, took, spent in zip(
            costs.values(), seconds.tolist(), joules.tolist(), strict=True
        ):
            own |= {"simulated_seconds": took, "energy_joules": spent}
        self._ended |= dict.fromkeys(cohort.tolist(), self._begun(cohort) + float(seconds.max()))
        for id, done in zip(costs, np.stack(work, axis=1).astype(np.float64), strict=True):
            self._worked[id] = self._worked.get(id, 0.0) + done


def _in_order(key: Key) -> tuple[int, int]:
    """The global model first, then clients of the cohort, then those with personal models."""
    whose, client = key
    return list(PREFIXES).index(whose), -1 if client is None else client


def _bytes_down(
    arguments: Mapping[str, Any], saved: Mapping[int | None, int]
) -> Callable[[int], int]:
    """The bytes of a call's arguments that a client receives.

    Args:
        saved: by how many bytes fewer they are sent; see `Exchange`.
    """
    apart = NotCounted | PerClient
    to_all = sum(nbytes(v) for v in arguments.values() if not isinstance(v, apart))
    own = [v.parts for v in arguments.values() if isinstance(v, PerClient)]

    def down(id: int) -> int:
        parts = sum(nbytes(parts.get(id)) for parts in own)
        return to_all + parts - saved.get(None, 0) - saved.get(id, 0)

    return down


def _first(outcome: Outcome) -> str:
    """The number of failed clients and the first failure, as the end of a sentence."""
    failed = [outcome.failures[id] for id in sorted(outcome.failures)]
    if not failed:
        return ""
    return f"; {len(failed)} failed, the first one: {failed[0].partition(chr(10))[0]}"
