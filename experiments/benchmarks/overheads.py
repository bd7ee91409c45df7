"""What surrounds training: the driver's work, what other methods add, and the start.

    python experiments/benchmarks/overheads.py
    python experiments/benchmarks/overheads.py --only start --turns 5

driver   processor time of the driver for each round of FedAvg on the MLP of speed.py, with 50, 200
         and 1,000 clients a round on two client actors
methods  milliseconds a client of other methods beside FedAvg's, in one process and on two actors
start    seconds from the command to the end of the first round of ../quickstart.yaml
explain  seconds of all its rounds in one process, without explanations, with some every 5 rounds,
         and every round

A figure is the median of turns, and within a turn of rounds. Nothing else should be running.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml
from rivals.work import WORKS

import fedsim

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart.yaml"
METHODS = ("fedavg", "fedprox", "feddyn", "scaffold", "moon")
WARM_UP = 5  # rounds


def experiment(method: str, engine: dict[str, Any], cohort: int, rounds: int) -> fedsim.Experiment:
    """The small reference work of speed.py with another method or more clients."""
    content = WORKS["mlp"].experiment(4 * cohort, cohort, rounds, method, engine)
    return fedsim.Experiment.from_dict(content)


def run(it: fedsim.Experiment, at_end: Callable[[], float]) -> list[float]:
    """By how much a reading grows in each round after the first few, but for the last."""
    readings = []

    def read(event: Any) -> None:
        if isinstance(event, dict):
            readings.append(at_end())

    with tempfile.TemporaryDirectory() as out:
        fedsim.run(it, out, read)
    return [b - a for a, b in zip(readings[WARM_UP:-2], readings[WARM_UP + 1 : -1], strict=True)]


def driver_seconds() -> float:
    """Processor time that the driver below this process has taken."""
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::Driver"):
                used = process.cpu_times()
                return float(used.user + used.system)
        except psutil.NoSuchProcess:
            continue
    raise RuntimeError("there is no driver")


def driver(turns: int, rounds: int) -> None:
    print("\n| clients a round | round, ms | driver, ms a round | of a core | us a client |")
    print("| --- | --- | --- | --- | --- |")
    for cohort in (50, 200, 1000):
        figures = []
        count = max(8, rounds * 50 // cohort) + WARM_UP + 2
        for _ in range(turns):
            seconds, used = [], []

            def both(seconds: list[float] = seconds, used: list[float] = used) -> float:
                seconds.append(time.perf_counter())
                used.append(driver_seconds())
                return 0.0

            run(experiment("fedavg", {"kind": "ray", "actors": 2}, cohort, count), both)
            # Its clock ticks 100 times a second: over all rounds together.
            span = slice(WARM_UP, -1)
            length = len(seconds[span]) - 1
            wall = (seconds[span][-1] - seconds[span][0]) / length
            figures.append((wall, (used[span][-1] - used[span][0]) / length))
        wall, busy = (statistics.median(part) for part in zip(*figures, strict=True))
        print(
            f"| {cohort:,} | {1e3 * wall:.1f} | {1e3 * busy:.1f} | {busy / wall:.1%} "
            f"| {1e6 * busy / cohort:.0f} |",
            flush=True,
        )


def methods(turns: int, rounds: int) -> None:
    engines = {"local": {"kind": "local"}, "ray": {"kind": "ray", "actors": 2}}
    print("\n| method | local, ms a client | of FedAvg | two actors, ms a client | of FedAvg |")
    print("| --- | --- | --- | --- | --- |")
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(turns):
        for method in METHODS:
            for name, engine in engines.items():
                it = experiment(method, engine, 50, rounds + WARM_UP + 2)
                seconds = statistics.median(run(it, time.perf_counter))
                found.setdefault((method, name), []).append(1e3 * seconds / 50)
    for method in METHODS:
        cells = []
        for name in engines:
            ms = statistics.median(found[method, name])
            cells += [f"{ms:.2f}", f"{ms / statistics.median(found['fedavg', name]):.2f}"]
        print(f"| {method} | " + " | ".join(cells) + " |", flush=True)


def start(turns: int, rounds: int) -> None:
    command = [str(Path(sys.executable).with_name("fedsim")), "run", str(QUICKSTART)]
    found = []
    for _ in range(turns):
        with tempfile.TemporaryDirectory() as out:
            begun = time.time()
            subprocess.run(command, cwd=out, check=True, capture_output=True)
            (log,) = Path(out).glob("runs/*/*/log.txt")
            first = next(line for line in log.read_text().splitlines() if " round 1," in line)
            moment, milliseconds = first[:23].split(",")
            ended = time.mktime(time.strptime(moment, "%Y-%m-%d %H:%M:%S"))
            found.append(ended + int(milliseconds) / 1000 - begun)
    each = ", ".join(f"{seconds:.1f}" for seconds in found)
    print(f"\nFirst round after {statistics.median(found):.1f} s ({each}).", flush=True)


def explain(turns: int, rounds: int) -> None:
    one, two = ["integrated_gradients"], ["integrated_gradients", "occlusion"]
    sections: dict[str, dict[str, Any]] = {
        "none": {},
        "integrated gradients, every 5 rounds": {"explain": {"explainers": one}},
        "and occlusion": {"explain": {"explainers": two}},
        "both, every round": {"explain": {"explainers": two, "every": 1}},
    }
    content = yaml.safe_load(QUICKSTART.read_text()) | {"engine": {"kind": "local"}}
    found: dict[str, list[float]] = {}
    for _ in range(turns + 1):
        for name, section in sections.items():
            it = fedsim.Experiment.from_dict(content | section)
            with tempfile.TemporaryDirectory() as out:
                begun = time.perf_counter()
                fedsim.run(it, out)
                found.setdefault(name, []).append(time.perf_counter() - begun)
    print("\n| explanations | seconds | of none |\n| --- | --- | --- |")
    without = statistics.median(found["none"][1:])
    for name, seconds in found.items():
        median = statistics.median(seconds[1:])  # what is loaded first is loaded in the first turn
        print(f"| {name} | {median:.2f} | {median / without:.2f} |", flush=True)


PARTS = {"driver": driver, "methods": methods, "start": start, "explain": explain}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    for name, part in PARTS.items():
        if given.only in (None, name):
            part(given.turns, given.rounds)


if __name__ == "__main__":
    main()
