"""Carries out client work, in an actor or in process."""

from __future__ import annotations

import copy
import functools
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from torch import Tensor

from fedsim.errors import ClientError, Diverged, RunError, in_own_code
from fedsim.federation.client import Client, Trainer
from fedsim.federation.condition import (
    Condition,
    ConditionFailed,
    Rehearsed,
    Sent,
    Withdrawn,
)
from fedsim.federation.context import TEST_SHARD, WorkerContext
from fedsim.federation.reduction import (
    Discard,
    DivergedUpdate,
    InvalidUpdate,
    Reduction,
    Update,
)
from fedsim.federation.stacking import StackedTrainer, SuspendForStack, train_together
from fedsim.federation.wire import (
    PerClient,
    as_arrays,
    each_leaf,
    freeze,
    same,
    sent_to_all,
    to_arrays,
    to_tensors,
)
from fedsim.objectives import evaluate
from fedsim.objectives.objective import Context
from fedsim.support.rng import keyed_torch_rng
from fedsim.training import Trained, TrainingJob, choose_stack_size, work_of

MEMORY = "memory of conditions"  # where a client's kept state has what conditions keep


def totals_of(condition: Condition) -> str:
    """The key of a condition's totals among those of slices of the test set."""
    return f"condition/{condition.name}"


@dataclass(frozen=True)
class Call:
    """One request of the server to a cohort, or to score a model.

    Attributes:
        function: the name of the client function; for shards `evaluate` or `validate`, and for
            pieces the condition whose work they are.
        reduction: reduces the results; each worker folds them into a copy.
        round: t.
        serial: the number of the call, which tells its partial results from those of other calls.
        clients_per_step: V, how many clients are trained at once.
        unit: what blocks hold: `clients`, `shards` of the central test set or of the validation
            set, or `pieces` of a condition's work.
        told: what conditions tell their side at a client, by their names and by client.
    """

    function: str
    reduction: Reduction
    round: int
    serial: int
    clients_per_step: int
    unit: Literal["clients", "shards", "pieces"] = "clients"
    told: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)


@dataclass
class BlockResult:
    """The results of a block, each by client.

    Attributes:
        rows: recorded columns.
        failures: why a client failed.
        withdrawn: clients whom a condition took out of the round: why, and the examples that they
            would have trained on; nothing else of them is kept.
        states: kept states that changed.
        records: rows of further tables, by table.
        notices: lines for the user.
        examples: number of examples that clients trained on, each pass counted.
        acted: sections of conditions that have changed messages.
        notes: what conditions note of clients, by their names.
        partial: the folded messages; None if they stay with the worker.
    """

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    withdrawn: dict[int, tuple[str, int]] = field(default_factory=dict)
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    records: dict[int, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    notices: set[str] = field(default_factory=set)
    examples: dict[int, int] = field(default_factory=dict)
    acted: set[str] = field(default_factory=set)
    notes: dict[int, dict[str, Any]] = field(default_factory=dict)
    partial: Reduction | None = None

    def take(self, other: BlockResult) -> None:
        """Add the results of another block."""
        for part in fields(BlockResult):
            if part.name != "partial":
                getattr(self, part.name).update(getattr(other, part.name))
        self.add_partial(other.partial)

    def add_partial(self, partial: Reduction | None) -> None:
        """Add folded messages."""
        if self.partial is None:
            self.partial = partial
        elif partial is not None:
            self.partial.merge(partial)


class SharedInputMutated(InvalidUpdate):
    """A client changed an argument that all clients share: the run cannot continue."""


@dataclass(frozen=True)
class Answer:
    """What arrives of a client's message, and the client's state afterwards.

    Attributes:
        size: its bytes.
        acted: names of the conditions that have changed the message.
    """

    message: Any
    size: int
    kept: dict[str, Any]
    acted: frozenset[str]


class Rehearsal:
    """Instead of training, counts on how many examples a client would train.

    Attributes:
        visited: how many so far.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self.visited = 0

    def train(self, job: TrainingJob) -> Trained:
        steps, visited = work_of(self._context.model, job, self._context.spec.train)
        self._context.model.load(job.weights)
        self.visited += visited
        return Trained(job.weights.clone(), steps, visited, 0.0)


class Worker:
    """Carries out blocks of client work, one client after another, on one model.

    A worker keeps only the partial result of the current call, which the engine collects at its
    end; lost work can be computed again from the same inputs.

    Attributes:
        on_client_done: called with each client after a client function.
    """

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.on_client_done: Callable[[Client], None] = lambda client: None
        self._serial = -1
        self._partial: Reduction | None = None
        self._arguments: dict[str, Any] = {}  # of the call, as arrays
        self._shared: dict[str, Any] = {}  # as tensors, the same for all clients
        self._own: dict[str, Mapping[int, Any]] = {}  # those that came as `PerClient`

    def run_blocks(
        self,
        call: Call,
        blocks: Sequence[Sequence[int]],
        arguments: Mapping[str, Any],
        states: Mapping[int, Mapping[str, Any]],
    ) -> BlockResult:
        """Carry out a call for blocks of clients, in the order given.

        Args:
            call: the request.
            blocks: client ids, or indices of test shards.
            arguments: what the server sends, by the function's parameter names.
            states: kept states of clients that have one.

        Raises:
            ClientError: a client failed and the experiment says `on_client_error: stop`.
            Diverged: its values are NaN, infinite or too large (likewise).
            RunError: a client changed an argument.
        """
        if call.serial != self._serial:
            self._begin(call, arguments)
        result = BlockResult()
        try:
            for block in blocks:
                result.take(self._run_block(call, block, states))
        finally:  # a failure may be due to an argument that another client changed
            if call.unit == "clients" and self._shared_changed():
                self._refuse_change(call, blocks, arguments, states)
        return result

    def _run_block(
        self, call: Call, block: Sequence[int], states: Mapping[int, Mapping[str, Any]]
    ) -> BlockResult:
        if self._partial is None:
            self._partial = copy.deepcopy(call.reduction)
        result = BlockResult()
        if self.context.notice is not None:
            result.notices.add(self.context.notice)
        if call.unit == "shards":
            for shard in block:
                self._partial.fold(shard, self._score(call, shard), {})
        elif call.unit == "pieces":
            whose = next(c for c in self.context.spec.conditions if c.name == call.function)
            for number in block:
                found = whose.piece(self.context, number, call.round, self._shared)
                self._partial.fold(number, found, {})
        else:
            for start in range(0, len(block), call.clients_per_step):
                together = block[start : start + call.clients_per_step]
                self._run_stack(call, together, states, self._partial, result)
        self._partial.end_block()
        if not call.reduction.stays:
            result.partial, self._partial = self._partial, None
        return result

    def take_partial(self, serial: int) -> Reduction | None:
        """Return the partial sum of this call's blocks since the last time."""
        if serial != self._serial:
            return None
        partial, self._partial = self._partial, None
        return partial

    def choose_clients_per_step(
        self, wanted: int | Literal["auto"], clients: Sequence[int], most: int
    ) -> tuple[int, str]:
        """V, how many clients to train at once, and the reason for the log.

        Args:
            wanted: `engine.clients_per_step`.
            clients: ids of clients to try it with.
            most: largest stack to try.
        """
        context = self.context
        if context.why_not_stacked is not None:
            return 1, f"clients are trained one by one: {context.why_not_stacked}"
        if wanted != "auto":
            return wanted, f"{wanted} clients are trained at once, as requested"
        with_examples = [k for k in clients if len(context.splits.train[k])]

        def examples(v: int) -> tuple[Tensor, Tensor, Context]:
            own = context.examples(context.splits.train[with_examples[v % len(with_examples)]])
            return own.x, own.y, own.facts

        spec = context.spec
        return choose_stack_size(
            context.stack, context.model, examples, spec.train, spec.objective.loss, most
        )

    def _begin(self, call: Call, arguments: Mapping[str, Any]) -> None:
        """Set the arguments of a new call and discard the previous one."""
        self._serial, self._partial = call.serial, None
        self._arguments = sent_to_all(arguments)
        self._shared = to_tensors(self._arguments, self.context.device)
        self._own = {name: a.parts for name, a in arguments.items() if isinstance(a, PerClient)}

    def _run_stack(
        self,
        call: Call,
        together: Sequence[int],
        states: Mapping[int, Mapping[str, Any]],
        partial: Reduction,
        result: BlockResult,
    ) -> None:
        """Run the client function for the clients of a stack, or for a single one."""
        trainers = {id: StackedTrainer(self.context) for id in together}
        if len(together) == 1:
            trainers[together[0]].alone = True
        waiting: Sequence[int] = together
        while waiting:
            suspended = {}
            for id in waiting:
                try:
                    trainers[id].rewind()
                    self._run_client(id, call, states.get(id, {}), trainers[id], partial, result)
                except SuspendForStack as reached:
                    suspended[id] = reached
                except Withdrawn as withdrawn:
                    result.withdrawn[id] = withdrawn.reason, withdrawn.examples
                except ConditionFailed:
                    raise
                except Exception as error:
                    self._failed(id, call, error, result)
            if suspended:
                reason = train_together(self.context, suspended, trainers)
                if reason is None:
                    result.notices |= self.context.stack.notices
                else:
                    result.notices.add(
                        f"clients are not stacked, but trained one by one: {reason}"
                    )
            waiting = list(suspended)

    def _run_client(
        self,
        id: int,
        call: Call,
        state: Mapping[str, Any],
        trainer: StackedTrainer,
        partial: Reduction,
        result: BlockResult,
    ) -> None:
        """Run the client function and store what it returns, keeps and reports.

        Nothing is stored of a client that fails.

        Raises:
            Withdrawn: a condition takes the client out of the round.
        """
        started = time.perf_counter()
        told = dict[str, Any]()
        for condition in self.context.spec.conditions:
            if id in (own := call.told.get(condition.name, {})):
                before = dict(told)
                rehearse = functools.partial(self._rehearse, id, call, state, partial, before)
                told[condition.name] = condition.begin(id, own[id], rehearse)
        client, answer = self._call(id, call, state, trainer, partial, told)
        seconds = time.perf_counter() - started + trainer.seconds
        size = self._answered(client, answer.size)
        self.on_client_done(client)
        changed = not same(answer.kept, state)
        if client.lost:
            client.row["lost"] = 1
        else:
            partial.fold(id, answer.message, self._shared)
        result.examples[id] = client.examples
        result.acted |= answer.acted
        if client.notes:
            result.notes[id] = client.notes
        if changed:
            result.states[id] = answer.kept
        if client.records:
            result.records[id] = client.records
        result.rows[id] = {
            **client.row,
            "samples": client.num_samples,
            "bytes_up": size,
            "seconds": seconds,
        }

    def _answered(self, client: Client, size: int) -> int:
        """How many bytes a client sends in all, given those of its message."""
        for condition in self.context.spec.conditions:
            size = condition.answered(client, size)
        return size

    def _rehearse(
        self,
        id: int,
        call: Call,
        state: Mapping[str, Any],
        partial: Reduction,
        told: Mapping[str, Any],
    ) -> Rehearsed:
        """Run the client function without training, and keep nothing of it."""
        rehearsal = Rehearsal(self.context)
        client, answer = self._call(id, call, state, rehearsal, partial, told)
        client.rehearses = True
        return Rehearsed(client, rehearsal.visited, self._answered(client, answer.size))

    def _call(
        self,
        id: int,
        call: Call,
        state: Mapping[str, Any],
        trainer: Trainer,
        partial: Reduction,
        told: Mapping[str, Any],
    ) -> tuple[Client, Answer]:
        """The client after its function, and what arrives of what it returns."""
        context = self.context
        function = getattr(context.spec.functions, call.function)
        rng = getattr(function, "rng", call.function)
        own_state = {name: part for name, part in state.items() if name != MEMORY}
        own_state = to_tensors(own_state, context.device)
        client = Client(context, id, call.round, rng, own_state, trainer, told)
        context.model.train()
        context.model.restrict_classes(client.labels)
        shared = each_leaf(self._shared)  # the client gets its own dicts and lists
        own = {n: to_tensors(parts.get(id), context.device) for n, parts in self._own.items()}
        versions = _versions(shared)
        # Torch's global generator is seeded from this client's stream.
        with keyed_torch_rng(context.spec.seed, f"{rng}/torch", call.round, id, context.device):
            try:
                message = function(client, **shared, **own)
            finally:
                if _versions(shared) != versions:
                    raise SharedInputMutated(
                        "changes an argument, which all clients share; copy it first"
                    )
        if not isinstance(client.state, dict):
            raise TypeError(f"client.state must be a dict, not {type(client.state).__name__}")
        kept = to_arrays(client.state)
        partial.check(message)
        memory, acted = {**state.get(MEMORY, {})}, set()
        # Those who send nothing reach nobody.
        chain = () if isinstance(partial, Discard) else context.spec.conditions
        layers = context.layers if chain else {}
        sent = Sent(message, partial.size(message), self._shared, layers, {})
        beside = message.message if isinstance(message, Update) else None
        for condition in reversed(chain):
            if beside is not None and "messages" in condition.hides:
                raise InvalidUpdate(
                    f"sends a message beside its update, which `{condition.name}` hides from the "
                    "server"
                )
            key = f"{condition.name}/{call.function}"
            given = replace(sent, memory=MappingProxyType(memory.get(key, {})))
            sent = condition.sent(client, given)
            if sent is not given:
                partial.check(sent.message)
                acted.add(condition.name)
            if sent.memory is not given.memory and (sent.memory or given.memory):
                memory[key] = to_arrays(dict(sent.memory))
                freeze(memory[key])  # a change within would not be noticed
        if memory:
            kept[MEMORY] = memory
        return client, Answer(sent.message, sent.size, kept, frozenset(acted))

    def _shared_changed(self) -> bool:
        """Whether arguments were changed through their arrays, which tensors do not notice."""
        return not same(as_arrays(self._shared), as_arrays(self._arguments))

    def _refuse_change(
        self,
        call: Call,
        blocks: Sequence[Sequence[int]],
        arguments: Mapping[str, Any],
        states: Mapping[int, Mapping[str, Any]],
    ) -> NoReturn:
        """Find the client that changes an argument, by running the blocks again.

        Raises:
            RunError: always.
        """
        clients = [id for block in blocks for id in block]
        for block in blocks:
            self._begin(call, arguments)
            with suppress(ClientError, Diverged):
                self._run_block(call, block, states)
            if self._shared_changed():
                clients = list(block)
                break
        raise RunError(
            f"round {call.round}, {call.function}: one of clients {clients} changes an argument, "
            "which all clients share; copy it first"
        )

    def _failed(self, id: int, call: Call, error: Exception, result: BlockResult) -> None:
        known = isinstance(error, InvalidUpdate)
        cause = str(error) if known else in_own_code(error)
        failure = ClientError(id, call.round, call.function, cause)
        if not known:  # notes are logged and survive pickling
            failure.add_note("".join(traceback.format_exception(error)).rstrip())
        stop = self.context.spec.train.on_client_error == "stop"
        if isinstance(error, SharedInputMutated):  # the client is known, and the run ends
            self._shared, stop = to_tensors(self._arguments, self.context.device), True
        if stop and isinstance(error, DivergedUpdate):
            raise Diverged(call.round, f"client {id}: {cause}") from None
        if stop:
            raise failure from None
        result.failures[id] = "\n".join([str(failure), *getattr(failure, "__notes__", ())])

    def _score(self, call: Call, shard: int) -> dict[str, Any]:
        """The totals of a shard of the central test set, by slice, or of the validation set."""
        context, start = self.context, shard * TEST_SHARD
        part = slice(start, start + TEST_SHARD)
        network = context.as_network(self._shared["model"])
        context.model.restrict_classes(None)
        purpose = "test/torch" if call.function == "evaluate" else "validation/torch"
        # For networks that draw random numbers in evaluation, too.
        with keyed_torch_rng(context.spec.seed, purpose, call.round, shard, context.device):
            if call.function == "validate":
                batch = context.validation_batch(part)
                return {"": evaluate(context.spec.objective, network, batch)}
            totals = dict(context.slices.totals(network, context.test_batch(part), start))
            for condition in context.spec.conditions:
                if own := condition.totals(context, network, part):
                    totals[totals_of(condition)] = own
            return totals


def _versions(tree: Any) -> list[int]:
    """How often each of nested tensors was changed in place."""
    if isinstance(tree, Tensor):
        return [tree._version]
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [version for part in tree for version in _versions(part)]
    return []
