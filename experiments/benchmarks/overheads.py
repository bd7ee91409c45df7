"""What surrounds training: the driver's work, what other methods add, and the start.

    python experiments/benchmarks/overheads.py
    python experiments/benchmarks/overheads.py --only start --turns 5
    python experiments/benchmarks/overheads.py --only methods --methods fedavg,ditto

driver      processor time of the driver for each round of FedAvg on the MLP of speed.py, with 50,
            200 and 1,000 clients a round on two client actors
methods     milliseconds a client of other methods beside FedAvg's, in one process and on two
            actors; of FedSeIT, which learns tasks of documents, also how much of it is scoring
conditions  milliseconds a client of FedAvg with each condition, explainer (every round, of the
            global model and five clients' models) and test of clients, in one process
start       seconds from the command to the end of the first round of ../quickstart.yaml
explain     seconds of all its rounds in one process, without explanations, with each explainer
            but `sage` every 5 rounds, and with two every round

A figure is the median of turns, and within a turn of rounds. Nothing else should be running.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import psutil
import yaml
from rivals.work import WORKS

import fedsim

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart.yaml"
METHODS = ("fedavg", "fedprox", "feddyn", "scaffold", "moon", "fedseit")
WARM_UP = 5  # rounds
COHORT = 50
EXPLAINERS = (
    *("gradient", "gradient_x_input", "integrated_gradients", "lrp", "occlusion", "random"),
    *("sage", "smoothgrad", "deep_shap", "gradient_shap", "kernel_shap", "captum"),
)
# Of a client's 100 examples, 50 are its test examples.
HALF = {"data": {"samples": 4 * COHORT * 100}, "partition": {"test_fraction": 0.5}}
# What an experiment has beside FedAvg.
CONDITIONS: dict[str, dict[str, dict[str, Any]]] = {
    "plain FedAvg": {},
    "uplink: top-k": {"uplink": {"name": "topk"}},
    "uplink: int8": {"uplink": {"name": "int8"}},
    "uplink: QSGD": {"uplink": {"name": "qsgd"}},
    "downlink: int8": {"downlink": {"name": "int8"}},
    "median": {"aggregation": {"name": "median"}},
    "Krum": {"aggregation": {"name": "krum"}},
    "masks": {"secure_aggregation": {"graph": "complete"}},
    "masks with 20 neighbours": {"secure_aggregation": {"graph": 20}},
    "privacy of clients": {"privacy": {"clip": 1, "noise_multiplier": 1}},
    "privacy of examples": {"privacy": {"clip": 1, "noise_multiplier": 1, "level": "example"}},
    "devices": {"devices": {"speed": {"median": 100, "sigma": 0.5}}},
    "test of all clients, every round": {**HALF, "evaluate": {"every": 1, "clients": True}},
    **{
        f"explained by {name}, every round": {
            "data": {"test_samples": 20},
            "explain": {"explainers": [name], "every": 1},
        }
        for name in EXPLAINERS
    },
}


def experiment(
    method: str,
    engine: dict[str, Any],
    cohort: int,
    rounds: int,
    sections: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> fedsim.Experiment:
    """The small reference work of speed.py with another method, more clients or more sections."""
    content: Any = WORKS["mlp"].experiment(4 * cohort, cohort, rounds, method, engine)
    for name, section in sections.items():
        content[name] = {**content.get(name, {}), **section}
    return fedsim.Experiment.from_dict(content)


def write_documents(path: Path) -> None:
    """60 documents of each of 12 classes, as long as TREC's questions: random words."""
    stream = np.random.default_rng(0)
    lines = []
    for label in range(12):
        for _ in range(60):
            words = stream.integers(50, size=stream.integers(5, 16)) + 25 * label
            lines.append(f"class{label}\t" + " ".join(f"word{word}" for word in words))
    path.write_text("\n".join(lines) + "\n")


def of_tasks(
    engine: dict[str, Any], documents: Path, rounds: int, every: int
) -> fedsim.Experiment:
    """FedSeIT on three clients with two tasks each, scored every so many rounds.

    Half of the documents are the test set, as long as it takes to test what each client learnt.
    """
    content = {
        "name": "documents",
        "data": {"name": "text", "path": str(documents), "test_fraction": 0.5},
        "partition": {"kind": "tasks", "clients": 3, "tasks": 2},
        "model": {"name": "text_cnn"},
        "method": {"name": "fedseit"},
        "train": {
            "rounds": rounds + rounds % 2,  # the same for each task
            "local_epochs": 10,
            "batch_size": 64,
            "optimizer": {"name": "adam", "lr": 0.001},
        },
        "engine": engine,
        "evaluate": {"every": every},
        "checkpoint": {"every": 0},
    }
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


def methods(turns: int, rounds: int, names: Sequence[str]) -> None:
    engines: dict[str, dict[str, Any]] = {
        "local": {"kind": "local"},
        "ray": {"kind": "ray", "actors": 2},
    }
    of_images = [name for name in names if name != "fedseit"]
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(turns):
        for method in of_images:
            for name, engine in engines.items():
                it = experiment(method, engine, COHORT, rounds + WARM_UP + 2)
                seconds = statistics.median(run(it, time.perf_counter))
                found.setdefault((method, name), []).append(1e3 * seconds / COHORT)
    if of_images:
        first = of_images[0]
        print(f"\n| method | local, ms a client | of {first} | two actors, ms a client ", end="")
        print(f"| of {first} |\n| --- | --- | --- | --- | --- |")
    for method in of_images:
        cells = []
        for name in engines:
            ms = statistics.median(found[method, name])
            cells += [f"{ms:.2f}", f"{ms / statistics.median(found[first, name]):.2f}"]
        print(f"| {method} | " + " | ".join(cells) + " |", flush=True)
    if "fedseit" in names:
        fedseit(turns, rounds, engines)


def fedseit(turns: int, rounds: int, engines: Mapping[str, dict[str, Any]]) -> None:
    """Its rounds with and without scoring, which it does not need for anything else."""
    found: dict[tuple[str, int], list[float]] = {}
    total = rounds + WARM_UP + 2
    with tempfile.TemporaryDirectory() as folder:
        documents = Path(folder, "documents.txt")
        write_documents(documents)
        for _ in range(turns):
            for name, engine in engines.items():
                for every in (1, total + 1):
                    it = of_tasks(engine, documents, total, every)
                    seconds = statistics.fmean(run(it, time.perf_counter))  # over both tasks
                    found.setdefault((name, every), []).append(1e3 * seconds / 3)
    print(
        "\n| fedseit | ms a client | without scoring | of it scoring |\n| --- | --- | --- | --- |"
    )
    for name in engines:
        whole, without = (statistics.median(found[name, every]) for every in (1, total + 1))
        print(f"| {name} | {whole:.1f} | {without:.1f} | {1 - without / whole:.0%} |", flush=True)


def conditions(turns: int, rounds: int) -> None:
    found: dict[str, list[float]] = {}
    for _ in range(turns):
        for name, sections in CONDITIONS.items():
            engine = {"kind": "local"}
            it = experiment("fedavg", engine, COHORT, rounds + WARM_UP + 2, sections)
            seconds = statistics.median(run(it, time.perf_counter))
            found.setdefault(name, []).append(1e3 * seconds / COHORT)
            print(f"{name}: {found[name][-1]:.2f} ms a client", file=sys.stderr)
    medians = {name: statistics.median(ms) for name, ms in found.items()}
    print("\n| FedAvg with | ms a client | of FedAvg |\n| --- | --- | --- |")
    for name, ms in sorted(medians.items(), key=lambda item: item[1]):
        print(f"| {name} | {ms:.2f} | {ms / medians['plain FedAvg']:.2f} |", flush=True)


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
        **{
            f"{name}, every 5 rounds": {"explain": {"explainers": [name]}}
            for name in (*EXPLAINERS, "gradcam")  # which an MLP has not
            if name not in (*two, "sage")  # which takes minutes
        },
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


PARTS = ("driver", "methods", "conditions", "start", "explain")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--methods", default=",".join(METHODS), help="for the part `methods`")
    given = parser.parse_args()
    parts: dict[str, Callable[[int, int], None]] = {
        "driver": driver,
        "methods": partial(methods, names=given.methods.split(",")),
        "conditions": conditions,
        "start": start,
        "explain": explain,
    }
    for name in PARTS:
        if given.only in (None, name):
            parts[name](given.turns, given.rounds)


if __name__ == "__main__":
    main()
