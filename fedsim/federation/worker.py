"""Carries out client work, in an actor or in process."""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from fedsim.conditions.devices import Allowance
from fedsim.errors import ClientError, Diverged, RunError, in_own_code
from fedsim.explain.scores.measure import Explained
from fedsim.explain.share import Share
from fedsim.federation.client import Client, DeadlineMissed, Trainer
from fedsim.federation.condition import Sent
from fedsim.federation.context import TEST_SHARD, WorkerContext
from fedsim.federation.explaining import ExplainerFailed, explain_client, explain_global
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
from fedsim.objectives import Batch, Objective, Totals, evaluate
from fedsim.support.rng import keyed_torch_rng
from fedsim.training import Trained, TrainingJob, choose_stack_size, work_of

MEMORY = "memory of conditions"  # where a client's kept state has what conditions keep
TRIGGERED = "attack/triggered"  # among totals by slice: test examples with an attack's trigger


@dataclass(frozen=True)
class Call:
    """One request of the server to a cohort, or to score a model.

    Attributes:
        function: the name of the client function; for shards `evaluate` or `validate`.
        reduction: reduces the results; each worker folds them into a copy.
        round: t.
        serial: the number of the call, which tells its partial results from those of other calls.
        clients_per_step: V, how many clients are trained at once.
        unit: what blocks hold: `clients`, `shards` of the central test set or of the validation
            set, or `explainers`.
        explained: clients whose models are explained after training.
        lost: clients whose messages are lost.
        allowances: what clients' devices can do before the round's deadline, if there is one.
    """

    function: str
    reduction: Reduction
    round: int
    serial: int
    clients_per_step: int
    unit: Literal["clients", "shards", "explainers"] = "clients"
    explained: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()
    allowances: Mapping[int, Allowance] = field(default_factory=dict)


@dataclass
class BlockResult:
    """The results of a block, each by client.

    Attributes:
        rows: recorded columns.
        failures: why a client failed.
        late: examples that clients would have trained on that miss the deadline; nothing else of
            them is kept.
        states: kept states that changed.
        records: rows of further tables, by table.
        notices: lines for the user.
        explained: explanations of clients' models, by explainer.
        examples: number of examples that clients trained on, each pass counted.
        acted: sections of conditions that have changed messages.
        notes: what conditions note of clients, by their names.
        partial: the folded messages; None if they stay with the worker.
    """

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    late: dict[int, int] = field(default_factory=dict)
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    records: dict[int, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    notices: set[str] = field(default_factory=set)
    explained: dict[int, dict[str, Explained]] = field(default_factory=dict)
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
    """What arrives of a client's message, its bytes, and the client's state afterwards.

    `acted` has the sections of the conditions that have changed the message.
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
        self._lent: dict[str, Any] = {}  # as tensors, the same for all clients
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
            if call.unit == "clients" and self._spoilt():
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
        elif call.unit == "explainers":
            for number in block:
                model, given = self._lent["model"], self._lent.get("given", {}).get(number)
                found = explain_global(self.context, number, model, call.round, given)
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
        if context.obstacle is not None:
            return 1, f"clients are trained one by one: {context.obstacle}"
        if wanted != "auto":
            return wanted, f"{wanted} clients are trained at once, as requested"
        with_examples = [k for k in clients if len(context.splits.train[k])]

        def examples(v: int) -> tuple[Tensor, Tensor]:
            own = context.examples(context.splits.train[with_examples[v % len(with_examples)]])
            return own.x, own.y

        spec = context.spec
        return choose_stack_size(
            context.stack, context.model, examples, spec.train, spec.objective.loss, most
        )

    def _begin(self, call: Call, arguments: Mapping[str, Any]) -> None:
        """Set the arguments of a new call and discard the previous one."""
        self._serial, self._partial = call.serial, None
        self._arguments = sent_to_all(arguments)
        self._lent = to_tensors(self._arguments, self.context.device)
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
                except DeadlineMissed as missed:
                    result.late[id] = missed.examples
                except ExplainerFailed:
                    raise
                except Exception as error:
                    self._failed(id, call, error, result)
            if suspended:
                obstacle = train_together(self.context, suspended, trainers)
                if obstacle is not None:
                    result.notices.add(
                        f"clients are not stacked, but trained one by one: {obstacle}"
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
            DeadlineMissed: the client is too slow.
        """
        started = time.perf_counter()
        allowance, share = call.allowances.get(id), None
        if allowance is not None and allowance.partial:
            share = self._share_of(id, call, state, partial, allowance)
        client, answer = self._call(id, call, state, trainer, partial, allowance, share)
        seconds = time.perf_counter() - started + trainer.seconds
        explained = self._explain(client, call)
        up = answer.size + self._shared_bytes(explained)
        # What a client neither trains on nor answers may reach it after the deadline.
        awaited = client.examples > 0 or up > 0
        if allowance is not None and awaited and not allowance.covers(client.examples, up):
            raise DeadlineMissed(client.examples)
        self.on_client_done(client)
        changed = not same(answer.kept, state)
        if id in call.lost:
            client.row["lost"] = 1
        else:
            partial.fold(id, answer.message, self._lent)
        if explained:
            result.explained[id] = explained
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
            "bytes_up": up,
            "seconds": seconds,
        }

    def _explain(self, client: Client, call: Call) -> dict[str, Explained]:
        """Explanations of the model that a client has trained, if it is to be explained."""
        if client.id not in call.explained or client.trained is None:
            return {}
        return explain_client(self.context, client)

    def _shared_bytes(self, explained: Mapping[str, Explained]) -> int:
        """The bytes of explanations that a client sends to the server."""
        share = self._sharing
        return sum(share.size(one.present) for one in explained.values()) if share else 0

    @property
    def _sharing(self) -> Share | None:
        """How clients send their explanations, if they do."""
        section = self.context.spec.explain
        return None if section is None else section.share

    def _share_of(
        self,
        id: int,
        call: Call,
        state: Mapping[str, Any],
        partial: Reduction,
        allowance: Allowance,
    ) -> tuple[int, int] | None:
        """How many of how many examples a client can train on; None if all.

        It runs the client function without training, to see how much that is in all. What it
        computes beside training, such as a gradient of all examples, cannot be less.
        """
        rehearsal = Rehearsal(self.context)
        client, answer = self._call(id, call, state, rehearsal, partial)
        up = answer.size
        if self._sharing is not None:
            up += self._shared_bytes(self._explain(client, call))
        left = allowance.examples(up) - (client.examples - rehearsal.visited)
        if rehearsal.visited <= max(left, 0):
            return None
        if left < max(1, min(self.context.spec.train.batch_size, rehearsal.visited)):
            raise DeadlineMissed(client.examples)
        return left, rehearsal.visited

    def _call(
        self,
        id: int,
        call: Call,
        state: Mapping[str, Any],
        trainer: Trainer,
        partial: Reduction,
        allowance: Allowance | None = None,
        share: tuple[int, int] | None = None,
    ) -> tuple[Client, Answer]:
        """The client after its function, and what arrives of what it returns."""
        context = self.context
        function = getattr(context.spec.functions, call.function)
        rng = getattr(function, "rng", call.function)
        own_state = {name: part for name, part in state.items() if name != MEMORY}
        own_state = to_tensors(own_state, context.device)
        client = Client(context, id, call.round, rng, own_state, trainer, allowance, share)
        context.model.train()
        context.model.restrict_classes(client.labels)
        lent = each_leaf(self._lent)  # the client gets its own dicts and lists
        own = {n: to_tensors(parts.get(id), context.device) for n, parts in self._own.items()}
        versions = _versions(lent)
        # Torch's global generator is seeded from this client's stream.
        with keyed_torch_rng(context.spec.seed, f"{rng}/torch", call.round, id, context.device):
            try:
                message = function(client, **lent, **own)
            finally:
                if _versions(lent) != versions:
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
        sent = Sent(message, partial.size(message), self._lent, layers, {})
        beside = message.message if isinstance(message, Update) else None
        for condition in reversed(chain):
            if beside is not None and "messages" in condition.hides:
                raise InvalidUpdate(
                    f"sends a message beside its update, which `{condition.name}` hides from the "
                    "server"
                )
            key = f"{condition.name}/{call.function}"
            given = replace(sent, memory=memory.get(key, {}))
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

    def _spoilt(self) -> bool:
        """Whether arguments were changed through their arrays, which tensors do not notice."""
        return not same(as_arrays(self._lent), as_arrays(self._arguments))

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
            if self._spoilt():
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
            self._lent, stop = to_tensors(self._arguments, self.context.device), True
        if stop and isinstance(error, DivergedUpdate):
            raise Diverged(call.round, f"client {id}: {cause}") from None
        if stop:
            raise failure from None
        result.failures[id] = "\n".join([str(failure), *getattr(failure, "__notes__", ())])

    def _score(self, call: Call, shard: int) -> dict[str, Any]:
        """The totals of a shard of the central test set, by slice, or of the validation set."""
        context, start = self.context, shard * TEST_SHARD
        part, network = slice(start, start + TEST_SHARD), context.model.module
        context.model.load(self._lent["weights"])
        context.model.restrict_classes(None)
        purpose = "test/torch" if call.function == "evaluate" else "validation/torch"
        # For networks that draw random numbers in evaluation, too.
        with keyed_torch_rng(context.spec.seed, purpose, call.round, shard, context.device):
            if call.function == "validate":
                batch = context.validation_batch(part)
                return {"": evaluate(context.spec.objective, network, batch)}
            totals = dict(context.slices.totals(network, context.test_batch(part), start))
            if (triggered := context.triggered_batch(part)) is not None:
                totals[TRIGGERED] = _taken_for(context.spec.objective, network, triggered)
            return totals


@torch.no_grad()
def _taken_for(objective: Objective, network: nn.Module, batch: Batch) -> Totals:
    """How many examples a network, which is in evaluation, takes for the class they have."""
    predicted = objective.predictions(objective.outputs(network, batch.x)).argmax(dim=1)
    return {"hits": int((predicted == batch.y).sum()), "tried": len(batch)}


def _versions(tree: Any) -> list[int]:
    """How often each of nested tensors was changed in place."""
    if isinstance(tree, Tensor):
        return [tree._version]
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [version for part in tree for version in _versions(part)]
    return []
