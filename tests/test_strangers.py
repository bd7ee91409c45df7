"""Folders that somebody else prepared: nothing of theirs runs, is followed or is overwritten."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

import fedsim
from experiments import Say, by_day, change_manifest, grid_in_process, small_experiment
from fedsim.errors import RunFolderError
from fedsim.results.folder import RunFolder
from fedsim.results.run import Run
from fedsim.sweep.submit import _no_links

PAYLOAD = """
from pathlib import Path
Path({marker!r}).touch()
from fedsim.methods.fedavg import FedAvg
class It(FedAvg):
    name: str = {module!r} + ":It"
"""


@pytest.fixture
def payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """A module that leaves a mark when it is imported, and where that is."""
    marker, module = tmp_path / "marker", f"payload_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(PAYLOAD.format(marker=str(marker), module=module))
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"{module}:It", marker


@pytest.fixture
def strange(
    tmp_path: Path, payload: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path]:
    """The folder of a run by a stranger's method, and where their code leaves its mark."""
    name, marker = payload
    with monkeypatch.context() as theirs:
        theirs.setenv("XDG_CONFIG_HOME", str(tmp_path / "their-home"))
        done = fedsim.run(small_experiment(method={"name": name}, train={"rounds": 1}), tmp_path)
    sys.modules.pop(name.partition(":")[0])
    marker.unlink()
    return done.path, marker


class TestCode:
    def test_that_a_folder_names_is_not_imported(
        self, strange: tuple[Path, Path], say: Say
    ) -> None:
        path, marker = strange
        change_manifest(path, status="failed")
        for command in ("explain", "attack", "resume"):
            code, _, complaint = say(command, str(path))
            assert code == 2
            assert re.search(
                r"method 'payload_\w+:It' is code of the folder's author, and the folder was made "
                r"elsewhere; if you trust them, add --trust, or in Python: fedsim\.load\(folder\)",
                complaint,
            )
        assert say("report", str(path))[0] == 0  # which needs none of it
        assert not marker.exists()

    def test_it_is_with_trust_then_and_later(self, strange: tuple[Path, Path], say: Say) -> None:
        path, marker = strange
        shutil.rmtree(path / "weights")
        change_manifest(path, "result_hash", status="failed")
        assert say("resume", str(path), "--trust")[0] == 0
        assert marker.exists()
        assert fedsim.load(path).experiment.method.name.startswith("payload_")

    def test_in_python(self, strange: tuple[Path, Path]) -> None:
        path, marker = strange
        done = fedsim.load(path)
        with pytest.raises(RunFolderError, match=r"fedsim\.load\(folder\)\.trust\(\)$"):
            _ = done.experiment
        assert not marker.exists()
        done.trust()
        assert done.experiment.method.name.startswith("payload_")
        assert fedsim.load(path).experiment == done.experiment
        assert marker.exists()

    def test_one_s_own_folders_need_no_trust(
        self, tmp_path: Path, payload: tuple[str, Path]
    ) -> None:
        done = fedsim.run(
            small_experiment(method={"name": payload[0]}, train={"rounds": 1}), tmp_path
        )
        copy = shutil.copytree(done.path, tmp_path / "copy")
        assert fedsim.load(copy).experiment == done.experiment
        experiment = copy / "experiment.yaml"
        experiment.write_text(experiment.read_text() + "\n")
        assert not RunFolder(copy, done.manifest).trusted

    def test_of_a_grid_is_not_imported(
        self, tmp_path: Path, payload: tuple[str, Path], say: Say, monkeypatch: Any
    ) -> None:
        name, marker = payload
        content = small_experiment(train={"rounds": 1}).model_dump(mode="json")
        content |= {"method": {"name": name}, "grid": {"axes": {"partition.clients": [4, 5]}}}
        with monkeypatch.context() as theirs:
            theirs.setenv("XDG_CONFIG_HOME", str(tmp_path / "their-home"))
            path = grid_in_process(content, tmp_path)
        change_manifest(path, status="interrupted")
        sys.modules.pop(name.partition(":")[0])
        marker.unlink()
        code, _, complaint = say("resume", str(path))
        assert (code, "--trust" in complaint, marker.exists()) == (2, True, False)

    @pytest.mark.parametrize("kind", by_day(["local", "ray"], ["local"]))
    def test_beside_a_file_does_not_stand_in_for_a_library(
        self, tmp_path: Path, kind: str
    ) -> None:
        for module in ("jinja2", "pandas", "psutil"):
            (tmp_path / f"{module}.py").write_text(
                f"from pathlib import Path\nPath('{module}.ran').touch()\n"
            )
        (tmp_path / "own.py").write_text(
            "from torch import nn\n"
            "def net(shape, outputs):\n"
            "    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))\n"
        )
        experiment = small_experiment(
            train={"rounds": 1}, partition={"clients": 2}, engine={"kind": kind}
        )
        text = re.sub(r"model:\n(  .*\n)+", "model: {name: 'own:net'}\n", experiment.to_yaml())
        (tmp_path / "small.yaml").write_text(text)
        fedsim_command = Path(sys.executable).with_name("fedsim")
        for words in (["run", "small.yaml"], ["report", "runs/small"]):
            done = subprocess.run(
                [str(fedsim_command), *words],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "RAY_ADDRESS": "local"},
            )
            assert done.returncode == 0, done.stdout + done.stderr
        assert not list(tmp_path.glob("*.ran"))


class TestLinks:
    @pytest.fixture(scope="class")
    def finished(self, tmp_path_factory: pytest.TempPathFactory) -> Run:
        return fedsim.run(small_experiment(train={"rounds": 1}), tmp_path_factory.mktemp("runs"))

    def test_below_are_refused(self, finished: Run, tmp_path: Path) -> None:
        grid = shutil.copytree(finished.path, tmp_path / "grid")
        (grid / "cells").mkdir()
        (grid / "cells" / "manifest.json").write_text("{}")  # hides nothing
        (grid / "cells" / "a").symlink_to(finished.path)
        with pytest.raises(RunFolderError, match=f"{grid / 'cells' / 'a'}: is a symbolic link"):
            RunFolder.open(grid)

    def test_to_a_run_folder_are_followed(self, finished: Run, tmp_path: Path) -> None:
        """Which the user made, outside of it."""
        (tmp_path / "latest").symlink_to(finished.path)
        assert fedsim.load(tmp_path / "latest").result_hash == finished.result_hash

    @pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
    def test_are_not_fetched(self, tmp_path: Path, kind: bytes) -> None:
        member = tarfile.TarInfo("small/one/rounds.parquet")
        member.type, member.linkname = kind, "../two/rounds.parquet"
        with pytest.raises(tarfile.FilterError, match=r"one/rounds\.parquet' is a link"):
            _no_links(member, str(tmp_path))
