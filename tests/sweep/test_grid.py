"""Grids: their cells, what is refused, and the same table whatever happens on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from commands import Command

from experiments import WHOLE, Say, pickles, small_experiment
from fedsim import grid, load, resume, run
from fedsim.config.file import RawConfig
from fedsim.errors import ClusterError, RunFolderError
from fedsim.results.summary import summarise_cells, tidy
from fedsim.sweep.grid import GridSweep

TWO_BY_TWO: dict[str, Any] = {
    "axes": {
        "method": {
            "FedAvg": {"method.name": "fedavg"},
            "FedProx": {"method": {"name": "fedprox", "mu": 0.1}},
        },
        "partition.alpha": [0.2, 1.0],
    },
    "seeds": [0, 1, 2],
    "baseline": {"method": "FedAvg"},
    "target": 0.7,
}


def content(grid: Any, **sections: Any) -> dict[str, Any]:
    """A small experiment file, as nested dicts, with a grid."""
    whole = small_experiment(train={"rounds": 6}, **sections).model_dump(mode="json")
    if "method" not in sections:
        del whole["method"]
    return {**whole, "grid": grid}


FEDAVG = {"method": {"name": "fedavg"}}


@pytest.mark.parametrize(
    ("grid", "sections", "cells", "last"),
    [
        (
            *(TWO_BY_TWO, {}),
            [(m, a, s) for m in ("FedAvg", "FedProx") for a in (0.2, 1.0) for s in (0, 1, 2)],
            {"method": {"name": "fedprox", "mu": 0.1}, "partition": {"alpha": 1.0}, "seed": 2},
        ),
        (
            {
                **TWO_BY_TWO,
                "exclude": [{"method": "FedProx", "partition.alpha": 1.0}],
                "seeds": [7],
            },
            *({}, [("FedAvg", 0.2, 7), ("FedAvg", 1.0, 7), ("FedProx", 0.2, 7)]),
            {"method": {"name": "fedprox", "mu": 0.1}, "partition": {"alpha": 0.2}, "seed": 7},
        ),
        # The experiment's own seed.
        (
            *({"axes": {"train.batch_size": [8, 16]}}, {**FEDAVG, "seed": 5}, [(8, 5), (16, 5)]),
            {"train": {"rounds": 6, "batch_size": 16}, "seed": 5},
        ),
        # Values with parts are shown as JSON, and those of several types become words.
        (
            {"axes": {"model.hidden": [[8], [8, 8]]}, "baseline": {"model.hidden": [8]}},
            *(FEDAVG, [("[8]", 0), ("[8, 8]", 0)], {"model": {"hidden": [8, 8]}}),
        ),
        (
            {"axes": {"train.clip_norm": [None, 5]}, "exclude": [{"train.clip_norm": None}]},
            *(FEDAVG, [("5", 0)], {"train": {"rounds": 6, "clip_norm": 5}}),
        ),
    ],
)
def test_cells(
    grid: dict[str, Any], sections: dict[str, Any], cells: list[Any], last: dict[str, Any]
) -> None:
    runs = GridSweep(RawConfig(content(grid, **sections))).runs
    assert [(*run.values.values(), run.seed) for run in runs] == cells
    assert len({run.folder for run in runs}) == len(cells)
    assert runs[-1].experiment == small_experiment(**{"train": {"rounds": 6}, **last})
    label = ", ".join(
        str(value) if key == "method" else f"{key}={value}"
        for key, value in runs[-1].values.items()
    )
    assert runs[-1].label == f"{label}, seed {runs[-1].seed}"


class TestOnRay:
    """Trials with client actors: one is lost, one fails, and the rest does not care."""

    @pytest.fixture(scope="class")
    @staticmethod
    def folder(tmp_path_factory: pytest.TempPathFactory, own_ray: None) -> Path:
        """A grid with a driver that dies once, and a client that fails."""
        tmp_path = tmp_path_factory.mktemp("grid")
        method = {
            "plain": {"method.name": "fedavg"},
            "dying": {
                "method": {"name": "faults:DyingDriver", "marker": str(tmp_path / "marker")}
            },
            "failing": {
                "method": {"name": "faults:FailsUntil", "mended": str(tmp_path / "mended")}
            },
        }
        # Two at a time with two actors each take all four CPUs: nothing is free outside.
        whole = content({"axes": {"method": method}}, engine={"kind": "ray", "actors": 2})
        whole["train"] = {**whole["train"], "rounds": 8}
        lines: list[str] = []
        done = grid(whole, out=tmp_path / "runs", progress=lines.append)
        (tmp_path / "lines").write_text("\n".join(lines))
        return done.path

    def test_the_failing_cell_is_reported(self, folder: Path) -> None:
        manifest = yaml.safe_load((folder / "manifest.json").read_text())
        assert manifest["status"] == "failed"
        states = {run["cell"]["method"]: run["status"] for run in manifest["cells"]}
        assert states == {"plain": "finished", "dying": "finished", "failing": "failed"}
        (error,) = (run["error"] for run in manifest["cells"] if run["error"])
        assert error.startswith("client 2, round 4, local_update: ")
        lines = (folder.parents[2] / "lines").read_text().splitlines()
        assert lines[0] == "3 runs, 2 at a time, with 2 client actor(s) each"
        assert any("failing, seed 0: failed: client 2, round 4" in line for line in lines)

    def test_the_others_are_as_if_nothing_had_happened(self, folder: Path) -> None:
        expected = run(small_experiment(train={"rounds": 8}), folder.parent / "local").result_hash
        rounds = pd.read_parquet(folder / "rounds.parquet")
        assert rounds.groupby("method").size().to_dict() == {"plain": 8, "dying": 8}
        for cell in folder.glob("cells/00[01]-*/seed-0"):
            assert load(cell).result_hash == expected

    def test_resumed_it_runs_what_had_failed_and_nothing_else(self, folder: Path) -> None:
        (plain,) = folder.glob("cells/*-plain/seed-0")
        before = (plain / "manifest.json").stat().st_mtime_ns
        (folder.parents[2] / "mended").touch()
        lines: list[str] = []
        done = resume(folder, lines.append)
        assert done.manifest["status"] == "finished"
        assert [line for line in lines if line.startswith("[")] == [
            line for line in lines if line.startswith("[3/3] failing, seed 0: accuracy")
        ]
        assert (plain / "manifest.json").stat().st_mtime_ns == before
        assert done.rounds.groupby("method").size()["failing"] == 8
        with pytest.raises(RunFolderError, match="the grid is finished"):
            resume(folder)

    def test_what_does_not_fit_is_refused_before_anything_is_made(self, tmp_path: Path) -> None:
        whole = content(TWO_BY_TWO, engine={"kind": "ray", "actors": 64})
        with pytest.raises(ClusterError, match=r"engine.actors=64: only 4 client actor\(s\)"):
            grid(whole, out=tmp_path / "runs")
        assert not (tmp_path / "runs").exists()

    def test_a_folder_that_cannot_be_written_is_one_line(self, own_ray: None) -> None:
        whole = content({**TWO_BY_TWO, "seeds": [0]})
        with pytest.raises(RunFolderError, match=r"^/proc/none/small/\S+: cannot be made: .*$"):
            grid(whole, out="/proc/none")


@pytest.mark.night  # by day a run is killed: tests/test_same_bits.py
def test_killed_halfway_and_resumed_it_ends_with_the_same_table(tmp_path: Path, say: Say) -> None:
    axes = {"method": TWO_BY_TWO["axes"]["method"]}
    of_two = {**TWO_BY_TWO, "axes": axes, "seeds": [0, 1], "target": 0.5}
    whole = content(of_two, data=WHOLE)
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(whole))
    # Undisturbed: each cell by itself, in this process.
    sweep = GridSweep(RawConfig(whole))
    undisturbed = tmp_path / "undisturbed"
    runs = [(c.values, c.seed, run(c.experiment, undisturbed)) for c in sweep.runs]
    rounds = tidy(runs)
    table = summarise_cells(runs, list(sweep.grid.axes), sweep.grid.baseline, sweep.grid.target)

    with Command("grid", "grid.yaml", cwd=tmp_path, shares_workers=True) as first:
        for line in first.stdout:
            if line.startswith("[2/4]"):
                first.kill()
                break
    (folder,) = (tmp_path / "runs" / "small").iterdir()
    assert not (folder / "summary.parquet").exists()
    # A trial killed between its weights and its last word to the manifest writes both again.
    weights = {
        path: path.stat().st_mtime_ns
        for manifest in folder.glob("cells/*/*/manifest.json")
        if json.loads(manifest.read_text())["status"] == "finished"
        for path in (manifest.parent / "weights").glob("final*")
    }
    assert 2 <= len(weights) < 4

    code, text, complaints = say("resume", str(folder))
    assert code == 0, complaints
    assert "[4/4]" in text
    assert "two-tailed t-test of the difference of mean of last 5 to method=FedAvg, paired" in text
    assert all(path.stat().st_mtime_ns == written for path, written in weights.items())
    assert not pickles(folder)
    found = pd.read_parquet(folder / "rounds.parquet")
    pd.testing.assert_frame_equal(found.drop(columns="seconds"), rounds.drop(columns="seconds"))
    pd.testing.assert_frame_equal(pd.read_parquet(folder / "summary.parquet"), table)
    assert table["p_value"].notna().sum() == 1
    assert table["reached"].sum() > 0
