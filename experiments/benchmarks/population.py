"""A hundred times the clients, the same cohort: round time and memory.

    python population.py

Runs FedAvg and SCAFFOLD with 10,000 and with 1,000,000 clients of ten synthetic examples each,
1,000 of them a round, on one client actor per core, and prints a table of medians.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

from memory import own_megabytes

import fedsim

ROUNDS, COHORT = 20, 1_000


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
                "participation": COHORT / clients,
                "batch_size": 5,
                "optimizer": {"lr": 0.01},
            },
            "evaluate": {"every": ROUNDS},
            "checkpoint": {"every": ROUNDS},
        }
    )


class Watch:
    """Notes when the first round has ended, how long rounds take, and the memory near the end."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.first = 0.0
        self.seconds: list[float] = []
        self.memory: dict[str, float] = {}

    def __call__(self, event: Any) -> None:
        if isinstance(event, dict):
            self.first = self.first or time.monotonic() - self.started
            self.seconds.append(event["seconds"])
            if event["round"] == ROUNDS - 1:
                self.memory = own_megabytes()


def main() -> None:
    columns = "method | clients | s to the end of the first round | ms a round | "
    print(f"| {columns}launcher MB | driver MB | client actors MB |")
    print("| --- " * 7 + "|")
    for method in ("fedavg", "scaffold"):
        for clients in (10_000, 1_000_000):
            watch = Watch()
            with tempfile.TemporaryDirectory() as out:
                fedsim.run(experiment(method, clients), out, watch)
            round_, memory = statistics.median(watch.seconds[5:]), watch.memory
            print(
                f"| {method} | {clients:,} | {watch.first:.0f} | {1000 * round_:.0f} | "
                f"{memory['launcher']:.0f} | {memory['driver']:.0f} | {memory['actors']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
