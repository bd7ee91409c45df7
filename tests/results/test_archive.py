"""One archive for a reader elsewhere: whole, small, the same each time, and good for all there."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pandas as pd
import pytest

import fedsim
from experiments import Say, change_manifest, grid_in_process, ran, small_experiment
from fedsim import Run
from fedsim.analysis.replay import replay
from fedsim.errors import RunFolderError
from fedsim.results.archive import pack_results

SCAFFOLD = {
    "method": {"name": "scaffold"},
    "train": {"rounds": 3},
    "checkpoint": {"every": 1},
}


@pytest.fixture(scope="module")
def finished() -> Run:
    return ran(**SCAFFOLD)


@pytest.fixture
def run(finished: Run, tmp_path: Path) -> Path:
    return shutil.copytree(finished.path, tmp_path / "mine" / "run")


def unpacked(archive: Path) -> Path:
    with ZipFile(archive) as packed:
        packed.extractall(archive.parent / "elsewhere")
    (folder,) = (archive.parent / "elsewhere").iterdir()
    return folder


@pytest.mark.usefixtures("undrawn")
def test_what_is_unpacked_elsewhere_is_as_good(
    finished: Run, run: Path, tmp_path: Path, say: Say
) -> None:
    assert say("explain", str(run))[0] == 0
    (run / "weights" / ".round-000003.safetensors.1a.part").write_bytes(b"half")
    code, told, _ = say("pack", str(run), "--out", "here.zip")
    assert code == 0
    archive = tmp_path / "here.zip"
    assert told.splitlines()[0] == "written: here.zip"
    assert told.splitlines()[2] == f"sha256: {hashlib.sha256(archive.read_bytes()).hexdigest()}"
    shutil.rmtree(run)

    there = unpacked(archive)
    left = {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}
    assert {name for name in left if not re.match(r"weights/clients/|explanations/", name)} == {
        *("experiment.yaml", "manifest.json", "manifest.copy.json", "log.txt"),
        *("rounds.parquet", "clients.parquet", "labels.parquet"),
        *("weights/final.safetensors", "weights/round-000003.safetensors"),
    }
    assert any(name.startswith("explanations/") for name in left)
    assert say("verify", str(there))[:2] == (0, "no damage found (1 folder(s))\n")
    assert say("report", str(there))[0] == 0
    again = fedsim.load(there)
    assert again.result_hash == finished.result_hash
    pd.testing.assert_frame_equal(again.rounds, finished.rounds)
    begun: list[int] = []
    models = [replay(each, on_round=begun.append).state.weights for each in (again, finished)]
    assert (models[0] == models[1]).all()
    assert begun == []  # no round had to be made once more, which other machines round otherwise
    assert len(again.weights()) == len(finished.weights())


def test_the_same_folder_gives_the_same_bytes(run: Path, tmp_path: Path) -> None:
    first = pack_results(run, tmp_path / "first.zip")
    for number, path in enumerate(run.rglob("*")):
        os.utime(path, (number, number))
        path.chmod(0o700)
    second = pack_results(
        shutil.copytree(run, tmp_path / "other" / "run"), tmp_path / "second.zip"
    )
    assert first.path.read_bytes() == second.path.read_bytes()
    assert first.sha256 == second.sha256


def test_all_checkpoints_are_packed_if_all_are_kept(tmp_path: Path, say: Say) -> None:
    path = ran(train={"rounds": 3}, checkpoint={"every": 1, "keep": "all"}).path
    there = unpacked(pack_results(path, tmp_path / "all.zip").path)
    assert len(list(there.glob("weights/round-*"))) == 3
    before = sorted(there.rglob("*"))
    assert say("verify", str(there))[0] == 0
    assert sorted(there.rglob("*")) == before  # it only looks: folders can be read-only


@pytest.mark.usefixtures("undrawn")
def test_a_grid_is_packed_with_all_its_runs(tmp_path: Path, say: Say) -> None:
    """Also with one that failed, which is part of its result."""
    content = small_experiment(train={"rounds": 1}).model_dump(mode="json")
    axes = {"train.optimizer.lr": [0.1, 1e38]}
    path = grid_in_process({**content, "grid": {"axes": axes, "seeds": [0, 1]}}, tmp_path)
    code, told, _ = say("pack", str(path))
    assert code == 0
    assert told.startswith("not all runs are finished; packed anyway: 2 failed\n")
    there = unpacked(tmp_path / f"{path.name}.zip")
    shutil.rmtree(path)
    assert say("verify", str(there))[:2] == (0, "no damage found (5 folder(s))\n")
    assert say("report", str(there))[0] == 0
    assert (there / "summary.csv").is_file()


HARMS: dict[str, Callable[[Path], object]] = {
    r"1 file\(s\) damaged or missing:\n  .*/rounds.parquet: is damaged: ": (
        lambda path: (path / "rounds.parquet").write_bytes(b"nothing")
    ),
    r"/weights/clients/link: is not a regular file; remove it$": (
        lambda path: (path / "weights" / "clients" / "link").symlink_to("/etc/passwd")
    ),
    "/explanations.fifo: is neither a file nor a folder": (
        lambda path: os.mkfifo(path / "explanations.fifo")
    ),
    r"the run is not finished \(interrupted\), .* go on with: fedsim resume /": (
        lambda path: change_manifest(path, status="interrupted")
    ),
}


@pytest.mark.parametrize("told", HARMS)
def test_what_is_not_as_it_should_be_is_refused(run: Path, tmp_path: Path, told: str) -> None:
    HARMS[told](run)
    with pytest.raises(RunFolderError, match=told):
        pack_results(run, tmp_path / "x.zip")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
