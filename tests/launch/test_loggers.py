"""TensorBoard, MLflow and W&B are told what the tables hold, and a run does not depend on them."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import ray
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

import fedsim
from experiments import Later, interrupt, small_experiment, unused_address
from fedsim import Experiment, Run
from fedsim.cluster import connection
from fedsim.cluster.placement import Node
from fedsim.experiment import LOGGERS
from fedsim.launch import loggers
from fedsim.launch.loggers import with_loggers
from fedsim.results.folder import RunFolder
from fedsim.sweep import trials

mlflow: Any = Later("mlflow")

FACTS = {"clients_per_step": 1, "clients": 10}  # that a manifest cannot do without
ROUNDS = 6

Points = dict[str, list[tuple[int, float]]]  # steps and values, by name


class WandbRun:
    """What the logger asks of a run of wandb's."""

    def __init__(self, **given: Any) -> None:
        self.id, self.given, self.summary = given["id"], given, {}
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.exit_code: int | None = None

    def log(self, values: dict[str, float], step: int) -> None:
        if self.logged and step <= self.logged[-1][0]:
            raise ValueError("steps must ascend")
        self.logged.append((step, values))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture(scope="module", autouse=True)
def begun() -> Iterator[list[WandbRun]]:
    """All runs that were begun of a stand-in: wandb is large, and its server is not ours."""
    begun: list[WandbRun] = []

    def init(**given: Any) -> WandbRun:
        begun.append(WandbRun(**given))
        return begun[-1]

    module: Any = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.init, module.Settings = init, dict
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", module)
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        for name, value in loggers._MLFLOW_DEFAULTS.items():  # what a run sets ends with the tests
            patch.setenv(name, value)
        yield begun


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs lie, in a folder where somebody has an experiment file."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "experiment.yaml").touch()
    return folder / "runs"


def experiment(*names: str, **sections: Any) -> Experiment:
    """Six rounds, of which every second is evaluated and can be gone on from."""
    return small_experiment(
        **{
            "train": {"rounds": ROUNDS},
            "evaluate": {"every": 2},
            "checkpoint": {"every": 2},
            "loggers": list(names),
            **sections,
        }
    )


@pytest.fixture(scope="module")
def plain(out: Path) -> Run:
    return fedsim.run(experiment(), out)


@pytest.fixture(scope="module")
def logged(out: Path) -> Run:
    return fedsim.run(experiment(*LOGGERS), out)


def made(path: Path, *names: str) -> RunFolder:
    """The folder of a run that has ended."""
    return RunFolder.create(experiment(*names), path, {**FACTS, "result_hash": "0"})


def events(run: Path) -> list[Event]:
    """What TensorBoard reads of a run: of event files one after the other, all their records."""
    found = []
    for file in sorted((run / "tensorboard").iterdir()):
        content, at = file.read_bytes(), 0
        while at < len(content):
            (size,) = struct.unpack_from("<Q", content, at)
            found.append(Event.FromString(content[at + 12 : at + 12 + size]))
            at += 12 + size + 4  # the record between its length and a checksum each
    return found


def in_tensorboard(run: Path) -> Points:
    """What TensorBoard shows: a restart at a step hides all that was there from this step on."""
    shown: Points = {}
    for event in events(run):
        if event.session_log.status == SessionLog.START:
            for name, points in shown.items():
                shown[name] = [p for p in points if p[0] < event.step]
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                shown.setdefault(value.tag, []).append((event.step, value.simple_value))
    return shown


def in_mlflow(folder: RunFolder | Run, out: Path) -> tuple[Any, Any]:
    client = mlflow.MlflowClient(f"sqlite:///{out / 'mlflow.db'}")
    return client, client.get_run(folder.manifest["mlflow_run"])


def told(logger: str, folder: RunFolder | Run, out: Path, begun: list[WandbRun]) -> Points:
    """What a logger knows of a run."""
    if logger == "tensorboard":
        return in_tensorboard(folder.path)
    if logger == "mlflow":
        client, run = in_mlflow(folder, out)
        histories = {n: client.get_metric_history(run.info.run_id, n) for n in run.data.metrics}
        return {name: [(p.step, p.value) for p in points] for name, points in histories.items()}
    found: Points = {}
    for run in begun:
        for step, values in run.logged if run.id == folder.manifest["wandb_run"] else ():
            for name, value in values.items():
                if step > max((t for t, _ in found.get(name, ())), default=0):
                    found.setdefault(name, []).append((step, value))
    return found


def columns(rounds: pd.DataFrame) -> Points:
    """The table of rounds, in the same shape."""
    numbers = rounds.select_dtypes("number").set_index("round")
    return {name: list(numbers[name].dropna().items()) for name in numbers}


def alike(found: Points, expected: Points) -> bool:
    """The same steps, and the same values but for the seconds of rounds that were made again."""

    def steps(points: Points) -> dict[str, list[int]]:
        return {name: [t for t, _ in of] for name, of in points.items()}

    return steps(found) == steps(expected) and all(
        [v for _, v in found[name]] == pytest.approx([v for _, v in expected[name]])
        for name in found.keys() - {"seconds"}
    )


# what is logged


def test_loggers_change_nothing(plain: Run, logged: Run) -> None:
    assert logged.result_hash == plain.result_hash
    pd.testing.assert_frame_equal(
        logged.rounds.drop(columns="seconds"), plain.rounds.drop(columns="seconds")
    )
    assert {p.name for p in logged.path.iterdir()} - {p.name for p in plain.path.iterdir()} == {
        "tensorboard"
    }


@pytest.mark.parametrize("logger", LOGGERS)
def test_each_is_told_what_the_table_of_rounds_holds(
    logger: str, logged: Run, out: Path, begun: list[WandbRun]
) -> None:
    found = told(logger, logged, out, begun)
    assert [t for t, _ in found["accuracy"]] == [2, 4, 6]
    assert alike(found, columns(logged.rounds))


def test_tensorboard_knows_the_parameters(logged: Run) -> None:
    first, last = (
        [v for v in event.summary.value if v.metadata.plugin_data.plugin_name == "hparams"]
        for event in (events(logged.path)[1], events(logged.path)[-1])
    )
    (start,) = (HParamsPluginData.FromString(v.metadata.plugin_data.content) for v in first)
    given = start.session_start_info.hparams
    assert given["method.name"].string_value == "fedavg"
    assert given["partition.alpha"].number_value == 0.5
    assert given["evaluate.clients"].WhichOneof("kind") == "bool_value"
    assert given["model.hidden"].string_value == "[32]"
    (end,) = (HParamsPluginData.FromString(v.metadata.plugin_data.content) for v in last)
    assert end.HasField("session_end_info")


def test_mlflow_knows_the_run(logged: Run, out: Path) -> None:
    client, found = in_mlflow(logged, out)
    assert client.get_experiment(found.info.experiment_id).name == "small"
    assert out / found.info.run_name == logged.path
    assert found.info.status == "FINISHED"
    assert found.data.tags["result_hash"] == logged.result_hash
    assert found.data.tags["fedsim_version"] == logged.manifest["packages"]["fedsim"]
    given = found.data.params
    assert given.keys() == loggers.parameters(logged.experiment).keys()
    assert (given["method.name"], given["train.rounds"]) == ("fedavg", "6")


def test_wandb_knows_the_run(logged: Run, out: Path, begun: list[WandbRun]) -> None:
    (found,) = (run for run in begun if run.id == logged.manifest["wandb_run"])
    assert found.summary == {"status": "finished", "result_hash": logged.result_hash}
    assert found.exit_code == 0
    given = found.given
    assert (given["project"], given["dir"]) == ("small", out)
    assert given["name"] == f"small/{logged.path.name}"
    assert given["config"]["train.optimizer.lr"] == 0.1


def test_a_run_of_a_grid_is_named_with_it(logged: Run, out: Path) -> None:
    """And lies in MLflow beside the other runs of the experiment."""
    grid = out / "small" / "grid"
    folder = made(grid / "cells" / "FedAvg" / "seed-1", "mlflow")
    for name in ("experiment.yaml", "manifest.json"):
        (grid / name).touch()
    assert list(with_loggers(folder, iter([]))) == []
    _, found = in_mlflow(folder, out)
    assert found.info.run_name == "small/grid/cells/FedAvg/seed-1"
    _, other = in_mlflow(logged, out)
    assert found.info.experiment_id == other.info.experiment_id
    assert found.info.run_id != other.info.run_id


def test_the_database_is_opened_by_one_process_at_a_time(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials of a grid start together, and several that make its tables spoil them."""
    alone = []

    def opened(uri: str) -> Any:
        other = os.open(out, os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            alone.append(uri)
        finally:
            os.close(other)
        return client(uri)

    client = mlflow.MlflowClient
    monkeypatch.setattr("mlflow.MlflowClient", opened)
    assert list(with_loggers(made(out / "small" / "alone", "mlflow"), iter([]))) == []
    assert alone == [f"sqlite:///{out / 'mlflow.db'}"]


def record(t: int) -> dict[str, Any]:
    return {"round": t, "loss": 1 / t, "total_bytes_up": t, "phase": "warm-up"}


def test_variables_of_the_environment_count(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: list[WandbRun]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mine' / 'mlflow.db'}")
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    elsewhere = loggers.environment()  # for drivers
    assert elsewhere.items() >= {"WANDB_API_KEY": "secret", **loggers._MLFLOW_DEFAULTS}.items()
    assert all(name.startswith(("MLFLOW_", "WANDB_")) for name in elsewhere)
    folder = made(out / "small" / "variables", "mlflow", "wandb")
    assert list(with_loggers(folder, iter([record(1)]))) == [record(1)]
    assert told("mlflow", folder, tmp_path / "mine", begun)["loss"] == [(1, 1.0)]
    given = begun[-1].given
    assert (given["project"], given["dir"]) == ("ours", str(tmp_path))


# runs that go on


def test_a_resumed_run_goes_on_in_its_logs(plain: Run, out: Path, begun: list[WandbRun]) -> None:
    started: list[RunFolder] = []
    with pytest.raises(KeyboardInterrupt):
        fedsim.run(experiment(*LOGGERS), out, interrupt(after=5), started.append)
    broken = fedsim.load(started[0].path)
    for logger in LOGGERS:
        found = told(logger, broken, out, begun)
        assert [t for t, _ in found["train_loss"]] == [1, 2, 3, 4, 5]
    assert in_mlflow(broken, out)[1].info.status == "KILLED"
    run = fedsim.resume(broken.path)  # from round 4
    assert run.manifest["mlflow_run"] == broken.manifest["mlflow_run"]
    assert run.result_hash == plain.result_hash
    for logger in LOGGERS:
        assert alike(told(logger, run, out, begun), columns(run.rounds))
    starts = [v.tag for e in events(run.path) for v in e.summary.value if "start_info" in v.tag]
    assert len(starts) == 1
    assert in_mlflow(run, out)[1].info.status == "FINISHED"
    first, second = begun[-2:]
    assert first.id == second.id
    assert first.given["resume"] == second.given["resume"] == "allow"
    assert (first.exit_code, second.exit_code) == (1, 0)
    assert first.summary == {"status": "interrupted"}
    assert [t for t, _ in second.logged] == [5, 6]
    assert second.summary["result_hash"] == run.result_hash


def test_a_run_that_falls_back_logs_no_round_twice(out: Path, begun: list[WandbRun]) -> None:
    folder = made(out / "small" / "falling", *LOGGERS)
    events = [*map(record, (1, 2, 3, 4)), "falling back", *map(record, (2, 3, 4, 5))]
    assert list(with_loggers(folder, iter(events))) == events
    expected = {
        "loss": [(t, 1 / t) for t in range(1, 6)],
        "total_bytes_up": [(t, t) for t in range(1, 6)],
    }
    for logger in LOGGERS:
        assert alike(told(logger, folder, out, begun), expected)


def test_a_run_that_fails_is_marked_so(out: Path, begun: list[WandbRun]) -> None:
    def failing() -> Iterator[dict[str, Any]]:
        yield record(1)
        raise ValueError("no more")

    folder = made(out / "small" / "failing", "mlflow", "wandb")
    with pytest.raises(ValueError, match="no more"):
        list(with_loggers(folder, failing()))
    assert in_mlflow(folder, out)[1].info.status == "FAILED"
    assert begun[-1].summary == {"status": "failed"}
    assert begun[-1].exit_code == 1


def test_trials_are_told_where_mlflow_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {}

    def prepared(_: object, **parameters: Any) -> None:
        given.update(parameters)
        raise InterruptedError

    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    monkeypatch.setattr(trials, "connected", lambda *_: nullcontext())
    here = Node("here", 2, 0, math.inf)
    monkeypatch.setattr(trials, "cluster", lambda: ([here], here, None))
    monkeypatch.setattr(ray, "put", lambda what: what)
    monkeypatch.setattr(trials.tune, "with_parameters", prepared)
    trial = trials.Trial("one", tmp_path / "one", lambda: experiment("mlflow"))
    plan = trials.SweepPlan(lambda _: trial, [trial], 1)
    unused: Any = None
    with pytest.raises(InterruptedError):
        trials.run_trials(plan, tmp_path, unused, unused, unused, {})
    assert given["variables"] == loggers.environment()

    def drive(*_: object) -> None:
        assert os.environ["MLFLOW_TRACKING_PASSWORD"] == "secret"
        raise InterruptedError

    monkeypatch.delenv("MLFLOW_TRACKING_PASSWORD")
    monkeypatch.setattr(trials, "drive", drive)
    with pytest.raises(InterruptedError):
        trials._trial({}, **given)


@pytest.mark.parametrize("address", [None, "head:6379"])
def test_ray_does_not_get_to_see_mlflows_password(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(ray, "init", lambda **given: asked.update(given))
    monkeypatch.setattr(connection, "_cluster_address", lambda: address)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    monkeypatch.setenv("PYTHONPATH", "/home/me/code")
    with connection.connected(None):
        pass
    assert asked["address"] == (address or "local")
    assert list(asked.get("runtime_env", {}).get("env_vars", {})) == (
        ["FEDSIM_MODULES", "PYTHONPATH"] if address else []
    )
    assert "secret" not in str(asked)


# loggers that fail


def test_a_server_that_is_away_does_not_stop_a_run(
    plain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = unused_address()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{address}")
    events: list[Any] = []
    run = fedsim.run(experiment("tensorboard", "mlflow"), tmp_path, events.append)
    (line,) = (event for event in events if isinstance(event, str))
    assert line.startswith("mlflow failed; the run goes on without this logger: ")
    assert address in line
    assert line in (run.path / "log.txt").read_text()
    assert run.result_hash == plain.result_hash
    assert alike(in_tensorboard(run.path), columns(run.rounds))
    assert "mlflow_run" not in run.manifest


@pytest.mark.parametrize(
    ("logger", "error", "words"),
    [
        *(
            (
                "mlflow",
                ConnectionError(f"404 at https://{user}tracking:5000/api: ask me@tracking"),
                "404 at https://tracking:5000/api: ask me@tracking",  # and no password
            )
            for user in ("me:secret@", "me:sec@ret@", "")
        ),
        ("wandb", RuntimeError("No API key configured.\nLog in."), "No API key configured."),
        ("tensorboard", ValueError(), "ValueError"),
    ],
)
def test_a_logger_that_cannot_begin_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logger: str, error: Exception, words: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(loggers._LOGGERS[logger], "begin", fail)
    folder = made(tmp_path / "small" / "failing", logger)
    assert list(with_loggers(folder, iter([record(1)]))) == [
        f"{logger} failed; the run goes on without this logger: {words}",
        record(1),
    ]


def test_a_logger_that_fails_on_the_way_is_left_out(
    out: Path, monkeypatch: pytest.MonkeyPatch, begun: list[WandbRun]
) -> None:
    written = []
    write = EventsWriter.write_event

    def write_some(self: EventsWriter, event: Event) -> None:
        written.append(event)
        if event.step == 3:
            raise OSError(28, "No space left on device")
        write(self, event)

    monkeypatch.setattr(EventsWriter, "write_event", write_some)
    folder = made(out / "small" / "on-the-way", *LOGGERS)
    events = list(with_loggers(folder, map(record, range(1, 6))))
    assert [event for event in events if isinstance(event, str)] == [
        "tensorboard failed; the run goes on without this logger: "
        "[Errno 28] No space left on device"
    ]
    assert [event.step for event in written][-1] == 3
    for logger in ("mlflow", "wandb"):
        found = told(logger, folder, out, begun)["loss"]
        assert found == [(t, pytest.approx(1 / t)) for t in range(1, 6)]


def test_a_failure_while_a_run_breaks_off_is_logged(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ConnectionError

    monkeypatch.setattr(loggers.TensorBoard, "end", fail)
    folder = made(out / "small" / "closing", "tensorboard")
    passing = with_loggers(folder, iter([record(1), record(2)]))
    next(passing)
    lines = list[str]()
    monkeypatch.setattr(logging.getLogger(loggers.__name__), "info", lines.append)
    passing.close()
    assert lines == ["tensorboard failed; the run goes on without this logger: ConnectionError"]
