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
import json
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
COMMANDS: dict[str, dict[str, Any]] = {
    "run": {},
    "grid": {"grid": {"axes": {"partition.alpha": [0.1, 1.0]}, "seeds": [0]}},
    "tune": {
        "search": {
            "space": {"train.optimizer.lr": [0.05, 0.1]},
            "objectives": {"accuracy": "max"},
            "sampler": "random",
            "trials": 3,
        }
    },
}
MOST_RESUMES = 6


def named(*words: str, part: int = 0) -> Callable[[psutil.Process], list[psutil.Process]]:
    """The processes of a command with one of these words in that part of their command line."""

    def find(command: psutil.Process) -> list[psutil.Process]:
        found = []
        for process in command.children(recursive=True):
            try:
                line = process.cmdline()
                if any(word in "".join(line[part : part + 1]) for word in words):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    return find


VICTIMS: dict[str, tuple[signal.Signals, Callable[[psutil.Process], list[psutil.Process]]]] = {
    "a client actor": (signal.SIGKILL, named("ray::ClientActor")),
    "the driver or a trial": (signal.SIGKILL, named("ray::Driver", "ray::ImplicitFunc")),
    "any of Ray's workers": (signal.SIGKILL, named("ray::")),
    "the process that forks workers": (signal.SIGKILL, named("forked_workers.py", part=2)),
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


def difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """In what the results of a folder differ from those expected; empty if in nothing."""
    if found.keys() != expected.keys():
        return f"runs {sorted(found)}, not {sorted(expected)}"
    wrong = [key for key in expected if found[key][0] != expected[key][0]]
    tables = [key for key in expected if not found[key][1].equals(expected[key][1])]
    return f"hashes of {wrong}, tables of {tables}" if wrong or tables else ""


def start(*words: str, out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [FEDSIM, *words],
        cwd=out,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def begun(out: Path) -> Path | None:
    """The folder of results, if there is one yet."""
    folders = [manifest.parent for manifest in out.glob("runs/faults/*/manifest.json")]
    return folders[0] if folders else None


def next_command(command: str, out: Path) -> list[str]:
    """The words that start it, or go on with what there is."""
    folder = begun(out)
    if folder is None:
        return [command, "faults.yaml"]
    return ["resume", str(folder)]


def finish(command: str, out: Path) -> Path | None:
    """Resume what lies in a folder until it is finished; None if it never is."""
    for _ in range(MOST_RESUMES):
        folder = begun(out)
        if folder and json.loads((folder / "manifest.json").read_text())["status"] == "finished":
            return folder
        start(*next_command(command, out), out=out).wait()
    return None


def kill(words: list[str], victim: str, moments: list[float], out: Path) -> int:
    """Start a command and kill at these moments, or as soon after as there is something to kill.

    Returns:
        How often there was.
    """
    process = start(*words, out=out)
    number, find = VICTIMS[victim]
    hits = 0
    started = time.monotonic()
    for moment in moments:
        time.sleep(max(0.0, started + moment - time.monotonic()))
        victims: list[psutil.Process] = []
        while not victims and process.poll() is None:
            try:
                victims = find(psutil.Process(process.pid))
                time.sleep(0.01)
            except psutil.NoSuchProcess:
                break
        for each in (
            victims if victim == "all processes" else random.sample(victims, k=len(victims[:1]))
        ):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(number)
                hits += 1
    process.wait()
    return min(hits, len(moments))


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
        (left_alone,) = out.glob("runs/faults/*")
        expected[command] = results(left_alone)
        assert len(expected[command]) == {"run": 1, "grid": 2, "tune": 2}[command]
    outcomes: Counter[str] = Counter()
    failed = []
    victims = list(VICTIMS)
    k = 0
    while sum(outcomes.values()) < count:
        k += 1
        command = random.choices(list(COMMANDS), weights=[3, 1, 1])[0]
        victim = victims[k % len(victims)]
        moments = [random.uniform(0.1, 0.98) * seconds[command]]
        how = random.choices(["once", "twice", "and its resume"], weights=[3, 1, 1])[0]
        if how == "twice":
            moments.append(moments[0] + random.uniform(0.1, 3.0))
        out = base / f"kill-{k}"
        out.mkdir()
        shutil.copy(base / command / "faults.yaml", out)
        hits = kill(next_command(command, out), victim, moments, out)
        if how == "and its resume":
            moments.append(random.uniform(0.1, 0.98) * seconds[command])
            hits += kill(next_command(command, out), victim, moments[-1:], out)
        if not hits:
            shutil.rmtree(out)  # there was no such process any more
            continue
        outcomes[victim] += 1
        folder = finish(command, out)
        wrong = difference(results(folder), expected[command]) if folder else "never finished"
        after = ", ".join(f"{moment:.1f}" for moment in moments)
        line = f"{command}, {victim}, {how}, after {after} s"
        outcome = f"LOST: {wrong}" if wrong else "as undisturbed"
        print(f"[{sum(outcomes.values())}/{count}] {line}: {outcome}", flush=True)
        if wrong:
            failed.append(line)
            print(f"    its folder: {out}", flush=True)
        else:
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
    """Damage files; a line for each damage that was not noticed, not named or not survived."""
    experiment = fedsim.Experiment.from_dict({**EXPERIMENT, "engine": {"kind": "local"}})
    whole = results(fedsim.run(experiment, base / "whole").path)

    def stop(event: Any) -> None:
        if isinstance(event, dict) and event["round"] == ROUNDS - 1:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        fedsim.run(experiment, base / "begun", stop)
    (broken_off,) = base.glob("begun/faults/*")
    failed = []
    names = [p.relative_to(broken_off) for p in sorted(broken_off.rglob("*")) if p.is_file()]
    names = [name for name in names if name.name != "log.txt"]
    for k in range(1, count + 1):
        name, how = random.choice(names), random.choice(list(DAMAGES))
        path = shutil.copytree(broken_off, base / f"damage-{k}")
        DAMAGES[how](path / name)
        said = subprocess.run(
            [FEDSIM, "verify", str(path)], capture_output=True, text=True, check=False
        )
        noticed = said.returncode != 0 and name.name.partition(".")[0] in said.stderr
        try:
            survived = not difference(results(fedsim.resume(path).path), whole)
            outcome = "survived" if survived else "WRONG"
        except fedsim.errors.RunFolderError as error:
            outcome = "UNNAMED"
            # What is YAML still may have been edited on purpose.
            if name.name == "experiment.yaml" and "remove it to have it put back" in str(error):
                (path / name).unlink()
                survived = not difference(results(fedsim.resume(path).path), whole)
                outcome = "survived by the remedy that it names" if survived else "WRONG"
        wrong = outcome.isupper() or not noticed
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
    folder = Path(tempfile.mkdtemp(prefix="fedsim-faults-"))
    failed = damages(given.damages, folder) + kills(given.kills, folder)
    if not failed:
        shutil.rmtree(folder)
    for line in failed:
        print(f"not survived: {line}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
