"""TensorBoard, MLflow and Weights & Biases, for experiments that name them under `loggers`.

They are told what the run's own tables hold, and no run depends on them: a logger that fails is
left out from then on, with a line for the user.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from fedsim.config.file import flat
from fedsim.experiment import Experiment
from fedsim.results.folder import RunFolder, alone
from fedsim.support.extras import require

# How MLflow behaves unless the user has said otherwise: a server that is away costs a run seconds
# and not minutes, and nobody is told of it who was not named.
_MLFLOW_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}


class Logger(Protocol):
    """What a logger does; each of these may raise whatever it likes."""

    def begin(self, folder: RunFolder) -> None:
        """Open the log of a run, or go on with it."""

    def record(self, row: Mapping[str, Any]) -> None:
        """Log a round. After a crash or on resumption, some rounds come once more."""

    def end(self, status: str, result_hash: str | None) -> None:
        """Close the log: the run is `finished`, `interrupted` or `failed`."""


def check_loggers(experiment: Experiment) -> None:
    """Raise NotInstalled if the experiment's loggers need a package that is missing."""
    for name in experiment.loggers:
        require(_PACKAGES[name], f"loggers: {name}")


def environment() -> dict[str, str]:
    """The variables that loggers go by, for a driver in another process.

    They may hold a password, and so reach it as an argument: Ray logs the variables that it sets.
    """
    return {
        name: value for name, value in os.environ.items() if name.startswith(("MLFLOW_", "WANDB_"))
    }


def with_loggers(
    folder: RunFolder, events: Iterator[dict[str, Any] | str]
) -> Generator[dict[str, Any] | str]:
    """The events of a run, whose records are told to the loggers that its experiment names.

    Yields:
        The events, and a line for each logger that failed.
    """
    loggers = {name: _LOGGERS[name]() for name in folder.experiment.loggers}

    def tell(what: str, *about: Any) -> list[str]:
        lines = []
        for name, logger in list(loggers.items()):
            try:
                getattr(logger, what)(*about)
            except Exception as error:  # of a server, a disk, a package
                del loggers[name]
                cause = str(error).partition("\n")[0] or type(error).__name__
                cause = re.sub(r"//[^/\s]+@", "//", cause)  # a URL may hold a password
                lines.append(f"{name} failed; the run goes on without this logger: {cause}")
        return lines

    yield from tell("begin", folder)
    try:
        for event in events:
            if isinstance(event, dict):
                yield from tell("record", event)
            yield event
    except BaseException as error:
        status = "interrupted" if isinstance(error, GeneratorExit) else "failed"
        for line in tell("end", status, None):
            logging.getLogger(__name__).info(line)
        raise
    yield from tell("end", "finished", folder.manifest["result_hash"])


class TensorBoard:
    """Writes event files to `tensorboard/` in the run's folder."""

    def begin(self, folder: RunFolder) -> None:
        # Not SummaryWriter: its thread would hide that a disk is full, and its queue then block.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.summary import hparams

        path = folder.path / "tensorboard"
        known = path.exists()
        path.mkdir(exist_ok=True)
        # A file is named by the second, and one of that name would be written over.
        self._writer = EventsWriter(str(path / "events"), f".{time.time_ns()}")
        self._last = 0
        _, self._parameters, self._success = hparams(parameters(folder.experiment), {})
        if not known:
            self._write(0, summary=self._parameters)

    def record(self, row: Mapping[str, Any]) -> None:
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        t = row["round"]
        if t != self._last + 1:  # what is there of this round and later ones is void
            self._write(t, session_log=SessionLog(status=SessionLog.START))
        self._last = t
        values = [Summary.Value(tag=k, simple_value=v) for k, v in metrics(row).items()]
        self._write(t, summary=Summary(value=values))

    def end(self, status: str, result_hash: str | None) -> None:
        if status == "finished":
            self._write(self._last, summary=self._success)
        self._writer.close()

    def _write(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write_event(Event(wall_time=time.time(), step=step, **content))
        self._writer.flush()


class MLflow:
    """Logs to the server or database of MLFLOW_TRACKING_URI, or else to `mlflow.db` among runs."""

    def begin(self, folder: RunFolder) -> None:
        for name, value in _MLFLOW_DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        out = _among(folder.path)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{out / 'mlflow.db'}"
        with alone(out):  # several processes that make one database spoil it for each other
            self._client = client = MlflowClient(uri)
        self._last = 0
        if "mlflow_run" in folder.manifest:
            self._run = folder.manifest["mlflow_run"]
            client.update_run(self._run, status="RUNNING")
            logged = client.get_metric_history(self._run, "total_bytes_up")
            self._last = max((metric.step for metric in logged), default=0)
            return
        name = folder.experiment.name
        try:  # to make it first, because another run may be making it just now
            id = client.create_experiment(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            id = client.get_experiment_by_name(name).experiment_id
        run = client.create_run(
            id,
            run_name=str(folder.path.relative_to(out)),
            tags={"fedsim_version": folder.manifest["packages"]["fedsim"]},
        )
        self._run = run.info.run_id
        given = parameters(folder.experiment)
        client.log_batch(self._run, params=[Param(k, str(v)) for k, v in given.items()])
        folder.update(mlflow_run=self._run)

    def record(self, row: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        t = row["round"]
        if t <= self._last:  # the same once more; MLflow cannot take a metric back
            return
        now = int(time.time() * 1000)
        values = [Metric(name, value, now, t) for name, value in metrics(row).items()]
        self._client.log_batch(self._run, metrics=values)
        self._last = t

    def end(self, status: str, result_hash: str | None) -> None:
        if result_hash is not None:
            self._client.set_tag(self._run, "result_hash", result_hash)
        words = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
        self._client.set_terminated(self._run, words[status])


class Wandb:
    """Logs to Weights & Biases, or with WANDB_MODE=offline to files, in `wandb/` among runs.

    A project is named as the experiment, a run as its folder below that of all runs. WANDB_DIR,
    WANDB_PROJECT, WANDB_ENTITY and other variables of its own are heeded.
    """

    def begin(self, folder: RunFolder) -> None:
        import wandb

        self._last, out = 0, _among(folder.path)
        known = folder.manifest.get("wandb_run")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or folder.experiment.name,
            name=str(folder.path.relative_to(out)),
            id=known or secrets.token_hex(4),
            resume="allow",
            # Not into the run's folder: it makes links there.
            dir=os.environ.get("WANDB_DIR") or out,
            config=parameters(folder.experiment),
            reinit="create_new",  # beside a run of the user's own
            settings=wandb.Settings(silent=True, console="off", save_code=False),
        )
        if known is None:
            folder.update(wandb_run=self._run.id)

    def record(self, row: Mapping[str, Any]) -> None:
        t = row["round"]
        if t > self._last:  # else the same once more; wandb takes steps in ascending order alone
            self._run.log(metrics(row), step=t)
            self._last = t

    def end(self, status: str, result_hash: str | None) -> None:
        self._run.summary["status"] = status
        if result_hash is not None:
            self._run.summary["result_hash"] = result_hash
        self._run.finish(exit_code=0 if status == "finished" else 1)


_LOGGERS: dict[str, type[Logger]] = {"mlflow": MLflow, "tensorboard": TensorBoard, "wandb": Wandb}
_PACKAGES = {"mlflow": "mlflow", "tensorboard": "tensorboardX", "wandb": "wandb"}


def _among(path: Path) -> Path:
    """The folder of all runs, which one at `path` is below."""
    # A run of a grid or search lies within the folder of that, which has these files, too.
    files = ("experiment.yaml", "manifest.json")
    at = (path, *path.parents)
    return [above for above in at if all((above / f).exists() for f in files)][-1].parents[1]


def metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a round's record, but for the round itself."""
    numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k != "round"}
    return {k: float(v) for k, v in numbers.items()}


def parameters(experiment: Experiment) -> dict[str, str | float | bool]:
    return {
        key: value if isinstance(value, str | float | int) else json.dumps(value)
        for key, value in flat(experiment.model_dump(mode="json")).items()
    }
