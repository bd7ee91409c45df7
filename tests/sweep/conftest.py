"""Commands as processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import Command


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start commands in the test's own folder; those still running at its end are killed."""
    processes: list[Command] = []

    def command(*words: str) -> Command:
        processes.append(Command(*words, cwd=tmp_path, shares_workers=True))
        return processes[-1]

    yield command
    for process in processes:
        process.kill()
        process.wait()
