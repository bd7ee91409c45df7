"""What a run leaves behind."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import resource
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedsim
from experiments import RESNET, TABLE, interrupted, small_experiment
from fedsim import Experiment, Run, State
from fedsim.errors import RunError, RunFolderError
from fedsim.objectives import Metric
from fedsim.results.folder import RunFolder, version
from fedsim.results.manifest import FORMAT
from fedsim.results.records import chained, new_ledger, result_hash, summarise
from fedsim.support.hardware import hardware

ROUNDS, CLIENTS = 3, 6


def experiment(**sections: Any) -> Experiment:
    """Six clients, half of them a round, on synthetic images."""
    usual = {
        "data": {**TABLE, "shape": [1, 8, 8], "test_samples": 700},
        "partition": {"kind": "iid", "clients": CLIENTS, "test_fraction": 0.2},
        "model": RESNET,
        "train": {"rounds": ROUNDS, "participation": 0.5, "batch_size": 5},
        "checkpoint": {"every": 2},
    }
    return small_experiment(**{**usual, **sections})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def done(folder: Path) -> Run:
    """Made without fedsim's metadata, which jobs of a cluster lack."""
    known = metadata.distribution
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "distribution", lambda n: known("none" if n == "fedsim" else n))
        version.cache_clear()
        return fedsim.run(experiment(), folder)


@pytest.fixture(scope="module")
def scaffold(folder: Path) -> Run:
    return fedsim.run(experiment(method={"name": "scaffold"}), folder)


def files(path: Path) -> set[str]:
    return {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}


# files


def test_the_files_of_a_run(done: Run, scaffold: Run, folder: Path) -> None:
    assert done.path.parent == scaffold.path.parent == folder / "small"
    assert done.path != scaffold.path
    assert files(done.path) == {
        *("experiment.yaml", "manifest.json", "manifest.copy.json", "log.txt"),
        *("rounds.parquet", "clients.parquet", "labels.parquet"),
        *("weights/final.safetensors", "weights/round-000002.safetensors"),
        "weights/round-000003.safetensors",
    }


def test_kept_client_states_lie_beside(scaffold: Run) -> None:
    rows = scaffold.clients
    needed = set()  # by the last two checkpoints
    for t in (2, 3):
        latest = rows[rows["round"] <= t].groupby("client")["round"].max()
        # Written in the first checkpoint after they changed.
        needed |= {f"weights/clients/{k}-00000{max(2, n)}.safetensors" for k, n in latest.items()}
    assert {f for f in files(scaffold.path) if f.startswith("weights/clients/")} == needed


def test_the_manifest(done: Run) -> None:
    manifest = json.loads((done.path / "manifest.json").read_text())
    del manifest["checksum"]
    assert manifest == done.manifest
    assert manifest["format"] == FORMAT
    assert manifest["status"] == "finished"
    content = (done.path / "experiment.yaml").read_bytes()
    assert manifest["experiment_hash"] == hashlib.sha256(content).hexdigest()[:16]
    assert (manifest["seed"], manifest["clients"]) == (0, CLIENTS)
    assert (manifest["actors"], manifest["clients_per_step"]) == (0, 1)
    assert {"git_revision", "python"} <= manifest.keys()
    assert {"fedsim", "torch", "numpy", "ray"} <= manifest["packages"].keys()
    assert manifest["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert manifest["hardware"] == hardware()
    assert manifest["wall_seconds"] > 0
    assert pd.Timestamp(manifest["created"]) <= pd.Timestamp.now("UTC")
    assert len(manifest["partition_hash"]) == len(manifest["result_hash"]) == 16
    int(manifest["partition_hash"] + manifest["result_hash"], 16)


def test_the_log_names_every_round(done: Run) -> None:
    lines = (done.path / "log.txt").read_text().splitlines()
    assert len(lines) == ROUNDS
    assert all(f"INFO round {t}, 3 clients, " in line for t, line in enumerate(lines, start=1))


# tables


def test_a_row_for_each_round(done: Run) -> None:
    rounds = done.rounds
    assert rounds["round"].tolist() == [1, 2, 3]
    assert rounds["clients"].tolist() == [3, 3, 3]
    assert rounds["failed"].tolist() == [0, 0, 0]
    for way in ("bytes_up", "bytes_down"):
        assert rounds[f"total_{way}"].tolist() == rounds[way].cumsum().tolist()
        by_round = done.clients.groupby("round")[way].sum()
        assert rounds[way].tolist() == by_round.tolist()
    assert (rounds["seconds"] > 0).all()
    assert rounds["accuracy"].between(0, 1).all()


def test_a_row_for_each_client_of_a_round(done: Run) -> None:
    clients = done.clients
    assert not clients.duplicated(["round", "client"]).any()
    assert clients.groupby("round").size().tolist() == [3, 3, 3]
    assert set(clients["client"]) <= set(range(CLIENTS))
    assert (clients["samples"] == 12).all()  # 90 / 6, less the fifth that is tested on
    assert (clients["steps"] == 3).all()
    weighted = (clients["loss"] * clients["samples"]).groupby(clients["round"]).sum()
    mean = weighted / clients.groupby("round")["samples"].sum()
    np.testing.assert_allclose(done.rounds["train_loss"], mean, rtol=1e-12)


def test_evaluation_of_clients_costs_no_bytes(done: Run, folder: Path) -> None:
    run = fedsim.run(experiment(evaluate={"every": 2, "clients": True}), folder)
    assert run.rounds["accuracy"].notna().tolist() == [False, True, True]
    assert run.rounds["client_accuracy"].notna().tolist() == [False, True, True]
    tested = run.clients[run.clients["round"] == ROUNDS]
    assert tested["client"].tolist() == list(range(CLIENTS))
    last = run.rounds.iloc[-1]
    assert last["client_accuracy"] == pytest.approx(tested["test_accuracy"].mean())
    assert last["worst_client_accuracy"] == tested["test_accuracy"].min()
    assert last["clients"] == 3
    assert run.rounds["total_bytes_up"].tolist() == done.rounds["total_bytes_up"].tolist()
    assert run.rounds["total_bytes_down"].tolist() == done.rounds["total_bytes_down"].tolist()


# the hash


def test_the_hash_is_of_the_result(done: Run, scaffold: Run, folder: Path) -> None:
    again = fedsim.run(experiment(name="other", checkpoint={"every": 0}), folder)
    assert again.result_hash == done.result_hash == fedsim.load(done.path).result_hash
    assert again.rounds["seconds"].tolist() != done.rounds["seconds"].tolist()
    other = fedsim.run(experiment(seed=1), folder)
    assert len({done.result_hash, other.result_hash, scaffold.result_hash}) == 3


ROW = {"round": 1, "accuracy": 0.5, "clients": 2, "total_bytes_up": 8, "seconds": 1.0}
CLIENT_ROWS: list[dict[str, Any]] = [
    {"round": 1, "client": 0, "loss": 0.3, "bytes_up": 4, "seconds": 0.5},
    {"round": 1, "client": 3, "error": "NaN", "bytes_up": 4, "seconds": 0.5},
]


def test_the_hash_chains_every_record_but_times_and_tracebacks() -> None:
    records = [ROW, *CLIENT_ROWS]
    expected = chained("", records)
    for place, row in enumerate(records):
        for key in [*row, "new"]:
            others = [*records]
            others[place] = {**row, key: f"{row.get(key)}, but not quite"}
            assert (chained("", others) == expected) == (key in ("seconds", "error")), key
    dropped = {key: value for key, value in CLIENT_ROWS[0].items() if key != "loss"}
    for others in ([ROW, *CLIENT_ROWS[::-1]], records[:2], [ROW, dropped, CLIENT_ROWS[1]]):
        assert chained("", others) != expected
    assert chained("before", records) != expected
    shuffled = {key: ROW[key] for key in reversed(ROW)}
    assert chained("", [shuffled, *CLIENT_ROWS]) == expected


@dataclasses.dataclass(frozen=True)
class Keeper(State):
    control: dict[str, Any]


def test_the_hash_is_of_the_whole_state() -> None:
    def keeper(weight: float = 1.0, entry: float = 2.0, name: str = "a") -> Keeper:
        weights = np.array([0, weight], dtype=np.float32)
        return Keeper(weights, {name: [np.array([entry])]})

    expected = result_hash("chain", keeper())
    assert result_hash("chain", keeper()) == expected
    others = [keeper(weight=1.0000001), keeper(entry=3), keeper(name="b")]
    hashes = {result_hash("chain", other) for other in others} | {result_hash("", keeper())}
    assert len(hashes - {expected}) == 4


# sums of records


def test_a_round_is_summed_up() -> None:
    client_rows: list[dict[str, Any]] = [
        {"loss": 1.0, "samples": 30, "steps": 3, "bytes_up": 8, "bytes_down": 4},
        {"loss": 4.0, "samples": 10, "steps": 1, "bytes_up": 8, "bytes_down": 4},
        {"error": "NaN", "bytes_up": 0, "bytes_down": 4},
        {"test_accuracy": 0.25, "samples": 5, "bytes_up": 0, "bytes_down": 0},
        {"test_accuracy": 0.75, "samples": 9, "bytes_up": 0, "bytes_down": 0},
    ]
    ledger = {**new_ledger(), "total_bytes_up": 100}
    lower = Metric("accuracy", "accuracy", best="min", primary=True)
    turned = summarise(7, {}, client_rows, dict(ledger), [lower])
    assert turned["worst_client_accuracy"] == 0.75
    primary = Metric("accuracy", "accuracy", primary=True)
    row = summarise(7, {"accuracy": 0.5}, client_rows, ledger, [primary, Metric("loss", "loss")])
    assert row == {
        **{"round": 7, "accuracy": 0.5, "train_loss": 1.75, "clients": 2, "failed": 1},
        **{"client_accuracy": 0.5, "worst_client_accuracy": 0.25},
        **{"bytes_up": 16, "bytes_down": 12, "total_bytes_up": 116, "total_bytes_down": 12},
    }
    assert (ledger["total_bytes_up"], ledger["total_bytes_down"]) == (116, 12)


# runs that are not finished


def test_an_unfinished_run_can_be_looked_at(tmp_path: Path) -> None:
    run = fedsim.load(interrupted(experiment(train={"rounds": 5}), tmp_path, 3))
    assert run.manifest["status"] == "interrupted"
    assert run.rounds["round"].tolist() == [1, 2]  # up to the checkpoint
    assert set(run.clients["round"]) == {1, 2}
    with pytest.raises(RunFolderError, match="the run is not finished; it has no result yet"):
        _ = run.result_hash
    with pytest.raises(RunFolderError, match="the run is not finished; it has no weights yet"):
        run.weights()


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(RunError, match=r"^\S+: cannot be written: \[Errno \d+\] .*$"):
            fedsim.run(experiment(model={"name": "mlp", "hidden": [64, 64]}), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_metrics_are_those_of_the_manifest(done: Run, tmp_path: Path) -> None:
    assert [metric.column for metric in done.metrics] == ["accuracy", "loss"]
    assert done.primary_metric.label == "accuracy"
    own = {"column": "hamming", "label": "Hamming loss", "best": "min", "primary": True}
    path = shutil.copytree(done.path, tmp_path / "run")
    RunFolder.open(path).update(metrics=[{"column": "loss", "label": "loss"}, own])
    again = fedsim.load(path)
    assert again.primary_metric == Metric("hamming", "Hamming loss", best="min", primary=True)


def test_what_a_driver_replaces_meanwhile_is_passed_over(
    done: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, listed = shutil.copytree(done.path, tmp_path / "run"), Path.iterdir
    (folder / "rounds.parts").mkdir()

    def gone(of: Path) -> list[Path]:
        """With a file that is gone before it is looked at, and a folder before it is listed."""
        if of.name == "rounds.parts":
            of.rmdir()
        return [*listed(of), of / ".rounds.parquet.1.part"]

    monkeypatch.setattr(Path, "iterdir", gone)
    assert RunFolder.open(folder).manifest == RunFolder.open(done.path).manifest
    assert not (folder / "rounds.parts").exists()
