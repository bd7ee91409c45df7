"""Runs that end in seconds, and a Ray of our own."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import fork_server
import pytest
import ray
from hypothesis import settings
from markupsafe import Markup
from xdist.scheduler import LoadFileScheduling

from experiments import HERE, WRITTEN, Say, private_ray, small_experiment
from fedsim import Run, run
from fedsim.cluster import forked_workers
from fedsim.cluster.private import environment
from fedsim.data import ClientSplits, Dataset
from fedsim.federation import RunSpec, limit_threads
from fedsim.launch import run as launch
from fedsim.results.figures.look import Drawing
from fedsim.results.folder import RunFolder
from fedsim.simulate import Progress

gc.disable()  # until all is imported and collected

# No test is timed: machines are busy, and schemas are built by the first example.
settings.register_profile("day", deadline=None, max_examples=50)
settings.register_profile("night", deadline=None, max_examples=500)
settings.load_profile("day")

# Else libraries set it up, to write to what captures one test, and later to a closed file.
logging.getLogger().addHandler(logging.NullHandler())

# Files that take the longest, in this order.
LONGEST = (
    "every_method",  # and the card's runs
    *("card", "notebooks"),  # at night
    *("unlearning", "same_bits", "viewer", "on_a_card", "docs", "submit", "audit"),
    *("search", "refusals", "report", "contributions", "contributions_of_sweeps", "without"),
    *("reference", "paths", "drawings", "fedseit", "cli", "signals", "chosen_words"),
    *("lora", "alone_or_together"),
)

NIGHT = pytest.StashKey[int]()  # how many tests the night alone has


@pytest.hookimpl(tryfirst=True)  # before tests are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest first, so that no process is left alone with them at the end."""
    place = {f"test_{name}": k for k, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    config.stash[NIGHT] = sum(item.get_closest_marker("night") is not None for item in items)
    if hasattr(config, "workeroutput"):
        config.workeroutput["night"] = config.stash[NIGHT]


class ByFile(LoadFileScheduling):
    """A process takes a file at a time, of the matrix a method, and all that ask for one run."""

    def _split_scope(self, nodeid: str) -> str:
        if "test_matrix.py" in nodeid:
            return nodeid
        asks = ("test_every_method.py", "test_methods_come_to_the_same_bits")
        return "trained" if any(word in nodeid for word in asks) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    node.config.stash[NIGHT] = getattr(node, "workeroutput", {}).get("night", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.option.markexpr == "not night" and config.stash.get(NIGHT, 0):
        more = config.stash[NIGHT]
        terminalreporter.write_line(
            f"{more} more tests, and more examples of properties: make test-all"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """What was imported and collected stays: the garbage collector need not look at it again."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def ray_apart() -> Iterator[None]:
    """Ray's folder is this process's own: what others start is not found there."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tempfile.mkdtemp(prefix="fedsim-", dir="/tmp")  # sockets want a short path
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("XDG_CONFIG_HOME", folder)  # where this user's key is
        WRITTEN.mkdir()  # before Python looks there for the first time
        yield
    for left in (folder, WRITTEN):
        shutil.rmtree(left, ignore_errors=True)  # of Rays that are still ending


@pytest.fixture(scope="session", autouse=True)
def one_fork_server(ray_apart: None) -> Iterator[None]:
    """All Rays that this process starts share the process that forks their workers."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        started = forked_workers.fork_server

        @cache
        def path() -> str:
            with environment(HERE["env_vars"]), pytest.MonkeyPatch.context() as script:
                script.setattr(forked_workers, "__file__", fork_server.__file__)
                return stack.enter_context(started(os.environ["RAY_TMPDIR"]))

        patch.setattr(forked_workers, "fork_server", lambda folder: nullcontext(path()))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """As in a client actor: the threads of small networks wait for each other."""
    undo = limit_threads(1)
    yield
    undo()


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Files need not outlive a power failure, for which a small run waits 20 times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


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
    """Run commands in the test's own folder."""
    monkeypatch.chdir(tmp_path)
    return Say(monkeypatch, capsys)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports with titles in place of drawings, which take most of their time."""
    monkeypatch.setattr(Drawing, "svg", lambda drawing: Markup.escape(drawing.title))


@pytest.fixture(scope="class")
def own_ray() -> Iterator[None]:
    """A private Ray with four CPUs and one logical GPU, which has no card behind it."""
    with private_ray(num_cpus=4, num_gpus=1):
        yield


@pytest.fixture
def driver_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is this process rather than an actor, which takes two seconds to start.

    For tests of what client actors come to, not of the driver.
    """

    def on_ray(
        folder: RunFolder, dataset: Dataset, splits: ClientSplits, spec: RunSpec, actors: int
    ) -> Iterator[Progress]:
        data = [ray.put(dataset), ray.put(splits)]
        return launch._with_actors(folder, spec, actors, data)

    monkeypatch.setattr(launch, "_on_ray", on_ray)
