"""What is said to differ between runs is what was made to differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments import Say, change_manifest, grid_in_process, refusal, small_experiment
from fedsim import Comparison, Run, compare, load, run


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compared")


@pytest.fixture(scope="module")
def runs(out: Path) -> dict[str, Run]:
    """The same experiment twice, with more rounds, and with another method."""
    usual: dict[str, Any] = {"train": {"rounds": 3}}
    longer, prox = {"train": {"rounds": 4}}, {"method": {"name": "fedprox", "mu": 0.5}}
    changes: dict[str, Any] = {"once": {}, "again": {}, "longer": longer, "prox": prox}
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


def test_tables_and_environments_that_differ_are_found(runs: dict[str, Run], out: Path) -> None:
    other = load(shutil.copytree(runs["once"].path, out / "edited"))
    clients = other.clients.copy()
    clients.loc[(clients["round"] == 2) & (clients["client"] == 7), "loss"] += 1e-12
    clients.to_parquet(other.path / "clients.parquet")
    packages = {**other.manifest["packages"], "torch": "1.0"}
    hardware = {**other.manifest["hardware"], "cpus": 99}
    change_manifest(other.path, "files", packages=packages, hardware=hardware)
    edited = compare(runs["once"], other.path)
    assert edited.results["differs_from_round"].tolist() == [pd.NA, 2]
    assert list(edited.environments.columns) == ["packages.torch", "hardware.cpus"]
    assert edited.environments["hardware.cpus"].tolist()[1] == 99


def test_a_grid_stands_for_its_runs(runs: dict[str, Run], out: Path, say: Say) -> None:
    content = small_experiment(train={"rounds": 1}).model_dump(mode="json")
    content["grid"] = {"axes": {"partition.alpha": [0.1, 1.0]}, "seeds": [0, 1]}
    grid = grid_in_process(content, out / "grid")
    compared = compare(grid)
    assert len(compared.runs) == 4
    assert list(compared.experiments.columns) == ["seed", "partition.alpha"]
    assert len(compare(grid, runs["once"]).runs) == 5
    text = say.printed("compare", str(grid), str(runs["once"].path))
    header = [*["experiments", "seed"], "partition.alpha", "train.rounds"]
    assert header in [line.split() for line in text.splitlines()]  # many runs are rows


def test_how_it_is_shown(two: Comparison) -> None:
    shown = two._repr_html_()
    assert shown.count("<table") == 2
    assert "<b>environments</b>: the same" in shown
    table = two.experiments.rename(columns={"method.mu": "<script>"})
    shown = Comparison(two.runs, table, two.environments, two.results)._repr_html_()
    assert "<script>" not in shown
    results = two.results.assign(accuracy=[0.225, 0.22222], seconds=[0.123, float("nan")])
    in_text = Comparison(two.runs, two.experiments, two.environments, results)
    assert in_text.texts["results"]["accuracy"].tolist() == ["0.2250", "0.2222"]
    assert in_text.texts["results"]["seconds"].tolist() == ["0.1", "–"]
    assert "0.2250" in str(in_text)


def test_what_cannot_be_compared(runs: dict[str, Run], tmp_path: Path) -> None:
    once = runs["once"]
    for given in ([], [once], [once, once.path]):
        assert "at least two different runs" in refusal(lambda given=given: compare(*given))
    assert "there is no such folder" in refusal(lambda: compare(once, tmp_path / "nowhere"))


def test_the_command(runs: dict[str, Run], say: Say) -> None:
    paths = [runs["once"].path, runs["prox"].path]
    text = say.printed("compare", *map(str, paths))
    lines = [line.split() for line in text.splitlines()]
    assert ["[1]", str(paths[0])] in lines
    assert ["experiments", "[1]", "[2]"] in lines
    assert ["method.mu", "–", "0.5"] in lines
    assert ["environments:", "the", "same"] in lines
    assert ["differs_from_round", "–", "1"] in lines
    text = say.printed("compare", str(paths[0]), str(runs["again"].path))
    assert text.endswith("the results are the same, to the bit\n")
    found = json.loads(say.printed("compare", *map(str, paths), "--json"))
    assert list(found) == ["runs", "experiments", "environments", "results"]
    name = next(name for name, path in found["runs"].items() if path == str(paths[1]))
    assert found["experiments"][name] == {"method.name": "fedprox", "method.mu": 0.5}
    assert found["results"][name]["differs_from_round"] == 1
