"""What a round costs the driver as nodes are added, with and without adding sums up on the way.

    python experiments/benchmarks/nodes.py
    python experiments/benchmarks/nodes.py --nodes 1,4 --rounds 3

FedAvg on the MLP of speed.py (199,210 parameters), 64 clients a round, one client actor a node.
The nodes are simulated: Ray's nodes with a store and a scheduler of their own, on one machine. So
sums, bytes and the driver's processor time are those of a cluster, while the time of a round is
not: all nodes share the cores, and nothing crosses a network.

The rounds are driven from this process. Bytes are what it puts into and gets out of Ray's object
stores. Ends with an error if the weights are not the same bits on any number of nodes.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import ray
from ray.cluster_utils import Cluster
from rivals.work import WORKS
from scaling import driven

import fedsim
from fedsim.federation import Federation, ray_engine

CLIENTS = 64  # all of them in each round
WARM_UP = 2
STORE = 3 * 10**8  # bytes of each node's object store
NEVER = 10**9
WAYS = {"all fetched": NEVER, "in a tree": ray_engine.FETCHED}


@dataclass(frozen=True)
class Figures:
    """Medians over rounds.

    Attributes:
        fetched, megabytes: sums that the driver fetches, and MB through it.
        driver: its processor time, ms.
        seconds: of a round.
        digest: of the last weights.
    """

    nodes: int
    way: str
    fetched: float
    megabytes: float
    driver: float
    seconds: float
    digest: str


@contextmanager
def cluster(count: int) -> Iterator[None]:
    """Ray's nodes on this machine, one logical CPU each."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as temporary:
        os.environ["RAY_TMPDIR"] = temporary
        nodes = Cluster()
        try:
            for _ in range(count):
                nodes.add_node(num_cpus=1, object_store_memory=STORE, dashboard_port=None)
            ray.init(nodes.address, log_to_driver=False, logging_level=logging.ERROR)
            yield
        finally:
            ray.shutdown()
            nodes.shutdown()


def measure(count: int, way: str, rounds: int) -> Figures:
    """A few rounds on so many nodes."""
    content = WORKS["mlp"].experiment(CLIENTS, CLIENTS, rounds, "fedavg", {"kind": "ray"})
    experiment = fedsim.Experiment.from_dict(content)
    ray_engine.FETCHED = WAYS[way]
    with cluster(count):
        engine, runner, traffic = driven(experiment, count)
        fed, method = Federation(runner), experiment.method
        state, found = method.init(fed), []
        sums = [0]
        fetch = ray_engine.RayEngine._fetch

        def counted(self: Any, *arguments: Any) -> None:
            sums[0] += 1
            fetch(self, *arguments)

        ray_engine.RayEngine._fetch = counted  # type: ignore[method-assign]
        while not all(actor.ready for actor in engine._actors):
            for actor in engine._actors:
                if not actor.ready:
                    engine._take_up(actor)
        for t in range(1, WARM_UP + rounds + 1):
            runner.begin(t)
            traffic.count, sums[0] = 0, 0
            started, used = time.perf_counter(), time.process_time()
            state = method.round(fed, state, t)
            took = time.perf_counter() - started, time.process_time() - used
            found.append((sums[0], traffic.count / 1e6, 1e3 * took[1], took[0]))
        medians = [statistics.median(column) for column in zip(*found[WARM_UP:], strict=True)]
        engine.close()
    digest = hashlib.blake2b(state.weights.tobytes(), digest_size=8).hexdigest()
    return Figures(count, way, *medians, digest)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--nodes", default="1,2,4,8,16")
    options.add_argument("--rounds", type=int, default=12)
    given = options.parse_args()
    print("| nodes | sums | fetched | MB through the driver | driver, ms | round, s | weights |")
    print("| --- " * 7 + "|")
    digests = set[str]()
    # Each in a process of its own, as Ray keeps things of an earlier cluster.
    with get_context("spawn").Pool(1, maxtasksperchild=1) as apart:
        for count in map(int, given.nodes.split(",")):
            for way in WAYS:
                found = apart.apply(measure, (count, way, given.rounds))
                digests.add(found.digest)
                print(
                    f"| {found.nodes} | {found.way} | {found.fetched:g} | {found.megabytes:.1f} "
                    f"| {found.driver:.1f} | {found.seconds:.2f} | {found.digest} |",
                    flush=True,
                )
    if len(digests) > 1:
        sys.exit("the weights differ")


if __name__ == "__main__":
    main()
