"""How many clients a second: fedsim, a bare PyTorch loop, and other simulators, side by side.

    python experiments/benchmarks/speed.py
    python experiments/benchmarks/speed.py --only bare,ray,pfl-all --models cnn --turns 1
    python experiments/benchmarks/speed.py --reference cifar --rounds 2 --only bare,local

All do the same: cohorts of clients, local epochs of plain SGD with learning rate 0.1, then the
mean; nothing is evaluated, logged or saved in the rounds that count. Inputs are random numbers in
clusters, which cost what images cost.

small   an MLP and a CNN on 1×28×28 inputs: 50 of 200 clients a round with 50 samples each, one
        local epoch, batches of 10
long    a ResNet8 on 3×32×32 inputs: 8 of 16 clients with 200 samples, five epochs, batches of 20
cifar   pfl-research's CIFAR-10 benchmark: 50 of 1,000 clients with 50 samples, one epoch, batches
        of 10, a CNN of 1,626,442 parameters

`small` on CPUs, with the numbers as they are here, takes about half an hour on two cores.

Contenders take turns, each a fresh process, and a figure is the median over turns of the median
over a turn's rounds. On CPUs every process computes with one thread; what uses more than one core
does so with one process a core. With a card (`--device cuda`, the default where there is one) a
single process trains on it, and pfl-research tries several as well.

The others (Flower, pfl-research, fluke, BlazeFL) live in environments of their own, which are made
when missing, with the PyTorch version that this script runs on. One that is there already is used
as it is, whoever made it. What cannot be installed or breaks off is left out, and the output says
why. BlazeFL needs Python 3.14: with `python3.14t`, which has no global lock, it trains in threads,
with `python3.14` in processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rivals.work import WORKS, Work

SCRIPTS = Path(__file__).resolve().parent / "rivals"
CACHE = Path("~/.cache/fedsim-benchmarks").expanduser()
# What is installed, the module to import, and the Pythons that it needs if not this one.
RIVALS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "flower": ("flwr[simulation]==1.41.0", "flwr", ()),
    "pfl": ("pfl[pytorch]==0.6.0", "pfl", ()),
    "fluke": ("fluke-fl==0.8.1", "fluke", ()),
    "blazefl": (
        "blazefl[contrib,reproducibility]==3.0.0",
        "blazefl.contrib",
        ("python3.14t", "python3.14"),
    ),
}
CORES = os.cpu_count() or 1
SHARERS = 4  # processes of pfl-research on one card; its guide says one to five
PATIENCE = 900.0  # seconds for a turn
REFERENCES = {"small": ["mlp", "cnn"], "long": ["resnet8"], "cifar": ["cifar"]}
CIFAR_ROUNDS = 1_500  # of pfl-research's benchmark


class LeftOut(Exception):
    """Why a contender has no figure."""


@dataclass(frozen=True)
class Contender:
    """Who runs, and how.

    Attributes:
        name: for --only.
        words: for the table.
        script: in `rivals`.
        processes: how many train at once.
        options: of the script, beyond those that all have.
        rival: whose environment it needs; None is fedsim's own.
    """

    name: str
    words: str
    script: str
    processes: int = 1
    options: tuple[str, ...] = ()
    rival: str | None = None


def contenders(device: str, stacks: Sequence[str]) -> list[Contender]:
    """All of them.

    Args:
        device: cpu or cuda.
        stacks: for `engine.clients_per_step`, beside 1.
    """
    on_card = device == "cuda"
    found = [Contender("bare", "bare PyTorch loop", "bare_loop.py")]
    if not on_card:
        words = f"{CORES} bare loops side by side"
        found.append(Contender("bare-all", words, "bare_loop.py", CORES))
    for kind, processes in (("local", 1), ("ray", 1 if on_card else CORES)):
        for stack in ("1", *stacks):
            name = kind if stack == "1" else f"{kind}-{stack}"
            words = f"fedsim, {kind}, stacks of {stack}" if stack != "1" else f"fedsim, {kind}"
            options = ("--engine", kind, "--stack", stack)
            found.append(Contender(name, words, "fedsim_run.py", processes, options))
    if not on_card:
        words = f"Flower, {CORES} clients at once"
        found.append(Contender("flower", words, "flower_run.py", CORES, rival="flower"))
        words = f"BlazeFL, {CORES} clients at once"
        found.append(Contender("blazefl", words, "blazefl_run.py", CORES, rival="blazefl"))
        found.append(Contender("fluke", "fluke", "fluke_run.py", rival="fluke"))
    found.append(Contender("pfl", "pfl-research", "pfl_run.py", rival="pfl"))
    count = SHARERS if on_card else CORES
    words = f"pfl-research, {count} processes"
    found.append(Contender("pfl-all", words, "pfl_run.py", count, rival="pfl"))
    return found


def first_error(text: str) -> str:
    """The line to show of what a program complained of."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines[-1:] or ["it gave no reason"])[0]


def environment(rival: str, folder: Path) -> Path:
    """The Python of a rival's environment, which is made when missing.

    Raises:
        LeftOut: it cannot be.
    """
    python = folder / rival / "bin" / "python"
    requirement, module, pythons = RIVALS[rival]
    check: list[str | Path] = [python, "-P", "-c", f"import torch, {module}"]
    if python.exists() and subprocess.run(check, capture_output=True).returncode == 0:
        return python
    base = next(filter(None, map(shutil.which, pythons)), None) if pythons else sys.executable
    if base is None:
        raise LeftOut(f"needs {' or '.join(pythons)}")
    print(f"installing {requirement} below {folder}", file=sys.stderr)
    same_torch = f"torch=={torch.__version__.partition('+')[0]}"
    steps: list[list[str | Path]] = [
        [base, "-m", "venv", folder / rival],
        [python, "-m", "pip", "install", "--quiet", requirement, same_torch],
        check,
    ]
    for command in steps:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise LeftOut(f"cannot be installed: {first_error(done.stderr or done.stdout)}")
    return python


def run_turn(
    contender: Contender, work: str, rounds: int, device: str, python: Path
) -> list[float]:
    """Let a contender run once.

    Returns:
        Seconds of each measured round.

    Raises:
        LeftOut: it broke off.
    """
    command = [python, SCRIPTS / contender.script, "--work", work, "--rounds", rounds]
    command += ["--processes", contender.processes, "--device", device, *contender.options]
    with tempfile.TemporaryDirectory(prefix="speed-", ignore_cleanup_errors=True) as scratch:
        variables = os.environ | {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            # Where Ray's workers find the network and Flower's client.
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")])
            ),
            # A cluster of its own, whatever runs on this machine; and nobody is told of it.
            "RAY_TMPDIR": scratch,
            "RAY_USAGE_STATS_ENABLED": "0",
            "FLWR_HOME": scratch,
            "FLWR_TELEMETRY_ENABLED": "0",
        }
        variables.pop("RAY_ADDRESS", None)
        if device == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        process = subprocess.Popen(
            [str(part) for part in command],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, complaints = process.communicate(timeout=PATIENCE)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise LeftOut(f"not done after {PATIENCE:.0f} s") from None
            raise
    told = [line for line in out.splitlines() if line.startswith('{"seconds"')]
    if process.returncode or not told:
        raise LeftOut(f"broke off: {first_error(complaints)}")
    seconds: list[float] = json.loads(told[-1])["seconds"]
    return seconds


Figures = dict[str, list[float]]  # by contender, milliseconds a client of each turn
Pythons = dict[str | None, Path]  # by rival


def measure(
    arguments: argparse.Namespace,
    runners: Sequence[Contender],
    pythons: Pythons,
    figures: dict[str, Figures],
    left_out: dict[str, str],
) -> None:
    """Let all contenders run in turns, and add to their figures on each work.

    Who breaks off is noted in `left_out` and runs no more.
    """
    for turn in range(1, arguments.turns + 1):
        for work in figures:
            for contender in runners:
                what = f"{contender.name}, {WORKS[work].title}"
                if contender.name in left_out or what in left_out:
                    continue
                try:
                    seconds = run_turn(
                        contender,
                        work,
                        arguments.rounds,
                        arguments.device,
                        pythons[contender.rival],
                    )
                except LeftOut as reason:
                    left_out[what] = str(reason)
                    print(f"turn {turn}: {what}: {reason}", file=sys.stderr)
                    continue
                ms = 1000 * statistics.median(seconds) / WORKS[work].cohort
                figures[work].setdefault(contender.name, []).append(ms)
                print(f"turn {turn}: {what}: {ms:.2f} ms a client", file=sys.stderr)


def floor(work: Work, bytes_a_second: float) -> float:
    """Milliseconds a client that memory alone takes, however the steps are computed.

    A step reads the weights forward, backward and to change them, writes them, and writes and
    reads their gradient.
    """
    return 1000 * work.steps * 6 * 4 * work.parameters / bytes_a_second


def bandwidth(device: str) -> float:
    """Bytes a second that a copy reads and writes."""
    size = 2**30 if device == "cuda" else 2**28
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(10):
        started = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, 2 * size / (time.perf_counter() - started))
    return best


def print_table(
    runners: Sequence[Contender], figures: dict[str, Figures], bytes_a_second: float
) -> None:
    """A row for each contender; ratios are to the bare loop on as many cores."""
    titles = ["contender", "processes"]
    for name in figures:
        titles += [f"{WORKS[name].title}, ms a client", "of the bare loop per core"]
        if name == "cifar":
            titles += [f"s for {CIFAR_ROUNDS:,} rounds", "times the memory floor"]
    print("\n| " + " | ".join(titles) + " |")
    print("| --- " * len(titles) + "|")
    for contender in runners:
        cells = [contender.words, str(contender.processes)]
        for name, turns in figures.items():
            if contender.name not in turns:
                cells += ["–"] * (4 if name == "cifar" else 2)
                continue
            ms = statistics.median(turns[contender.name])
            cells.append(f"{ms:.2f}")
            if "bare" in turns:
                ratio = statistics.median(turns["bare"]) / ms / contender.processes
                cells.append(f"{ratio:.2f}")
            else:
                cells.append("–")
            if name == "cifar":
                cells.append(f"{ms * WORKS[name].cohort * CIFAR_ROUNDS / 1000:,.1f}")
                cells.append(f"{ms / floor(WORKS[name], bytes_a_second):,.1f}")
        print("| " + " | ".join(cells) + " |")


def goals(work: str, device: str) -> list[tuple[str, str, float, float]]:
    """What fedsim is to reach: words, against whom, divided by what, how many times as fast."""
    if device == "cuda":
        return [("pfl-research on the same card", "pfl", 1, 10)]
    if work == "cifar":
        return []
    if work == "resnet8":
        return [(f"{CORES} × the bare loop", "bare", CORES, 0.97)]
    return [
        (f"{CORES} × the bare loop", "bare", CORES, 0.9),
        ("pfl-research, one process a core", "pfl-all", 1, 1.3),
    ]


def print_goals(runners: Sequence[Contender], figures: dict[str, Figures], device: str) -> None:
    """What was to be reached and what fedsim's fastest row has reached."""
    rows = []
    for work, turns in figures.items():
        medians = {name: statistics.median(ms) for name, ms in turns.items()}
        ours = [c for c in runners if c.script == "fedsim_run.py" and c.name in medians]
        if not ours:
            continue
        best = min(ours, key=lambda c: medians[c.name])
        for words, against, divisor, wanted in goals(work, device):
            if against in medians:
                reached = medians[against] / medians[best.name] / divisor
                verdict = "yes" if reached >= wanted else "no"
                rows.append(
                    f"| {WORKS[work].title} | {words} | {wanted:g} | {reached:.2f} | {verdict} "
                    f"| {best.words} |"
                )
    if rows:
        print("\n| model | times as fast as | goal | reached | met | by |")
        print("| --- " * 6 + "|")
        print("\n".join(rows))


def versions(python: Path) -> str:
    """Of what matters in an environment."""
    ask = (
        "import importlib.metadata as m; there = {d.name: d.version for d in m.distributions()}; "
        "names = ('fedsim', 'flwr', 'pfl', 'fluke-fl', 'blazefl', 'torch', 'ray'); "
        "print(*(f'{n} {there[n]}' for n in names if n in there), sep=', ')"
    )
    return subprocess.run([python, "-P", "-c", ask], capture_output=True, text=True).stdout.strip()


def chosen(options: argparse.ArgumentParser, words: str | None, known: Sequence[str]) -> list[str]:
    """Which of the known are named, in their order; all if none is."""
    named = words.split(",") if words else list(known)
    unknown = [word for word in named if word not in known]
    if unknown:
        options.error(f"no {', '.join(unknown)} among {', '.join(known)}")
    return [name for name in known if name in named]


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    card = torch.cuda.is_available()
    options.add_argument("--turns", type=int, default=5, help="of each contender")
    options.add_argument("--rounds", type=int, default=20, help="measured in a turn")
    options.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if card else "cpu")
    options.add_argument("--reference", help="small, long, cifar; all on a card, else small")
    options.add_argument("--models", help="of the small reference: mlp,cnn")
    options.add_argument("--only", help="contenders, by name: bare,ray,…")
    options.add_argument("--stacks", help="fedsim's clients in a stack, beside 1: 8,auto")
    options.add_argument("--environments", type=Path, default=CACHE, help="folder of the rivals'")
    arguments = options.parse_args()

    # So that whoever is measured ends with this script, whatever ends it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    device = arguments.device
    default = "small" if device == "cpu" else None
    references = chosen(options, arguments.reference or default, list(REFERENCES))
    models = chosen(options, arguments.models, REFERENCES["small"])
    stacks = arguments.stacks or ("8,auto" if device == "cpu" else "10,25,50,auto")
    there = {c.name: c for c in contenders(device, stacks.split(","))}
    runners = [there[name] for name in chosen(options, arguments.only, list(there))]

    left_out: dict[str, str] = {}
    pythons: Pythons = {None: Path(sys.executable)}
    for rival in dict.fromkeys(c.rival for c in runners if c.rival):
        try:
            pythons[rival] = environment(rival, arguments.environments.absolute())
        except LeftOut as reason:
            print(f"{rival}: {reason}", file=sys.stderr)
            for contender in runners:
                if contender.rival == rival:
                    left_out[contender.name] = str(reason)
    found: list[dict[str, Figures]] = []
    try:
        for reference in references:
            works = models if reference == "small" else REFERENCES[reference]
            found.append({work: {} for work in works})
            measure(arguments, runners, pythons, found[-1], left_out)
    except KeyboardInterrupt:
        print("\nBroken off; what was measured until then:")

    speed = bandwidth(device)  # at the end, because it takes memory on the card
    for figures in found:
        print_table(runners, figures, speed)
        print_goals(runners, figures, device)
    print(f"\nMedians of {arguments.turns} turns of {arguments.rounds} rounds, {CORES} cores.")
    print("; ".join(versions(python) for python in pythons.values()) + ".")
    if "cifar" in references:
        print(f"Memory, read and written by a copy on {device}: {speed / 1e9:,.0f} GB/s.")
    for who, why in left_out.items():
        print(f"Left out: {who}: {why}.")


if __name__ == "__main__":
    main()
