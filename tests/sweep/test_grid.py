"""Grids: their cells, what is refused, and the same table whatever happens on the way."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from experiments import small_experiment
from fedsim import load, run
from fedsim.cli import main
from fedsim.config_file import RawConfig
from fedsim.errors import ClusterError, ExperimentError, RunFolderError
from fedsim.results.summary import summarise, tidy
from fedsim.sweep.grid import read, resume_grid, run_grid

TWO_BY_TWO = {
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
    del whole["method"]
    return {
        **whole,
        "grid": grid,
        **({"method": sections["method"]} if "method" in sections else {}),
    }


class TestCells:
    def test_every_combination_with_every_seed(self) -> None:
        grid, cells = read(RawConfig(content(TWO_BY_TWO)))
        assert [(c.values["method"], c.values["partition.alpha"], c.seed) for c in cells] == [
            (method, alpha, seed)
            for method in ("FedAvg", "FedProx")
            for alpha in (0.2, 1.0)
            for seed in (0, 1, 2)
        ]
        last = cells[-1]
        assert last.experiment == small_experiment(
            train={"rounds": 6},
            seed=2,
            method={"name": "fedprox", "mu": 0.1},
            partition={"alpha": 1.0},
        )
        assert last.label == "FedProx, partition.alpha=1.0, seed 2"
        assert len({cell.folder for cell in cells}) == 12
        assert grid.baseline == {"method": "FedAvg"}

    def test_excluded_cells_are_left_out(self) -> None:
        excluded = [{"method": "FedProx", "partition.alpha": 0.2}]
        _, cells = read(RawConfig(content({**TWO_BY_TWO, "exclude": excluded, "seeds": [7]})))
        assert [(c.values["method"], c.values["partition.alpha"]) for c in cells] == [
            ("FedAvg", 0.2),
            ("FedAvg", 1.0),
            ("FedProx", 1.0),
        ]

    def test_without_seeds_the_experiments_own_is_taken(self) -> None:
        grid = {"axes": {"train.batch_size": [8, 16]}}
        _, cells = read(RawConfig(content(grid, method={"name": "fedavg"}, seed=5)))
        assert [(c.experiment.seed, c.experiment.train.batch_size) for c in cells] == [
            (5, 8),
            (5, 16),
        ]

    def test_values_with_parts_are_shown_as_json(self) -> None:
        grid = {"axes": {"model.hidden": [[8], [8, 8]]}, "baseline": {"model.hidden": [8]}}
        _, cells = read(RawConfig(content(grid, method={"name": "fedavg"})))
        assert [c.values["model.hidden"] for c in cells] == ["[8]", "[8, 8]"]
        assert cells[1].experiment.model.hidden == (8, 8)  # type: ignore[attr-defined]

    def test_values_of_several_types_become_words(self) -> None:
        grid = {"axes": {"train.clip_norm": [None, 5]}, "exclude": [{"train.clip_norm": None}]}
        _, cells = read(RawConfig(content(grid, method={"name": "fedavg"})))
        assert [(c.values["train.clip_norm"], c.experiment.train.clip_norm) for c in cells] == [
            ("5", 5)
        ]


FILE = """\
name: small
data: {name: synthetic, samples: 60, test_samples: 10, shape: [4], classes: 3}
partition: {kind: iid, clients: 4}
model: {name: mlp, hidden: [4]}
method: {name: fedavg}
train: {rounds: 1}
engine: {kind: local}
"""


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("", "small.yaml: has no grid section; fedsim run carries it out"),
        ("grid: {seeds: [1]}", "small.yaml:8: grid.axes: missing"),
        ("grid: {axes: {}}", "small.yaml:8: grid.axes: Dictionary should have at least 1 item"),
        ("grid: {axis: {}}", "small.yaml:8: grid.axis: unknown key; did you mean 'axes'?"),
        (
            "grid: {axes: {train.batch_size: [8]}, seeds: [1, 1]}",
            "small.yaml:8: grid.seeds: names a seed twice",
        ),
        (
            "grid: {axes: {seed: [1, 2]}}",
            "small.yaml:8: grid.axes.seed: is not the name of an axis; give grid.seeds",
        ),
        (
            "grid: {axes: {train.batch_size: [8, 8]}}",
            "small.yaml:8: grid.axes.train.batch_size: has a value twice",
        ),
        (
            "grid: {axes: {train.batch_size: []}}",
            "small.yaml:8: grid.axes.train.batch_size: has no values",
        ),
        (
            "grid: {axes: {train.batch_size: [8]}, baseline: {train.batchsize: 8}}",
            "small.yaml:8: grid.baseline: 'train.batchsize' is not an axis; did you mean "
            "'train.batch_size'?",
        ),
        (
            "grid: {axes: {train.batch_size: [8, 16]}, baseline: {train.batch_size: 9}}",
            "small.yaml:8: grid.baseline: train.batch_size has no value 9; known: 16, 8",
        ),
        (
            "grid: {axes: {train.batch_size: [8]}, exclude: [{train.batch_size: 8}]}",
            "small.yaml:8: grid.exclude: leaves no cell",
        ),
        (
            "grid: {axes: {train.batchsize: [8, 16]}}",
            "small.yaml:8: cell train.batchsize=8: train.batchsize: unknown key; did you mean "
            "'batch_size'?",
        ),
        (
            "grid: {axes: {method: {a: {method.name: fedavg}, b: {method.name: fedprx}}}}",
            "small.yaml:8: cell b: method.name: unknown method 'fedprx'; did you mean 'fedprox'?",
        ),
        (
            "grid: {axes: {partition.clients: [4, 100]}}",
            "partition.clients=100",
        ),
        ("grid: {axes: {train.batch_size: [8]}, concurrent: 0}", "grid.concurrent: "),
        (
            "grid: {axes: {r2: {a: {train.batch_size: 8}}}}",
            "small.yaml:8: grid.axes.r2: is not the name of an axis; call the axis otherwise",
        ),
        (
            "grid: {axes: {method.mu: [0.1, 1], method: {b: {method: {name: fedprox}}}}}",
            "small.yaml:8: grid.axes: both 'method.mu' and 'method' set method.mu",
        ),
        (
            "grid: {axes: {method: {b: {seed: 1, method.name: fedprox}}}}",
            "small.yaml:8: grid.axes.method: sets seed; give grid.seeds",
        ),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing_behind(
    grid: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(FILE + grid)
    monkeypatch.setattr(sys, "argv", ["fedsim", "grid", "small.yaml"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") <= 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.yaml"]


def test_a_grid_file_is_no_single_run(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(FILE + "grid: {axes: {train.batch_size: [8]}}")
    from fedsim import Experiment

    with pytest.raises(
        ExperimentError, match=r":8: grid: many experiments in one file; .* fedsim grid"
    ):
        Experiment.load(path)


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
        done = run_grid(RawConfig(whole), tmp_path / "runs", lines.append)
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
        done = resume_grid(folder, lines.append)
        assert done.manifest["status"] == "finished"
        assert [line for line in lines if line.startswith("[")] == [
            line for line in lines if line.startswith("[3/3] failing, seed 0: accuracy")
        ]
        assert (plain / "manifest.json").stat().st_mtime_ns == before
        assert done.table("rounds").groupby("method").size()["failing"] == 8
        with pytest.raises(RunFolderError, match="the grid is finished; nothing is missing"):
            resume_grid(folder)

    def test_what_does_not_fit_is_refused_before_anything_is_made(self, tmp_path: Path) -> None:
        whole = content(TWO_BY_TWO, engine={"kind": "ray", "actors": 64})
        with pytest.raises(ClusterError, match=r"engine.actors=64: only 4 client actor\(s\)"):
            run_grid(RawConfig(whole), tmp_path / "runs")
        assert not (tmp_path / "runs").exists()

    def test_a_folder_that_cannot_be_written_is_one_line(self, own_ray: None) -> None:
        whole = content({**TWO_BY_TWO, "seeds": [0]})
        with pytest.raises(RunFolderError, match=r"^/proc/none/small/\S+: cannot be made: .*$"):
            run_grid(RawConfig(whole), "/proc/none")


def command(*words: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fedsim", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
    )


def test_killed_halfway_and_resumed_it_ends_with_the_same_table(tmp_path: Path) -> None:
    whole = content(TWO_BY_TWO)
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(whole))
    # Undisturbed: each cell by itself, in this process.
    grid, cells = read(RawConfig(whole))
    runs = [(c.values, c.seed, run(c.experiment, tmp_path / "undisturbed")) for c in cells]
    rounds = tidy(runs)
    table = summarise(runs, list(grid.axes), grid.baseline, grid.target)

    first = command("grid", "grid.yaml", cwd=tmp_path)
    assert first.stdout is not None
    for line in first.stdout:
        if line.startswith("[6/12]"):
            first.send_signal(signal.SIGKILL)
            break
    first.communicate(timeout=60)
    (folder,) = (tmp_path / "runs" / "small").iterdir()
    assert not (folder / "summary.parquet").exists()
    weights = {path: path.stat().st_mtime_ns for path in folder.glob("cells/*/*/weights/final*")}
    assert 6 <= len(weights) < 12

    second = command("grid", "--resume", str(folder), cwd=tmp_path)
    text, _ = second.communicate(timeout=300)
    assert second.returncode == 0, text
    assert "[12/12]" in text
    assert "one-tailed Welch test, mean of last 5 above that of method=FedAvg" in text
    assert all(path.stat().st_mtime_ns == written for path, written in weights.items())
    found = pd.read_parquet(folder / "rounds.parquet")
    pd.testing.assert_frame_equal(found.drop(columns="seconds"), rounds.drop(columns="seconds"))
    pd.testing.assert_frame_equal(pd.read_parquet(folder / "summary.parquet"), table)
    assert table["p_value"].notna().sum() == 2
    assert table["reached"].sum() > 0
