"""The records of a run: the rows of its rounds, and the hashes of data and results."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.conditions.devices import Devices
from fedsim.config.registry import nearest
from fedsim.data import ClientSplits, Dataset
from fedsim.data.stored import AnyArray, StoredArray
from fedsim.errors import ExperimentError
from fedsim.experiment import EarlyStopping, Experiment
from fedsim.federation import RunSpec
from fedsim.federation.checkpoint import hash_of
from fedsim.federation.wire import PROTOCOL, PROTOCOL_COLUMNS
from fedsim.methods import State
from fedsim.objectives import VALIDATION, Metric
from fedsim.objectives.slices import slices_of

TESTED = ("client", "worst_client")  # prefixes of summaries of clients' scores
# Columns that vary between runs: times, and tracebacks, which contain paths.
VARYING = frozenset({"seconds", "explain_seconds", "error"})
CONTRIBUTIONS = "contributions/"  # prefix of columns of the last round, found out after the run
WITHOUT_UNIT = ("shapfed", "cosine")  # estimates of contributions that are no part of a score


def is_of_result(column: str) -> bool:
    """Whether a column is the same whenever the run is computed again."""
    return column not in VARYING and not column.startswith(CONTRIBUTIONS)


def new_ledger() -> dict[str, Any]:
    """A new ledger: data carried from round to round besides the state, and saved with it.

    Totals of bytes, budgets spent, the latest relevance maps, and a chain of hashes: each round's
    hash covers its records and the previous hash.
    """
    return {"total_bytes_up": 0, "total_bytes_down": 0, "chain": ""}


def summarise(
    t: int,
    record: Mapping[str, Any],
    client_rows: list[dict[str, Any]],
    ledger: dict[str, Any],
    metrics: Sequence[Metric],
    setup_bytes: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    """The row of a round, from its own records and those of its clients.

    What all clients sent and received before the first round counts as of that. Sums are exactly
    rounded (`math.fsum`), so that they do not depend on the order of clients.
    """
    trained = [r for r in client_rows if "loss" in r and "samples" in r]
    row: dict[str, Any] = {"round": t, **record}
    if trained:
        samples = sum(r["samples"] for r in trained)
        row["train_loss"] = math.fsum(r["loss"] * r["samples"] for r in trained) / samples
    for column, best in ((m.column, m.best) for m in metrics if m.of_clients):
        if tested := [r[f"test_{column}"] for r in client_rows if f"test_{column}" in r]:
            mean, worst = (f"{who}_{column}" for who in TESTED)
            row[mean] = math.fsum(tested) / len(tested)
            row[worst] = min(tested) if best == "max" else max(tested)
    learnt = [r for r in client_rows if "steps" in r or "rules" in r]
    row["clients"] = len(learnt)
    if any("adversary" in r for r in client_rows):
        row["adversaries"] = sum(r["adversary"] for r in learnt)
    row["failed"] = sum("error" in r for r in client_rows)
    before = dict(zip(("up", "down"), setup_bytes if t == 1 else (0, 0), strict=True))
    for way, count in before.items():
        if count or any(f"one_off_{way}" in r for r in client_rows):
            row[f"one_off_{way}"] = count + sum(r.get(f"one_off_{way}", 0) for r in client_rows)
    for way in ("bytes_up", "bytes_down"):
        row[way] = before[way.removeprefix("bytes_")] + sum(r[way] for r in client_rows)
        ledger[f"total_{way}"] += row[way]
        row[f"total_{way}"] = ledger[f"total_{way}"]
    for name, added in PROTOCOL.items():
        if any(added in r for r in client_rows):
            row[added] = sum(r.get(added, 0) for r in client_rows)
            if name.startswith("bytes"):
                total = PROTOCOL[f"total_{name}"]
                row[total] = ledger[total] = ledger.get(total, 0) + row[added]
    return row


def stopped_early(
    stopping: EarlyStopping | None, metrics: Sequence[Metric], ledger: dict[str, Any]
) -> str | None:
    """Why a run ends before its last round; None if it continues."""
    if stopping is None or "best" not in ledger:
        return None
    noted = ledger["best"]
    if noted["last"] - noted["round"] < stopping.patience:
        return None
    label = _watched(stopping, metrics).label
    return (
        f"stopped early after round {noted['last']}: no better {label} on the validation set "
        f"since round {noted['round']}"
    )


def watch_score(
    stopping: EarlyStopping | None,
    metrics: Sequence[Metric],
    row: Mapping[str, Any],
    ledger: dict[str, Any],
) -> None:
    """Note the best score so far, and the latest round that had one."""
    if stopping is None:
        return
    metric = _watched(stopping, metrics)
    score = row.get(VALIDATION + metric.column)
    if score is None or math.isnan(score):
        return
    sign = 1 if metric.best == "max" else -1
    noted = ledger.setdefault("best", {"score": score, "round": row["round"]})
    if sign * (score - noted["score"]) > stopping.min_delta:
        noted["score"], noted["round"] = score, row["round"]
    noted["last"] = row["round"]


def check_stopping(stopping: EarlyStopping | None, metrics: Sequence[Metric]) -> None:
    """Reject a metric that is not displayed, and so is in no round."""
    known = [metric.column for metric in metrics if not metric.calibrated]
    if stopping is not None and stopping.metric and stopping.metric not in known:
        raise ExperimentError(
            f"evaluate.early_stopping.metric: there is no score '{stopping.metric}'"
            f"{nearest(stopping.metric, known)}"
        )


def _watched(stopping: EarlyStopping, metrics: Sequence[Metric]) -> Metric:
    return next(
        metric
        for metric in metrics
        if metric.column == stopping.metric or (not stopping.metric and metric.primary)
    )


def known_columns(
    dataset: Dataset, splits: ClientSplits, spec: RunSpec, tests_clients: bool
) -> list[str]:
    """The columns of numbers in rounds.parquet that are known before a run starts.

    A method or an objective may record further ones.
    """
    metrics = spec.objective.shown(dataset)
    columns = [metric.column for metric in spec.shown(dataset)]
    if len(splits.held_out):
        columns += [VALIDATION + metric.column for metric in metrics if not metric.calibrated]
    columns += slices_of(spec.objective, dataset, splits).columns
    if tests_clients:
        columns += [f"{who}_{m.column}" for m in metrics if m.of_clients for who in TESTED]
    of_conditions = [name for condition in spec.conditions for name in condition.columns]
    ways = [f"{what}_{way}" for what in ("bytes", "total_bytes") for way in ("up", "down")]
    return [*columns, "train_loss", *ways, *of_conditions]


def chained(chain: str, records: Iterable[Mapping[str, Any]]) -> str:
    """The hash of all records up to this round, except `VARYING` and what a protocol adds.

    A run with secure aggregation has the hash of one without.
    """

    def digest(array: NDArray[Any]) -> str:  # of relevance maps and curves, which are long
        return hashlib.sha256(array.tobytes()).hexdigest()

    content = [
        {
            k: v - row[PROTOCOL[k]] if PROTOCOL.get(k) in row else v
            for k, v in row.items()
            if k not in VARYING | PROTOCOL_COLUMNS
        }
        for row in records
    ]
    words = json.dumps(content, sort_keys=True, default=digest)
    return hashlib.sha256((chain + words).encode()).hexdigest()


def result_hash(chain: str, state: State) -> str:
    return hash_of(chain, {f.name: getattr(state, f.name) for f in dataclasses.fields(state)})


def facts(dataset: Dataset, splits: ClientSplits, experiment: Experiment) -> dict[str, Any]:
    """A manifest's entries about the data: hashes, number of clients, changes, adversaries."""
    adversaries = {"adversaries": list(splits.adversaries)} if splits.adversaries else {}
    change = {} if splits.change is None else {"change": splits.change.facts()}
    names = {"client_names": list(splits.names)} if splits.names else {}
    known = {**hashes(dataset, splits, experiment), "clients": len(splits)}
    return {**known, **names, **change, **adversaries}


def hashes(dataset: Dataset, splits: ClientSplits, experiment: Experiment) -> dict[str, str]:
    """Hashes of the data (data_hash) and of the partition (partition_hash).

    The data hash includes other files that affect the result.
    """
    devices = experiment.devices or Devices()
    traces = devices.capacity_trace, devices.availability_trace
    files = experiment.train.initial_weights, *traces, *experiment.model.files()
    held = [splits] if splits.change is None else [splits, splits.change.splits]
    parts = [part for s in held for part in (s.train, s.unlabelled, s.test)]
    contents: dict[str, list[AnyArray]] = {
        "data_hash": [
            *(dataset.x, dataset.y, dataset.test_x, dataset.test_y),
            *experiment.method.extra_hash_inputs(),
            *(np.fromfile(path, dtype=np.uint8) for path in files if path is not None),
        ],
        "partition_hash": [
            *(array for part in parts for array in (part.values, part.offsets)),
            *(splits.server, splits.held_out),
        ],
    }
    contents["data_hash"] += dataset.spec.embeddings or ()
    contents["data_hash"] += dataset.further_targets
    if splits.sequence is not None:
        contents["partition_hash"] += splits.sequence.arrays()
    found = {}
    for name, arrays in contents.items():
        digest = hashlib.sha256()
        for array in arrays:
            for part in array.contents() if isinstance(array, StoredArray) else [array]:
                digest.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).data)
        found[name] = digest.hexdigest()[:16]
    return found
