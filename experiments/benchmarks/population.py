"""A hundred times the clients, the same cohort: round time and memory.

    python population.py

Runs FedAvg and SCAFFOLD with 1,000 and with 100,000 clients of ten synthetic examples each, 100 of
them a round, on one client actor per core, and prints a table of medians.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from typing import Any

from memory import own_megabytes

import fedsim

ROUNDS = 60


def experiment(method: str, clients: int) -> fedsim.Experiment:
    return fedsim.Experiment.from_dict(
        {
            "name": "population",
            "data": {"name": "synthetic", "samples": 10 * clients, "test_samples": 500},
            "partition": {"kind": "iid", "clients": clients},
            "model": {"name": "mlp", "hidden": [200, 200]},
            "method": {"name": method},
            "train": {
                "rounds": ROUNDS,
                "participation": 100 / clients,
                "batch_size": 5,
                "optimizer": {"lr": 0.01},
            },
            "checkpoint": {"every": 20},
        }
    )


def watch(seconds: list[float], memory: dict[str, float], event: Any) -> None:
    """Note how long a round took, and the memory near the end."""
    if isinstance(event, dict):
        seconds.append(event["seconds"])
        if event["round"] == ROUNDS - 1:
            memory.update(own_megabytes())


def main() -> None:
    print("| method | clients | ms a round | launcher MB | driver MB | client actors MB |")
    print("| --- " * 6 + "|")
    for method in ("fedavg", "scaffold"):
        for clients in (1_000, 100_000):
            seconds: list[float] = []
            memory: dict[str, float] = {}

            with tempfile.TemporaryDirectory() as out:
                fedsim.run(experiment(method, clients), out, partial(watch, seconds, memory))
            print(
                f"| {method} | {clients:,} | {1000 * statistics.median(seconds[5:]):.0f} | "
                f"{memory['launcher']:.0f} | {memory['driver']:.0f} | {memory['actors']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
