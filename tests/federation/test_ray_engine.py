"""What the driver does with answers, sums and kept states: without any Ray."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, GetTimeoutError, ObjectLostError, RayTaskError

from experiments import examples
from fedsim.federation import ray_engine
from fedsim.federation.client_actor import Introduction
from fedsim.federation.ray_engine import RayEngine, _Actor, is_lost, store_notice
from fedsim.federation.reduction import Reduction
from fedsim.federation.worker import BlockResult, Call
from fedsim.support.hardware import Arithmetic

GB = 10**9


class Counted(Reduction):
    """How often each client was counted."""

    stays: ClassVar[bool] = True

    def __init__(self) -> None:
        self.seen = Counter[int]()

    def fold(self, id: int, message: Any, arguments: Mapping[str, Any]) -> None:
        self.seen[id] += 1

    def merge(self, other: Counted) -> None:
        self.seen += other.seen

    def result(self, arguments: Mapping[str, Any], failures: Mapping[int, str]) -> None:
        raise NotImplementedError


class Simulated:
    """A cluster of actors that answer in any order and may die, in place of Ray.

    Args:
        nodes: of each actor, and of those that replace it.
        deaths: how many die.
    """

    def __init__(self, rng: np.random.Generator, nodes: Sequence[str], deaths: int) -> None:
        self.rng, self.nodes, self.deaths = rng, nodes, deaths
        self.survives = rng.random() < 0.5  # what dead actors have put on their nodes
        self.tasks = dict[object, tuple[Any, Callable[[], list[Any]], list[object]]]()
        self.objects = dict[object, tuple[Any, Any]]()  # a value or an error, and its actor
        self.fetched = 0

    def start(self, node: str) -> _Actor:
        handle = Handle(self)
        introduced = Introduction(Arithmetic.of(torch.device("cpu")), node, None)
        return _Actor(handle, handle.submit(lambda: [introduced], 1)[0], None)

    def value(self, ref: object) -> Any:
        value, holder = self.objects[ref]
        lost = holder is not None and not holder.alive and not self.survives
        if lost and isinstance(value, Counted):
            return ObjectLostError("", None, "")  # type: ignore[no-untyped-call]
        return value

    def finish(self, ref: object) -> None:
        """Run the task that makes an object, after those that its actor got before."""
        actor, run, refs = self.tasks[ref]
        for earlier in [r for r, (a, _, _) in self.tasks.items() if a is actor]:
            if earlier is ref or earlier not in self.tasks:
                break
            self.finish(earlier)
        if ref not in self.tasks:
            return
        for made in refs:
            del self.tasks[made]
        try:
            values = run() if actor.alive else [ActorDiedError()] * len(refs)
        except ObjectLostError as error:
            values = [RayTaskError("combine", "", error)] * len(refs)
        self.objects |= {made: (v, actor) for made, v in zip(refs, values, strict=True)}

    def wait(
        self, refs: list[object], num_returns: int, timeout: float | None, fetch_local: bool
    ) -> tuple[list[object], list[object]]:
        assert refs
        pending = [ref for ref in refs if ref in self.tasks]
        if len(pending) == len(refs):
            self.finish(pending[self.rng.integers(len(pending))])
        if self.deaths and self.rng.random() < 0.3:
            actors = list({id(a): a for a, _, _ in self.tasks.values()}.values())
            if actors:
                self.deaths -= 1
                actors[self.rng.integers(len(actors))].alive = False
        return [ref for ref in refs if ref not in self.tasks], []

    def get(self, ref: object) -> Any:
        found = self.value(ref)
        if isinstance(found, RayTaskError):
            raise found.as_instanceof_cause()
        if isinstance(found, Exception):
            raise found
        self.fetched += isinstance(found, Counted)
        return found

    def kill(self, handle: Handle) -> None:
        handle.alive = False

    @staticmethod
    def put(value: Any) -> Any:
        return value


class Handle:
    """An actor that works on blocks, and holds the sum of those that it was not asked for."""

    def __init__(self, cluster: Simulated) -> None:
        self.cluster, self.alive, self.total = cluster, True, Counted()

    def submit(self, run: Callable[[], list[Any]], count: int) -> list[object]:
        refs = [object() for _ in range(count)]
        self.cluster.tasks |= dict.fromkeys(refs, (self, run, refs))
        return refs

    def taken(self) -> Counted:
        total, self.total = self.total, Counted()
        return total

    def __getattr__(self, name: str) -> Any:
        def remote(*given: Any, count: int = 1) -> Any:
            def run_blocks() -> list[Any]:
                result = BlockResult()
                for id in (id for block in given[1] for id in block):
                    self.total.fold(id, None, {})
                    result.rows[id] = {}
                return [result, *([self.taken()] if given[2] else [])]

            def combine() -> list[Any]:
                total = copy.deepcopy(given[0].reduction)
                for each in map(self.cluster.value, given[1:]):
                    if isinstance(each, Exception):
                        raise ObjectLostError("", None, "")  # type: ignore[no-untyped-call]
                    total.merge(each)
                return [total]

            run = {
                "run_blocks": run_blocks,
                "combine": combine,
                "take_partial": lambda: [self.taken()],
            }[name]
            refs = self.submit(run, count)
            return refs if count > 1 else refs[0]

        def options(num_returns: int) -> Any:
            return SimpleNamespace(remote=lambda *given: remote(*given, count=num_returns))

        if name not in ("run_blocks", "combine", "take_partial"):
            raise AttributeError(name)
        return SimpleNamespace(remote=remote, options=options)


def engine_on(cluster: Simulated, monkeypatch: pytest.MonkeyPatch) -> RayEngine:
    """An engine whose actors are the cluster's."""
    nodes = iter([*cluster.nodes, *cluster.nodes * 20])
    monkeypatch.setattr(ray_engine, "ray", cluster)
    monkeypatch.setattr(RayEngine, "_start", lambda self: cluster.start(next(nodes)))
    settings: Any = SimpleNamespace(gpus_per_actor=0, mixed_processors=False)
    nothing: Any = None
    return RayEngine(settings, len(cluster.nodes), 0, nothing, None, None)


@examples(150)
@given(
    seed=st.integers(0, 10**6),
    nodes=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=12),
    blocks=st.integers(1, 40),
    deaths=st.integers(0, 2),
    dealt_out=st.booleans(),
    fetched=st.integers(2, 5),
)
def test_every_client_counts_once_whoever_dies(
    seed: int, nodes: list[str], blocks: int, deaths: int, dealt_out: bool, fetched: int
) -> None:
    cluster = Simulated(np.random.default_rng(seed), nodes, deaths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_engine, "FETCHED", fetched)
        engine = engine_on(cluster, patch)
        if dealt_out:
            engine._even.add("local_update")
        if not deaths:
            for actor in engine._actors:
                cluster.finish(actor.up)
                engine._take_up(actor)
        call = Call("local_update", Counted(), 1, 1, 1)
        outcome = engine.run(call, [[k] for k in range(blocks)], {}, {})
    assert isinstance(outcome.partial, Counted)
    assert outcome.partial.seen == Counter(range(blocks))
    assert set(outcome.rows) == set(range(blocks))
    if not deaths:
        sources = sum(1 if nodes.count(node) >= 3 else nodes.count(node) for node in set(nodes))
        # An actor that gave its sum with its first answer may be asked for a second one.
        assert cluster.fetched <= (fetched if sources > fetched else 2 * sources)


@pytest.mark.parametrize(
    ("nodes", "found", "lost"),
    [
        (["other"], AssertionError("it would be brought here"), False),
        ([], AssertionError("it lies in this process"), False),
        (["here"], {}, False),
        (["here"], GetTimeoutError(), False),
        (["here"], ObjectLostError("", None, ""), True),
    ],
)
def test_a_state_is_lost_if_an_error_lies_in_its_place(
    monkeypatch: pytest.MonkeyPatch, nodes: list[str], found: Any, lost: bool
) -> None:
    def get(handle: str, timeout: float) -> Any:
        assert (handle, timeout) == ("state", 0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(ray_engine, "places", lambda objects: [{"node_ids": nodes}])
    monkeypatch.setattr(ray_engine, "ray", SimpleNamespace(get=get))
    assert is_lost("state", "here") is lost


SLOWER = (
    "and Ray's object store has 10 GB. What does not fit goes to the nodes' disks, and rounds "
    "take longer"
)


@pytest.mark.parametrize(
    ("kept", "spilled", "clients", "told"),
    [
        ([], [], 100, None),
        ([GB], [], 8, None),
        ([GB] * 8, [], 8, None),
        ([3 * GB, GB], [], 4, None),
        # What all would keep, after the first did; and others may have filled the store.
        ([3 * GB, GB], [], 5, "2 clients keep 4 GB; all 5 would keep 10 GB, "),
        ([GB] * 3, [GB], 3, "3 clients keep 3 GB, 1 GB of it on disk; all 3 would keep 3 GB, "),
    ],
)
def test_what_is_told_of_the_store(
    kept: list[int], spilled: list[int], clients: int, told: str | None
) -> None:
    expected = None if told is None else told + SLOWER
    assert store_notice(kept, spilled, clients, 10 * GB) == expected
