"""Kill runs, grids and searches, damage their files, and compare what they end with.

    python faults.py --kills 100 --damages 40 --seed 0

Each kill starts a command on a private Ray of two client actors and ends one of its processes, or
all of them, at a random moment; what is left is resumed until it finishes. Each damage changes one
file of a run that broke off. The result must be that of the same experiment left alone: the same
result hash, and the same tables but for times.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import yaml

import fedsim

FEDSIM = str(Path(sys.executable).with_name("fedsim"))
ROUNDS = 8
EXPERIMENT: dict[str, Any] = {
    "name": "faults",
    "data": {"name": "digits"},
    "partition": {"kind": "dirichlet", "clients": 12, "alpha": 0.5},
    "model": {"name": "mlp", "hidden": [32]},
    "method": {"name": "scaffold"},
    "train": {"rounds": ROUNDS, "participation": 0.5, "optimizer": {"lr": 0.1}},
    "checkpoint": {"every": 2},
    "engine": {"kind": "ray", "actors": 2},
}
COMMANDS = {
    "run": {},
    "grid": {"grid": {"axes": {"partition.alpha": [0.1, 1.0]}, "seeds": [0, 1]}},
    "tune": {
        "search": {
            "space": {"train.optimizer.lr": [0.05, 0.1]},
            "objectives": {"accuracy": "max"},
            "sampler": "random",
            "trials": 4,
        }
    },
}
MOST_RESUMES = 6


def named(word: str) -> Callable[[psutil.Process], list[psutil.Process]]:
    """The processes of a command whose command line holds a word."""

    def find(command: psutil.Process) -> list[psutil.Process]:
        found = []
        for process in command.children(recursive=True):
            try:
                if any(word in part for part in process.cmdline()[:1]):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    return find


VICTIMS: dict[str, tuple[signal.Signals, Callable[[psutil.Process], list[psutil.Process]]]] = {
    "a client actor": (signal.SIGKILL, named("ray::ClientActor")),
    "the driver": (signal.SIGKILL, named("ray::Driver")),
    "a trial": (signal.SIGKILL, named("ray::")),
    "the raylet": (signal.SIGKILL, named("raylet")),
    "the control service": (signal.SIGKILL, named("gcs_server")),
    "the command": (signal.SIGKILL, lambda command: [command]),
    "the command, by SIGTERM": (signal.SIGTERM, lambda command: [command]),
    "the command, by SIGHUP": (signal.SIGHUP, lambda command: [command]),
    "the command, by Ctrl-C": (signal.SIGINT, lambda command: [command]),
    "all processes": (
        signal.SIGKILL,
        lambda command: [*command.children(recursive=True), command],
    ),
}


def results(folder: Path) -> dict[str, tuple[str, pd.DataFrame]]:
    """The hash and the table of clients of each run below a folder, by what sets it apart."""
    found = {}
    for manifest in sorted({*folder.glob("manifest.json"), *folder.glob("*/**/manifest.json")}):
        if (
            not (manifest.parent / "rounds.parquet").exists()
            or not (manifest.parent / "weights").exists()
        ):
            continue
        run = fedsim.load(manifest.parent)
        key = str(manifest.parent.relative_to(folder))
        found[key] = (
            run.result_hash,
            run.clients.drop(columns=["seconds", "error"], errors="ignore"),
        )
    return found


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(
        found[key][0] == expected[key][0] and found[key][1].equals(expected[key][1])
        for key in expected
    )


def start(*words: str, out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [FEDSIM, *words],
        cwd=out,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(command: str, out: Path) -> Path | None:
    """Resume what lies in a folder until it is finished; None if it never is."""
    for _ in range(MOST_RESUMES):
        folders = sorted(out.glob("runs/faults/*"))
        if not folders:  # it had not begun
            start(command, "faults.yaml", out=out).wait()
            continue
        manifest = yaml.safe_load((folders[0] / "manifest.json").read_text())
        if manifest["status"] == "finished":
            return folders[0]
        words = ["resume"] if command == "run" else [command, "--resume"]
        start(*words, str(folders[0]), out=out).wait()
    return None


def kill(command: str, victim: str, moment: float, again: float | None, out: Path) -> bool:
    """Start a command and kill; whether there was anything to kill."""
    process = start(command, "faults.yaml", out=out)
    number, find = VICTIMS[victim]
    hit = False
    begun = time.monotonic()
    for when in (moment, again):
        if when is None:
            continue
        time.sleep(max(0.0, begun + when - time.monotonic()))
        if process.poll() is not None:
            break
        try:
            victims = find(psutil.Process(process.pid))
        except psutil.NoSuchProcess:
            break
        for each in (
            victims if victim == "all processes" else random.sample(victims, min(1, len(victims)))
        ):
            try:
                each.send_signal(number)
                hit = True
            except psutil.NoSuchProcess:
                continue
    process.wait()
    return hit


def kills(count: int, base: Path) -> list[str]:
    """Carry out kills; a line for each that was not survived."""
    expected, seconds = {}, {}
    for command, section in COMMANDS.items():
        out = base / command
        out.mkdir()
        (out / "faults.yaml").write_text(yaml.safe_dump({**EXPERIMENT, **section}))
        begun = time.monotonic()
        start(command, "faults.yaml", out=out).wait()
        seconds[command] = time.monotonic() - begun
        (folder,) = out.glob("runs/faults/*")
        expected[command] = results(folder)
        assert len(expected[command]) == {"run": 1, "grid": 4, "tune": 2}[command]
    outcomes: Counter[str] = Counter()
    failed = []
    victims = list(VICTIMS)
    k = 0
    while sum(outcomes.values()) < count:
        k += 1
        command = random.choices(list(COMMANDS), weights=[3, 1, 1])[0]
        victim = victims[k % len(victims)]
        moment = random.uniform(0.1, 0.98) * seconds[command]
        again = moment + random.uniform(0.1, 3.0) if random.random() < 0.2 else None
        out = base / f"kill-{k}"
        out.mkdir()
        shutil.copy(base / command / "faults.yaml", out)
        if not kill(command, victim, moment, again, out):
            shutil.rmtree(out)  # there was no such process at that moment
            continue
        outcomes[victim] += 1
        folder = finish(command, out)
        ok = folder is not None and same(results(folder), expected[command])
        line = f"{command}, {victim}, after {moment:.1f} s{' and again' if again else ''}"
        print(
            f"[{sum(outcomes.values())}/{count}] {line}: {'as undisturbed' if ok else 'LOST'}",
            flush=True,
        )
        if not ok:
            failed.append(line)
        shutil.rmtree(out)
    for victim, number in outcomes.items():
        print(f"{victim}: {number} kills")
    return failed


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: random.randrange(path.stat().st_size)])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped bit": flip,
    "truncated": truncate,
    "zeros": zero,
    "removed": Path.unlink,
}


def damages(count: int, base: Path) -> list[str]:
    """Damage files; a line for each damage that was neither noticed nor without effect."""
    experiment = fedsim.Experiment.from_dict({**EXPERIMENT, "engine": {"kind": "local"}})
    expected = results(fedsim.run(experiment, base / "whole").path)

    def stop(event: Any) -> None:
        if isinstance(event, dict) and event["round"] == ROUNDS - 1:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        fedsim.run(experiment, base / "begun", stop)
    (begun,) = base.glob("begun/faults/*")
    failed = []
    names = [p.relative_to(begun) for p in sorted(begun.rglob("*")) if p.is_file()]
    names = [name for name in names if name.name != "log.txt"]
    for k in range(1, count + 1):
        name, how = random.choice(names), random.choice(list(DAMAGES))
        path = shutil.copytree(begun, base / f"damage-{k}")
        DAMAGES[how](path / name)
        said = subprocess.run(
            [FEDSIM, "verify", str(path)], capture_output=True, text=True, check=False
        )
        noticed = said.returncode != 0 and name.name.partition(".")[0] in said.stderr
        try:
            survived = same(
                results(fedsim.resume(path).path), {".": next(iter(expected.values()))}
            )
            outcome = "survived" if survived else "WRONG"
        except fedsim.errors.RunFolderError as error:
            outcome = "refused" if name.name.partition(".")[0] in str(error) else "UNNAMED"
        wrong = outcome.isupper() or (not noticed and outcome != "survived")
        told = "noticed" if noticed else "not noticed"
        print(f"[{k}/{count}] {name}, {how}: {told}, {outcome}", flush=True)
        if wrong:
            failed.append(f"{name}, {how}: {told}, {outcome}")
        shutil.rmtree(path)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--damages", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    random.seed(given.seed)
    print(f"seed {given.seed}")
    with tempfile.TemporaryDirectory(prefix="fedsim-faults-") as folder:
        failed = damages(given.damages, Path(folder)) + kills(given.kills, Path(folder))
    for line in failed:
        print(f"not survived: {line}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
