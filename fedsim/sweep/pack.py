"""Packs the results of a job on its node, for `fedsim fetch`.

A standalone script for any Python: it does not import fedsim.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

WAIT = 3600  # seconds until the package is removed if it was not fetched
TRIES = 5  # to pack a folder of a run that continues


def main(folder: Path, package: Path) -> None:
    """Pack a folder, print a line of JSON, and remove the package when stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    os.umask(0o077)
    try:
        said: dict[str, Any] = {"package": package.name}
        if folder.is_dir() and any(folder.iterdir()):
            for left in reversed(range(TRIES)):
                try:
                    if add_files(folder, package):
                        break
                except OSError as error:
                    if error.errno is not None or not left:  # no errno: a file became shorter
                        raise
            with package.open("rb") as file:
                said["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
        print(json.dumps(said), flush=True)
        time.sleep(WAIT)
    finally:
        package.unlink(missing_ok=True)


def add_files(folder: Path, package: Path) -> bool:
    """Pack all files; whether all of them still existed: old checkpoints of a run are removed."""
    still = True
    with tarfile.open(package, "w") as tar:
        for path in sorted(folder.rglob("*")):
            if path.name.startswith(".") and path.name.endswith(".part"):
                continue  # being written
            try:
                tar.add(path, path.relative_to(folder), recursive=False)
            except FileNotFoundError:
                still = False
    return still


if __name__ == "__main__":
    # Ray serves files from its log folder, which also has the log of this job.
    logs = Path("/proc/self/fd/1").readlink().parent
    main(Path(sys.argv[1]).expanduser(), logs / sys.argv[2])
