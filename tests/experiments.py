"""Experiments that run in seconds."""

from __future__ import annotations

import doctest
import json
import logging
import os
import pickletools
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import ray
import typer.main
from hypothesis import settings

from fedsim import Experiment, Run, grid, run, testing
from fedsim.cli import main
from fedsim.cluster import forked_workers
from fedsim.cluster.private import CONFIG, environment
from fedsim.cluster.ray_compat import lean_start
from fedsim.errors import BadInput, FedsimError
from fedsim.federation import Federation, LocalEngine, RoundRunner
from fedsim.launch.prepare import prepare
from fedsim.methods import methods
from fedsim.simulate import Progress, initial_state, one_round
from fedsim.sweep import sweep
from fedsim.sweep.trials import SweepPlan

Finish = Callable[..., Run]  # runs a small experiment with these sections to its end

Errors = dict[Path, str]  # of trials that failed

# Actors find the modules of the tests, the fedsim that is tested, and what a test writes.
_TESTS = Path(__file__).parent
WRITTEN = Path(tempfile.gettempdir(), f"fedsim-written-{os.getpid()}")
HERE = {"env_vars": {"PYTHONPATH": os.pathsep.join(map(str, (_TESTS, _TESTS.parent, WRITTEN)))}}


# Methods that learn networks; those of rules, streams or texts alone have tests of their own.
OF_TEXTS = {"fedrnl"}
NETWORK_METHODS = [
    name
    for name, method in methods.items()
    if method.learns.models == "network"
    and method.learns.task_sequences != "only"
    and name not in OF_TEXTS
]

WITHOUT_GLOBAL = {n for n in NETWORK_METHODS if not dict(methods.items())[n].has_global_model}

# Together they use all that methods can use of the engine; tests/methods/test_every_method.py
# compares this with what methods call.
MECHANISMS = (
    "scaffold",  # means of two vectors; clients keep states
    "fedaux",  # setup traffic, messages, examples of the server
    "fedfed",  # phases, a pool, further networks at clients
    "fedgen",  # a generator that the server trains
    "fedbuff",  # parts for single clients, simulated time
    "sse_agg",  # a reduction of its own
    "xpfl",  # clients keep networks, unlabelled examples
    "ifca",  # no global model
    "hist_trees",  # what is made once of a client's examples
)


def by_day(values: Iterable[Any], chosen: Collection[Any] = MECHANISMS) -> list[Any]:
    """Values of a parameter: those chosen by day, all of them by night."""
    values = list(values)
    assert all(c in values or c in MECHANISMS for c in chosen), chosen
    return [v if v in chosen else pytest.param(v, marks=pytest.mark.night) for v in values]


def examples(count: int, by_night: int | None = None) -> settings:
    """So many examples of a property by day; by night five times as many, or that many."""
    night = settings.get_current_profile_name() == "night"
    return settings(max_examples=(by_night or 5 * count) if night else count)


class Later:
    """A module that the first test that needs it imports: each process collects all tests."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # which pytest asks every name of a module for
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)


get_command = cache(typer.main.get_command)  # which takes a tenth of a second


@dataclass(frozen=True)
class Say:
    """Runs commands."""

    patch: pytest.MonkeyPatch
    capture: pytest.CaptureFixture[str]

    def __call__(self, *words: str) -> tuple[int, str, str]:
        """The exit code, what is printed, and the complaints."""
        self.patch.setattr(sys, "argv", ["fedsim", *words])
        self.patch.setattr(typer.main, "get_command", get_command)
        code = 0
        try:
            main()
        except SystemExit as left:
            code = int(left.code or 0)
        printed = self.capture.readouterr()
        return code, printed.out, printed.err

    def printed(self, *words: str) -> str:
        """What a command prints that succeeds."""
        code, printed, complaints = self(*words)
        assert code == 0, complaints
        return printed

    def refused(self, *words: str) -> str:
        """The complaint of a command that is refused."""
        code, printed, complaint = self(*words)
        assert (code, printed) == (2, "")
        return complaint


def refusal(ask: Callable[[], object]) -> str:
    """The line in which something is refused."""
    with pytest.raises(BadInput) as refused:
        ask()
    line = str(refused.value)
    assert "\n" not in line
    return line


LATE = {"fedfed", "fedxds"}  # that train the model in later rounds than the second

FEW: dict[str, Any] = {"name": "digits", "subset": 0.3}  # for tests that need no good model

WHOLE: dict[str, Any] = {"name": "digits"}  # for tests that need one


def small_experiment(**sections: Any) -> Experiment:
    """The small experiment of authors of components, on few data unless a test names others."""
    return testing.small_experiment(**{"data": FEW, **sections})


QUARTER: dict[str, Any] = {"name": "digits", "test_fraction": 0.75}  # a quarter to train on

PARAMETERS = 64 * 32 + 32 + 32 * 10 + 10  # of the small experiment's model

RESNET = {"name": "resnet8", "width": 2}  # a small model with running statistics

LITTLE_TEACHER = {
    **{"width": 8, "depth": 1, "heads": 2},
    **{"decoder_width": 8, "decoder_depth": 1, "decoder_heads": 2},
}

# Methods that learn boosted trees, and a small model for them.
TREE_METHODS = [n for n, m in methods.items() if m.learns.models == "tree ensemble"]
TREES: dict[str, Any] = {"model": {"name": "boosted_trees", "depth": 3, "bins": 8}}

# What a method needs beside its name to work on small experiments.
NEEDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(TREE_METHODS, TREES),
    **{name: {"adapters": {"r": 4}} for name, method in methods.items() if method.adapts},
    "ffa_lora": {"adapters": {"r": 16}},
    "hetlora": {"adapters": {"r": 16}, "method": {"name": "hetlora", "ranks": [8, 16]}},
    "fedaux": {
        "method": {"name": "fedaux", "pretrain_epochs": 3},
        "partition": {"server_fraction": 0.2},
    },
    "fedbuff": {
        "method": {"name": "fedbuff", "buffer": 5},
        "devices": {"speed": {"median": 100, "sigma": 1}},
    },
    "feddf": {"partition": {"server_fraction": 0.2}},
    "fedbn": {"model": {"name": "networks:normalised"}},
    "fedfed": {
        "method": {
            **{"name": "fedfed", "distillation_rounds": 2, "width": 4},
            "distillation": {"mosaics": 8, "batch_size": 64},
        }
    },
    "fedftg": {"method": {"name": "fedftg", "width": 8, "iterations": 1}},
    "fedgen": {
        "method": {"name": "fedgen", "hidden": 64, "generator_steps": 10},
        "train": {"optimizer": {"lr": 0.01}},
    },
    "fedrep": {"method": {"name": "fedrep", "head_epochs": 3}},
    "fedxds": {
        "method": {
            "name": "fedxds",
            "warmup_rounds": 2,
            "attribution": {"name": "lrp", "composite": "epsilon"},
        }
    },
    "pfedme": {"method": {"name": "pfedme", "steps": 3}},
    # A threshold that some pseudo-labels pass after one round.
    "semifl": {
        "method": {"name": "semifl", "threshold": 0.12},
        "partition": {"server_fraction": 0.1},
    },
    "sse_agg": {"partition": {"server_fraction": 0.1}},
    "xpfl": {
        # Without personal models, of which the global one would not learn all classes.
        "method": {"name": "xpfl", "psi": 0.0, "teacher": LITTLE_TEACHER},
        "partition": {"labelled_fraction": 0.5},
    },
}


# What small runs are about, where no test needs more of it.
FOUR = {"kind": "iid", "clients": 4}
TABLE = {"name": "synthetic", "shape": [6], "classes": 3, "samples": 90, "test_samples": 30}
NUMBERS = {"data": {"name": "friedman", "samples": 100, "test_samples": 30}, "partition": FOUR}
REVIEWS: dict[str, Any] = {
    "data": {"name": "planted_reviews", "reviews": 20, "test_reviews": 10, "dimension": 4},
    "partition": {"kind": "aspects", "clients": 4},
}
READER = {"name": "text_cnn", "kernels": [1, 2], "filters": 4, "hidden": 5}
CHOOSER = {"name": "rationale", "hidden": 4}
KINDS: dict[str, dict[str, Any]] = {
    "images": {},
    "table": {"data": TABLE, "partition": FOUR},
    "numbers": NUMBERS,
    "documents": {**REVIEWS, "model": READER},
    "rationales": {**REVIEWS, "model": CHOOSER, "method": {"name": "fedrnl"}},
    "trees": {
        "data": TABLE,
        "partition": FOUR,
        **NEEDS["hist_trees"],
        "method": {"name": "hist_trees"},
    },
    "rules": {**NUMBERS, "model": {"name": "tsk", "rules": 3}, "method": {"name": "openfl_xai"}},
}


@cache
def _ran(sections: str) -> Run:
    return run(small_experiment(**json.loads(sections)), Path(tempfile.mkdtemp(dir=WRITTEN)))


def ran(**sections: Any) -> Run:
    """A run of a small experiment that tests only read: carried out once by a process."""
    return _ran(json.dumps(sections, sort_keys=True, default=str))  # paths are text


def with_method(name: str, **sections: Any) -> dict[str, Any]:
    """Sections of a small experiment with that method, and with what it needs."""
    needs = {"method": {"name": name}, **NEEDS.get(name, {})}
    return {key: {**needs.get(key, {}), **sections.get(key, {})} for key in {**needs, **sections}}


def grid_in_process(content: Mapping[str, Any], out: Path) -> Path:
    """The folder of a grid whose runs this process has carried out: starting Ray takes seconds."""

    def in_process(plan: SweepPlan, path: Path, begin: Callable[[], None], *_: Any) -> Errors:
        begin()
        errors = {}
        for number in range(plan.count):
            trial = plan.trial_of({"run": number})
            try:
                run(trial.experiment, out / f"runs-{number}")
            except FedsimError as error:
                errors[trial.path] = str(error)
            (made,) = out.glob(f"runs-{number}/*/[!.]*")
            trial.path.parent.mkdir(parents=True, exist_ok=True)
            made.rename(trial.path)
            shutil.rmtree(out / f"runs-{number}")
        return errors

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "run_trials", in_process)
        return grid(content, out=out).path


def interrupt(after: int) -> Callable[[Progress], None]:
    """What progress is told to, to interrupt a run after a round as Ctrl-C does."""

    def stop(event: Progress) -> None:
        if isinstance(event, dict) and event["round"] == after:
            raise KeyboardInterrupt

    return stop


def interrupted(experiment: Experiment, out: Path, after: int) -> Path:
    """The folder of a run that was interrupted after a round."""
    with pytest.raises(KeyboardInterrupt):
        run(experiment, out, interrupt(after))
    (folder,) = out.glob("*/[!.]*")
    return folder


class _Learned(Exception):
    """A run has learned enough."""


def learns(experiment: Experiment, out: Path, metric: str, least: float) -> bool:
    """Whether the metric is above `least` in two rounds in a row; the run ends with them."""
    above = 0

    def watch(event: Progress) -> None:
        nonlocal above
        if isinstance(event, dict):
            above = above + 1 if event[metric] > least else 0
            if above == 2:
                raise _Learned

    with suppress(_Learned):
        run(experiment, out, watch)
        return False
    return True


def run_example(documented: Callable[..., Any], **known: Any) -> None:
    """Run the example of a docstring, which may use the names that are known."""
    (test,) = doctest.DocTestFinder(recurse=False).find(documented, globs=known)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


class Driven(Federation):
    """A federation whose rounds a test carries out itself, through its runner."""

    def __init__(self, *of_runner: Any, **settings: Any) -> None:
        self.runner = RoundRunner(*of_runner, **settings)
        super().__init__(self.runner)


def federation(experiment: Experiment) -> Driven:
    dataset, splits, spec = prepare(experiment)
    engine = LocalEngine(experiment.engine, spec, dataset, splits)
    return Driven(spec, dataset, splits, engine)


def server_states(experiment: Experiment) -> list[Any]:
    """The server's state before the first round and after each."""
    runner = federation(experiment).runner
    states: list[Any] = [initial_state(runner, experiment)]
    for t in range(1, experiment.train.rounds + 1):
        states.append(one_round(runner, experiment, states[-1], t))
    return states


@contextmanager
def forked() -> Iterator[None]:
    """Within, a Ray that is started forks its workers, which find the modules of the tests."""
    with (
        forked_workers.fork_server("") as fork,  # that of this process; see conftest.py
        environment({**HERE["env_vars"], forked_workers.SOCKET: fork}),
        lean_start(forked_workers.__file__),
    ):
        yield


def unused_address() -> str:
    """An address where nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def private_ray(**resources: int) -> Iterator[None]:
    """A Ray of the test's own, whose workers find the modules of the tests."""
    with forked():
        ray.init(
            **resources,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _system_config=CONFIG,
        )
    yield
    ray.shutdown()


def change_manifest(folder: Path, *removed: str, **facts: Any) -> None:
    """Edit a manifest as its author would, who knows that its checksum has to go then."""
    path = folder / "manifest.json"
    manifest = {**json.loads(path.read_text()), **facts}
    for name in ("checksum", *removed):
        manifest.pop(name, None)
    path.write_text(json.dumps(manifest))


def pickles(folder: Path) -> list[Path]:
    """The files of a folder that hold a pickle, also as text in base 64."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if path.suffix == ".pkl" or _holds_a_pickle(path.read_bytes())]


def _holds_a_pickle(content: bytes) -> bool:
    if re.search(rb"gA[JOSV][A-Za-z0-9+/]{20}", content):
        return True
    try:
        return content[:1] == b"\x80" and bool(list(pickletools.genops(content)))
    except ValueError:
        return False
