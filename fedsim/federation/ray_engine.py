"""Client work on Ray: actors that take blocks, and may die."""

from __future__ import annotations

import copy
import ctypes
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectLostError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fedsim.cluster.compat import actor_id, actor_table, places
from fedsim.cluster.faults import LOST, failed_to_start, first_line
from fedsim.cluster.placement import live_nodes, starting, whereabouts
from fedsim.cluster.settings import EngineSettings
from fedsim.data import ClientSplits, Dataset
from fedsim.errors import FedsimError, RunError, StackTooLarge, StateLost
from fedsim.federation.context import RunSpec, WorkerContext
from fedsim.federation.engine import (
    Block,
    Engine,
    Handle,
    Outcome,
    limit_threads,
    pick_device,
)
from fedsim.federation.object_cache import ObjectCache
from fedsim.federation.reduction import Reduction
from fedsim.federation.scheduler import Scheduler, WorkItem
from fedsim.federation.worker import BlockResult, Call, Worker
from fedsim.hardware import Arithmetic
from fedsim.modules import search_here_last

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3  # actors that may die at the start, in a row
SHORT = 1.0  # seconds; calls that take less spend a notable share of them on messages
UNEVEN = 0.25  # largest spread of the actors' finishing times, as a share of the call's
STATE_LOST = "a kept client state was on a node that is gone"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
SPILLS = 0.8  # of the object store; Ray moves what comes on top of it to the disk
GROWTH = 1.25  # of the kept states in number, after which they are looked at again
LOOK = 1.0  # seconds without any answer after which a look is taken at what is under way
PATIENCE = 60.0  # seconds without any answer after which what is awaited is named in the log


class ClientActor:
    """A worker in an actor's process."""

    def __init__(
        self, settings: EngineSettings, spec: RunSpec, dataset: Dataset, splits: ClientSplits
    ) -> None:
        search_here_last()
        limit_threads(settings.cpus_per_actor)
        _keep_freed_memory()
        part = min(1.0, settings.gpus_per_actor)
        self._worker = Worker(WorkerContext(spec, dataset, splits, pick_device(settings), part))

    def arithmetic(self) -> Arithmetic:
        """What decides how the worker rounds; answers once the actor is up."""
        return Arithmetic.of(self._worker.context.device)

    def card(self) -> tuple[str, str | None]:
        """This actor's node and, by Ray's name, the card that it has, or has a part of."""
        context = ray.get_runtime_context()
        return context.get_node_id(), next(iter(context.get_accelerator_ids()["GPU"]), None)

    def run_blocks(
        self,
        call: Call,
        blocks: Sequence[Block],
        with_sum: bool,
        names: Sequence[str],
        with_state: Sequence[int],
        states_apart: bool,
        *objects: Any,
    ) -> Any:
        """`Worker.run_block`, with Ray objects as top-level arguments so that Ray resolves them.

        Args:
            with_sum: hand over what the blocks were folded into along with their result.
            names: of the arguments, which come first among `objects`.
            with_state: the clients whose kept states come after.
            states_apart: return changed states as objects of their own, which stay on this node
                until they are needed, rather than within the result.

        Returns:
            The result of all blocks; with `states_apart`, the result, whose states are empty, and
            then the changed state of each client, or None.
        """
        arguments = dict(zip(names, objects, strict=False))
        states = dict(zip(with_state, objects[len(names) :], strict=True))
        result = BlockResult()
        for block in blocks:
            result.take(self._worker.run_block(call, block, arguments, states))
        if with_sum:
            result.add_partial(self._worker.take_partial(call.serial))
        if not states_apart:
            return result
        apart = [result.states.get(id) for block in blocks for id in block]
        result.states = {id: {} for id in result.states}  # tells the driver whose changed
        return [result, *apart]

    def take_partial(self, serial: int) -> Reduction | None:
        return self._worker.take_partial(serial)

    def choose_clients_per_step(self, *arguments: Any) -> tuple[int, str]:
        return self._worker.choose_clients_per_step(*arguments)


def _keep_freed_memory() -> None:
    """Let this process keep what it frees, for training asks for the same again in each step.

    By default the C library gives much of it back to the system, and several thousand times a
    round a page of it has to be mapped again.
    """
    with suppress(OSError, AttributeError):  # other C libraries know no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_TRIM_THRESHOLD, 1 << 28)  # bytes of freed memory to keep
        mallopt(M_MMAP_THRESHOLD, 1 << 25)  # bytes from which on it is mapped apart; the most


@dataclass(eq=False)
class _Actor:
    """An actor as the driver sees it."""

    handle: Any
    up: Any  # answers once the actor has started
    ready: bool = False


@dataclass(eq=False)
class _Message:
    """Blocks that are with an actor, or the question for the sum of their updates.

    A block counts only once the sum that it went into has arrived.

    Attributes:
        since: when it was sent.
        states: references of what the clients keep, one for each, if they come apart.
        asks_for_sum: of items that were sent before.
    """

    actor: _Actor
    items: list[WorkItem]
    since: float
    states: list[Any] = field(default_factory=list)
    asks_for_sum: bool = False


# Messages that no answer has come to, by the references of the answers, in the order sent.
_Flying = dict[Any, _Message]


class RayEngine(Engine):
    """Client work on actors of a Ray cluster.

    Idle actors take the next blocks, several at first and one by one towards the end. An actor
    that is lost is replaced, and all blocks of the call whose sum it held are run again: with the
    same inputs and the same random streams, so to the same bits.

    Args:
        count: how many actors to make.
        clients: of the whole federation.
        spec, dataset, splits: what a worker needs; the latter two may be references.
    """

    def __init__(
        self,
        settings: EngineSettings,
        count: int,
        clients: int,
        spec: RunSpec,
        dataset: Any,
        splits: Any,
    ) -> None:
        super().__init__()
        self._settings = settings
        self._clients = clients
        self._setup = ray.put(spec)
        self._data = (dataset, splits)
        self._stateful: set[str] = set()
        self._even: set[str] = set()  # whose last call was short, and kept all actors busy
        self._last_answer: dict[_Actor, float] = {}  # when it came, in this call
        self._failed_starts = 0  # in a row
        self._objects = ObjectCache()
        self._actors = [self._start() for _ in range(count)]
        self._arithmetic: Arithmetic | None = None  # of the actors
        self._last_heard = 0.0  # when an answer came, or its lack was told
        self._looked_at = 0  # kept states
        self._store_told = False

    def run(
        self,
        call: Call,
        blocks: Sequence[Block],
        arguments: Mapping[str, Any],
        states: Mapping[int, Handle],
    ) -> Outcome:
        self._look_at_store(states)
        objects = self._objects.put(arguments)
        at_once = call.function in self._even
        scheduler: Scheduler[_Actor] = Scheduler(blocks, at_once)
        flying: _Flying = {}
        outcome = Outcome(partial=copy.deepcopy(call.reduction))
        started, self._last_answer = time.monotonic(), {}
        self._last_heard = started
        try:
            while not scheduler.all_accepted:
                self._hand_out(call, scheduler, flying, list(arguments), objects, states)
                self._ask_for_sums(call, scheduler, flying)
                self._collect(call, scheduler, flying, states, outcome)
        except StackTooLarge:  # what is under way must not take the memory of the next try
            if flying:
                ray.wait(list(flying), num_returns=len(flying), fetch_local=False)
            raise
        self._note_balance(call.function, started)
        return outcome

    def server_device(self) -> torch.device:
        device = pick_device(self._settings)
        # A trial holds all that its actors have: no other trial's driver is to take their cards.
        if device.type == "cuda" and ray.util.get_current_placement_group():
            here = ray.get_runtime_context().get_node_id()
            waiting = [actor.handle.card.remote() for actor in self._actors]
            while waiting:
                (answer,), waiting = ray.wait(waiting)
                with suppress(*LOST):  # which is noticed where actors are awaited
                    node, card = ray.get(answer)
                    if node == here and card is not None:
                        torch.cuda.set_device(card_number(card))
                        break
        return device

    def choose_clients_per_step(self, clients: Sequence[int]) -> tuple[int, str]:
        # Each actor is to have work of its own.
        most = max(1, len(clients) // len(self._actors))
        while True:
            actor = self._actors[0]
            if not actor.ready:
                self._take_up(actor)
                continue
            try:
                chosen: tuple[int, str] = ray.get(
                    actor.handle.choose_clients_per_step.remote(
                        self._settings.clients_per_step, list(clients), most
                    )
                )
            except LOST as error:
                self._failed_starts += 1
                if self._failed_starts == MAX_FAILED_STARTS:
                    raise RunError(
                        f"{MAX_FAILED_STARTS} client actors died while they tried how many "
                        "clients to train at once; set engine.clients_per_step=1: "
                        f"{first_line(error)}"
                    ) from error
                self._replace(actor)
            else:
                self._failed_starts = 0
                return chosen

    def fetch(self, handle: Handle) -> dict[str, Any]:
        try:
            state: dict[str, Any] = ray.get(handle)
        except ObjectLostError as error:
            raise StateLost(STATE_LOST) from error
        return state

    def keep(self, state: Mapping[str, Any]) -> Handle:
        return ray.put(state)

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor.handle)
        self._actors = []

    # -- one call ------------------------------------------------------------------------------

    def _look_at_store(self, states: Mapping[int, Handle]) -> None:
        """Tell once if kept states do not, or will not, fit Ray's object store."""
        if self._store_told or len(states) <= GROWTH * self._looked_at:
            return
        self._looked_at = len(states)
        # Small ones are with the driver.
        there = [place for place in places(states.values()) if place["node_ids"]]
        told = store_notice(
            [place["object_size"] for place in there],
            [place["object_size"] for place in there if place["did_spill"]],
            self._clients,
            ray.cluster_resources().get("object_store_memory", 0.0),
        )
        if told:
            self._store_told = True
            self.notices.append(told)

    def _note_balance(self, function: str, started: float) -> None:
        """Note whether blocks are to be dealt out at once the next time.

        Messages take time that counts in short calls alone, and equal parts are right where all
        actors are equally quick.
        """
        ends = [self._last_answer.get(actor, started) - started for actor in self._actors]
        if max(ends) < SHORT and max(ends) - min(ends) < UNEVEN * max(ends):
            self._even.add(function)
        else:
            self._even.discard(function)

    def _hand_out(
        self,
        call: Call,
        scheduler: Scheduler[_Actor],
        flying: _Flying,
        names: list[str],
        objects: list[Any],
        states: Mapping[int, Handle],
    ) -> None:
        """Send blocks to the actors that have room."""
        stateful = call.function in self._stateful
        ready = [actor for actor in self._actors if actor.ready]
        for actor, item in scheduler.hand_out(ready, len(self._actors)):
            clients = item.clients
            with_state = [id for id in clients if id in states]
            returned = actor.handle.run_blocks.options(
                num_returns=1 + len(clients) if stateful else 1
            ).remote(
                call,
                item.blocks,
                item.with_sum,
                names,
                with_state,
                stateful,
                *objects,
                *(states[k] for k in with_state),
            )
            main, *apart = returned if stateful else [returned]
            flying[main] = _Message(actor, [item], time.monotonic(), apart)

    def _ask_for_sums(self, call: Call, scheduler: Scheduler[_Actor], flying: _Flying) -> None:
        """Ask actors for what they hold, behind the blocks that they are still to carry out."""
        if not call.reduction.stays:
            return
        for actor, items in scheduler.to_ask().items():
            ref = actor.handle.take_partial.remote(call.serial)
            flying[ref] = _Message(actor, items, time.monotonic(), asks_for_sum=True)

    def _collect(
        self,
        call: Call,
        scheduler: Scheduler[_Actor],
        flying: _Flying,
        states: Mapping[int, Handle],
        outcome: Outcome,
    ) -> None:
        """Wait for a block, or for an actor to start, and take all that is there by then."""
        starting = {actor.up: actor for actor in self._actors if not actor.ready}
        # A sum is awaited only once its blocks have answered; if their actor is lost, these tell.
        awaited = (
            ref
            for ref, message in flying.items()
            if not message.asks_for_sum or scheduler.are_done(message.items)
        )
        waiting = [*awaited, *starting]
        if not ray.wait(waiting, num_returns=1, timeout=min(LOOK, PATIENCE))[0]:
            self._look_after_states(flying, states)
            if time.monotonic() - self._last_heard >= PATIENCE:
                self._report_silence(call, scheduler, flying)
                self._last_heard = time.monotonic()
            return
        self._last_heard = time.monotonic()
        for ref in ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]:
            if ref in starting:
                self._take_up(starting[ref])
            elif ref in flying:  # not, when its actor was lost a moment ago
                message = flying[ref]
                try:
                    answer = ray.get(ref)
                except RayTaskError as error:  # before LOST: it is of the type of its cause, too
                    raise _cause(error) from None
                except LOST as error:
                    lost = message.actor
                    for other in [r for r, m in flying.items() if m.actor is lost]:
                        del flying[other]
                    self._lose(lost, scheduler, error)
                    continue
                del flying[ref]
                with_sum = message.asks_for_sum or not call.reduction.stays
                if message.asks_for_sum:
                    outcome.add_partial(answer)
                else:
                    (item,) = message.items
                    scheduler.done(item, (answer, message.states))
                    self._last_answer[message.actor] = time.monotonic()
                    with_sum |= item.with_sum
                if with_sum:
                    scheduler.accept(message.actor, message.items)
                    for item in message.items:
                        self._accept(call, item, outcome)

    def _look_after_states(self, flying: _Flying, states: Mapping[int, Handle]) -> None:
        """See whether actors wait for states that are gone.

        Ray tells them only when it tries once more to fetch these: after 10 s, 30 s, 70 s ...

        Raises:
            StateLost: they do; these actors are replaced, because they go on waiting.
        """
        here = ray.get_runtime_context().get_node_id()
        needed = {id: m.actor for m in flying.values() for item in m.items for id in item.clients}
        lost = [id for id in needed if id in states and is_lost(states[id], here)]
        for actor in {needed[id] for id in lost}:
            self._replace(actor)
        if lost:
            raise StateLost(STATE_LOST)

    def _accept(self, call: Call, item: WorkItem, outcome: Outcome) -> None:
        result, references = item.answer
        outcome.take(result)
        self.notice(result.notices)
        apart = dict(zip(item.clients, references, strict=False))
        for id, state in result.states.items():
            # The first time, before it was known that this function keeps any, states come with
            # the result. From then on they stay on their nodes.
            outcome.states[id] = apart[id] if apart else ray.put(state)
            self._stateful.add(call.function)

    # -- actors --------------------------------------------------------------------------------

    def _start(self) -> _Actor:
        settings = self._settings
        # In a trial, into the bundles of its placement group, which hold what is theirs. This must
        # be said: "DEFAULT" would wait for resources that no group holds.
        group = ray.util.get_current_placement_group()
        strategy = PlacementGroupSchedulingStrategy(group) if group else "SPREAD"
        handle = (
            ray.remote(ClientActor)
            .options(
                num_cpus=settings.cpus_per_actor,
                num_gpus=settings.gpus_per_actor,
                scheduling_strategy=strategy,
                max_restarts=0,
            )
            .remote(settings, self._setup, *self._data)
        )
        return _Actor(handle, handle.arithmetic.remote())

    def _take_up(self, actor: _Actor) -> None:
        """An actor has started, or failed to."""
        try:
            found: Arithmetic = ray.get(actor.up)
        except LOST as error:
            self._failed_starts += 1
            if failed_to_start(error):
                raise RunError(f"client actors cannot start: {error}") from error
            if self._failed_starts == MAX_FAILED_STARTS:
                raise RunError(
                    f"client actors cannot start, {MAX_FAILED_STARTS} died in a row "
                    f"(out of memory?): {first_line(error)}"
                ) from error
            self.notices.append("a client actor was lost while it started; another is made")
            self._replace(actor)
            return
        actor.ready, self._failed_starts = True, 0
        if self._arithmetic is None:
            if self._settings.gpus_per_actor and found.device == "cpu":
                self.notices.append("no card is behind the GPUs asked for: computing on CPUs")
            # Of the driver no more is asked than that it rounds as actors without a card do.
            here = Arithmetic.of(torch.device("cpu"))
            self._arithmetic = here if found.device == "cpu" else found
        self.notice(compare(self._arithmetic, found, self._settings.mixed_processors))

    def _lose(self, actor: _Actor, scheduler: Scheduler[_Actor], error: Exception) -> None:
        """Replace an actor; whatever it held is run again."""
        blocks = scheduler.lose(actor, first_line(error))
        self._replace(actor)
        self.notices.append(f"a client actor was lost; {blocks} block(s) of clients run again")

    def _replace(self, actor: _Actor) -> None:
        ray.kill(actor.handle)  # it may be unreachable rather than dead
        self._actors[self._actors.index(actor)] = self._start()

    def _report_silence(self, call: Call, scheduler: Scheduler[_Actor], flying: _Flying) -> None:
        table = actor_table()
        ids = {actor: actor_id(actor.handle) for actor in self._actors}
        entries = {actor: table[id] for actor, id in ids.items() if id in table}
        parts = [f"nothing has moved for {PATIENCE:.0f} s in round {call.round}, {call.function}"]
        parts += filter(None, [starting(list(entries.values()), self._settings)])
        if flying:
            message = next(iter(flying.values()))  # the first that was sent
            clients = [id for item in message.items for id in item.clients]
            place = entries[message.actor]
            whom = ", ".join(map(str, clients[:10])) + (", …" if clients[10:] else "")
            parts.append(
                f"the longest under way is in {whereabouts(place, live_nodes())}, "
                f"{call.unit} {whom}, "
                f"for {time.monotonic() - message.since:.0f} s"
            )
        log.warning(f"{'; '.join(parts)}; {scheduler.waiting} block(s) wait for an actor")


def card_number(card: str) -> int:
    """The number by which torch knows a card in a process to which Ray has given none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(card) if visible else int(card)


def is_lost(handle: Handle, here: str) -> bool:
    """Whether an object that this process owns was on a node that is gone.

    Args:
        here: the id of this process's node, where an error then lies in its place.
    """
    (place,) = places([handle])
    if here in place["node_ids"]:
        try:
            ray.get(handle, timeout=0)
        except ObjectLostError:
            return True
        except GetTimeoutError:  # it is being read from the disk
            return False
    return False


def store_notice(
    kept: Sequence[int], spilled: Sequence[int], clients: int, capacity: float
) -> str | None:
    """What to tell of kept states that lie on the disk, or will; None if all fit the store.

    Args:
        kept: bytes of each state so far.
        spilled: of those that are on the disk.
        clients: that may come to keep one.
        capacity: bytes of Ray's object store, on all nodes.
    """
    if not kept:
        return None
    expected = sum(kept) / len(kept) * clients
    if not spilled and expected <= SPILLS * capacity:
        return None
    on_disk = f", {sum(spilled) / 1e9:.3g} GB of it on the disk" if spilled else ""
    return (
        f"{len(kept)} clients keep {sum(kept) / 1e9:.3g} GB{on_disk}; all {clients} would keep "
        f"{expected / 1e9:.3g} GB, and Ray's object store has {capacity / 1e9:.3g} GB. What does "
        "not fit goes to the nodes' disks, and rounds take longer"
    )


def compare(one: Arithmetic, other: Arithmetic, mixed: bool) -> list[str]:
    """What to tell of two processes of a run that may round differently.

    Args:
        mixed: `engine.mixed_processors`.

    Raises:
        RunError: they do, and the experiment does not allow for it.
    """
    if one == other:
        return []
    if one.device != other.device:
        raise RunError(
            f"client actors compute on different devices ({one.device}, {other.device}); "
            "results would depend on who computes what"
        )
    if not mixed:
        raise RunError(
            f"{one.host} ({one}) and {other.host} ({other}) round differently; results would "
            "depend on who computes what. Take nodes of one kind, or set "
            "engine.mixed_processors=true to do without results that are the same to the bit"
        )
    return [f"results depend on who computes what: nodes round differently ({one}; {other})"]


def _cause(error: RayTaskError) -> Exception:
    """The error to raise for what Ray reports of a task that failed."""
    cause: Exception = error.cause
    if isinstance(cause, ObjectLostError):  # an argument; the server's own are beside the driver
        return StateLost(STATE_LOST)
    return cause if isinstance(cause, FedsimError) else error
