"""Client work on Ray: actors that take blocks, and may die."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Mapping, Sequence
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
from fedsim.errors import FedsimError, RunError, StackTooLarge, StateLost
from fedsim.federation.client_actor import ClientActor, Introduction
from fedsim.federation.context import RunSpec
from fedsim.federation.engine import Block, Engine, Handle, Outcome, pick_device
from fedsim.federation.object_cache import ObjectCache
from fedsim.federation.scheduler import Scheduler, WorkItem
from fedsim.federation.worker import Call
from fedsim.hardware import Arithmetic

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3  # actors that may die at the start, in a row
SHORT = 1.0  # seconds; calls that take less spend a notable share of them on messages
UNEVEN = 0.25  # largest spread of the actors' finishing times, as a share of the call's
STATE_LOST = "a kept client state was on a node that is gone"
SPILLS = 0.8  # of the object store; Ray moves what comes on top of it to the disk
GROWTH = 1.25  # of the kept states in number, after which they are looked at again
COMBINED = 3  # actors of a node from which on their sums are added up there
LOOK = 1.0  # seconds without any answer after which a look is taken at what is under way
PATIENCE = 60.0  # seconds without any answer after which what is awaited is named in the log


@dataclass(eq=False)
class _Actor:
    """An actor as the driver sees it.

    Attributes:
        up: answers once it has started.
        introduced: what it answered.
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
    """What an actor's blocks were folded into: it lies on the actor's node.

    Attributes:
        alone: it is fetched as it is, not combined with others of its node.
    """

    actor: _Actor
    items: list[WorkItem]
    reference: Any
    alone: bool = False


@dataclass(eq=False)
class _Message:
    """Blocks that are with an actor, or the question for the sum of their updates.

    A block counts only once the sum that it went into has arrived.

    Attributes:
        since: when it was sent.
        sum: reference of what the blocks are folded into, if it comes with their answer.
        states: references of what the clients keep, one for each, if they come apart.
        asks_for_sum: of items that were sent before.
        combines: sums of actors of one node.
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
    """A call that is being carried out.

    Attributes:
        names: of the arguments.
        objects: references of these.
        states: what clients keep.
        flying: messages that no answer has come to, by the references of the answers, in the
            order sent.
        sums: that are there, and neither fetched nor combined yet.
        heard: when an answer came last, or their lack was told.
        answered: when each actor did.
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
        except StackTooLarge:  # what is under way must not take the memory of the next try
            if now.flying:
                ray.wait(list(now.flying), num_returns=len(now.flying), fetch_local=False)
            raise
        ends = [now.answered.get(actor, started) - started for actor in self._actors]
        self._note_balance(call.function, ends)
        return now.outcome

    def server_device(self) -> torch.device:
        device = pick_device(self._settings)
        # A trial holds all that its actors have: no other trial's driver is to take their cards.
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
        """A card on that node that an actor has, as far as actors have started."""
        there = (a.introduced for a in self._actors if a.introduced and a.node == node)
        return next((each.card for each in there if each.card is not None), None)

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

    def _note_balance(self, function: str, ends: Sequence[float]) -> None:
        """Note whether blocks are to be dealt out at once the next time.

        Messages take time that counts in short calls alone, and equal parts are right where all
        actors are equally quick.

        Args:
            ends: seconds after which each actor was done.
        """
        if max(ends) < SHORT and max(ends) - min(ends) < UNEVEN * max(ends):
            self._even.add(function)
        else:
            self._even.discard(function)

    def _hand_out(self, now: _UnderWay) -> None:
        """Send blocks to the actors that have room."""
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
        """Ask actors for what they hold, behind the blocks that they are still to carry out."""
        if not now.call.reduction.stays:
            return
        for actor, items in now.scheduler.to_ask().items():
            ref = actor.handle.take_partial.remote(now.call.serial)
            now.flying[ref] = _Message(actor, items, time.monotonic(), asks_for_sum=True)

    def _collect(self, now: _UnderWay) -> None:
        """Wait for a block, or for an actor to start, and take all that is there by then."""
        starting = {actor.up: actor for actor in self._actors if not actor.ready}
        # A sum is awaited only once its blocks have answered; if their actor is lost, these tell.
        awaited = (
            ref
            for ref, message in now.flying.items()
            if not message.asks_for_sum or now.scheduler.are_done(message.items)
        )
        waiting = [*awaited, *starting]
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
            elif ref in now.flying:  # not, when its actor was lost a moment ago
                self._take_answer(now, ref, now.flying[ref])

    def _take_answer(self, now: _UnderWay, ref: Any, message: _Message) -> None:
        if message.asks_for_sum:
            now.sums.append(_Sum(message.actor, message.items, ref))
        else:
            try:
                answer = ray.get(ref)
            except RayTaskError as error:  # before LOST: it is of the type of its cause, too
                if not (message.combines and isinstance(error.cause, LOST)):
                    raise _cause(error) from None
                del now.flying[ref]  # the sum of another actor is gone; fetched alone, it tells
                self._take_apart(now, message)
                return
            except LOST as error:
                self._lose(now, message.actor, error)
                return
            if message.combines:
                now.outcome.add_partial(answer)
                for part in message.combines:
                    self._accept(now, part.actor, part.items)
            else:
                (item,) = message.items
                now.scheduler.done(item, (answer, message.states))
                now.answered[message.actor] = time.monotonic()
                if item.with_sum:
                    now.sums.append(_Sum(message.actor, message.items, message.sum))
                elif not now.call.reduction.stays:
                    self._accept(now, message.actor, message.items)
        del now.flying[ref]

    def _take_sums(self, now: _UnderWay) -> None:
        """Fetch the sums that are there, those of a node with many actors as one.

        So the driver's traffic grows with the nodes, not with the actors.
        """
        for node in {part.actor.node for part in now.sums}:
            actors = [actor for actor in self._actors if actor.node == node]
            parts = [part for part in now.sums if part.actor.node == node]
            together = [part for part in parts if not part.alone]
            if len(actors) >= COMBINED:
                summed = {item for part in parts for item in part.items}
                more = any(set(now.scheduler.held(actor)) - summed for actor in actors)
                if now.scheduler.waiting or more:
                    parts = [part for part in parts if part.alone]
                elif len(together) >= COMBINED:
                    self._combine(now, together)
                    parts = [part for part in parts if part.alone]
            for part in parts:
                if part in now.sums:  # not, when its actor was lost a moment ago
                    self._fetch(now, part)

    def _combine(self, now: _UnderWay, parts: list[_Sum]) -> None:
        """Have sums of one node added up by one of their actors."""
        one = parts[0].actor
        ref = one.handle.combine.remote(now.call, *(part.reference for part in parts))
        items = [item for part in parts for item in part.items]
        now.flying[ref] = _Message(one, items, time.monotonic(), combines=parts)
        now.sums = [part for part in now.sums if part not in parts]

    def _take_apart(self, now: _UnderWay, message: _Message) -> None:
        """Have each of the sums that were to be combined fetched as it is."""
        for part in message.combines:
            part.alone = True
            now.sums.append(part)

    def _fetch(self, now: _UnderWay, part: _Sum) -> None:
        """Take a sum as it is."""
        try:
            answer = ray.get(part.reference)
        except RayTaskError as error:  # before LOST: it is of the type of its cause, too
            raise _cause(error) from None
        except LOST as error:
            self._lose(now, part.actor, error)
            return
        now.sums.remove(part)
        now.outcome.add_partial(answer)
        self._accept(now, part.actor, part.items)

    def _accept(self, now: _UnderWay, actor: _Actor, items: Sequence[WorkItem]) -> None:
        """Take over what blocks left behind: what they were folded into has arrived."""
        now.scheduler.accept(actor, items)
        for item in items:
            result, references = item.answer
            now.outcome.take(result)
            self.notice(result.notices)
            apart = dict(zip(item.clients, references, strict=False))
            for id, state in result.states.items():
                # The first time, before it was known that this function keeps any, states come
                # with the result. From then on they stay on their nodes.
                now.outcome.states[id] = apart[id] if apart else ray.put(state)
                self._stateful.add(now.call.function)

    def _look_after_states(self, now: _UnderWay) -> None:
        """See whether actors wait for states that are gone.

        Ray tells them only when it tries once more to fetch these: after 10 s, 30 s, 70 s ...

        Raises:
            StateLost: they do; these actors are replaced, because they go on waiting.
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
        return _Actor(handle, handle.introduce.remote())

    def _take_up(self, actor: _Actor) -> None:
        """An actor has started, or failed to."""
        try:
            introduced: Introduction = ray.get(actor.up)
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
        actor.introduced, self._failed_starts = introduced, 0
        found = introduced.arithmetic
        if self._arithmetic is None:
            if self._settings.gpus_per_actor and found.device == "cpu":
                self.notices.append("no card is behind the GPUs asked for: computing on CPUs")
            # Of the driver no more is asked than that it rounds as actors without a card do.
            here = Arithmetic.of(torch.device("cpu"))
            self._arithmetic = here if found.device == "cpu" else found
        self.notice(compare(self._arithmetic, found, self._settings.mixed_processors))

    def _lose(self, now: _UnderWay, actor: _Actor, error: Exception) -> None:
        """Replace an actor; whatever it held is run again."""
        for ref, message in list(now.flying.items()):
            if actor in (message.actor, *(part.actor for part in message.combines)):
                del now.flying[ref]
                self._take_apart(now, message)  # sums of others are still on their node
        now.sums = [part for part in now.sums if part.actor is not actor]
        blocks = now.scheduler.lose(actor, first_line(error))
        self._replace(actor)
        self.notices.append(f"a client actor was lost; {blocks} block(s) of clients run again")

    def _replace(self, actor: _Actor) -> None:
        ray.kill(actor.handle)  # it may be unreachable rather than dead
        self._actors[self._actors.index(actor)] = self._start()

    def _report_silence(self, now: _UnderWay) -> None:
        table = actor_table()
        ids = {actor: actor_id(actor.handle) for actor in self._actors}
        entries = {actor: table[id] for actor, id in ids.items() if id in table}
        call = now.call
        parts = [f"nothing has moved for {PATIENCE:.0f} s in round {call.round}, {call.function}"]
        parts += filter(None, [starting(list(entries.values()), self._settings)])
        if now.flying:
            message = next(iter(now.flying.values()))  # the first that was sent
            clients = [id for item in message.items for id in item.clients]
            place = entries[message.actor]
            whom = ", ".join(map(str, clients[:10])) + (", …" if clients[10:] else "")
            parts.append(
                f"the longest under way is in {whereabouts(place, live_nodes())}, "
                f"{call.unit} {whom}, "
                f"for {time.monotonic() - message.since:.0f} s"
            )
        log.warning(f"{'; '.join(parts)}; {now.scheduler.waiting} block(s) wait for an actor")


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
