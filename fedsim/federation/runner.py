"""Rounds as the loop of a run carries them out: requests, conditions, records and states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim.data import ClientSplits, Dataset
from fedsim.errors import ClientError, NobodyAnswers, RunError
from fedsim.federation.client import RECORDED, check_free, check_table, plain
from fedsim.federation.cohort import Cohort, cut_blocks, draw_cohort
from fedsim.federation.condition import (
    Asked,
    Condition,
    Exchange,
    Layers,
    Round,
    Runner,
    Work,
    planned_bytes,
)
from fedsim.federation.context import TEST_SHARD, RunSpec, WorkerContext
from fedsim.federation.engine import Engine, Handle, Outcome
from fedsim.federation.reduction import (
    Discard,
    Gather,
    InvalidUpdate,
    MergeTotals,
    NothingToReduce,
    Reduction,
    TooFewUpdates,
    Vector,
)
from fedsim.federation.wire import PROTOCOL, PROTOCOL_COLUMNS, freeze
from fedsim.federation.worker import Call, totals_of
from fedsim.objectives import Totals, of_validation, scores_of
from fedsim.training import Train

CPU = torch.device("cpu")

# Columns of rounds.parquet that are filled for every round.
RESERVED = frozenset(
    {"round", "clients", "adversaries", "failed", "seconds"}
    | {f"{kind}_{way}" for kind in ("bytes", "one_off", "total_bytes") for way in ("up", "down")}
    | PROTOCOL_COLUMNS
)


class RoundRunner(Runner):
    """The rounds of a run: methods see them as a `Federation`, conditions as a `Runner`.

    An engine does the work in blocks: a block is a list of clients that one worker processes in
    order, and the unit that is repeated if it is lost.

    Args:
        spec: model, training settings, conditions and seed.
        dataset, splits: the data, and the examples that each client holds.
        engine: carries out the clients' work.
        clients_per_step: V, number of clients trained at once.
        device: the server's device.

    Attributes:
        clients_per_step: V, for the following calls.
        round: the round that runs, as conditions see it.
        conditions: in ascending order.
        context: the network and the data in this process.
        initial_weights: (size,) of the run.
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
        self.clients_per_step = clients_per_step
        self.context = WorkerContext(spec, dataset, splits, device)
        self.initial_weights: Vector = self.context.model.weights()
        self.conditions = spec.conditions
        self._shards = {
            "evaluate": range(math.ceil(len(dataset.test_y) / TEST_SHARD)),
            "validate": range(math.ceil(len(splits.held_out) / TEST_SHARD)),
        }
        self._engine = engine
        self._states: dict[int, Handle] = {}
        self._ledger: dict[str, Any] = {}
        self._serial = 0
        self._setup_traffic = False
        self._acted = set[str]()  # names of conditions that have changed something
        self._answered = False  # a call that shows whether conditions have anything to do
        self.round = Round(0, self)
        self._record: dict[str, Any] = {}
        self._rows: dict[int, dict[str, Any]] = {}
        self._withdrawn = set[int]()
        self._tables: dict[str, list[dict[str, Any]]] = {}

    # -- for the loop of a run -----------------------------------------------------------------

    def restore(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace the kept client states by those of a checkpoint."""
        self._states = {id: self._engine.keep(state) for id, state in states.items()}

    def use_ledger(self, ledger: dict[str, Any]) -> None:
        """Carry data from round to round in this ledger."""
        self._ledger = ledger

    def begin(self, t: int) -> None:
        """Start the records of round t."""
        self.round = Round(t, self)
        self._record, self._rows, self._tables = {}, {}, {}
        self._withdrawn = set()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Context of the method's round: evaluation is no part of what conditions act on."""
        self.round.running = True
        try:
            yield
        finally:
            self.round.running = False

    def evaluated(self, model: Any, own_models: Callable[[], Mapping[str, Any]]) -> None:
        """Let conditions look at the models after a round.

        Args:
            model: weights (size,), or arrays by name.
            own_models: returns what clients make their personal models from.
        """
        for condition in self.conditions:
            condition.evaluated(self.round, model, own_models)

    def records(self) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
        """What was recorded since `begin`: the round's columns, and the rows of each table.

        Raises:
            RunError: the method has no use for a section of the experiment.
        """
        acted = self._ledger["acted"] = sorted(self._acted.union(self._ledger.get("acted", ())))
        for condition in self.conditions:
            due = self.t == self.settings.rounds or not condition.patient
            if condition.idle and due and self._answered and condition.name not in acted:
                raise RunError(
                    f"round {self.t}: {condition.idle}, which are all that "
                    f"`{condition.name}` is about; leave it out, or take another method"
                )
        record = dict(self._record)
        for condition in self.conditions:
            columns = condition.close(self.round, self.ledger(condition.name))
            if unknown := sorted(columns.keys() - set(condition.columns)):
                raise RunError(
                    f"round {self.t}: {condition.name}: the column '{unknown[0]}' is not "
                    "among its `columns`"
                )
            record |= columns
        rows = [{"round": self.t, "client": k, **self._rows[k]} for k in sorted(self._rows)]
        further = {
            table: [{"round": self.t, **row} for row in self._tables.get(table, [])]
            for table in (*RECORDED, "maps")
        }
        return record, {"clients": rows, **further}

    def states(self) -> dict[int, Handle]:
        """Handles of all kept client states. A changed state gets a new handle."""
        return dict(self._states)

    def fetch(self, handle: Handle) -> dict[str, Any]:
        """A kept state as arrays."""
        return self._engine.fetch(handle)

    # -- for methods, through their Federation -------------------------------------------------

    @property
    def t(self) -> int:
        """The number of the round."""
        return self.round.t

    @property
    def loses_clients(self) -> bool:
        """Whether clients, possibly all, may drop out of a round without an error."""
        lost = any(condition.loses_clients for condition in self.conditions)
        return lost or bool(self.context.splits.absent)

    @property
    def splits(self) -> ClientSplits:
        """The examples that each client holds in this round."""
        return self.context.splits_at(self.t)

    def check_asked(self, asked: Asked, what: str) -> None:
        """Refuse a method what a condition hides; scoring models is no part of the protocol.

        Raises:
            RunError: it is hidden.
        """
        if not self.t or self.round.running:
            for condition in self.conditions:
                if asked in condition.hides:
                    raise RunError(
                        f"the method {what}, which `{condition.name}` hides from the server"
                    )

    def reduce(
        self,
        function: Callable[..., Any],
        cohort: Sequence[int] | Cohort,
        reduction: Reduction,
        arguments: Mapping[str, Any],
    ) -> Any:
        """Run a client function, commit what clients keep, and reduce their messages.

        Raises:
            ClientError: a client failed (`train.on_client_error: stop`).
            NobodyAnswers: conditions leave no client.
            RunError: the reduction needs messages, and every client was skipped.
        """
        round, cohort = self.round, np.asarray(cohort, dtype=np.int64)
        if len(np.unique(cohort)) < len(cohort):
            raise ValueError(
                "a client occurs twice in the cohort: it can answer only once per call"
            )
        asked, cohort = len(cohort), cohort[self.present[cohort]]
        if round.running and asked and not len(cohort) and not isinstance(reduction, Discard):
            raise NobodyAnswers(self.t, "no client is left")
        everybody = cohort if round.cohort is None else round.cohort
        if round.running and self._withdrawn:  # they take no further part
            cohort = cohort[~np.isin(cohort, list(self._withdrawn))]
        freeze(arguments)
        exchange = Exchange(function.__name__, cohort, arguments, reduction)
        passed = list[tuple[Condition, Exchange, Exchange]]()
        for condition in self.conditions:
            before, exchange = exchange, condition.outgoing(round, exchange)
            if exchange.cohort is not cohort or exchange.function != function.__name__:
                raise RunError(
                    f"round {self.t}: {condition.name}: outgoing must leave the cohort and "
                    "the function as they are"
                )
            passed.append((condition, before, exchange))
            if round.running and exchange is not before:
                self._acted.add(condition.name)
        call = self._call(exchange.function, exchange.reduction, told=exchange.told)
        if len(cohort) or not exchange.reduction.probes:
            blocks = cut_blocks(cohort, self.num_samples[cohort], self.clients_per_step)
            outcome = self._engine.run(call, blocks, exchange.arguments, self._states)
            nobody = self._commit(exchange, outcome)
            if self._withdrawn and np.isin(everybody, list(self._withdrawn)).all():
                nobody = nobody or "no client is left"
            if round.running and nobody and not isinstance(exchange.reduction, Discard):
                raise NobodyAnswers(self.t, nobody)
        else:
            outcome = self._engine.run(call, [[0]], exchange.arguments, self._states)
            outcome.partial.forget()
        try:
            result = outcome.partial.result(exchange.to_all, outcome.failures)
        except NothingToReduce as nothing:
            if self.loses_clients and isinstance(nothing, TooFewUpdates):
                raise NobodyAnswers(self.t, str(nothing)) from None
            raise RunError(f"round {self.t}: {nothing}{_first(outcome)}") from None
        except InvalidUpdate as invalid:
            raise ClientError(invalid.client, self.t, call.function, str(invalid)) from None
        for condition, before, after in reversed(passed):
            result = condition.incoming(round, before, after, result)
        return result

    def evaluate(self, model: Vector | Mapping[str, Any]) -> dict[str, float]:
        """The scores of a model on the central test set; see `Federation.evaluate`."""
        slices, objective = self.context.slices, self.context.spec.objective
        totals = self._totals("evaluate", model)
        own = [(c, totals.pop(totals_of(c), None)) for c in self.conditions]
        held_out = self._totals("validate", model)[""] if self._shards["validate"] else None
        scores, rows = slices.scores(totals, self.splits.task, held_out=held_out)
        for condition, found in own:
            if found is not None:
                scores = {**scores, **condition.scores(found)}
        for table, added in rows.items():
            self.record(table, added)
        if held_out is not None:
            scores = {**scores, **of_validation(scores_of(objective, held_out))}
        return scores

    def log(self, **scalars: float | int | str) -> None:
        """Record scalars of this round in rounds.parquet.

        Raises:
            ValueError: a name is reserved for what is recorded for every round, or a condition's.
        """
        check_free(scalars, self.context.spec.columns)
        self._record.update(plain(scalars, RESERVED))

    def recorded(self, table: str) -> list[dict[str, Any]]:
        """The rows of a further table recorded in this round so far."""
        return list(self._tables.get(table, []))

    @contextmanager
    def setup_traffic(self) -> Iterator[None]:
        """Context in which traffic is also recorded separately, as sent only once per run."""
        self._setup_traffic = True
        try:
            yield
        finally:
            self._setup_traffic = False

    # -- for conditions ------------------------------------------------------------------------

    @property
    def num_clients(self) -> int:
        return len(self.context.splits)

    @property
    def seed(self) -> int:
        return self.context.spec.seed

    @property
    def settings(self) -> Train:
        return self.context.spec.train

    @property
    def independent_draws(self) -> bool:
        return any(condition.independent_draws for condition in self.conditions)

    @property
    def num_samples(self) -> NDArray[np.int64]:
        return self.splits.train.lengths

    @property
    def present(self) -> NDArray[np.bool_]:
        return self.context.splits.present

    @property
    def layers(self) -> Layers:
        return self.context.layers

    @property
    def rows(self) -> dict[int, dict[str, Any]]:
        return self._rows

    @cached_property
    def planned_bytes(self) -> tuple[int, int]:
        return planned_bytes(self.conditions, self.seed, self.context.model.size, self.layers)

    def draw(self, t: int, among: Cohort | None = None, over_selection: float = 1.0) -> Cohort:
        share, K = self.settings.participation, self.num_clients
        independent, without = self.independent_draws, self.context.spec.without
        return draw_cohort(self.seed, share, K, t, independent, among, over_selection, without)

    def sample(self, t: int) -> Cohort:
        round = self.round if t == self.t else Round(t, self)
        if round.cohort is None:
            try:
                chosen = [condition.sample(round) for condition in self.conditions]
            except NobodyAnswers:
                if round.running:
                    raise
                chosen = [np.zeros(0, np.int64)]
            found = next((one for one in chosen if one is not None), None)
            cohort = self.draw(t) if found is None else np.unique(found).astype(np.int64)
            cohort = cohort[self.present[cohort]]
            # Draws that are independent of each other may find nobody, which noise must hide.
            hidden = found is None and self.independent_draws
            if round.running and not len(cohort) and not hidden:
                raise NobodyAnswers(t, "no client is left")
            round.cohort = cohort
        return round.cohort

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        return self.context.once(name, make)

    def ledger(self, name: str) -> dict[str, Any]:
        own: dict[str, Any] = self._ledger.setdefault("conditions", {}).setdefault(name, {})
        return own

    def run_unrecorded(
        self,
        function: str,
        clients: Sequence[int],
        arguments: Mapping[str, Any],
        told: Mapping[str, Mapping[int, Any]],
    ) -> Mapping[int, Mapping[str, Any]]:
        call = self._call(function, Discard(), told=told)
        freeze(arguments)
        outcome = self._engine.run(call, [[k] for k in clients], arguments, self._states)
        self._engine.notice([why.partition("\n")[0] for why in outcome.failures.values()])
        return outcome.notes

    def pieces(
        self, name: str, numbers: Sequence[int], arguments: Mapping[str, Any]
    ) -> dict[int, Any]:
        found: dict[int, Any] = self._each(
            self._call(name, Gather(), "pieces"), numbers, arguments
        )
        return found

    def record(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        if table != "maps":  # whose columns are arrays
            check_table(table)
            rows = [plain(row, {"round"}) for row in rows]
        self._tables.setdefault(table, []).extend(map(dict, rows))

    def notice(self, line: str) -> None:
        self._engine.notice([line])

    # -- within --------------------------------------------------------------------------------

    def _call(
        self,
        function: str,
        reduction: Reduction,
        unit: Literal["clients", "shards", "pieces"] = "clients",
        told: Mapping[str, Mapping[int, Any]] | None = None,
    ) -> Call:
        self._serial += 1
        V = self.clients_per_step
        return Call(function, reduction, self.t, self._serial, V, unit, told or {})

    def _totals(
        self, function: Literal["evaluate", "validate"], model: Vector | Mapping[str, Any]
    ) -> dict[str, Totals]:
        call, shards = self._call(function, MergeTotals(), "shards"), self._shards[function]
        totals: dict[str, Totals] = self._each(call, shards, {"model": model})
        return totals

    def _each(self, call: Call, numbers: Sequence[int], arguments: Mapping[str, Any]) -> Any:
        """What a call that is no client's reduces to; each number is a block."""
        freeze(arguments)
        outcome = self._engine.run(call, [[number] for number in numbers], arguments, {})
        return outcome.partial.result({}, {})

    def _commit(self, exchange: Exchange, outcome: Outcome) -> str | None:
        """Take over kept states and records of a call; returns why nobody answers, if so."""
        self._states.update(outcome.states)
        self._acted |= outcome.acted
        # Clients without anything to send to a mean show nothing of what conditions are about.
        telling = isinstance(exchange.reduction, Discard) or any(
            row.get("bytes_up") for row in outcome.rows.values()
        )
        self._answered |= self.round.running and bool(outcome.rows) and telling
        for id, notes in outcome.notes.items():
            for name, note in notes.items():
                self.round.note(name, (id, note))
        for id in sorted(outcome.records):
            for table, rows in outcome.records[id].items():
                self.record(table, rows)
        failed = {id: {"error": why} for id, why in outcome.failures.items()}
        answers, costs = {**outcome.rows, **failed}, dict[int, dict[str, float]]()
        for id, row in answers.items():
            added = dict(zip(("up", "down"), outcome.partial.overhead(id), strict=True))
            costs[id], protocol = {}, {}
            plain_bytes = {"up": row.get("bytes_up", 0), "down": exchange.bytes_down(id)}
            for way, count in plain_bytes.items():
                for kind in ("bytes", "one_off") if self._setup_traffic else ("bytes",):
                    costs[id][f"{kind}_{way}"] = count + added[way]
                    protocol[PROTOCOL[f"{kind}_{way}"]] = added[way]
            costs[id] |= protocol if any(added.values()) else {}
            costs[id]["seconds"] = row.get("seconds", 0.0)
        work = Work(costs, outcome.examples, outcome.withdrawn)
        nobody = [c.worked(self.round, exchange, work) for c in self.conditions]
        for id, (why, _) in outcome.withdrawn.items():
            answers[id] = {"dropped": why}
            costs[id] = {"bytes_up": 0, "bytes_down": exchange.bytes_down(id), "seconds": 0.0}
        self._withdrawn |= outcome.withdrawn.keys()
        for id, row in answers.items():
            known = self._rows.setdefault(id, {})
            # A client may work several times in a round: costs add up, the rest is the latest.
            added_up = {name: known.get(name, 0) + cost for name, cost in costs[id].items()}
            known.update({**row, **added_up})
        return next(filter(None, nobody), None)


def _first(outcome: Outcome) -> str:
    """The number of failed clients and the first failure, as the end of a sentence."""
    failed = [outcome.failures[id] for id in sorted(outcome.failures)]
    if not failed:
        return ""
    return f"; {len(failed)} failed, the first one: {failed[0].partition(chr(10))[0]}"
