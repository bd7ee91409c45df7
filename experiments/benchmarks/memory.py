"""Memory of a run, as the operating system counts it."""

from __future__ import annotations

import os
from pathlib import Path

import ray


def stored_megabytes() -> float:
    """What lies in the object stores of the cluster that this process is connected to, in MB."""
    name = "object_store_memory"
    return (ray.cluster_resources()[name] - ray.available_resources().get(name, 0)) / 1e6


def own_megabytes() -> dict[str, float]:
    """Memory of this process and all processes below it, by role, in MB.

    Counted is what a process allocated for itself (RssAnon): libraries are left out, and so is
    the object store, which all processes share. Roles: `launcher` (this process), `driver`,
    `actors` (all client actors together), `ray` (everything else that Ray runs).
    """
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended a moment ago
            continue
        parents[int(entry.name)] = int(fields[1])
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
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        kilobytes = int(status.partition("RssAnon:")[2].split()[0])
        role = "ray"
        if pid == os.getpid():
            role = "launcher"
        elif command.startswith("ray::Driver"):
            role = "driver"
        elif command.startswith("ray::ClientActor"):
            role = "actors"
        used[role] += kilobytes / 1000
    return used
