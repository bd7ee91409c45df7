"""Memory of a run, as the operating system counts it."""

from __future__ import annotations

import os
from pathlib import Path


def private_megabytes() -> dict[str, float]:
    """Private memory of this process and all processes below it, by role, in MB.

    Private memory is what a process has for itself: libraries and the shared object store, which
    all processes map, are left out. Roles: `launcher` (this process), `driver`, `actors` (all
    client actors together), `ray` (everything else that Ray runs).
    """
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            status = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended a moment ago
            continue
        parents[int(entry.name)] = int(status[1])
    used = {"launcher": 0.0, "driver": 0.0, "actors": 0.0, "ray": 0.0}
    for pid in parents:
        above, seen = pid, set()
        while above in parents and above != os.getpid() and above not in seen:
            seen.add(above)
            above = parents[above]
        if above != os.getpid():
            continue
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        kilobytes = sum(
            int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_")
        )
        role = "ray"
        if pid == os.getpid():
            role = "launcher"
        elif command.startswith("ray::Driver"):
            role = "driver"
        elif command.startswith("ray::ClientActor"):
            role = "actors"
        used[role] += kilobytes / 1000
    return used
