"""What is said to differ between runs is what was made to differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments import Say, change_manifest, grid_in_process, small_experiment
from fedsim import Comparison, Run, compare, load, run
from fedsim.errors import BadInput, RunFolderError

PROX = {"method": {"name": "fedprox", "mu": 0.5}}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compared")


@pytest.fixture(scope="module")
def runs(out: Path) -> dict[str, Run]:
    """The same experiment twice, with more rounds, and with another method."""
    usual: dict[str, Any] = {"train": {"rounds": 3}}
    changes: dict[str, dict[str, Any]] = {
        "once": {},
        "again": {},
        "longer": {"train": {"rounds": 4}},
        "prox": PROX,
    }
    return {
        name: run(small_experiment(**{**usual, **change}), out / name)
        for name, change in changes.items()
    }


@pytest.fixture(scope="module")
def two(runs: dict[str, Run]) -> Comparison:
    return compare(runs["once"], runs["prox"])


def test_the_same_experiment_twice_is_the_same(runs: dict[str, Run]) -> None:
    same = compare(runs["once"].path, str(runs["again"].path))
    assert same.experiments.columns.empty
    assert same.environments.columns.empty
    assert same.results["result_hash"].nunique() == 1
    assert same.results["differs_from_round"].isna().all()


def test_keys_that_differ_stand_side_by_side(two: Comparison) -> None:
    assert list(two.experiments.columns) == ["method.name", "method.mu"]
    assert two.experiments["method.name"].tolist() == ["fedavg", "fedprox"]
    assert two.experiments["method.mu"].isna().tolist() == [True, False]


def test_results_are_those_of_the_runs(runs: dict[str, Run], two: Comparison) -> None:
    for name, (_, row) in zip(("once", "prox"), two.results.iterrows(), strict=True):
        rounds = runs[name].rounds
        assert row["accuracy"] == rounds["accuracy"].iloc[-1]
        assert row["best"] == rounds["accuracy"].max()
        assert row["last5"] == pytest.approx(rounds["accuracy"].mean())
        assert row["bytes_up"] == rounds["total_bytes_up"].iloc[-1]
        assert row["result_hash"] == runs[name].result_hash
        assert (row["status"], row["rounds"]) == ("finished", 3)
    assert two.results["partition_hash"].nunique() == 1
    assert two.results["differs_from_round"].tolist() == [pd.NA, 1]


def test_a_longer_run_differs_from_where_the_other_ends(runs: dict[str, Run]) -> None:
    longer = compare(runs["once"], runs["longer"])
    assert list(longer.experiments.columns) == ["train.rounds"]
    assert longer.results["differs_from_round"].tolist() == [pd.NA, 4]


def test_clients_that_differ_are_found(runs: dict[str, Run], out: Path) -> None:
    other = run(small_experiment(train={"rounds": 3}), out / "edited")
    clients = other.clients.copy()
    clients.loc[(clients["round"] == 2) & (clients["client"] == 7), "loss"] += 1e-12
    clients.to_parquet(other.path / "clients.parquet")
    change_manifest(other.path, "files")
    edited = compare(runs["once"], other.path)
    assert edited.results["differs_from_round"].tolist() == [pd.NA, 2]


def test_versions_and_hardware_that_differ(runs: dict[str, Run], out: Path) -> None:
    other = run(small_experiment(train={"rounds": 3}), out / "elsewhere")
    packages = {**other.manifest["packages"], "torch": "1.0"}
    hardware = {**other.manifest["hardware"], "cpus": 99}
    change_manifest(other.path, packages=packages, hardware=hardware)
    found = compare(runs["once"], other.path).environments
    assert list(found.columns) == ["packages.torch", "hardware.cpus"]
    assert found["hardware.cpus"].tolist()[1] == 99


def test_a_grid_stands_for_its_runs(runs: dict[str, Run], out: Path) -> None:
    content = small_experiment(train={"rounds": 1}).model_dump(mode="json")
    content["grid"] = {"axes": {"partition.alpha": [0.1, 1.0]}, "seeds": [0, 1]}
    grid = grid_in_process(content, out / "grid")
    compared = compare(grid)
    assert len(compared.runs) == 4
    assert list(compared.experiments.columns) == ["seed", "partition.alpha"]
    assert len(compare(grid, runs["once"]).runs) == 5


def test_a_notebook_shows_it_with_names_escaped(two: Comparison) -> None:
    shown = two._repr_html_()
    assert shown.count("<table") == 2
    assert "<b>environments</b>: the same" in shown
    table = two.experiments.rename(columns={"method.mu": "<script>"})
    shown = Comparison(two.runs, table, two.environments, two.results)._repr_html_()
    assert "<script>" not in shown


def test_scores_are_printed_with_the_same_decimals(two: Comparison) -> None:
    results = two.results.assign(accuracy=[0.225, 0.22222], seconds=[0.123, float("nan")])
    shown = Comparison(two.runs, two.experiments, two.environments, results)
    assert shown.texts["results"]["accuracy"].tolist() == ["0.2250", "0.2222"]
    assert shown.texts["results"]["seconds"].tolist() == ["0.1", "–"]
    assert "0.2250" in str(shown)


def test_what_cannot_be_compared(runs: dict[str, Run], tmp_path: Path) -> None:
    once = runs["once"]
    for given in ([], [once], [once, once.path]):
        with pytest.raises(BadInput, match="at least two different runs"):
            compare(*given)
    with pytest.raises(RunFolderError, match="there is no such folder"):
        compare(once, tmp_path / "nowhere")


def test_the_command(runs: dict[str, Run], say: Say) -> None:
    code, text, _ = say("compare", str(runs["once"].path), str(runs["prox"].path))
    assert code == 0
    lines = [line.split() for line in text.splitlines()]
    assert ["[1]", str(runs["once"].path)] in lines
    assert ["experiments", "[1]", "[2]"] in lines
    assert ["method.mu", "–", "0.5"] in lines
    assert ["environments:", "the", "same"] in lines
    assert ["differs_from_round", "–", "1"] in lines
    _, text, _ = say("compare", str(runs["once"].path), str(runs["again"].path))
    assert text.endswith("the results are the same, to the bit\n")
    code, text, _ = say("compare", str(runs["once"].path), str(runs["prox"].path), "--json")
    found = json.loads(text)
    assert list(found) == ["runs", "experiments", "environments", "results"]
    name = next(name for name, path in found["runs"].items() if path == str(runs["prox"].path))
    assert found["experiments"][name] == {"method.name": "fedprox", "method.mu": 0.5}
    assert found["results"][name]["differs_from_round"] == 1


def test_many_runs_are_rows(runs: dict[str, Run], out: Path, say: Say) -> None:
    (grid,) = (out / "grid").glob("*/*")
    code, text, _ = say("compare", str(grid), str(runs["once"].path))
    assert code == 0
    assert [*["experiments", "seed"], "partition.alpha", "train.rounds"] in [
        line.split() for line in text.splitlines()
    ]


def test_the_command_with_one_run(runs: dict[str, Run], say: Say) -> None:
    code, _, complaint = say("compare", str(load(runs["once"].path).path))
    assert (code, complaint) == (2, "error: give at least two different runs to compare\n")
