"""Runs that end in seconds, and a Ray of our own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small import Say, private_ray, small_experiment
from xdist.scheduler import LoadScopeScheduling

from fedsim import Run, run
from fedsim.cli import main

# Files with tests that start Ray. Some start a cluster for all on the machine, which no other test
# must meet: they all run in one process, one after another, while another takes the rest.
ON_RAY = {
    *("test_bad_input", "test_cli", "test_cluster", "test_contract", "test_grid", "test_launch"),
    *("test_loggers", "test_notebooks", "test_openfl_xai", "test_placement", "test_preflight"),
    *("test_readme", "test_run", "test_same_bits", "test_search", "test_submit"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ray's tests first: they take the longest."""
    items.sort(key=lambda item: item.path.stem not in ON_RAY)


class _Apart(LoadScopeScheduling):
    """Hands out whole files, and all of Ray's as one."""

    def _split_scope(self, nodeid: str) -> str:
        stem = Path(nodeid.partition("::")[0]).stem
        return "ray" if stem in ON_RAY else stem


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Apart:
    return _Apart(config, log)


@pytest.fixture
def finish(tmp_path: Path) -> Callable[..., Run]:
    """Run a small experiment to its end, below the test's own folder."""

    def finish(**sections: Any) -> Run:
        return run(small_experiment(**sections), tmp_path / "runs")

    return finish


@pytest.fixture
def say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Say:
    """Run a command in the test's own folder; its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)

    def say(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedsim", *words])
        code = 0
        try:
            main()
        except SystemExit as left:
            code = int(left.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return say


@pytest.fixture(scope="class")
def own_ray() -> Iterator[None]:
    """A private Ray with four CPUs and one logical GPU, which has no card behind it."""
    with private_ray(num_cpus=4, num_gpus=1):
        yield
