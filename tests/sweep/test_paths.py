"""Relative paths start from the folder of the command, wherever and whenever they are opened."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from experiments import by_day
from fedsim import Experiment, Grid, Search, grid, resume, run, tune
from fedsim.config.file import RawConfig
from fedsim.config.registry import Config
from fedsim.errors import RunError

EVERYTHING = {
    "name": "paths",
    "data": {"name": "table", "path": "in/table.csv", "label": "ill"},
    "partition": {"kind": "file", "path": "in/clients.json"},
    "model": {"name": "own_paths:widened", "notes": "in/width.txt"},
    "method": {"name": "fedavg"},
    "train": {"rounds": 2, "initial_weights": "in/weights.pt"},
    "devices": {"availability_trace": "in/online.pkl", "capacity_trace": "in/speed.json"},
    "engine": {"kind": "local"},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all the files, where the command is given."""
    here = tmp_path / "here"
    (here / "in").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(here)
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(40, 3)), columns=["a", "b", "c"])
    table["ill"] = np.where(table["a"] > 0, "yes", "no")
    table.to_csv("in/table.csv", index=False)
    table.to_csv("in/other.csv", index=False)
    Path("in/clients.json").write_text(json.dumps([[*range(8)], [*range(8, 20)]]))
    Path("in/width.txt").write_text("5")
    network = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    torch.save(network.state_dict(), "in/weights.pt")
    device = {"active": [0], "inactive": [9], "finish_time": 9}
    Path("in/online.pkl").write_bytes(pickle.dumps({0: device}))
    Path("in/speed.json").write_text('{"0": {"computation": 1, "communication": 1000}}')
    return here


# Without code of one's own, which is sought in the present folder.
PLAIN = {**EVERYTHING, "model": {"name": "mlp", "hidden": [5]}, "train": {"rounds": 2}}
GRID = {"axes": {"data.path": ["in/table.csv", "in/other.csv"]}}
SEARCH = {
    "space": {
        "data.path": ["in/table.csv", "in/other.csv"],
        "train.optimizer.lr": {"type": "float", "low": 0.01, "high": 0.1},
    },
    "objectives": {"accuracy": "max"},
    "trials": 2,
    "concurrent": 1,
}


def test_paths_in_lists_and_dicts_too(tmp_path: Path) -> None:
    class Own(Config):
        several: tuple[Path, ...]
        named: dict[str, list[Path]]

    built = RawConfig({"several": ["a", "/b"], "named": {"c": ["d"]}}, folder=tmp_path).build(Own)
    assert built.several == (tmp_path / "a", Path("/b"))
    assert built.named == {"c": [tmp_path / "d"]}


class TestOnRay:
    """The private Ray was started in another folder, as a cluster's is."""

    def test_runs_grids_and_searches(self, here: Path, own_ray: None) -> None:
        engine = {"kind": "ray", "actors": 1}
        done = run(Experiment.from_dict({**EVERYTHING, "engine": engine}), progress=False)
        assert done.path.parent == here / "runs" / "paths"
        assert done.status == "finished"
        cells = grid({**EVERYTHING, "grid": GRID}, progress=False).cells
        assert list(cells["status"]) == ["finished"] * 2
        assert list(cells["data.path"]) == ["in/table.csv", "in/other.csv"]  # as given
        trials = tune({**EVERYTHING, "search": SEARCH}, progress=False).trials
        assert list(trials["status"]) == ["finished"] * 2

    @pytest.mark.parametrize("kind", by_day([Grid, Search], [Search]))
    def test_what_was_interrupted_goes_on_from_another_folder(
        self, here: Path, own_ray: None, kind: type[Grid | Search], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stop(line: str) -> None:
            if line.startswith("[1/2]"):
                raise InterruptedError

        start, section = (grid, {"grid": GRID}) if kind is Grid else (tune, {"search": SEARCH})
        with pytest.raises(InterruptedError):
            start({**PLAIN, **section}, progress=stop)
        (path,) = (here / "runs" / "paths").iterdir()
        monkeypatch.chdir(here.parent / "elsewhere")
        done = resume(path, progress=False)
        assert {each.status for each in done.runs} == {"finished"}
        assert len(done.runs) == 2

    def test_a_failure_that_all_trials_have_ends_the_search(
        self, here: Path, own_ray: None
    ) -> None:
        """In its own words: the file is gone when the trials look for it."""
        (notes := Path("in/notes.txt")).write_text("")
        data = {"name": "own_paths:Noted", "notes": "in/notes.txt", "shape": [4], "classes": 2}
        space = {"data.samples": {"type": "int", "low": 50, "high": 90}}
        content = {**PLAIN, "data": data, "partition": {"kind": "iid", "clients": 2}}
        content["search"] = {**SEARCH, "space": space, "trials": 9}
        lines: list[str] = []
        with pytest.raises(RunError, match=r"in/notes\.txt") as raised:
            tune(content, progress=lines.append, on_start=lambda _: notes.unlink())
        assert "\n" not in str(raised.value)
        assert len(lines) == 2, lines  # no trial is told of
        (folder,) = (Search.open(path) for path in here.glob("runs/*/*"))
        assert folder.status == "failed"

    def test_a_trial_that_is_refused_for_its_values_ends_nothing(
        self, here: Path, own_ray: None
    ) -> None:
        """The bounds can be carried out, what lies between them cannot."""
        space = {"train.rounds": {"type": "int", "low": 1, "high": 3}}
        search = {**SEARCH, "space": space, "sampler": "random", "seed": 0}
        content = {**PLAIN, "method": {"name": "own_paths:Odd"}, "train": {}, "search": search}
        trials = tune(content, progress=False).trials
        assert sorted(trials["status"]) == ["failed", "finished"]
        failed = trials[trials["status"] == "failed"]
        assert failed["error"].str.fullmatch(r"experiment: rounds must be odd, not 2").all()
