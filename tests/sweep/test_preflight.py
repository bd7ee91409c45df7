"""What trials get of a cluster, and what they are refused."""

from __future__ import annotations

import math
import time
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim.cluster.placement import Node
from fedsim.errors import ClusterError
from fedsim.federation import EngineSettings
from fedsim.sweep import preflight
from fedsim.sweep.preflight import Allocation, Watchdog, allocate, describe_pending, placement

SMALL = Node("small", cpus=4, gpus=0, memory=math.inf)
CARDS = Node("cards", cpus=8, gpus=2, memory=math.inf)
HEAD = Node("head", cpus=0, gpus=0, memory=math.inf)


def engine(**keys: Any) -> EngineSettings:
    return EngineSettings(**keys)


@pytest.mark.parametrize(
    ("settings", "nodes", "trials", "concurrent", "plan"),
    [
        ({}, [SMALL], 12, "auto", Allocation(1, 4)),
        ({}, [SMALL], 3, "auto", Allocation(1, 3)),
        ({}, [SMALL], 2, "auto", Allocation(2, 2)),
        ({}, [SMALL], 12, 2, Allocation(2, 2)),
        ({}, [SMALL, CARDS], 4, "auto", Allocation(3, 4)),
        ({}, [HEAD, SMALL], 12, "auto", Allocation(1, 4)),
        ({"actors": 3}, [SMALL, SMALL], 12, "auto", Allocation(3, 2)),
        ({"actors": 3, "cpus_per_actor": 2}, [CARDS], 12, "auto", Allocation(3, 1)),
        ({"gpus_per_actor": 0.5}, [SMALL, CARDS], 12, "auto", Allocation(1, 4)),
        ({"gpus_per_actor": 1, "actors": 2}, [CARDS], 12, "auto", Allocation(2, 1)),
        ({"kind": "local"}, [SMALL, CARDS], 12, "auto", Allocation(0, 4)),
        ({"kind": "local", "cpus_per_actor": 2}, [SMALL], 12, "auto", Allocation(0, 2)),
        ({"kind": "local"}, [SMALL], 1, "auto", Allocation(0, 1)),
    ],
)
def test_trials_share_what_there_is(
    settings: dict[str, Any], nodes: list[Node], trials: int, concurrent: Any, plan: Allocation
) -> None:
    assert allocate(engine(**settings), nodes, nodes[0], trials, concurrent) == plan


def test_little_memory_means_fewer_drivers() -> None:
    small = Node("small", cpus=16, gpus=0, memory=1.5e9)  # room for five processes
    assert allocate(engine(kind="local"), [small], small, 12).concurrent == 5
    far = Node("far", cpus=64, gpus=0, memory=math.inf)
    assert allocate(engine(), [small, far], small, 100).concurrent == 2


@given(
    cpus=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    each=st.integers(1, 3),
    actors=st.one_of(st.just("auto"), st.integers(1, 6)),
    trials=st.integers(1, 20),
    concurrent=st.one_of(st.just("auto"), st.integers(1, 6)),
)
def test_what_is_planned_fits_at_once(
    cpus: list[int], each: int, actors: Any, trials: int, concurrent: Any
) -> None:
    nodes = [Node(str(k), n, 0, math.inf) for k, n in enumerate(cpus)]
    settings = engine(actors=actors, cpus_per_actor=each)
    try:
        plan = allocate(settings, nodes, nodes[0], trials, concurrent)
    except ClusterError:
        room = sum(n // each for n in cpus)
        at_once = 1 if concurrent == "auto" else min(concurrent, trials)
        wanted = (1 if actors == "auto" else actors) * at_once
        assert room < wanted
        return
    free = list(cpus)
    for _ in range(plan.concurrent * plan.actors):
        node = next(k for k, n in enumerate(free) if n >= each)
        free[node] -= each
    assert 1 <= plan.concurrent <= trials


def test_a_place_has_room_for_the_driver_and_each_actor() -> None:
    place = placement(engine(cpus_per_actor=2, gpus_per_actor=0.25), 3, "node:10.0.0.1")
    assert place.bundles == [{"node:10.0.0.1": 0.001}, *[{"CPU": 2, "GPU": 0.25}] * 3]
    alone = placement(engine(kind="local"), 0, "node:10.0.0.1")
    assert alone.bundles == [{"node:10.0.0.1": 0.001, "CPU": 1}]


class TestWatchdog:
    PLACED: ClassVar[dict[str, Any]] = {"state": "CREATED", "bundles": {0: {"CPU": 1.0}}}
    WAITING: ClassVar[dict[str, Any]] = {
        "state": "PENDING",
        "bundles": {0: {"node:x": 0.001}, 1: {"CPU": 2.0}, 2: {"CPU": 2.0}},
    }

    def test_names_what_is_pending_and_what_is_free(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(preflight, "free_now", lambda: [])
        monkeypatch.setattr(preflight, "describe_free", lambda _: "small: 1 of 4 CPUs free")
        assert describe_pending([self.PLACED, self.WAITING, self.WAITING]) == (
            "no news for 60 s; 1 trial(s) are placed, 2 wait(s) for 4 CPU(s); "
            "small: 1 of 4 CPUs free"
        )

    def test_is_quiet_if_nothing_is_pending(self) -> None:
        assert describe_pending([self.PLACED]) is None

    def test_barks_once_a_while_and_only_in_silence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(preflight, "PATIENCE", 0.2)
        groups = {"some": self.PLACED, "other": self.WAITING}
        monkeypatch.setattr(preflight.ray.util, "placement_group_table", lambda: groups)
        monkeypatch.setattr(preflight, "free_now", lambda: [])
        lines: list[str] = []
        with Watchdog(lines.append) as watchdog:
            deadline = time.monotonic() + 30
            while len(lines) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
        assert len(lines) == 2
        heard = len(lines)
        watchdog.heard()
        time.sleep(0.3)
        assert len(lines) == heard  # its thread ended with the context
