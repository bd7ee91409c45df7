"""The parts of card.py, each of which tells the rows of its table on stdout.

PYTHONPATH=tests python experiments/benchmarks/card_parts.py stacks --device cuda
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from card import PARTS
from rivals.work import LEARNING_RATE, WORKS, Work
from speed import CACHE
from test_on_a_card import EXPLAINED, LITTLE, explained

import fedsim
from experiments import FEW, NETWORK_METHODS, interrupted, small_experiment, with_method
from fedsim.cluster.settings import EngineSettings
from fedsim.errors import in_one_line
from fedsim.explain.explainers import explainers as known_explainers
from fedsim.federation import context, pick_device
from fedsim.objectives import Classification
from fedsim.testing import check_explainer, check_method
from fedsim.training import FlatModel, Hooks, Stack, Train, Trained, TrainingJob, train

SPEED = Path(__file__).resolve().parent / "speed.py"
CHECKERS = 8  # processes that check methods at once


@dataclass(frozen=True)
class Place:
    """Where a part runs, and whether in small."""

    device: str
    smoke: bool

    @property
    def engine(self) -> dict[str, Any]:
        return {"kind": "local", "gpus_per_actor": int(self.device == "cuda")}

    @property
    def turns(self) -> int:
        return 2 if self.smoke else 5


def tell(what: str, found: str) -> None:
    """A row of the table."""
    print(json.dumps([what, found]), flush=True)


# whether results are right


def methods(place: Place) -> None:
    names = ["scaffold"] if place.smoke else NETWORK_METHODS
    count = 1 if place.smoke else min(CHECKERS, os.cpu_count() or 1)
    wrong = 0
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        for name, error in zip(names, pool.map(partial(check, place), names), strict=True):
            if error:
                wrong += 1
                tell(name, error)
    tell("methods that keep the contract", f"{len(names) - wrong} of {len(names)}")
    if wrong:
        raise SystemExit(f"{wrong} methods do not keep it")


def check(place: Place, name: str) -> str:
    """What is wrong with a method; nothing if all is well."""
    train = {"rounds": 3 if place.smoke else 5}
    sections = with_method(name, data=FEW, train=train, engine=place.engine)
    try:
        check_method(sections.pop("method"), **sections)
    except Exception as error:
        return in_one_line(error)
    return ""


def explainers(place: Place) -> None:
    checked = 0
    for kind in ["images"] if place.smoke else EXPLAINED:
        with tempfile.TemporaryDirectory() as folder:
            sections, names = explained(kind, Path(folder))
            experiment = small_experiment(**{**sections, "engine": place.engine})
            done = fedsim.run(experiment, Path(folder, "runs"), progress=False)
            for name in ["gradient", "occlusion"] if place.smoke else sorted(names):
                given = {"name": name, **LITTLE.get(name, {})}
                check_explainer(known_explainers.parse(given), done)
                checked += 1
    tell("explainers that keep the contract, by kinds of data", str(checked))


def actors(place: Place) -> None:
    work = small(WORKS["mlp"]) if place.smoke else WORKS["mlp"]
    shared_by = (2,) if place.smoke else (1, 2, 4, 8)
    # In stacks, processes capture their gradients at different times.
    for stack, counts in ((1, shared_by), *([] if place.smoke else [(5, (1, 4))])):
        stacked = {"clients_per_step": stack}
        words = f", stacks of {stack}" if stack > 1 else ""
        ms, expected = of_rounds(work, place, {**place.engine, **stacked})
        tell(f"in one process{words}", f"{ms:.2f} ms a client")
        for count in counts:
            share = 1 / count if place.device == "cuda" else 0
            engine = {"kind": "ray", "actors": count, "gpus_per_actor": share, **stacked}
            ms, found = of_rounds(work, place, engine)
            same = "the same hash" if found == expected else "ANOTHER HASH"
            tell(f"{count} actor{'s' * (count > 1)}{words}", f"{ms:.2f} ms a client, {same}")
            assert found == expected, f"another result on {count} actors"


def resume(place: Place) -> None:
    engine = {**place.engine, "clients_per_step": 4}
    train = {"rounds": 6}
    experiment = small_experiment(method={"name": "scaffold"}, train=train, engine=engine)
    with tempfile.TemporaryDirectory() as folder:
        whole = fedsim.run(experiment, Path(folder, "whole"), progress=False)
        left = interrupted(experiment, Path(folder, "left"), after=4)
        again = fedsim.resume(left, progress=False)
        assert again.result_hash == whole.result_hash, "another hash after an interruption"
    tell("interrupted after round 4 of 6, and resumed", "the same hash")


def memory(place: Place) -> None:
    most, real = 4, Stack.train

    def scarce(stack: Stack, jobs: Sequence[TrainingJob], *rest: Any) -> Any:
        if len(jobs) > most:
            raise MemoryError("no memory is left")
        return real(stack, jobs, *rest)

    width = 4 if place.smoke else 4096
    size = 784 * width + width * width  # and some more
    if place.device == "cuda":  # four stacked clients fit, but not sixteen
        room = 4 * size * (6 * most + 5)  # bytes
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(room / total)
    work = replace(
        WORKS["mlp"],
        **{"clients": 16, "cohort": 16, "model": {"name": "mlp", "hidden": [width, width]}},
    )
    engine = {**place.engine, "clients_per_step": 4 * most}
    experiment = fedsim.Experiment.from_dict(work.experiment(16, 16, 2, "fedavg", engine))
    lines: list[str] = []

    def listen(event: Any) -> None:
        if isinstance(event, str) and "not enough memory" in event:
            lines.append(event)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if place.device == "cpu":
            patch.setattr(Stack, "train", scarce)
        done = fedsim.run(experiment, folder, listen)
        assert lines, "all clients fitted"
        assert len(done.rounds) == 2, "the run did not go on"
    tell(f"{4 * most} clients at once, of which {most} fit", lines[-1])


# how fast they come


def stacks(place: Place) -> None:
    for name in ("mlp", "cnn"):
        work = WORKS[name]
        ms, _ = of_training(work, place, 1)
        tell(f"{work.title}, alone", f"{ms:.3f} ms a client")
        for V in (4,) if place.smoke else (8, 32, 128):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("fedsim.training.captured.available", lambda device: False)
                eager, expected = of_training(work, place, V)
            tell(f"{work.title}, stacks of {V}", f"{eager:.3f} ms a client")
            if place.device == "cpu":
                continue
            ms, found = of_training(work, place, V)
            same = all(
                torch.equal(one.weights, other.weights)
                for one, other in zip(found, expected, strict=True)
            )
            bits = "the same bits" if same else "OTHER BITS"
            tell(f"{work.title}, stacks of {V}, captured", f"{ms:.3f} ms a client, {bits}")
            assert same, "replayed gradients lead to other weights"


def cifar(place: Place) -> None:
    there = (CACHE / "pfl" / "bin" / "python").exists()
    if place.smoke:
        words = [
            "--reference",
            "small",
            "--models",
            "mlp",
            "--only",
            "local",
            "--rounds",
            "1",
        ]
    else:
        contenders = [
            "bare",
            "local",
            "local-10",
            "local-50",
            *(["pfl", "pfl-all"] if there else []),
        ]
        words = ["--reference", "cifar", "--only", ",".join(contenders), "--rounds", "10"]
        words += ["--stacks", "10,50"]
    command = [sys.executable, SPEED, "--device", place.device, "--turns", "1", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stderr, file=sys.stderr)
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line[:2] == "| "]
    figures = [row for row in rows if len(row) > 3 and row[1].isdigit()]
    for row in figures:
        tell(row[0], f"{row[2]} ms a client")
    for line in done.stdout.splitlines():
        if line.startswith("Left out: "):
            tell("left out", line.removeprefix("Left out: "))
    if not there:
        tell("pfl-research", "left out: its environment is not there")
    assert done.returncode == 0, f"speed.py ended with {done.returncode}"
    assert figures, "speed.py had no figures"


def precision(place: Place) -> None:
    for name in ("cnn",) if place.smoke else ("mlp", "cnn", "cifar"):
        for V in (4,) if place.smoke else (1, 32):
            for kind in ("float32", "bfloat16"):
                ms, _ = of_training(WORKS[name], place, V, precision=kind)
                tell(f"{WORKS[name].title}, stacks of {V}, {kind}", f"{ms:.3f} ms a client")


def data(place: Place) -> None:
    work = small(WORKS["mlp"]) if place.smoke else WORKS["mlp"]
    ms, expected = of_rounds(work, place, place.engine)
    tell("training examples on the card", f"{ms:.2f} ms a client")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "keep_on_card", lambda *_: (None, None))
        ms, found = of_rounds(work, place, place.engine)
    tell("sent to the card for each client", f"{ms:.2f} ms a client")
    assert found == expected, "where examples lie changes the result"


# measuring


def small(work: Work) -> Work:
    """Of few clients."""
    return replace(work, clients=20, cohort=20)


def of_rounds(work: Work, place: Place, engine: dict[str, Any]) -> tuple[float, str]:
    """Milliseconds a client of a round of FedAvg, the median; and the result hash."""
    rounds = 4 if place.smoke else 15
    content = work.experiment(work.clients, work.cohort, rounds, "fedavg", engine)
    ends: list[float] = []

    def watch(event: Any) -> None:
        if isinstance(event, dict):
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as out:
        found = fedsim.run(fedsim.Experiment.from_dict(content), out, watch).result_hash
    # Caches fill in the first rounds; the last one is evaluated and saved.
    seconds = [after - before for before, after in pairwise(ends[1:-1])]
    return 1000 * statistics.median(seconds) / work.cohort, found


def of_training(work: Work, place: Place, V: int, **settings: Any) -> tuple[float, list[Trained]]:
    """Milliseconds a client of local training, V at once; and what it comes to."""
    device = pick_device(EngineSettings.model_validate(place.engine))
    optimizer = {"lr": LEARNING_RATE}
    chosen = Train.model_validate({"batch_size": work.batch, "optimizer": optimizer, **settings})
    torch.manual_seed(0)
    model = FlatModel(work.build(), device)
    start, stack = model.vector.clone(), Stack(model)
    clients = replace(work, clients=V).data(place.device)
    state = torch.Generator(device).get_state()

    def once() -> list[Trained]:
        jobs = [
            TrainingJob(
                *(start, x, y, LEARNING_RATE, work.epochs, np.random.default_rng(v)),
                Hooks(Classification().loss),
            )
            for v, (x, y) in enumerate(clients)
        ]
        if V == 1:
            return [train(model, jobs[0], chosen)]
        return stack.train(jobs, chosen, [state] * V)[0]

    times = []
    for _ in range(3 + place.turns):  # graphs are captured in the first ones
        before = time.perf_counter()
        found = once()
        if place.device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - before)
    return 1000 * statistics.median(times[3:]) / V, found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("part", choices=PARTS)
    options.add_argument("--device", choices=["cuda", "cpu"], required=True)
    options.add_argument("--smoke", action="store_true")
    arguments = options.parse_args()
    carry_out: Callable[[Place], None] = globals()[arguments.part]
    carry_out(Place(arguments.device, arguments.smoke))


if __name__ == "__main__":
    main()
