"""Grids, searches and runs as Python shows them: tables, figures, notebooks."""

from __future__ import annotations

import itertools
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from made import CLIENTS, Cell, classification, made_grid, made_search
from matplotlib import pyplot as plt

from experiments import change_manifest, small_experiment
from fedsim import Grid, Run, Search, load
from fedsim.cli.runs import _search_summary
from fedsim.errors import BadInput, RunFolderError
from fedsim.experiment import Experiment
from fedsim.results.folder import GridFolder, RunFolder, SearchFolder
from fedsim.results.summary import mean_std
from fedsim.sweep.sweep import write_tables

PROX = '<b onclick="alert(1)">prox'  # a named variant of somebody who means no good
AXES = {"method": ["FedAvg", PROX], "train.batch_size": [16, 32]}


@pytest.fixture(autouse=True)
def off_screen() -> Iterator[None]:
    backend = mpl.get_backend()
    plt.switch_backend("agg")
    yield
    plt.close("all")
    plt.switch_backend(backend)


class TestGrid:
    @pytest.fixture(scope="class")
    @staticmethod
    def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A grid of two axes and two seeds, with its tables."""
        out = tmp_path_factory.mktemp("grid")
        cells: list[Cell] = []
        for k, values in enumerate(itertools.product(*AXES.values(), (0, 1))):
            *of_cell, seed = values
            last = 0.4 + k / 20 + 0.01 * seed
            done = classification(out / str(k), last, rounds=3, seed=int(seed))
            cells.append((dict(zip(AXES, of_cell, strict=True)), int(seed), done))
        facts = {"baseline": {"method": "FedAvg"}, "target": 0.3}
        path = made_grid(out / "small" / "1", cells, **facts)
        folder = GridFolder.open(path)
        grid = Grid(folder)
        tables = {"summary": grid.summary, "rounds": grid.rounds}
        folder.update(files=write_tables(path, tables))
        return path

    @pytest.fixture
    def grid(self, path: Path) -> Grid:
        found = load(path)
        assert isinstance(found, Grid)
        return found

    def test_tables_have_the_axes(self, grid: Grid) -> None:
        assert (grid.name, grid.status, grid.axes) == ("small", "finished", list(AXES))
        cells = grid.cells
        assert list(cells["method"]) == ["FedAvg"] * 4 + [PROX] * 4
        assert list(cells["train.batch_size"]) == [16, 16, 32, 32] * 2
        assert list(cells["seed"]) == [0, 1] * 4
        assert set(cells["status"]) == {"finished"}
        for row, run in zip(cells.to_dict("records"), grid.runs, strict=True):
            assert run.path == grid.path / row["folder"]
            assert row["last"] == run.rounds["accuracy"].iloc[-1]
            assert row["best"] == run.rounds["accuracy"].max()
            assert row["total_bytes"] > 0
        first = cells[(cells["method"] == "FedAvg") & (cells["train.batch_size"] == 16)]
        summary = grid.summary
        assert summary["last_mean"][0] == pytest.approx(first["last"].mean())
        assert summary["last_std"][0] == pytest.approx(first["last"].std())
        assert list(summary["seeds"]) == [2] * 4
        assert {"p_value", "reached", "bytes_to_target_mean"} <= set(summary)
        assert len(grid.rounds) == 4 * 2 * 3
        assert list(grid.rounds)[:3] == [*AXES, "seed"]

    def test_while_it_goes_on_there_are_those_of_what_has_finished(
        self, grid: Grid, tmp_path: Path
    ) -> None:
        rows = [{**row, "status": "missing"} for row in grid.manifest["cells"]]
        facts = {key: grid.manifest[key] for key in ("name", "axes", "baseline", "target")}
        going_on = GridFolder.make(
            tmp_path / "going-on", "name: small\n", {**facts, "cells": rows}
        )
        for row in rows[:3]:
            there = going_on.path / row["folder"]
            shutil.copytree(grid.path / row["folder"], there)
        change_manifest(going_on.path / rows[2]["folder"], "result_hash", status="running")
        found = load(going_on.path)
        assert isinstance(found, Grid)
        assert list(found.cells["status"]) == ["finished"] * 2 + ["running"] + ["missing"] * 5
        assert found.cells["last"].notna().tolist() == [True] * 2 + [False] * 6
        assert len(found.runs) == 3
        pd.testing.assert_series_equal(found.summary.iloc[0], grid.summary.iloc[0])
        assert len(found.rounds) == 2 * 3
        assert "running, 2 of 8 runs finished" in repr(found)

    def test_a_run_that_was_resumed_alone_counts(self, grid: Grid, tmp_path: Path) -> None:
        again = shutil.copytree(grid.path, tmp_path / "again")
        cells = [dict(row) for row in grid.manifest["cells"]]
        cells[0]["status"] = "failed"  # as it was when the grid ended
        change_manifest(again, cells=cells)
        without = grid.summary.copy()
        without["seeds"] = 1
        files = write_tables(again, {"summary": without, "rounds": grid.rounds[:3]})
        change_manifest(again, files=files)
        found = load(again)
        assert isinstance(found, Grid)
        assert list(found.summary["seeds"]) == [2] * 4
        assert len(found.rounds) == 4 * 2 * 3

    def test_shows_itself(self, grid: Grid) -> None:
        assert repr(grid) == f"<Grid '{grid.path}': finished, 8 of 8 runs finished>"
        page = grid._repr_html_()
        assert "small: grid over method, train.batch_size" in page
        assert page.count("<tr>") == 1 + 2 + 4
        assert "<b onclick" not in page
        assert "&lt;b onclick" in page
        scores = mean_std(grid.summary["last_mean"], grid.summary["last_std"])
        assert all(score in page for score in scores)
        assert "<title>accuracy by round</title>" in page
        assert all(f"--line-{k}: " in page for k in re.findall(r"var\(--line-(\d)\)", page))

    def test_figures(self, grid: Grid) -> None:
        axes = grid.plot()
        assert axes.get_ylabel() == "accuracy"
        found = grid.rounds.groupby([*AXES, "round"], sort=False)["accuracy"].mean()
        drawn = [line.get_ydata() for line in axes.get_lines()]
        np.testing.assert_allclose(np.concatenate(drawn), found.to_numpy())
        labels = [text.get_text() for text in axes.get_legend().get_texts()]
        assert labels[0] == "FedAvg, train.batch_size=16"
        _, mine = plt.subplots()
        assert grid.plot("curves", metric="loss", ax=mine) is mine
        assert mine.get_ylabel() == "loss"
        summary = grid.plot("summary")
        assert len(summary.get_yticks()) == 4
        assert grid.plot("summary", metric="loss").get_xlabel().startswith("loss, last round")

    def test_figures_that_there_are_not(self, grid: Grid) -> None:
        plt.close("all")
        for figure, metric, message in (
            ("curve", None, "there is no figure 'curve'; did you mean 'curves'?"),
            ("curves", "acuracy", "no column 'acuracy' was recorded; did you mean 'accuracy'?"),
            ("summary", "los", "the summary has no score 'los'; did you mean 'loss'?"),
        ):
            with pytest.raises(BadInput, match=re.escape(f"plot: {message}")):
                grid.plot(figure, metric=metric)
        assert not plt.get_fignums()

    def test_a_dollar_is_no_mathematics(self, grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fedsim.results.figures.plots.cell_label", lambda cell: "$5 and $6")
        axes = grid.plot("curves")
        (text, *_) = axes.get_legend().get_texts()
        assert not text.get_parse_math()

    def test_a_run(self, grid: Grid) -> None:
        run = grid.runs[0]
        assert repr(run) == f"<Run '{run.path}': finished>"
        page = run._repr_html_()
        for words in ("small: fedavg on digits", "finished, 3 rounds", run.result_hash):
            assert words in page
        assert f"{run.rounds['accuracy'].iloc[-1]:.4f}" in page
        (line,) = run.plot(metric="train_loss").get_lines()
        np.testing.assert_array_equal(line.get_ydata(), run.rounds["train_loss"])
        dots = run.plot("clients").get_lines()[0].get_ydata()
        last = run.clients[run.clients["round"] == 3]["test_accuracy"]
        assert list(dots) == sorted(last)
        (image,) = run.plot("labels").get_images()
        assert image.get_array().shape == (10, CLIENTS)
        assert image.get_array().sum() == run.labels["examples"].sum()
        with pytest.raises(BadInput, match=r"clients\.parquet has no 'test_rmse'; it takes evalu"):
            run.plot("clients", metric="rmse")
        for figure in ("labels", "confusion"):
            with pytest.raises(BadInput, match=f"'{figure}' shows no metric; leave out"):
                run.plot(figure, metric="loss")


class TestSearch:
    @pytest.fixture
    def search(self, tmp_path: Path) -> Search:
        """As a search of three trials leaves it."""
        trials = pd.DataFrame(
            {
                "trial": [0, 1, 2],
                "train.batch_size": [8, 16, 32],
                "status": ["finished", "finished", "failed"],
                "accuracy": [0.7, 0.5, np.nan],
                "total_bytes": [200.0, 100.0, np.nan],
                "rounds": [3, 3, np.nan],
                "error": [None, None, "client 2, round 1"],
                "folder": ["trials/a", "trials/b", "trials/c"],
            }
        )
        shares = {"hyper-parameter": ["train.batch_size"], "accuracy": 1.0, "total_bytes": np.nan}
        path = made_search(
            tmp_path / "small" / "1",
            {"accuracy": "max", "total_bytes": "min"},
            **{"trials": trials, "pareto": trials[:2], "importance": pd.DataFrame(shares)},
        )
        change_manifest(path, space=["train.batch_size"], status="failed")
        (path / "best.yaml").write_text(small_experiment(train={"batch_size": 8}).to_yaml())
        found = load(path)
        assert isinstance(found, Search)
        return found

    def test_tables(self, search: Search) -> None:
        assert (search.status, search.runs) == ("failed", [])
        assert list(search.trials["trial"]) == [0, 1, 2]
        assert list(search.pareto["trial"]) == [0, 1]
        assert search.importance.set_index("hyper-parameter")["accuracy"].tolist() == [1.0]
        assert isinstance(search.best, Experiment)
        assert search.best.train.batch_size == 8

    def test_without_a_finished_trial_there_is_no_figure_and_no_best(self, tmp_path: Path) -> None:
        facts = {"name": "small", "objectives": {"accuracy": "max"}, "space": ["train.batch_size"]}
        folder = SearchFolder.make(tmp_path / "search", "name: small\n", facts)
        search = Search(folder)
        with pytest.raises(RunFolderError, match="no trial has finished; there is no best one"):
            _ = search.best
        with pytest.raises(BadInput, match="no trial has ended"):
            search.plot()
        assert "running; 0 trials finished" in search._repr_html_()
        assert repr(search) == f"<Search '{search.path}': running, 0 trials>"
        trials = pd.DataFrame({"trial": [0], "train.batch_size": [8], "status": ["failed"]})
        folder.update(files=write_tables(search.path, {"trials": trials}), status="failed")
        for figure in ("history", "importance"):
            with pytest.raises(BadInput, match="no trial has ended"):
                Search.open(search.path).plot(figure)

    def test_shows_itself(self, search: Search) -> None:
        page = search._repr_html_()
        assert "search for accuracy (max), total_bytes (min)" in page
        assert "failed; 2 trials finished" in page
        assert "Pareto front" in page
        assert '<td style="text-align: left">0.7</td>' in page
        history = search.plot("history")
        trials, best = (line.get_ydata() for line in history.get_lines())
        assert list(trials) == [0.7, 0.5]
        assert list(best) == [0.7, 0.7]
        assert search.plot("pareto").get_xlabel() == "accuracy (max)"
        assert search.plot("importance").get_xlabel() == "share of the variance (fANOVA)"
        with pytest.raises(BadInput, match=r"'acuracy' is not an objective .*; did you mean 'acc"):
            search.plot("history", metric="acuracy")


def test_a_run_of_no_round_shows_itself(tmp_path: Path) -> None:
    made = small_experiment(name="new")
    run = Run(RunFolder.create(made, tmp_path / "new", {"clients": 10}))
    page = run._repr_html_()
    assert "new: fedavg on digits" in page
    assert "running, 0 rounds" in page
    with pytest.raises(BadInput, match="no column 'accuracy' was recorded"):
        run.plot()


def test_the_table_of_a_search_says_which_trials_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, both = {"accuracy": "max"}, {"accuracy": "max", "loss": "min"}
    for objectives, count, heading in (
        (one, 7, "best 5 of 7 finished trials:"),
        (one, 3, "finished trials, best first:"),
        (both, 7, "Pareto front, 2 of 7 finished trials"),
    ):
        trials = pd.DataFrame(
            {"trial": range(count), "status": "finished", "lr": 0.1, "loss": 1.0}
        )
        trials["accuracy"] = trials["trial"] / 10
        shares = pd.DataFrame({"hyper-parameter": ["lr"], **dict.fromkeys(objectives, math.nan)})
        tables = {"trials": trials, "pareto": trials.tail(2), "importance": shares}
        path = made_search(tmp_path / heading[:4] / "1", objectives, **tables)
        _search_summary(Search.open(path))
        lines = capsys.readouterr().out.splitlines()
        at = next(k for k, line in enumerate(lines) if line.startswith(heading))
        assert lines[at + 1].split() == ["trial", "lr", *objectives]
        assert lines[at + 2].split()[0] == str(count - 1)  # the best first
