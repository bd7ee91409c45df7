"""The fork server of a private Ray, which imports fedsim while an experiment is checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import ray

from experiments import small_experiment
from fedsim import Experiment, run
from fedsim.cluster import forked_workers
from fedsim.cluster.connection import connected, imports_ahead
from fedsim.cluster.forked_workers import fork_server
from fedsim.cluster.settings import EngineSettings
from fedsim.errors import ClusterError, ExperimentError


@pytest.fixture(autouse=True)
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What Ray is asked for, which does not start; nobody else's fork server is taken."""
    asked = Mock()
    monkeypatch.setattr(ray, "init", asked)
    monkeypatch.setattr(forked_workers, "fork_server", fork_server)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return asked


@pytest.fixture(autouse=True)
def _none_is_left(tmp_path: Path) -> Iterator[None]:
    before = {*psutil.Process().children()}
    yield
    assert {*psutil.Process().children()} <= before  # some of which may have ended
    assert not sockets(tmp_path)


def sockets(folder: Path) -> list[Path]:
    """Of the fork servers below a folder."""
    return [*folder.glob("fsray-*/fork")]


def test_one_ray_takes_it(tmp_path: Path, asked: Mock) -> None:
    with imports_ahead(EngineSettings()):
        (ahead,) = sockets(tmp_path)
        with connected(None):
            assert sockets(tmp_path) == [ahead]
        with connected(None):
            (other,) = {*sockets(tmp_path)} - {ahead}
    folders = [call.kwargs["_temp_dir"] for call in asked.call_args_list]
    assert folders == [str(ahead.parent), str(other.parent)]


@pytest.mark.parametrize("case", ["in process", "a cluster", "Ray's own", "connected", "nowhere"])
def test_where_no_ray_is_started_nothing_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    settings = EngineSettings(kind="local" if case == "in process" else "ray")
    if case == "a cluster":
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    elif case == "Ray's own":
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    elif case == "connected":
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
    elif case == "nowhere":  # said when Ray is started, not before what is wrong otherwise
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "nowhere"))
    with imports_ahead(settings):
        assert not sockets(tmp_path)
        if case == "nowhere":
            with pytest.raises(ClusterError, match="no folder can be made there"), connected(None):
                pass


def test_what_is_refused_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def prepare(experiment: Experiment) -> Any:
        seen.append(sockets(tmp_path))
        raise ExperimentError("no")

    monkeypatch.setattr("fedsim.launch.run.prepare", prepare)
    with pytest.raises(ExperimentError, match="no"):
        run(small_experiment(engine={"kind": "ray"}), tmp_path / "runs", progress=False)
    assert [len(found) for found in seen] == [1]
    assert not [*tmp_path.iterdir()]
