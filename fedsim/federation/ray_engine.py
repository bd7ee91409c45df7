"""Client work on Ray actors, which may die."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectLostError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fedsim.cluster.faults import LOST, failed_to_start, first_line
from fedsim.cluster.placement import live_nodes, starting, whereabouts
from fedsim.cluster.ray_compat import actor_id, actor_table, places
from fedsim.cluster.settings import EngineSettings
from fedsim.errors import FedsimError, RunError, StackTooLarge, StateLost
from fedsim.federation.client_actor import ClientActor, Introduction
from fedsim.federation.context import RunSpec
from fedsim.federation.engine import Block, Engine, Handle, Outcome, pick_device
from fedsim.federation.object_cache import ObjectCache
from fedsim.federation.scheduler import Scheduler, WorkItem
from fedsim.federation.worker import Call
from fedsim.support.hardware import Arithmetic

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3  # actors in a row that may die while starting
SHORT = 1.0  # seconds; in shorter calls, messages take a notable share of the time
UNEVEN = 0.25  # largest spread of the actors' finishing times, as a share of the call's
STATE_LOST = "a kept client state was on a node that is gone"
SPILLS = 0.8  # of the object store; Ray spills the rest to disk
GROWTH = 1.25  # factor in the number of kept states, after which they are checked again
COMBINED = 3  # from this many actors on, a node adds up their sums
FETCHED = 4  # most sums that the driver fetches; if there are more, nodes add up so many at a time
LOOK = 1.0  # seconds without an answer before pending messages are checked
PATIENCE = 60.0  # seconds without an answer before pending work is logged


@dataclass(eq=False)
class _Actor:
    """An actor as the driver sees it.

    Attributes:
        up: reference that is ready once it has started.
        introduced: its answer then.
    """

    handle: Any
    up: Any
    introduced: Introduction | None = None

    @property
    def ready(self) -> bool:
        return self.introduced is not None

    @property
    def node(self) -> str | None:
        return self.introduced.node if self.introduced else None


@dataclass(eq=False)
class _Sum:
    """A partial sum, on the node of an actor.

    Attributes:
        actor: who has computed it.
        items: the actor's own, which it contains; none if it is a sum of sums.
        of: the sums of actors that were added up.
        alone: it is fetched by itself, not combined with others.
    """

    actor: _Actor
    items: list[WorkItem]
    reference: Any
    of: list[_Sum] = field(default_factory=list)
    alone: bool = False

    @property
    def parts(self) -> list[_Sum]:
        """The sums of single actors."""
        return self.of or [self]

    def needs(self, actor: _Actor) -> bool:
        """Whether it is lost, or partly, with an actor."""
        return actor in (self.actor, *(part.actor for part in self.of))


@dataclass(eq=False)
class _Message:
    """Blocks sent to an actor, or the request for the sum of their updates.

    A block counts only once the sum that contains it has arrived.

    Attributes:
        since: when it was sent.
        sum: reference of the blocks' partial sum, if it comes with their answer.
        states: references of the clients' kept states, if they are separate objects.
        asks_for_sum: items sent before, whose sum is requested.
        combines: sums to be added up.
    """

    actor: _Actor
    items: list[WorkItem]
    since: float
    sum: Any = None
    states: list[Any] = field(default_factory=list)
    asks_for_sum: bool = False
    combines: list[_Sum] = field(default_factory=list)


@dataclass(eq=False)
class _UnderWay:
    """A call in progress.

    Attributes:
        names: names of the arguments.
        objects: references of the arguments.
        states: clients' kept states.
        flying: messages without an answer, by the references of the answers, in the order sent.
        sums: available sums that are neither fetched nor combined yet.
        heard: time of the last answer, or of the last line about missing answers.
        answered: time of each actor's answer.
    """

    call: Call
    scheduler: Scheduler[_Actor]
    names: list[str]
    objects: list[Any]
    states: Mapping[int, Handle]
    outcome: Outcome
    heard: float
    flying: dict[Any, _Message] = field(default_factory=dict)
    sums: list[_Sum] = field(default_factory=list)
    answered: dict[_Actor, float] = field(default_factory=dict)


class RayEngine(Engine):
    """Client work on actors of a Ray cluster.

    Idle actors take the next blocks, several at first and one by one towards the end. A lost actor
    is replaced, and the blocks of the call whose sum it held are run again, with the same inputs
    and random streams and thus the same result to the bit.

    Args:
        count: number of actors.
        clients: number of clients of the federation.
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
        self._even: set[str] = set()  # last call short, all actors busy
        self._failed_starts = 0  # in a row
        self._objects = ObjectCache()
        self._actors = [self._start() for _ in range(count)]
        self._arithmetic: Arithmetic | None = None  # of the actors
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
        started = time.monotonic()
        now = _UnderWay(
            call,
            Scheduler(blocks, call.function in self._even, call.reduction.stays),
            list(arguments),
            self._objects.put(arguments),
            states,
            Outcome(partial=copy.deepcopy(call.reduction)),
            started,
        )
        try:
            while not now.scheduler.all_accepted:
                self._hand_out(now)
                self._ask_for_sums(now)
                self._collect(now)
                self._take_sums(now)
        except StackTooLarge:  # pending work must not use memory during the next try
            if now.flying:
                ray.wait(list(now.flying), num_returns=len(now.flying), fetch_local=False)
            raise
        ends = [now.answered.get(actor, started) - started for actor in self._actors]
        self._note_balance(call.function, ends)
        return now.outcome

    def server_device(self) -> torch.device:
        device = pick_device(self._settings)
        # In a trial, the driver shares a GPU with its own actors: others belong to other trials.
        if device.type == "cuda" and ray.util.get_current_placement_group():
            here = ray.get_runtime_context().get_node_id()
            starting = {actor.up: actor for actor in self._actors if not actor.ready}
            while not (card := self._card_on(here)) and starting:
                (up,), _ = ray.wait(list(starting))
                self._take_up(starting.pop(up))
            if card:
                torch.cuda.set_device(card_number(card))
        return device

    def _card_on(self, node: str) -> str | None:
        """A GPU on that node used by an actor that has started."""
        there = (a.introduced for a in self._actors if a.introduced and a.node == node)
        return next((each.card for each in there if each.card is not None), None)

    def choose_clients_per_step(self, clients: Sequence[int]) -> tuple[int, str]:
        # One block per actor.
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
                        f"{MAX_FAILED_STARTS} client actors died while measuring how many "
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
        """Notify once if kept states exceed, or will exceed, Ray's object store."""
        if self._store_told or len(states) <= GROWTH * self._looked_at:
            return
        self._looked_at = len(states)
        # Small objects are kept by the driver.
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

    def _note_balance(self, function: str, ends: Sequence[float]) -> None:
        """Note whether to deal out all blocks at once the next time.

        The time of messages matters only in short calls, and equal parts suit actors that are
        equally fast.

        Args:
            ends: seconds after which each actor finished.
        """
        if max(ends) < SHORT and max(ends) - min(ends) < UNEVEN * max(ends):
            self._even.add(function)
        else:
            self._even.discard(function)

    def _hand_out(self, now: _UnderWay) -> None:
        """Send blocks to actors with capacity."""
        stateful = now.call.function in self._stateful
        ready = [actor for actor in self._actors if actor.ready]
        for actor, item in now.scheduler.hand_out(ready, len(self._actors)):
            clients = item.clients
            with_state = [id for id in clients if id in now.states]
            returned = actor.handle.run_blocks.options(
                num_returns=1 + item.with_sum + (len(clients) if stateful else 0)
            ).remote(
                now.call,
                item.blocks,
                item.with_sum,
                now.names,
                with_state,
                stateful,
                *now.objects,
                *(now.states[k] for k in with_state),
            )
            main, *apart = returned if stateful or item.with_sum else [returned]
            total = apart.pop(0) if item.with_sum else None
            now.flying[main] = _Message(actor, [item], time.monotonic(), total, apart)

    def _ask_for_sums(self, now: _UnderWay) -> None:
        """Request actors' sums, queued behind their pending blocks."""
        if not now.call.reduction.stays:
            return
        for actor, items in now.scheduler.to_ask().items():
            ref = actor.handle.take_partial.remote(now.call.serial)
            now.flying[ref] = _Message(actor, items, time.monotonic(), asks_for_sum=True)

    def _collect(self, now: _UnderWay) -> None:
        """Wait for a block or the start of an actor, and take everything available by then."""
        starting = {actor.up: actor for actor in self._actors if not actor.ready}
        # Wait for a sum only once its blocks have answered; these reveal a lost actor.
        awaited = (
            ref
            for ref, message in now.flying.items()
            if not message.asks_for_sum or now.scheduler.are_done(message.items)
        )
        waiting = [*awaited, *starting]
        if not waiting:  # sums are left to fetch
            return
        here = not now.call.reduction.stays  # sums stay on their nodes until they are fetched
        if not ray.wait(waiting, num_returns=1, timeout=min(LOOK, PATIENCE), fetch_local=here)[0]:
            self._look_after_states(now)
            if time.monotonic() - now.heard >= PATIENCE:
                self._report_silence(now)
                now.heard = time.monotonic()
            return
        now.heard = time.monotonic()
        ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0, fetch_local=here)
        for ref in ready:
            if ref in starting:
                self._take_up(starting[ref])
            elif ref in now.flying:  # unless its actor was just lost
                self._take_answer(now, ref, now.flying[ref])

    def _take_answer(self, now: _UnderWay, ref: Any, message: _Message) -> None:
        if message.asks_for_sum or message.combines:
            parts = [part for one in message.combines for part in one.parts]
            now.sums.append(_Sum(message.actor, message.items, ref, parts))
        else:
            try:
                answer = ray.get(ref)
            except RayTaskError as error:  # before LOST: it is an instance of its cause's type
                raise _cause(error) from None
            except LOST as error:
                self._lose(now, message.actor, error)
                return
            (item,) = message.items
            now.scheduler.done(item, (answer, message.states))
            now.answered[message.actor] = time.monotonic()
            if item.with_sum:
                now.sums.append(_Sum(message.actor, message.items, message.sum))
            elif not now.call.reduction.stays:
                self._accept(now, message.actor, message.items)
        del now.flying[ref]

    def _take_sums(self, now: _UnderWay) -> None:
        """Fetch available sums, or have them added up: those of a node, then those of nodes.

        Apart from one short message each, the driver's traffic thus grows neither with the number
        of actors nor of nodes.
        """
        if not now.sums:
            return
        combined = [one for message in now.flying.values() for one in message.combines]
        summed = {
            item for one in (*now.sums, *combined) for part in one.parts for item in part.items
        }
        busy, waiting = now.scheduler.busy(summed), now.scheduler.waiting
        nodes, sums = defaultdict[str | None, list[_Actor]](list), defaultdict(list)
        for actor in (actor for actor in self._actors if actor.ready):
            nodes[actor.node].append(actor)
        for one in now.sums:
            sums[one.actor.node].append(one)
        of_nodes, sources = list[_Sum](), 0
        for node, actors in nodes.items():
            parts = sums[node]
            single = [part for part in parts if not (part.alone or part.of)]
            sources += len(actors) if len(actors) < COMBINED else 1
            if len(actors) >= COMBINED:
                if waiting or not busy.isdisjoint(actors):
                    parts = [part for part in parts if part not in single]
                elif len(single) >= COMBINED:
                    self._combine(now, single)
                    parts = [part for part in parts if part not in single]
            of_nodes += parts
        together = [part for part in of_nodes if not part.alone]
        if sources > FETCHED:
            for start in range(0, len(together) - FETCHED + 1, FETCHED):
                self._combine(now, together[start : start + FETCHED])
            if now.flying or waiting:  # more will come to add up
                of_nodes = [part for part in of_nodes if part.alone]
        for part in of_nodes:
            if part in now.sums:  # unless it is combined, or its actor was just lost
                self._fetch(now, part)

    def _combine(self, now: _UnderWay, sums: list[_Sum]) -> None:
        """Let one of these actors add up their sums; the result stays on its node."""
        one = sums[0].actor
        ref = one.handle.combine.remote(now.call, *(each.reference for each in sums))
        now.flying[ref] = _Message(one, [], time.monotonic(), combines=sums)
        now.sums = [each for each in now.sums if each not in sums]

    def _fetch(self, now: _UnderWay, one: _Sum) -> None:
        """Fetch a sum."""
        try:
            answer = ray.get(one.reference)
        except RayTaskError as error:  # before LOST: it is an instance of its cause's type
            if not (one.of and isinstance(error.cause, LOST)):
                raise _cause(error) from None
            now.sums.remove(one)  # an actor's sum is lost; fetching each shows whose
            self._take_apart(now, [one])
            return
        except LOST as error:
            self._lose(now, one.actor, error)
            return
        now.sums.remove(one)
        now.outcome.add_partial(answer)
        for part in one.parts:
            self._accept(now, part.actor, part.items)

    def _take_apart(self, now: _UnderWay, sums: Iterable[_Sum]) -> None:
        """Put back what single actors have summed, to be fetched each by itself."""
        for part in (part for one in sums for part in one.parts):
            part.alone = True
            now.sums.append(part)

    def _accept(self, now: _UnderWay, actor: _Actor, items: Sequence[WorkItem]) -> None:
        """Accept the results of blocks whose sum has arrived."""
        now.scheduler.accept(actor, items)
        for item in items:
            result, references = item.answer
            now.outcome.take(result)
            self.notice(result.notices)
            apart = dict(zip(item.clients, references, strict=False))
            for id, state in result.states.items():
                # States come with the result the first time that a function keeps any; later they
                # stay on their nodes.
                now.outcome.states[id] = apart[id] if apart else ray.put(state)
                self._stateful.add(now.call.function)

    def _look_after_states(self, now: _UnderWay) -> None:
        """Check whether actors wait for lost states.

        Ray tells them only at its next try to fetch a state: after 10 s, 30 s, 70 s ...

        Raises:
            StateLost: they do; these actors are replaced, because they would keep waiting.
        """
        here = ray.get_runtime_context().get_node_id()
        needed = {
            id: m.actor for m in now.flying.values() for item in m.items for id in item.clients
        }
        lost = [id for id in needed if id in now.states and is_lost(now.states[id], here)]
        for actor in {needed[id] for id in lost}:
            self._replace(actor)
        if lost:
            raise StateLost(STATE_LOST)

    # -- actors --------------------------------------------------------------------------------

    def _start(self) -> _Actor:
        settings = self._settings
        # In a trial, actors use its placement group, which holds their resources; "DEFAULT" would
        # wait for resources outside of any group.
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
            .remote(settings, self._setup, *self._data, os.getcwd())
        )
        return _Actor(handle, handle.introduce.remote())

    def _take_up(self, actor: _Actor) -> None:
        """Register an actor that has started or failed to."""
        try:
            introduced: Introduction = ray.get(actor.up)
        except LOST as error:
            self._failed_starts += 1
            if failed_to_start(error):
                raise RunError(f"client actors cannot start: {error}") from error
            if self._failed_starts == MAX_FAILED_STARTS:
                raise RunError(
                    f"client actors cannot start: {MAX_FAILED_STARTS} died in a row (out of "
                    f"memory?): {first_line(error)}"
                ) from error
            self.notices.append("a client actor was lost while starting and is replaced")
            self._replace(actor)
            return
        actor.introduced, self._failed_starts = introduced, 0
        found = introduced.arithmetic
        if self._arithmetic is None:
            if self._settings.gpus_per_actor and found.device == "cpu":
                self.notices.append(
                    "the requested GPUs are not available to PyTorch: computing on CPUs"
                )
            # The driver only has to round as actors without a GPU do.
            here = Arithmetic.of(torch.device("cpu"))
            self._arithmetic = here if found.device == "cpu" else found
        self.notice(compare(self._arithmetic, found, self._settings.mixed_processors))

    def _lose(self, now: _UnderWay, actor: _Actor, error: Exception) -> None:
        """Replace an actor and requeue the work that it held."""
        for ref, message in list(now.flying.items()):
            if actor is message.actor or any(one.needs(actor) for one in message.combines):
                del now.flying[ref]
                self._take_apart(now, message.combines)  # others' sums are still on their nodes
        broken = [one for one in now.sums if one.of and one.needs(actor)]
        now.sums = [one for one in now.sums if one not in broken]
        self._take_apart(now, broken)
        now.sums = [one for one in now.sums if one.actor is not actor]
        blocks = now.scheduler.lose(actor, first_line(error))
        self._replace(actor)
        self.notices.append(f"a client actor was lost; running {blocks} block(s) of clients again")

    def _replace(self, actor: _Actor) -> None:
        ray.kill(actor.handle)  # it may be alive but unreachable
        self._actors[self._actors.index(actor)] = self._start()

    def _report_silence(self, now: _UnderWay) -> None:
        table = actor_table()
        ids = {actor: actor_id(actor.handle) for actor in self._actors}
        entries = {actor: table[id] for actor, id in ids.items() if id in table}
        call = now.call
        parts = [f"no progress for {PATIENCE:.0f} s in round {call.round}, {call.function}"]
        parts += filter(None, [starting(list(entries.values()), self._settings)])
        if now.flying:
            message = next(iter(now.flying.values()))  # the oldest
            sums = [part for one in message.combines for part in one.parts]
            items = [*message.items, *(item for part in sums for item in part.items)]
            clients = [id for item in items for id in item.clients]
            place = entries[message.actor]
            whom = ", ".join(map(str, clients[:10])) + (", …" if clients[10:] else "")
            parts.append(
                f"the longest under way is in {whereabouts(place, live_nodes())}, "
                f"{call.unit} {whom}, "
                f"for {time.monotonic() - message.since:.0f} s"
            )
        log.warning(f"{'; '.join(parts)}; {now.scheduler.waiting} block(s) wait for an actor")


def card_number(card: str) -> int:
    """Torch's index of a GPU in a process to which Ray has assigned none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(card) if visible else int(card)


def is_lost(handle: Handle, here: str) -> bool:
    """Whether an object that this process owns was on a lost node.

    Args:
        here: the id of this process's node, where an error then replaces the object.
    """
    (place,) = places([handle])
    if here in place["node_ids"]:
        try:
            ray.get(handle, timeout=0)
        except ObjectLostError:
            return True
        except GetTimeoutError:  # it is still being restored from disk
            return False
    return False


def store_notice(
    kept: Sequence[int], spilled: Sequence[int], clients: int, capacity: float
) -> str | None:
    """A notice if kept states are or will be spilled to disk; None if all fit the store.

    Args:
        kept: bytes of each state so far.
        spilled: bytes of those on disk.
        clients: number of clients that may keep a state.
        capacity: bytes of Ray's object store, on all nodes.
    """
    if not kept:
        return None
    expected = sum(kept) / len(kept) * clients
    if not spilled and expected <= SPILLS * capacity:
        return None
    on_disk = f", {sum(spilled) / 1e9:.3g} GB of it on disk" if spilled else ""
    return (
        f"{len(kept)} clients keep {sum(kept) / 1e9:.3g} GB{on_disk}; all {clients} would keep "
        f"{expected / 1e9:.3g} GB, and Ray's object store has {capacity / 1e9:.3g} GB. What does "
        "not fit goes to the nodes' disks, and rounds take longer"
    )


def compare(one: Arithmetic, other: Arithmetic, mixed: bool) -> list[str]:
    """A notice if two processes of a run may round differently; None if they do not.

    Args:
        mixed: `engine.mixed_processors`.

    Raises:
        RunError: they do, and the experiment does not allow it.
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
            "depend on who computes what. Use nodes of one kind, or set "
            "engine.mixed_processors=true if results need not be reproducible to the bit"
        )
    return [
        f"results depend on which node computes what, because nodes round differently ({one}; "
        f"{other})"
    ]


def _cause(error: RayTaskError) -> Exception:
    """The error to raise for a failed task."""
    cause: Exception = error.cause
    if isinstance(cause, ObjectLostError):  # a kept state; the rest is on the driver's node
        return StateLost(STATE_LOST)
    return cause if isinstance(cause, FedsimError) else error
