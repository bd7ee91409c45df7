"""Feed bad inputs to the commands, and count those that end in anything but a short message.

    python bad_inputs.py --fields 1 --seed 0

Each input gets a process and a folder of its own, and so many seconds. It fails if it ends in a
traceback or by a signal, goes on for longer, says nothing or more than six lines, is carried out
although it must be wrong, or is refused (exit code 2) and leaves something behind.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import fedsim.results.report.report
import pandas as pd
import torch
from bad_input_kinds import Case, all_cases, find_templates, make_templates, write

# Imported once, and not by each of so many processes.
import fedsim.analysis.attacks.audit
import fedsim.results.archive
import fedsim.sweep.submit  # noqa: F401
from fedsim.cli import main as command_line

MOST_LINES = 6
MEMORY = 8 * 10**9  # bytes of addresses that a process may take
PATIENCE = 2.0  # seconds after which code that goes on for ever is interrupted
SORTS = ("traceback", "signal", "goes on", "lines", "silent", "accepted", "left behind")


def give_up_privileges() -> None:
    """Of root, by which it may read and write what modes forbid."""
    version_3, this_process = 0x20080522, 0
    header = (ctypes.c_uint32 * 2)(version_3, this_process)
    if os.geteuid() == 0 and ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError("root's privileges cannot be given up here")


def as_command(case: Case, folder: Path) -> int:
    """In a process of its own: prepare the folder and carry out the command; its exit code."""
    os.chdir(folder)
    for name, content in case.files.items():
        write(folder / name, content)
    (folder / ".prepared").write_text("\n".join(map(str, folder.rglob("*"))))
    if case.plain:
        give_up_privileges()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.argv = ["fedsim", *case.words]
    try:
        command_line()
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def start(case: Case, folder: Path, told: Path) -> int:
    """Fork a process for a case; its id.

    Args:
        told: the file for what it says.
    """
    process = os.fork()
    if process:
        return process
    code = 120  # of this script, not of the command
    try:
        os.setsid()
        for descriptor, path in ((0, os.devnull), (1, os.devnull), (2, told)):
            os.dup2(os.open(path, os.O_RDWR), descriptor)
        code = as_command(case, folder)
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(process: int, case: Case, limit: float) -> int | None:
    """The exit code of a process, which is ended after so many seconds: then None."""
    began, interrupted = time.monotonic(), False
    while True:
        found, status = os.waitpid(process, os.WNOHANG)
        waited = time.monotonic() - began
        if found:
            return os.waitstatus_to_exitcode(status)
        if case.endless and waited > PATIENCE and not interrupted:
            os.kill(process, signal.SIGINT)
            interrupted = True
        if waited > limit:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return None
        time.sleep(0.002)


def left_behind(folder: Path) -> list[str]:
    """What lies in a case's folder and was not prepared."""
    prepared = (folder / ".prepared").read_text().splitlines()
    return sorted({str(path) for path in folder.rglob("*")} - {*prepared, f"{folder}/.prepared"})


def faults(case: Case, base: Path, limit: float) -> tuple[list[str], str]:
    """How a bad input ended badly, nothing if all is well; and the last that it said."""
    folder, told = base / "case", base / "told"
    folder.mkdir()
    told.write_bytes(b"")
    code = ended(start(case, folder, told), case, limit)
    words = told.read_text(errors="replace")
    lines = [line for line in words.splitlines() if line.strip()]
    found = {
        "traceback": "Traceback" in words,
        "signal": code is not None and code not in (0, 1, 2, 130),
        "goes on": code is None or (case.endless and code != 130),
        "lines": sum(not line.startswith("warning: ") for line in lines) > MOST_LINES,
        "silent": code in (1, 2) and "error: " not in words and "Error" not in words,
        "accepted": code == 0 and case.wrong,
        "left behind": code == 2 and case.words[0] != "report" and bool(left_behind(folder)),
    }
    for each in (folder, *folder.rglob("*")):
        if each.is_dir() and not each.is_symlink():
            each.chmod(0o700)
    shutil.rmtree(folder)
    last = " | ".join(line[-160:] for line in lines[-2:])
    return [sort for sort in SORTS if found[sort]], last


def make_runs(base: Path) -> None:
    """Make the runs that cases damage, in a process that no other is forked from."""
    process = os.fork()
    if not process:
        try:
            make_templates(base)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    if os.waitpid(process, 0)[1]:
        sys.exit("the runs that are to be damaged could not be made")
    find_templates(base)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fields", type=int, default=1, help="strange values for each field")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for each input")
    parser.add_argument("--only", default="", help="a kind, or part of what is said of inputs")
    given = parser.parse_args()
    random.seed(given.seed)
    base = Path(tempfile.mkdtemp(prefix="fedsim-bad-"))
    # Nothing of this user's is read or written.
    home = {name: str(base) for name in ("HOME", "XDG_CONFIG_HOME", "FEDSIM_DATA", "RAY_TMPDIR")}
    os.environ |= {**home, "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    make_runs(base)
    cases = [c for c in all_cases(given.fields) if given.only in c.kind or given.only in c.label]
    counts: Counter[tuple[str, str]] = Counter()
    began, failed = time.monotonic(), 0
    for case in cases:
        found, last = faults(case, base, given.limit)
        counts.update((case.kind, sort) for sort in ("tried", *found))
        if found:
            failed += 1
            print(f"{case.kind}: {case.label}: {', '.join(found)}\n    {last}", flush=True)
    print(f"\nseed {given.seed}: {len(cases)} inputs, {time.monotonic() - began:.0f} s")
    kinds = dict.fromkeys(case.kind for case in cases)
    table = [{"kind": k, **{s: counts[k, s] for s in ("tried", *SORTS)}} for k in kinds]
    print(pd.DataFrame(table).to_string(index=False))
    shutil.rmtree(base, ignore_errors=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
