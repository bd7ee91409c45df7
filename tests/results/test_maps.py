"""Relevance maps that a run has kept, read from its folder: as they are, and edited."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedsim
from experiments import TABLE, Say, change_manifest, ran, small_experiment
from fedsim.errors import Damaged, RunFolderError
from fedsim.results.maps import agreement_matrix, importance, relevance_maps, similarity
from fedsim.results.run import Run

HOWS = ["rank", "top_k", "cosine"]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    explain = {
        **{"explainers": ["gradient", "random"], "every": 1, "clients": 2, "inputs": 2},
        **{"maps": True, "scores": ["deletion", "agreement", "global_agreement", "drift"]},
    }
    evaluate = {"metrics": ["confusion"]}
    experiment = small_experiment(train={"rounds": 2}, explain=explain, evaluate=evaluate)
    return fedsim.run(experiment, tmp_path_factory.mktemp("maps"))


def edited(done: Run, path: Path, table: str, column: str, values: Any) -> Run:
    """A copy of the run with another column, or without it."""
    shutil.copytree(done.path, path)
    frame = pd.read_parquet(path / f"{table}.parquet")
    if values is None:
        frame = frame.drop(columns=column)
    else:
        frame[column] = [values(i) for i in range(len(frame))]
    frame.to_parquet(path / f"{table}.parquet")
    change_manifest(path, "files")
    return fedsim.load(path)


def test_similarities_are_those_on_record(done: Run) -> None:
    last = done.rounds.iloc[-1]
    for how in HOWS:
        matrix = agreement_matrix(done, "gradient", how=how)
        clients = [name for name in matrix if name != "global"]
        assert matrix.loc["global", clients].mean() == pytest.approx(
            last[f"gradient/client_global_agreement_{how}"]
        )
        assert matrix.loc[clients[0], clients[1]] == pytest.approx(
            last[f"gradient/client_agreement_{how}"]
        )
        assert np.diag(matrix) == pytest.approx(1)
        drift = 1 - similarity(done, done, "gradient", how, round=1)
        assert drift == pytest.approx(last[f"gradient/drift_{how}"])


def test_importance_is_that_of_all_examples_together() -> None:
    explain = {
        **{"explainers": ["gradient"], "clients": 3, "inputs": 50, "inputs_from": "own"},
        **{"maps": True, "scores": ["sparseness"]},
    }
    partition = {"kind": "dirichlet", "clients": 3, "alpha": 0.5}
    found = ran(data=TABLE, partition=partition, train={"rounds": 1}, explain=explain)
    table = importance(found, "gradient")
    maps = relevance_maps(found, "gradient")
    assert list(table.index) == [*maps, "all clients"]
    counts = {name: len(of) for name, of in maps.items()}
    assert len(set(counts.values())) > 1
    for name, of in maps.items():
        assert table.loc[name].to_numpy() == pytest.approx(sum(of.values()) / len(of))
    weighted = sum(counts[name] * table.loc[name] for name in maps) / sum(counts.values())
    assert table.loc["all clients"].to_numpy() == pytest.approx(weighted.to_numpy())


def test_importance_of_whose_maps(done: Run, tmp_path: Path) -> None:
    table = importance(done, "gradient", round=1)
    assert table.index[0] == "global"
    assert table.shape == (4, 64)
    assert table.loc["all clients"].to_numpy() == pytest.approx(table.iloc[1:3].mean().to_numpy())
    ragged = edited(done, tmp_path / "ragged", "maps", "relevance", lambda i: [1.0] * (3 + i % 2))
    with pytest.raises(RunFolderError, match="inputs differ in length; there is no mean"):
        importance(ragged, "gradient")


def test_what_there_is_not(done: Run) -> None:
    for explainer, t, told in (("gradeint", 1, "explainer gradeint"), ("random", 9, "round 9")):
        with pytest.raises(RunFolderError, match=f"has no maps of {told}"):
            relevance_maps(done, explainer, t)
    with pytest.raises(ValueError, match="unknown similarity 'cosin'; did you mean 'cosine'"):
        agreement_matrix(done, "random", how="cosin")
    with pytest.raises(RunFolderError, match="has kept no relevance maps"):
        relevance_maps(ran(train={"rounds": 1}), "gradient")


@pytest.mark.usefixtures("undrawn")
def test_the_report_draws_them(done: Run, say: Say) -> None:
    assert say("report", str(done.path), "--out", "report.html")[0] == 0
    page = Path("report.html").read_text()
    assert "Deletion and insertion, global model" in page
    assert "Agreement of explanations by gradient, last round" in page
    assert "Global model, random, by round" in page


@pytest.mark.parametrize(
    ("table", "column", "values", "told"),
    [
        *(("maps", name, None, f"it has no column '{name}'") for name in ("round", "client")),
        ("maps", "relevance", None, "column 'relevance' has values that are no lists of numb"),
        ("maps", "round", lambda i: 0.5, "column 'round' has values that are no whole numbers"),
        ("maps", "input", lambda i: [1], "column 'input' has values that are no whole numbers"),
        ("maps", "explainer", lambda i: [1], "column 'explainer' has values that are no words"),
        ("maps", "model", lambda i: "x", "column 'model' has values that are no kinds of models"),
        ("maps", "client", lambda i: "x", "column 'client' has values that are no numbers"),
        ("maps", "client", lambda i: np.nan, "column 'client' has values that are no numbers"),
        ("maps", "relevance", lambda i: 0.5, "column 'relevance' has values that are no lists"),
        ("maps", "relevance", lambda i: ["x"], "column 'relevance' has values that are no lists"),
        ("maps", "deletion", lambda i: [0.5] * (i + 1), "column 'deletion' has lists of differ"),
        ("explanations", "round", None, "it has no column 'round'"),
        ("explanations", "client", None, "it has no column 'client'"),
        ("explanations", "model", lambda i: ["x"], "column 'model' has values that are no num"),
        ("explanations", "explainer", lambda i: 1, "column 'explainer' has values that are no w"),
        ("rounds", "gradient/drift_rank", lambda i: "x", "column 'gradient/drift_rank' has val"),
        ("rounds", "train_loss", lambda i: "x", "column 'train_loss' has values that are no num"),
        ("rounds", "client_accuracy", lambda i: "x", "column 'client_accuracy' has values that"),
        ("rounds", "total_bytes_up", lambda i: -1, "column 'total_bytes_up' has values that are"),
        ("clients", "samples", lambda i: [1], "column 'samples' has values that are no numbers"),
        *(("labels", name, None, f"it has no column '{name}'") for name in ("client", "label")),
        ("confusion", "client", None, "it has no column 'client'"),
    ],
)
def test_tables_that_are_no_runs_own(
    done: Run, tmp_path: Path, table: str, column: str, values: Any, told: str
) -> None:
    run = edited(done, tmp_path / "run", table, column, values)
    with pytest.raises(Damaged, match=f"{table}.parquet: is damaged: {told}"):
        getattr(run, table)


@pytest.mark.usefixtures("undrawn")
def test_a_report_of_a_folder_that_says_otherwise(done: Run, tmp_path: Path, say: Say) -> None:
    """Of an edited folder, or of a later version's."""
    few = edited(done, tmp_path / "few", "maps", "input", lambda i: i)  # of the inputs
    later = shutil.copytree(done.path, tmp_path / "later")
    explained = [{"column": "gradient/deletion", "label": "x", "of_later": 1}]
    change_manifest(later, map_shape=[2, 3], explained=explained)
    for path in (few.path, later):
        assert say("report", str(path))[0] == 0
