"""Packs the results of a job where it ran, for `fedsim fetch`.

Carried out by itself on the cluster, by any Python: it imports nothing of fedsim.
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

WAIT = 3600  # seconds after which the package goes, should nobody say that it was fetched
TRIES = 5  # at packing a folder in which a run goes on


def main(folder: Path, package: Path) -> None:
    """Pack a folder, say so in a line of JSON, and take the package away when stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    os.umask(0o077)
    try:
        said: dict[str, Any] = {"package": package.name}
        if folder.is_dir() and any(folder.iterdir()):
            for left in reversed(range(TRIES)):
                try:
                    if pack(folder, package):
                        break
                except OSError as error:
                    if error.errno is not None or not left:  # without: a file became shorter
                        raise
            with package.open("rb") as file:
                said["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
        print(json.dumps(said), flush=True)
        time.sleep(WAIT)
    finally:
        package.unlink(missing_ok=True)


def pack(folder: Path, package: Path) -> bool:
    """Pack all files as they are now.

    Returns:
        Whether all of them were still there when their turn came. Files of a run are written
        aside and renamed, so each is whole; but the checkpoint before the last goes.
    """
    still = True
    with tarfile.open(package, "w") as tar:
        for path in sorted(folder.rglob("*")):
            if path.name.startswith(".") and path.name.endswith(".part"):
                continue  # is being written
            try:
                tar.add(path, path.relative_to(folder), recursive=False)
            except FileNotFoundError:
                still = False
    return still


if __name__ == "__main__":
    # Ray hands out what lies in its folder of logs, where the log of this very job lies, too.
    logs = Path("/proc/self/fd/1").readlink().parent
    main(Path(sys.argv[1]).expanduser(), logs / sys.argv[2])
