"""What a client costs, what crosses the driver, and memory, as clients and actors grow.

    python experiments/benchmarks/scaling.py

FedAvg on an MLP 16-200-200-10 (45,610 parameters), ten synthetic examples a client. First 10 to
100,000 clients, at most 1,000 of them a round, on one client actor a core; then 1,000 clients, 200
a round, on one actor to as many as there are cores. Prints both tables and draws `scaling.png`.

The rounds are driven from this process, which therefore is the driver. Its traffic is all that it
puts into and gets out of Ray's object store, counted as pickles; on one machine most of that is
shared memory.
"""

from __future__ import annotations

import logging
import os
import pickle
import statistics
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import ray
from memory import own_megabytes

import fedsim
from fedsim.federation import Federation, RoundRunner, object_cache, ray_engine
from fedsim.federation.ray_engine import RayEngine
from fedsim.launch.prepare import prepare

CLIENTS = (10, 100, 1_000, 10_000, 100_000)
CORES = os.cpu_count() or 1
WARM_UP, ROUNDS = 2, 8
PICTURE = Path(__file__).with_name("scaling.png")


@dataclass
class Traffic:
    """Stands in for `ray` in the engine, and counts bytes."""

    count: int = 0

    def put(self, value: Any) -> Any:
        self.count += len(pickle.dumps(value))
        return ray.put(value)

    def get(self, ref: Any) -> Any:
        value = ray.get(ref)
        self.count += len(pickle.dumps(value))
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(ray, name)


@dataclass(frozen=True)
class Figures:
    """Medians of a few rounds."""

    clients: int
    cohort: int
    actors: int
    milliseconds: float  # a client
    traffic: float  # MB a round
    driver: float  # MB
    each_actor: float  # MB


def driven(experiment: fedsim.Experiment, actors: int) -> tuple[RayEngine, RoundRunner, Traffic]:
    """The experiment's rounds, led from this process, and what crosses it from now on."""
    dataset, splits, spec = prepare(experiment)
    data = ray.put(dataset), ray.put(splits)
    engine = RayEngine(experiment.engine, actors, len(splits), spec, *data)
    ray_engine.ray = object_cache.ray = traffic = Traffic()  # type: ignore[assignment]
    return engine, RoundRunner(spec, dataset, splits, engine), traffic


def measure(clients: int, cohort: int, actors: int) -> Figures:
    """A few rounds with so many clients, and so many of them a round."""
    experiment = fedsim.Experiment.from_dict(
        {
            "data": {"name": "synthetic", "samples": 10 * clients, "test_samples": 10},
            "partition": {"kind": "iid", "clients": clients},
            "model": {"name": "mlp"},
            "method": {"name": "fedavg"},
            "train": {
                "participation": cohort / clients,
                "batch_size": 5,
                "optimizer": {"lr": 0.01},
            },
        }
    )
    ray.init(
        num_cpus=actors,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        engine, runner, traffic = driven(experiment, actors)
        fed, method = Federation(runner), experiment.method
        state, seconds, sent = method.init(fed), [], []
        for t in range(1, WARM_UP + ROUNDS + 1):
            runner.begin(t)
            traffic.count, started = 0, time.perf_counter()
            state = method.round(fed, state, t)
            seconds.append(time.perf_counter() - started)
            sent.append(traffic.count)
        memory = own_megabytes()
        figures = Figures(
            clients,
            cohort,
            actors,
            1000 * statistics.median(seconds[WARM_UP:]) / cohort,
            statistics.median(sent[WARM_UP:]) / 1e6,
            memory["launcher"],
            memory["actors"] / actors,
        )
        engine.close()
        return figures
    finally:
        ray_engine.ray = object_cache.ray = ray
        ray.shutdown()


def table(rows: list[Figures]) -> None:
    print(
        "| clients | a round | actors | ms a client | driver traffic, MB a round | driver MB "
        "| MB an actor |"
    )
    print("| --- " * 7 + "|")
    for row in rows:
        print(
            f"| {row.clients:,} | {row.cohort:,} | {row.actors} | {row.milliseconds:.2f} | "
            f"{row.traffic:.2f} | {row.driver:.0f} | {row.each_actor:.0f} |"
        )
    print(flush=True)


def draw(by_clients: list[Figures], by_actors: list[Figures]) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(11, 6), layout="constrained")
    for row, figures, what in ((0, by_clients, "clients"), (1, by_actors, "actors")):
        at = [getattr(f, what) for f in figures]
        cost, bytes_, memory = axes[row]
        cost.plot(at, [f.milliseconds for f in figures], "o-")
        cost.set_title("time a client takes, ms")
        bytes_.plot(at, [f.traffic for f in figures], "o-", color="tab:green")
        bytes_.set_title("through the driver, MB a round")
        memory.plot(at, [f.driver for f in figures], "o-", color="tab:red", label="driver")
        memory.plot(
            at, [f.each_actor for f in figures], "s--", color="tab:purple", label="an actor"
        )
        memory.set_title("memory, MB")
        memory.legend()
        for axis in axes[row]:
            axis.set_xlabel(what)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
            if what == "clients":
                axis.set_xscale("log")
            else:
                axis.set_xticks(at)
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    # Each in a process of its own, so that memory is that of one run.
    with get_context("spawn").Pool(1, maxtasksperchild=1) as apart:
        sizes = [(clients, min(clients, 1_000), CORES) for clients in CLIENTS]
        by_clients = apart.starmap(measure, sizes, chunksize=1)
        table(by_clients)
        counts = [(1_000, 200, actors) for actors in range(1, CORES + 1)]
        by_actors = apart.starmap(measure, counts, chunksize=1)
        table(by_actors)
    draw(by_clients, by_actors)


if __name__ == "__main__":
    main()
