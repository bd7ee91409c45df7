"""Client work on Ray: actors that take blocks, and may die."""

from __future__ import annotations

import ctypes
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import ObjectLostError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fedsim.cluster.compat import actor_id, actor_table
from fedsim.cluster.faults import LOST, failed_to_start, first_line
from fedsim.cluster.placement import live_nodes, starting, whereabouts
from fedsim.data import ClientSplits, Dataset
from fedsim.errors import FedsimError, RunError, StateLost
from fedsim.federation.context import RunSpec, WorkerContext
from fedsim.federation.engine import (
    Block,
    Engine,
    EngineSettings,
    Handle,
    Outcome,
    limit_threads,
    pick_device,
)
from fedsim.federation.wire import NotCounted
from fedsim.federation.worker import BlockResult, Call, Sums, Worker

log = logging.getLogger(__name__)

IN_FLIGHT = 2  # blocks an actor holds: one it works on, and one so that it need not wait
MAX_DEATHS = 3  # actors that a block may take down, or that may die at the start, in a row
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
PATIENCE = 60.0  # seconds without any answer after which what is awaited is named in the log


class ClientActor:
    """A worker in an actor's process."""

    def __init__(
        self, settings: EngineSettings, spec: RunSpec, dataset: Dataset, splits: ClientSplits
    ) -> None:
        limit_threads(settings.cpus_per_actor)
        _keep_freed_memory()
        self._worker = Worker(WorkerContext(spec, dataset, splits, pick_device(settings)))

    def device(self) -> str:
        """What the worker computes on; answers once the actor is up."""
        return str(self._worker.host.device)

    def run_blocks(
        self,
        call: Call,
        blocks: Sequence[Block],
        names: Sequence[str],
        with_state: Sequence[int],
        states_apart: bool,
        *objects: Any,
    ) -> Any:
        """`Worker.run_block`, with Ray objects as top-level arguments so that Ray resolves them.

        Args:
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
        if not states_apart:
            return result
        apart = [result.states.get(id) for block in blocks for id in block]
        result.states = {id: {} for id in result.states}  # tells the driver whose changed
        return [result, *apart]

    def take_sums(self, serial: int) -> Sums:
        return self._worker.take_sums(serial)

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
    flying: int = 0
    done: list[_Task] = field(default_factory=list)


@dataclass(eq=False)
class _Task:
    """Blocks of the call under way that one actor is given at once."""

    blocks: list[Block]
    deaths: int = 0
    since: float = 0.0  # when it was handed out
    result: BlockResult | None = None
    states: list[Any] = field(default_factory=list)  # references, one for each client

    @property
    def clients(self) -> list[int]:
        return [id for block in self.blocks for id in block]


class RayEngine(Engine):
    """Client work on actors of a Ray cluster.

    Idle actors take the next blocks, several at first and one by one towards the end. An actor
    that is lost is replaced, and all blocks of the call whose sum it held are run again: with the
    same inputs and the same random streams, so to the same bits.

    Args:
        count: how many actors to make.
        spec, dataset, splits: what a worker needs; the latter two may be references.
    """

    def __init__(
        self,
        settings: EngineSettings,
        count: int,
        spec: RunSpec,
        dataset: Any,
        splits: Any,
    ) -> None:
        super().__init__()
        self._settings = settings
        self._setup = ray.put(spec)
        self._data = (dataset, splits)
        self._stateful: set[str] = set()
        self._failed_starts = 0  # in a row
        self._sent: list[tuple[NDArray[np.generic], type, Any]] = []
        self._actors = [self._start() for _ in range(count)]
        self._device: str | None = None

    def run(
        self,
        call: Call,
        blocks: Sequence[Block],
        arguments: Mapping[str, Any],
        states: Mapping[int, Handle],
    ) -> Outcome:
        objects = self._put(arguments)
        for actor in self._actors:  # a call before may have been broken off
            actor.flying, actor.done = 0, []
        todo = deque(_Task([block]) for block in blocks)
        flying: dict[Any, tuple[_Actor, _Task]] = {}
        outcome = Outcome()
        while True:
            self._hand_out(call, todo, flying, list(arguments), objects, states)
            if flying or todo:
                self._collect(call, todo, flying)
            elif not self._finish(call, todo, outcome):
                return outcome

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
                if self._failed_starts == MAX_DEATHS:
                    raise RunError(
                        f"{MAX_DEATHS} client actors died while they tried how many clients to "
                        f"train at once; set engine.clients_per_step=1: {first_line(error)}"
                    ) from error
                self._replace(actor)
            else:
                self._failed_starts = 0
                return chosen

    def fetch(self, handle: Handle) -> dict[str, Any]:
        try:
            state: dict[str, Any] = ray.get(handle)
        except ObjectLostError as error:
            raise StateLost("a kept client state was on a node that is gone") from error
        return state

    def keep(self, state: Mapping[str, Any]) -> Handle:
        return ray.put(state)

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor.handle)
        self._actors = []

    def _put(self, arguments: Mapping[str, Any]) -> list[Any]:
        """Objects of the arguments; an array of the call before (the weights) is put once only."""
        known, self._sent = self._sent, []
        objects = []
        for value in arguments.values():
            array = value.value if isinstance(value, NotCounted) else value
            same = (ref for sent, kind, ref in known if sent is array and isinstance(value, kind))
            ref = next(same, None) or ray.put(value)
            # It is frozen, so still the same, unless it is a view of what may change.
            if isinstance(array, np.ndarray) and array.base is None:
                self._sent.append((array, type(value), ref))
            objects.append(ref)
        return objects

    # -- one call ------------------------------------------------------------------------------

    def _hand_out(
        self,
        call: Call,
        todo: deque[_Task],
        flying: dict[Any, tuple[_Actor, _Task]],
        names: list[str],
        objects: list[Any],
        states: Mapping[int, Handle],
    ) -> None:
        """Give blocks to actors that have room, one round of them at a time.

        A message costs as much as a small client. So many blocks go out at once while many are
        left, and few towards the end, when they even out who is done when.
        """
        stateful = call.function in self._stateful
        for room in range(1, IN_FLIGHT + 1):
            for actor in self._actors:
                if not todo or not actor.ready or actor.flying >= room:
                    continue
                task = _together(todo, max(1, len(todo) // (IN_FLIGHT * len(self._actors))))
                clients = task.clients
                with_state = [id for id in clients if id in states]
                returned = actor.handle.run_blocks.options(
                    num_returns=1 + len(clients) if stateful else 1
                ).remote(
                    call,
                    task.blocks,
                    names,
                    with_state,
                    stateful,
                    *objects,
                    *(states[k] for k in with_state),
                )
                main, *task.states = returned if stateful else [returned]
                flying[main] = (actor, task)
                actor.flying += 1
                task.since = time.monotonic()

    def _collect(
        self, call: Call, todo: deque[_Task], flying: dict[Any, tuple[_Actor, _Task]]
    ) -> None:
        """Wait for a block, or for an actor to start, and take all that is there by then."""
        starting = {actor.up: actor for actor in self._actors if not actor.ready}
        waiting = [*flying, *starting]
        if not ray.wait(waiting, num_returns=1, timeout=PATIENCE)[0]:
            self._report_silence(call, todo, flying)
            return
        for ref in ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]:
            if ref in starting:
                self._take_up(starting[ref])
            elif ref in flying:  # not, when its actor was lost a moment ago
                actor, task = flying[ref]
                try:
                    task.result = ray.get(ref)
                except RayTaskError as error:  # before LOST: it is of the type of its cause, too
                    raise _cause(error) from None
                except LOST as error:
                    self._lose(actor, todo, flying, error)
                    continue
                del flying[ref]
                actor.flying -= 1
                actor.done.append(task)

    def _finish(self, call: Call, todo: deque[_Task], outcome: Outcome) -> bool:
        """All blocks are done: collect sums. True if an actor was lost and blocks must run again.

        A block counts only once the sum that it went into has arrived.
        """
        holders = [actor for actor in self._actors if actor.done]
        asked = [
            (actor, actor.handle.take_sums.remote(call.serial) if call.mode == "mean" else None)
            for actor in holders
        ]
        for actor, ref in asked:
            try:
                sums = ray.get(ref) if ref is not None else {}
            except LOST as error:
                self._lose(actor, todo, {}, error)
                continue
            outcome.add_sums(sums)
            for task in actor.done:
                self._accept(call, task, outcome)
            actor.done = []
        return bool(todo)

    def _accept(self, call: Call, task: _Task, outcome: Outcome) -> None:
        assert task.result is not None
        outcome.take(task.result)
        self.notice(task.result.notices)
        apart = dict(zip(task.clients, task.states, strict=False))
        for id, state in task.result.states.items():
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
        return _Actor(handle, handle.device.remote())

    def _take_up(self, actor: _Actor) -> None:
        """An actor has started, or failed to."""
        try:
            device = ray.get(actor.up)
        except LOST as error:
            self._failed_starts += 1
            if failed_to_start(error):
                raise RunError(f"client actors cannot start: {error}") from error
            if self._failed_starts == MAX_DEATHS:
                raise RunError(
                    f"client actors cannot start, {MAX_DEATHS} died in a row (out of memory?): "
                    f"{first_line(error)}"
                ) from error
            self.notices.append("a client actor was lost while it started; another is made")
            self._replace(actor)
            return
        actor.ready, self._failed_starts = True, 0
        if self._device is None:
            self._device = device
            if self._settings.gpus_per_actor and device == "cpu":
                self.notices.append("no card is behind the GPUs asked for: computing on CPUs")
        elif device != self._device:
            raise RunError(
                f"client actors compute on different devices ({self._device}, {device}); "
                "results would depend on who computes what"
            )

    def _lose(
        self,
        actor: _Actor,
        todo: deque[_Task],
        flying: dict[Any, tuple[_Actor, _Task]],
        error: Exception,
    ) -> None:
        """Replace an actor, and put back all blocks whose results it still held or worked on."""
        mine = [ref for ref, (holder, _) in flying.items() if holder is actor]
        under_way = [flying.pop(ref)[1] for ref in mine]  # in the order handed out
        for task in under_way[:1] or actor.done:  # the one that it was at, or all that it held
            task.deaths += 1
            if task.deaths == MAX_DEATHS:
                raise RunError(
                    f"clients {task.clients} took down {MAX_DEATHS} actors, one after the "
                    f"other (out of memory?): {first_line(error)}"
                )
        # One by one, so that a block that takes down its actor does not take others with it.
        back = [
            _Task([block], task.deaths)
            for task in (*actor.done, *under_way)
            for block in task.blocks
        ]
        todo.extendleft(reversed(back))
        self._replace(actor)
        self.notices.append(f"a client actor was lost; {len(back)} block(s) of clients run again")

    def _replace(self, actor: _Actor) -> None:
        ray.kill(actor.handle)  # it may be unreachable rather than dead
        self._actors[self._actors.index(actor)] = self._start()

    def _report_silence(
        self, call: Call, todo: deque[_Task], flying: dict[Any, tuple[_Actor, _Task]]
    ) -> None:
        table = actor_table()
        ids = {actor: actor_id(actor.handle) for actor in self._actors}
        entries = {actor: table[id] for actor, id in ids.items() if id in table}
        parts = [f"nothing has moved for {PATIENCE:.0f} s in round {call.round}, {call.function}"]
        parts += filter(None, [starting(list(entries.values()), self._settings)])
        if flying:
            actor, task = next(iter(flying.values()))  # the first that was handed out
            whom = ", ".join(map(str, task.clients[:10])) + (", …" if task.clients[10:] else "")
            parts.append(
                f"the longest under way is in {whereabouts(entries[actor], live_nodes())}, "
                f"{'test shards' if call.mode == 'test' else 'clients'} {whom}, "
                f"for {time.monotonic() - task.since:.0f} s"
            )
        blocks = sum(len(task.blocks) for task in todo)
        log.warning(f"{'; '.join(parts)}; {blocks} block(s) wait for an actor")


def _together(todo: deque[_Task], count: int) -> _Task:
    """The next blocks as one task; those that were lost before go alone."""
    task = todo.popleft()
    while todo and len(task.blocks) < count and not task.deaths and not todo[0].deaths:
        task.blocks += todo.popleft().blocks
    return task


def _cause(error: RayTaskError) -> Exception:
    """The error to raise for what Ray reports of a task that failed."""
    cause: Exception = error.cause
    if isinstance(cause, ObjectLostError):  # an argument; the server's own are beside the driver
        return StateLost("a kept client state was on a node that is gone")
    return cause if isinstance(cause, FedsimError) else error
