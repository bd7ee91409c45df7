"""Writing files whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a file to write aside, and rename it when it is written and on the disk.

    So nobody ever sees half a file. What is left aside by a block that raises is written over the
    next time.
    """
    aside = path.with_name(f".{path.name}.part")
    yield aside
    with open(aside, "rb") as file:
        os.fsync(file.fileno())
    aside.replace(path)


def write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    with replacing(path) as aside:
        aside.write_bytes(content)
