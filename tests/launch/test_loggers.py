"""TensorBoard, MLflow and W&B are told what the tables hold, and a run does not depend on them."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import mlflow
import pandas as pd
import pytest
import ray
from mlflow import MlflowClient
from mlflow.entities import Run as MlflowRun
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

import fedsim
from experiments import small_experiment
from fedsim import Experiment, Run
from fedsim.cli import main
from fedsim.cluster import connection
from fedsim.cluster.placement import Node
from fedsim.errors import ExperimentError
from fedsim.experiment import LOGGERS
from fedsim.launch import loggers
from fedsim.launch.loggers import with_loggers
from fedsim.launch.run import Driver
from fedsim.results.folder import RunFolder
from fedsim.sweep import trials

FACTS = {"clients_per_step": 1, "clients": 10}  # that a manifest cannot do without
BOTH = ("tensorboard", "mlflow")
ROUNDS = 6


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow as it is without any settings of the user's; what a run sets ends with the test."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, value in loggers._MLFLOW_DEFAULTS.items():
        monkeypatch.setenv(name, value)


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
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        return fedsim.run(experiment(*BOTH), out)


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


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: a restart at a step hides all that was there from this step on."""
    shown: dict[str, list[tuple[int, float]]] = {}
    for event in events(run):
        if event.session_log.status == SessionLog.START:
            for name, points in shown.items():
                shown[name] = [p for p in points if p[0] < event.step]
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                shown.setdefault(value.tag, []).append((event.step, value.simple_value))
    return shown


def in_mlflow(run: Run, out: Path) -> tuple[MlflowClient, MlflowRun]:
    client = MlflowClient(f"sqlite:///{out / 'mlflow.db'}")
    return client, client.get_run(run.manifest["mlflow_run"])


def history(run: Run, out: Path) -> dict[str, list[tuple[int, float]]]:
    client, found = in_mlflow(run, out)
    points = {
        name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics
    }
    return {name: [(p.step, p.value) for p in values] for name, values in points.items()}


def columns(rounds: pd.DataFrame) -> dict[str, list[tuple[int, float]]]:
    """The table of rounds, in the same shape."""
    numbers = rounds.select_dtypes("number").set_index("round")
    return {name: list(numbers[name].dropna().items()) for name in numbers}


def alike(
    found: dict[str, list[tuple[int, float]]], expected: dict[str, list[tuple[int, float]]]
) -> bool:
    """The same steps, and the same values but for the seconds of rounds that were made again."""
    names = found.keys() - {"seconds"}
    return (
        found.keys() == expected.keys()
        and {n: [t for t, _ in p] for n, p in found.items()}
        == {n: [t for t, _ in p] for n, p in expected.items()}
        and all(
            [v for _, v in found[n]] == pytest.approx([v for _, v in expected[n]]) for n in names
        )
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


def test_tensorboard_shows_the_table_of_rounds(logged: Run) -> None:
    assert [t for t, _ in scalars(logged.path)["accuracy"]] == [2, 4, 6]
    assert alike(scalars(logged.path), columns(logged.rounds))


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


def test_mlflow_has_the_table_of_rounds(logged: Run, out: Path) -> None:
    assert alike(history(logged, out), columns(logged.rounds))


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


def test_runs_of_one_experiment_lie_together_in_mlflow(logged: Run, out: Path) -> None:
    other = fedsim.run(experiment("mlflow", train={"rounds": 1}), out)
    _, first = in_mlflow(logged, out)
    _, second = in_mlflow(other, out)
    assert first.info.experiment_id == second.info.experiment_id
    assert first.info.run_id != second.info.run_id


def test_a_run_of_a_grid_is_named_with_it(logged: Run, out: Path) -> None:
    grid = out / "small" / "grid"
    folder = RunFolder.create(experiment("mlflow"), grid / "cells" / "FedAvg" / "seed-1", FACTS)
    for name in ("experiment.yaml", "manifest.json"):
        (grid / name).touch()
    folder.update(result_hash="0")
    assert list(with_loggers(folder, iter([]))) == []
    _, found = in_mlflow(fedsim.load(folder.path), out)
    assert found.info.run_name == "small/grid/cells/FedAvg/seed-1"


def test_the_database_is_opened_by_one_process_at_a_time(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials of a grid start together, and several that make its tables spoil them."""
    alone = []

    def opened(uri: str) -> MlflowClient:
        other = os.open(out, os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            alone.append(uri)
        finally:
            os.close(other)
        return MlflowClient(uri)

    monkeypatch.setattr(mlflow, "MlflowClient", opened)
    folder = RunFolder.create(
        experiment("mlflow"), out / "small" / "alone", {**FACTS, "result_hash": "0"}
    )
    assert list(with_loggers(folder, iter([]))) == []
    assert alone == [f"sqlite:///{out / 'mlflow.db'}"]


def test_the_tracking_uri_of_the_environment_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mine' / 'mlflow.db'}")
    run = fedsim.run(experiment("mlflow", train={"rounds": 1}), tmp_path / "runs")
    assert [t for t, _ in history(run, tmp_path / "mine")["loss"]] == [1]
    assert not (tmp_path / "runs" / "mlflow.db").exists()


# runs that go on


def interrupt(after: int) -> Callable[[object], None]:
    def stop(event: object) -> None:
        if isinstance(event, dict) and event["round"] == after:
            raise KeyboardInterrupt

    return stop


def test_a_resumed_run_goes_on_in_its_logs(plain: Run, out: Path) -> None:
    started: list[RunFolder] = []
    with pytest.raises(KeyboardInterrupt):
        fedsim.run(experiment(*BOTH), out, interrupt(after=5), started.append)
    broken = fedsim.load(started[0].path)
    assert [t for t, _ in history(broken, out)["train_loss"]] == [1, 2, 3, 4, 5]
    assert [t for t, _ in scalars(broken.path)["train_loss"]] == [1, 2, 3, 4, 5]
    assert in_mlflow(broken, out)[1].info.status == "KILLED"
    run = fedsim.resume(broken.path)  # from round 4
    assert run.manifest["mlflow_run"] == broken.manifest["mlflow_run"]
    assert run.result_hash == plain.result_hash
    assert alike(history(run, out), columns(run.rounds))
    assert alike(scalars(run.path), columns(run.rounds))
    starts = [v.tag for e in events(run.path) for v in e.summary.value if "start_info" in v.tag]
    assert len(starts) == 1
    assert in_mlflow(run, out)[1].info.status == "FINISHED"


def record(t: int) -> dict[str, Any]:
    return {"round": t, "loss": 1 / t, "total_bytes_up": t, "phase": "warm-up"}


def test_a_run_that_falls_back_logs_no_round_twice(out: Path) -> None:
    folder = RunFolder.create(experiment(*BOTH), out / "small" / "falling", FACTS)
    folder.update(result_hash="0")
    told = [*map(record, (1, 2, 3, 4)), "falling back", *map(record, (2, 3, 4, 5))]
    assert list(with_loggers(folder, iter(told))) == told
    expected = {
        "loss": [(t, 1 / t) for t in range(1, 6)],
        "total_bytes_up": [(t, t) for t in range(1, 6)],
    }
    assert alike(scalars(folder.path), expected)
    assert alike(history(fedsim.load(folder.path), out), expected)


def test_a_run_that_fails_is_marked_so(out: Path) -> None:
    def failing() -> Iterator[dict[str, Any]]:
        yield record(1)
        raise ValueError("no more")

    folder = RunFolder.create(experiment("mlflow"), out / "small" / "failing", FACTS)
    with pytest.raises(ValueError, match="no more"):
        list(with_loggers(folder, failing()))
    assert in_mlflow(fedsim.load(folder.path), out)[1].info.status == "FAILED"


@pytest.mark.usefixtures("own_ray")
class TestOnRay:
    def test_a_new_driver_goes_on_in_the_logs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Set after Ray was started, so that only the driver's arguments can tell it.
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
        method = {"name": "faults:DyingDriver", "marker": str(tmp_path / "marker")}
        lines: list[object] = []
        disturbed = experiment(
            *BOTH, method=method, train={"rounds": 8}, engine={"kind": "ray", "actors": 1}
        )
        run = fedsim.run(disturbed, tmp_path / "runs", lines.append)
        assert "the driver was lost; a new one continues from the last checkpoint" in lines
        assert len(run.rounds) == 8
        assert alike(scalars(run.path), columns(run.rounds))
        assert alike(history(run, tmp_path), columns(run.rounds))


def test_drivers_are_told_where_mlflow_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    told = loggers.environment()
    assert (
        told.items() >= {"MLFLOW_TRACKING_PASSWORD": "secret", **loggers._MLFLOW_DEFAULTS}.items()
    )
    assert all(name.startswith(("MLFLOW_", "WANDB_")) for name in told)
    monkeypatch.delenv("MLFLOW_TRACKING_PASSWORD")
    spec: Any = None
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Driver(Path(), spec, 1, [], told, str(tmp_path))
    assert os.environ["MLFLOW_TRACKING_PASSWORD"] == "secret"


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


def closed_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_a_server_that_is_away_does_not_stop_a_run(
    plain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"127.0.0.1:{closed_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{address}")
    told: list[Any] = []
    run = fedsim.run(experiment(*BOTH), tmp_path, told.append)
    (line,) = (event for event in told if isinstance(event, str))
    assert line.startswith("mlflow failed; the run goes on without this logger: ")
    assert address in line
    assert line in (run.path / "log.txt").read_text()
    assert run.result_hash == plain.result_hash
    assert alike(scalars(run.path), columns(run.rounds))
    assert "mlflow_run" not in run.manifest


@pytest.mark.parametrize("user", ["me:secret@", "me:sec@ret@", ""])
def test_a_complaint_holds_no_password(
    out: Path, monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    def fail(*_: object) -> None:
        raise ConnectionError(f"404 at https://{user}tracking:5000/api: ask me@tracking")

    monkeypatch.setattr(loggers.MLflow, "begin", fail)
    folder = RunFolder.create(experiment("mlflow"), out / "small" / f"user-{len(user)}", FACTS)
    line = next(with_loggers(folder, iter([])))
    assert line == (
        "mlflow failed; the run goes on without this logger: "
        "404 at https://tracking:5000/api: ask me@tracking"
    )


def test_a_logger_that_fails_on_the_way_is_left_out(
    out: Path, plain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    write = EventsWriter.write_event

    def write_some(self: EventsWriter, event: Event) -> None:
        written.append(event)
        if event.step == 3:
            raise OSError(28, "No space left on device")
        write(self, event)

    monkeypatch.setattr(EventsWriter, "write_event", write_some)
    told: list[Any] = []
    run = fedsim.run(experiment(*BOTH), out, told.append)
    assert [event for event in told if isinstance(event, str)] == [
        "tensorboard failed; the run goes on without this logger: "
        "[Errno 28] No space left on device"
    ]
    assert [event.step for event in written][-1] == 3
    assert run.result_hash == plain.result_hash
    assert alike(history(run, out), columns(run.rounds))


def test_a_failure_while_a_run_breaks_off_is_logged(
    out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ConnectionError

    monkeypatch.setattr(loggers.TensorBoard, "end", fail)
    folder = RunFolder.create(experiment("tensorboard"), out / "small" / "closing", FACTS)
    passing = with_loggers(folder, iter([record(1), record(2)]))
    next(passing)
    with caplog.at_level(logging.INFO, "fedsim"):
        passing.close()
    assert caplog.messages == [
        "tensorboard failed; the run goes on without this logger: ConnectionError"
    ]


# Weights & Biases: a stand-in, because the package is large and its server is not ours


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

    def history(self) -> dict[str, list[tuple[int, float]]]:
        found: dict[str, list[tuple[int, float]]] = {}
        for step, values in self.logged:
            for name, value in values.items():
                found.setdefault(name, []).append((step, value))
        return found


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[WandbRun]:
    """All that were begun."""
    begun: list[WandbRun] = []

    def init(**given: Any) -> WandbRun:
        begun.append(WandbRun(**given))
        return begun[-1]

    module: Any = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.init, module.Settings = init, dict
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    return begun


class TestWandb:
    def test_it_is_told_what_the_tables_hold(
        self, out: Path, plain: Run, wandb_runs: list[WandbRun]
    ) -> None:
        run = fedsim.run(experiment("wandb"), out)
        (logged,) = wandb_runs
        assert run.result_hash == plain.result_hash
        assert alike(logged.history(), columns(run.rounds))
        assert logged.summary == {"status": "finished", "result_hash": run.result_hash}
        assert logged.exit_code == 0
        assert logged.id == run.manifest["wandb_run"]
        given = logged.given
        assert (given["project"], given["dir"]) == ("small", out)
        assert given["name"] == f"small/{run.path.name}"
        assert given["config"]["train.optimizer.lr"] == 0.1

    def test_it_goes_on_with_a_run_that_broke_off(
        self, out: Path, wandb_runs: list[WandbRun]
    ) -> None:
        started: list[RunFolder] = []
        with pytest.raises(KeyboardInterrupt):
            fedsim.run(experiment("wandb"), out, interrupt(after=5), started.append)
        run = fedsim.resume(started[0].path)
        first, second = wandb_runs
        assert first.id == second.id
        assert first.given["resume"] == second.given["resume"] == "allow"
        assert (first.exit_code, second.exit_code) == (1, 0)
        assert first.summary == {"status": "interrupted"}
        whole = second.history()
        assert [t for t, _ in whole["train_loss"]] == [5, 6]
        assert second.summary["result_hash"] == run.result_hash

    def test_it_is_told_no_round_twice(self, out: Path, wandb_runs: list[WandbRun]) -> None:
        folder = RunFolder.create(experiment("wandb"), out / "small" / "again", FACTS)
        folder.update(result_hash="0")
        told = [*map(record, (1, 2, 3)), "falling back", *map(record, (2, 3, 4))]
        assert list(with_loggers(folder, iter(told))) == told
        assert [step for step, _ in wandb_runs[0].logged] == [1, 2, 3, 4]

    def test_its_own_variables_are_heeded(
        self,
        out: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        wandb_runs: list[WandbRun],
    ) -> None:
        monkeypatch.setenv("WANDB_PROJECT", "ours")
        monkeypatch.setenv("WANDB_DIR", str(tmp_path))
        monkeypatch.setenv("WANDB_API_KEY", "secret")
        assert loggers.environment()["WANDB_API_KEY"] == "secret"  # for drivers elsewhere
        folder = RunFolder.create(experiment("wandb"), out / "small" / "variables", FACTS)
        folder.update(result_hash="0")
        assert list(with_loggers(folder, iter([record(1)]))) == [record(1)]
        given = wandb_runs[0].given
        assert (given["project"], given["dir"]) == ("ours", str(tmp_path))

    def test_a_run_does_not_depend_on_it(
        self, out: Path, monkeypatch: pytest.MonkeyPatch, wandb_runs: list[WandbRun]
    ) -> None:
        def fail(**_: object) -> None:
            raise RuntimeError("No API key configured. Use `wandb login` to log in.")

        monkeypatch.setattr(sys.modules["wandb"], "init", fail)
        folder = RunFolder.create(experiment("wandb"), out / "small" / "no-key", FACTS)
        assert next(with_loggers(folder, iter([]))) == (
            "wandb failed; the run goes on without this logger: "
            "No API key configured. Use `wandb login` to log in."
        )


# what is refused


def test_mlflow_that_is_not_installed_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(experiment("mlflow").to_yaml())
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setattr(sys, "argv", ["fedsim", "run", "small.yaml"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "error: loggers: mlflow needs mlflow-skinny, which is not installed: "
        "pip install 'fedsim[mlflow]'\n"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["small.yaml"]


def test_mlflow_is_imported_by_runs_that_name_it_alone() -> None:
    code = "import sys, fedsim.cli; assert 'mlflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["tensorbord"], "loggers: unknown logger 'tensorbord'; did you mean 'tensorboard'?"),
        (["aim"], "loggers: unknown logger 'aim'; known: mlflow, tensorboard, wandb"),
        (["mlflow", "mlflow"], "loggers: 'mlflow' is named twice"),
        ("mlflow", "loggers: must be a list, not 'mlflow'"),
    ],
)
def test_names_that_do_not_fit_are_refused(names: object, message: str) -> None:
    with pytest.raises(ExperimentError) as refused:
        small_experiment(loggers=names)
    assert str(refused.value) == f"experiment: {message}"


def test_every_name_has_its_logger() -> None:
    assert tuple(sorted(loggers._LOGGERS)) == LOGGERS
    assert small_experiment().loggers == ()
