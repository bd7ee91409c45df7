"""What is free on which node, and the watchdogs' words when nothing moves."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from experiments import Driven, small_experiment
from fedsim import run
from fedsim.cluster.placement import Free, Node, free_now, live_nodes, why_waiting
from fedsim.cluster.ray_compat import actor_id, actor_table
from fedsim.federation import ray_engine
from fedsim.federation.ray_engine import RayEngine, card_number
from fedsim.launch import run as launch
from fedsim.launch.prepare import prepare

GPU_NODE = Node("node-a", cpus=4, gpus=1, memory=8e9)
CPU_NODE = Node("node-b", cpus=8, gpus=0, memory=8e9)


class TestWhyWaiting:
    def test_others_may_hold_what_is_needed(self) -> None:
        free = [Free(GPU_NODE, cpus=0, gpus=1), Free(CPU_NODE, cpus=3.5, gpus=0)]
        assert why_waiting(1, 0.5, free) == (
            "no node has these resources free now (node-a: 0 of 4 CPUs and 1 of 1 GPUs free; "
            "node-b: 3.5 of 8 CPUs free); other jobs may be using them"
        )

    def test_the_node_that_had_it_may_be_gone(self) -> None:
        assert why_waiting(1, 0.5, [Free(CPU_NODE, cpus=8, gpus=0)]) == (
            "no node has these resources at all (node-b: 8 of 8 CPUs free); a node that had "
            "them may be lost"
        )

    def test_it_may_be_there(self) -> None:
        words = why_waiting(1, 0.1, [Free(GPU_NODE, cpus=1, gpus=0.09999999)])
        assert words.startswith(
            "a node has these resources free now (node-a: 1 of 4 CPUs and 0.1 of 1 GPUs"
        )
        assert words.endswith(", unless the free fractions belong to different GPUs")


@pytest.mark.parametrize(
    ("visible", "card", "number"),
    [(None, "3", 3), ("", "0", 0), ("2,3", "3", 1), ("GPU-a,GPU-b", "GPU-b", 1)],
)
def test_torch_counts_the_cards_that_are_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, card: str, number: int
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert card_number(card) == number


def test_nodes_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(id: str, host: str, alive: bool = True) -> dict[str, Any]:
        return {"NodeID": id, "NodeManagerHostname": host, "Alive": alive, "Resources": {"CPU": 1}}

    there = [entry("abcdef01", "twin"), entry("12345678", "twin"), entry("9", "other")]
    monkeypatch.setattr(ray, "nodes", lambda: [*there, entry("0", "gone", alive=False)])
    assert [n.name for n in live_nodes().values()] == ["twin (abcdef)", "twin (123456)", "other"]


@contextmanager
def held(cpus: float) -> Iterator[Any]:
    """Somebody else's actor, which holds so many CPUs."""

    class Hog:
        def up(self) -> None:
            pass

    hog = ray.remote(Hog).options(num_cpus=cpus).remote()
    ray.get(hog.up.remote())
    try:
        yield hog
    finally:
        ray.kill(hog)


class Reader(logging.Handler):
    """Keeps warnings, and wakes a process when one comes."""

    def __init__(self, asleep: int) -> None:
        super().__init__(logging.WARNING)
        self.asleep = asleep
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        os.kill(self.asleep, signal.SIGCONT)


@pytest.mark.usefixtures("own_ray")
class TestWatchdogs:
    def test_what_is_free_on_a_node(self) -> None:
        with held(3):
            deadline = time.monotonic() + 30  # nodes report what they have now and then
            while (free := free_now())[0].cpus != 1:
                assert time.monotonic() < deadline, free
                time.sleep(0.1)
            (mine,) = free
            assert (mine.gpus, mine.node.cpus, mine.node.gpus) == (1, 4, 1)
            assert mine.describe() == f"{mine.node.name}: 1 of 4 CPUs and 1 of 1 GPUs free"

    def test_the_user_is_told_that_others_hold_the_cpus(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(launch, "PATIENCE", 1.0)
        told = []
        with held(4) as hog:

            def release(event: Any) -> None:
                if "are not placed yet" in str(event):
                    told.append(event)
                    ray.kill(hog)

            engine = {"kind": "ray", "actors": 2}
            run(small_experiment(engine=engine, train={"rounds": 1}), tmp_path, release)
        assert re.fullmatch(  # of both actors, or of the one that the driver has made so far
            r"no round has ended for 1 s: (\d) of \1 client actors of 1 CPU\(s\) are not "
            r"placed yet: no node has these resources free now \(\S+: 0 of 4 CPUs and 1 of "
            r"1 GPUs free\); other jobs may be using them; \S+/log.txt may say more",
            told[0],
        )

    def test_a_trial_s_server_computes_on_a_card_of_its_own_actors(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As far as can be seen without one: Ray gives out the card, and torch is a stand-in."""
        group = ray.util.placement_group([{"CPU": 1, "GPU": 0.5}])
        monkeypatch.setattr(ray.util, "get_current_placement_group", lambda: group)
        monkeypatch.setattr(ray_engine, "pick_device", lambda settings: torch.device("cuda"))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0")  # of Ray's here, which is called 0
        taken: list[int] = []
        monkeypatch.setattr(torch.cuda, "set_device", taken.append)
        experiment = small_experiment(engine={"kind": "ray", "gpus_per_actor": 0.5})
        dataset, splits, spec = prepare(experiment)
        data = [ray.put(dataset), ray.put(splits)]
        engine = RayEngine(experiment.engine, 1, len(splits), spec, *data)
        try:
            assert engine.server_device() == torch.device("cuda")
            assert taken == [2]
            monkeypatch.setattr(ray.util, "get_current_placement_group", lambda: None)
            assert engine.server_device() == torch.device("cuda")  # a run by itself: as torch does
            assert taken == [2]
        finally:
            engine.close()
            ray.util.remove_placement_group(group)

    def test_the_log_names_who_waits_and_who_is_at_work(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ray_engine, "PATIENCE", 1.0)
        experiment = small_experiment(engine={"kind": "ray", "gpus_per_actor": 0.5})
        dataset, splits, spec = prepare(experiment)
        data = [ray.put(dataset), ray.put(splits)]
        engine = RayEngine(experiment.engine, 3, len(splits), spec, *data)  # one more than fit
        log = logging.getLogger("fedsim.federation.ray_engine")
        try:
            fed = Driven(spec, dataset, splits, engine)
            state = experiment.method.init(fed)
            t = 0
            while len(ready := [actor for actor in engine._actors if actor.ready]) < 2:
                t += 1
                fed.runner.begin(t)
                experiment.method.round(fed, state, t)
            hung = actor_table()[actor_id(ready[0].handle)]["Pid"]
            os.kill(hung, signal.SIGSTOP)
            reader = Reader(hung)
            log.addHandler(reader)
            fed.runner.begin(t + 1)
            experiment.method.round(fed, state, t + 1)
        finally:
            log.removeHandler(reader)
            engine.close()
        assert re.fullmatch(
            rf"no progress for 1 s in round {t + 1}, local_update; "
            r"1 of 3 client actors of 1 CPU\(s\) and 0.5 GPU\(s\) are not placed yet: "
            r"no node has these resources free now \((\S+): 2 of 4 CPUs and 0 of 1 GPUs free\); "
            rf"other jobs may be using them; the longest under way is in process {hung} on \1, "
            r"clients \d(, \d)*, for \d+ s; \d+ block\(s\) wait for an actor",
            reader.lines[-1],
        )
