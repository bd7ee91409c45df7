"""Load a run from its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open

from fedsim.config.arguments import checked
from fedsim.errors import Damaged, RunFolderError
from fedsim.experiment import Experiment
from fedsim.explain.section import MODELS, OF_ALL
from fedsim.objectives import VALIDATION, Metric
from fedsim.results import display
from fedsim.results.folder import FINAL_WEIGHTS, RunFolder
from fedsim.results.tables import Table
from fedsim.support import atomic
from fedsim.support.words import client_name

# Of a run that has not begun, whose manifest names none yet.
_UNKNOWN = (Metric("accuracy", "accuracy", primary=True),)

# Columns of numbers, wherever they are; those of scores come with these prefixes.
_NUMBERS = {"seconds", "samples", "steps", "loss", "train_loss", "clients", "failed", "epsilon"}
_NUMBERS.add("explain_epsilon")
_PREFIXES = ("", "test_", "client_", "worst_client_", VALIDATION)
_CURVES = ("deletion", "insertion")  # of maps.parquet
# The columns of whole numbers and of words that each table has.
_KEYS: dict[str, tuple[list[str], list[str]]] = {
    "rounds": (["round", "total_bytes_up", "total_bytes_down"], []),
    "clients": (["round", "client"], []),
    "tasks": (["round", "client", "task"], []),
    "labels": (["client", "examples"], ["label"]),
    "confusion": (["round", "count"], ["target", "prediction"]),
    "adapters": (["round"], ["layer"]),
    "contributions": (["client"], ["how", "score"]),
    "explanations": (["round"], ["explainer"]),
    "maps": (["round", "input"], ["explainer", "model"]),
}

_METRICS = TypeAdapter(tuple[Metric, ...])

if TYPE_CHECKING:
    import pandas as pd


class Run(display.Displayed):
    """The results of a run. Loading it executes no code from its folder.

    Attributes:
        path: the run's folder.
        manifest: versions, hardware, hashes, status.
    """

    kind = "run"

    def __init__(self, folder: RunFolder) -> None:
        self.path: Path = folder.path
        self.manifest: dict[str, Any] = folder.manifest
        self._folder = folder

    @classmethod
    @checked
    def of(cls, given: Run | str | Path) -> Run:
        """A run as it is, or loaded from its folder, finished or not; see `open`."""
        return given if isinstance(given, Run) else cls.open(given)

    @classmethod
    @checked
    def open(cls, path: str | Path) -> Run:
        """Load a run from its folder, finished or not, or the latest below it (`runs/NAME`).

        Raises:
            RunFolderError: it is not the folder of a run, or was written by another version.
        """
        return cls(RunFolder.open(path))

    def __repr__(self) -> str:
        return f"<Run {str(self.path)!r}: {self.status}>"

    def client_name(self, client: int) -> str:
        """What a client is called in the data, such as "Kiel"; or else "client 3"."""
        return client_name(client, self.manifest.get("client_names", ()))

    @property
    def client_ids(self) -> list[int]:
        """The numbers of the clients that take part: all but those of `without`."""
        without = self.experiment.without
        absent = () if without is None else without.clients
        return [k for k in range(self.manifest["clients"]) if k not in absent]

    @property
    def status(self) -> str:
        """`running`, `finished`, `interrupted`, `failed` or `stopped` (early, in a search)."""
        return str(self.manifest["status"])

    @property
    def experiment(self) -> Experiment:
        """The experiment that was run; its user-defined components must be importable.

        Raises:
            RunFolderError: one of them is not, or the folder was made elsewhere; see `trust`.
        """
        return self._folder.experiment

    def trust(self) -> None:
        """Allow a run from elsewhere to import the code that its experiment names, from now on.

        Read that code first. Folders that you made yourself need no trust.
        """
        self._folder.trust()

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """The displayed scores of the run's objective, as listed in the manifest."""
        found = self.manifest.get("metrics")
        return _UNKNOWN if found is None else _METRICS.validate_python(found)

    @property
    def last_round(self) -> int:
        """The number of its last round: `train.rounds`, unless it was stopped early."""
        return self.manifest.get("stopped_after") or self.experiment.train.rounds

    @property
    def primary_metric(self) -> Metric:
        """The metric by which models are compared."""
        return next(metric for metric in self.metrics if metric.primary)

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row per round.

        Columns: `round`; the objective's scores on the central test set, such as `loss` and
        `accuracy` (NaN in rounds without evaluation), and with `evaluate.clients` the mean over
        clients `client_<score>` and the worst client's `worst_client_<score>`; `train_loss`;
        `clients` (how many took part) and `failed` (how many of these failed); `bytes_up` and
        `bytes_down` (traffic of all clients in the round), `total_bytes_up` and `total_bytes_down`
        (since the start); `seconds`; and the columns that the method and the `privacy` and
        `explain` sections add. In the last round also what a grid or a search has found out of
        clients' contributions.
        """
        rounds = self._table("rounds")
        for column, value in self.manifest.get("contributions", {}).items():
            rounds.loc[rounds.index[-1:], column] = value
        return rounds

    @cached_property
    def clients(self) -> pd.DataFrame:
        """One row per round and participating client.

        Columns: `round`, `client` (its number), `samples`, `loss` (training loss), `steps`,
        `seconds`, `bytes_up` and `bytes_down`, `one_off_up` and `one_off_down` (the part of these
        bytes that is sent only once), `error` (why it failed), with `evaluate.clients` the scores
        of its personal model, or else the global one, on its own test examples as `test_<score>`,
        and the columns that the method adds.
        """
        return self._table("clients")

    @cached_property
    def labels(self) -> pd.DataFrame:
        """Which labels each client holds.

        Columns: `client`, `label` (a class, or a bin of a regression's targets; a categorical over
        all of them) and `examples` (how many of any kind, at least one).
        """
        return self._table("labels")

    @property
    def contributions(self) -> pd.DataFrame:
        """What each client contributes to scores, as far as `fedsim.contributions` has found out.

        Columns: `client`, `value`, `how`, `score`, for samples `standard_error`, and those that
        estimates add. Empty if nobody has asked.
        """
        return self._table("contributions")

    @property
    def label_axis(self) -> str:
        """What `labels` are: `class`, or `target` in a regression; `label` if that is unknown."""
        columns = {metric.column for metric in self.metrics}
        return "class" if "accuracy" in columns else "target" if "r2" in columns else "label"

    @property
    def num_parameters(self) -> int | None:
        """The number of parameters of the global model; None before the run has finished.

        Frozen ones count, the running statistics of batch norm do not.

        Raises:
            RunFolderError: its weights cannot be read.
        """
        path = self.path / FINAL_WEIGHTS
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="np") as file:
                if counted := (file.metadata() or {}).get("parameters"):
                    return int(counted)
                # Of a rule model, the numbers in its arrays.
                names: list[str] = list(file.keys())
                shapes: list[list[int]] = [file.get_slice(name).get_shape() for name in names]
                return sum(map(math.prod, shapes))
        except (OSError, SafetensorError, ValueError) as error:
            raise RunFolderError(f"{path}: cannot be read: {error}") from error

    @cached_property
    def tasks(self) -> pd.DataFrame:
        """One row per evaluated round, client and task, in continual learning.

        Columns: `round`, `client`, `task`, `seen` (whether it has been or is being learnt),
        `classes` (how many it has), and the scores of the client's model for this task.
        """
        return self._table("tasks")

    @cached_property
    def confusion(self) -> pd.DataFrame:
        """The confusion matrix in long form, if `evaluate.metrics` includes `confusion`.

        Columns: `round`, `client` (whose model; NaN for the global one), `target` and `prediction`
        (class names), and `count`, the number of test examples. Pairs that never occur have no
        row. The last round as a matrix:

            last = run.confusion[run.confusion["round"] == run.confusion["round"].max()]
            last.pivot(index="target", columns="prediction", values="count").fillna(0)
        """
        return self._table("confusion")

    @cached_property
    def adapters(self) -> pd.DataFrame:
        """One row per round and layer with adapters: what averaging them loses.

        Columns: `round`, `layer`, `gap` = ‖mean(B·A) − mean(B)·mean(A)‖ over the round's clients,
        weighted as in their mean, and `norm` = ‖mean(B·A)‖ (Frobenius norms).
        """
        return self._table("adapters")

    @cached_property
    def explanations(self) -> pd.DataFrame:
        """One row per explanation; empty if there are none.

        Rows of the `explain` section have `model` (global, cohort, personal or shared), `client`,
        and the scores of that `explainer` for that model; `uninformative` is the number of inputs
        without scores, because all parts are equally relevant (or not finite), empty if there are
        none. The other rows are recorded by the method itself, such as a rule.
        """
        return self._table("explanations")

    @property
    def own_explanations(self) -> pd.DataFrame:
        """The rows of `explanations` that the method itself recorded."""
        rows = self.explanations
        return rows[rows["model"].isna()] if "model" in rows else rows

    @cached_property
    def maps(self) -> pd.DataFrame:
        """The relevances of each explained input, if `explain.maps` is set.

        Columns: `round`, `explainer`, `model`, `client`, `input` (its row in the test set or the
        training data), `relevance` (P numbers, one per pixel, feature or word), and the `deletion`
        and `insertion` curves if they are among the scores.
        """
        return self._table("maps")

    @cached_property
    def explained(self) -> tuple[Metric, ...]:
        """The explanation scores that are columns of `rounds`."""
        return _METRICS.validate_python(self.manifest.get("explained", ()))

    def _table(self, name: str) -> pd.DataFrame:
        table = Table(self.path, name)
        frame = table.read(self._folder.files.get(f"{name}.parquet"))
        metrics = [m["column"] for k in ("metrics", "explained") for m in self.manifest.get(k, ())]
        if len(frame.columns) and (fault := _fault(name, frame, metrics)):
            raise Damaged(f"{table.file}: is damaged: {fault}")
        return frame

    @property
    def result_hash(self) -> str:
        """A hash of everything that the run computed.

        Raises:
            RunFolderError: the run is not finished.
        """
        if "result_hash" not in self.manifest:
            raise RunFolderError(f"{self.path}: the run is not finished; it has no result yet")
        return str(self.manifest["result_hash"])

    def weights(self) -> dict[str, torch.Tensor]:
        """The global model's final weights by layer, as `load_state_dict` expects them.

        They are the whole state dict: first the layers of the flat vector (the trainable
        parameters in the network's order, then float buffers), which flattened and concatenated
        are the global model's weights (size,); then frozen parameters, integer buffers and the
        further names of shared layers.

        For a rule model, the arrays of its rules.

        Raises:
            RunFolderError: the run is not finished, its weights cannot be read, or its method has
                no global model.
        """
        path = self.path / FINAL_WEIGHTS
        if not path.exists():
            raise RunFolderError(f"{self.path}: the run is not finished; it has no weights yet")
        expected = self._folder.files.get(FINAL_WEIGHTS)
        try:
            atomic.check(path, expected)
            with safe_open(path, framework="pt") as file:
                names = json.loads((file.metadata() or {})["layers"])
                weights = {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
            raise RunFolderError(f"{path}: cannot be read: {error}") from error
        if not weights:
            raise RunFolderError(
                f"{path}: holds no weights, because the run's method has no global model; for a "
                "client's own: fedsim.analysis.replay.ModelSnapshot.of(run, client=0).network()"
            )
        return weights


def _fault(name: str, frame: pd.DataFrame, metrics: Sequence[str]) -> str | None:
    """Why a table cannot be that of a run; None if it can."""
    whole, words = _KEYS[name]
    of_models = name in ("confusion", "maps") or (name == "explanations" and "model" in frame)
    for key in (*whole, *words, *(["client"] if of_models else [])):
        if key not in frame:
            return f"it has no column '{key}'"
    for key in whole:
        if frame[key].dtype.kind not in "iu" or (frame[key] < 0).any():
            return f"column '{key}' has values that are no whole numbers"
    for key in words:
        if not all(isinstance(value, str) for value in frame[key]):
            return f"column '{key}' has values that are no words"
    if name == "labels" and frame["label"].dtype != "category":
        return "column 'label' does not say which labels there are"
    if name == "maps":
        return _fault_of_maps(frame)
    numbers = _NUMBERS | {prefix + metric for prefix in _PREFIXES for metric in metrics}
    for column in frame if name not in ("labels", "confusion") else ():
        number = name != "explanations" and column in numbers
        if frame[column].dtype.kind not in "iufb" and (
            number or not frame[column].dropna().map(np.isscalar).all()
        ):
            kinds = "numbers or words" if name == "explanations" else "numbers"
            return f"column '{column}' has values that are no {kinds}"
    return None


def _fault_of_maps(frame: pd.DataFrame) -> str | None:
    if not frame["model"].isin(MODELS).all():
        return "column 'model' has values that are no kinds of models"
    clients = frame.loc[~frame["model"].isin(OF_ALL), "client"]
    if len(clients) and (clients.dtype.kind not in "iuf" or clients.isna().any()):
        return "column 'client' has values that are no numbers"

    def is_vector(value: Any) -> bool:
        vector = isinstance(value, np.ndarray) and value.ndim == 1
        return vector and (value.dtype.kind in "iuf" or not value.size)

    for column in ("relevance", *(name for name in _CURVES if name in frame)):
        if column not in frame or not frame[column].map(is_vector).all():
            return f"column '{column}' has values that are no lists of numbers"
        if column in _CURVES and frame[column].map(len).nunique() > 1:
            return f"column '{column}' has lists of different lengths"
    return None
