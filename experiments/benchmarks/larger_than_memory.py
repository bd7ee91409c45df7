"""Data larger than memory: 20 GB of images, read in place, in 4 GB.

    python larger_than_memory.py [--gigabytes 20] [--limit 4] [--folder DIR]

Writes images of 3×64×64 with 10 classes to a folder of `.npy` files, and runs FedAvg on 1,000
clients, 20 of them a round, with `in_place: true`, on one client actor per core. The run and all
that it starts are held to the limit by a control group, page cache and all, where this user may
make one (root may). Prints how long each part took and the most memory that was used.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from memory import own_megabytes

import fedsim

SHAPE, CLASSES, CHUNK = (3, 64, 64), 10, 20_000
GROUPS = Path("/sys/fs/cgroup")


def write(folder: Path, gigabytes: float) -> int:
    """Images whose brightness tells their class; how many."""
    count = int(gigabytes * 1e9 / np.prod(SHAPE))
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, count)
    np.save(folder / "y.npy", y)
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.uint8, (count, *SHAPE))
    for start in range(0, count, CHUNK):
        part = y[start : start + CHUNK].astype(np.uint8)
        noise = np.frombuffer(rng.bytes(len(part) * x[0].size), np.uint8).reshape(-1, *SHAPE)
        x[start : start + CHUNK] = (noise >> 1) + 12 * part[:, None, None, None]
    x.flush()
    del x
    return count


def forget(folder: Path) -> None:
    """Have the system forget the files, whose pages would be counted as those of their writer."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def limited(limit: int) -> Iterator[Path | None]:
    """Hold this process and all that it starts to so many bytes of memory, if that can be done.

    Yields:
        The file that tells the most memory used; None if there is no limit.
    """
    first = (GROUPS / "memory").is_dir()  # of the two versions of control groups
    group = (GROUPS / "memory" if first else GROUPS) / f"fedsim-{os.getpid()}"
    try:
        group.mkdir()
        bound = "memory.limit_in_bytes" if first else "memory.max"
        (group / bound).write_text(str(limit))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        print(f"memory is not limited: {error}")
        yield None
        return
    try:
        yield group / ("memory.max_usage_in_bytes" if first else "memory.peak")
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--limit", type=float, default=4)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()

    folder = Path(tempfile.mkdtemp(dir=options.folder))
    own: dict[str, float] = {}
    started = last = time.monotonic()

    def tell(what: str) -> None:
        nonlocal last
        now = time.monotonic()
        print(f"{what}: {now - last:.1f} s", flush=True)
        last = now

    def watch(event: Any) -> None:
        if isinstance(event, dict):
            tell(f"round {event['round']}, accuracy {event['accuracy']:.3f}")
            own.update({k: max(v, own.get(k, 0.0)) for k, v in own_megabytes().items()})

    try:
        count = write(folder, options.gigabytes)
        tell(f"{count:,} images written")
        forget(folder)
        experiment = fedsim.Experiment.from_dict(
            {
                "name": "larger-than-memory",
                "data": {
                    **{"name": "npz", "path": str(folder), "in_place": True},
                    "test_fraction": 0.001,
                },
                "partition": {"kind": "iid", "clients": 1_000},
                "model": {"name": "cnn"},
                "method": {"name": "fedavg"},
                "train": {"rounds": 5, "participation": 0.02, "batch_size": 32},
                "engine": {"kind": "ray"},
            }
        )
        with limited(int(options.limit * 2**30)) as peak, tempfile.TemporaryDirectory() as out:
            fedsim.run(experiment, out, watch)
            if peak is not None:
                print(f"most memory used: {int(peak.read_text()) / 2**30:.2f} GiB")
        print("without the page cache, MB:", {k: round(v) for k, v in own.items()})
        print(f"{time.monotonic() - started:.0f} s in all")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
