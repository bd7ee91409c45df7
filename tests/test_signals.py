"""SIGTERM and SIGHUP end a command in order, as Ctrl-C does."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from commands import Command

from experiments import small_experiment
from fedsim import load
from fedsim.cli.signals import orderly_end
from fedsim.cluster import private

SIGNALS = [signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, *SIGNALS)}
    for each in before:
        signal.signal(each, signal.default_int_handler)
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, *SIGNALS])
def test_the_first_is_an_interrupt_and_a_second_would_end_the_process(number: int) -> None:
    second = None

    @orderly_end()
    def interrupted() -> None:
        nonlocal second
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            second = signal.getsignal(number)
            raise

    with pytest.raises(SystemExit) as left:
        interrupted()
    assert second == signal.SIG_DFL
    assert left.value.code == 128 + number
    assert signal.getsignal(number) is signal.default_int_handler


@pytest.mark.parametrize("number", SIGNALS)
def test_whoever_handles_ctrl_c_handles_these(number: int) -> None:
    seen: list[int] = []

    @orderly_end()
    def command() -> None:
        signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
        signal.raise_signal(number)
        sys.exit(130)  # as commands do that were told to end

    with pytest.raises(SystemExit) as left:
        command()
    assert seen == [signal.SIGINT]
    assert left.value.code == 128 + number


def test_what_is_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (signal.SIGHUP, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    with orderly_end():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGINT)
    monkeypatch.setenv("RAY_JOB_STOP_SIGNAL", "SIGINT")
    with pytest.raises(SystemExit), orderly_end():
        signal.raise_signal(signal.SIGINT)


def test_other_ends_are_left_alone() -> None:
    with pytest.raises(SystemExit) as left, orderly_end():
        sys.exit(2)
    assert left.value.code == 2


def command(name: str, file: str, folder: Path) -> Command:
    """A command on a private Ray, what it prints and its complaints in one."""
    return Command(name, file, cwd=folder, env={**os.environ, "RAY_ADDRESS": "local"})


@pytest.mark.parametrize(
    ("number", "kind"),
    [(signal.SIGHUP, "local"), (signal.SIGTERM, "ray")],
)
def test_a_run_ends_in_order(tmp_path: Path, number: int, kind: str) -> None:
    experiment = small_experiment(
        train={"rounds": 100_000}, engine={"kind": kind}, checkpoint={"every": 1}
    )
    (tmp_path / "small.yaml").write_text(experiment.to_yaml())
    base = Path(os.environ["RAY_TMPDIR"])
    left_by_others = set(base.glob("fsray-*"))  # that were killed, and cleaned up by the next Ray
    with command("run", "small.yaml", tmp_path) as process:
        for line in process.stdout:
            if line.startswith("round 3/"):
                break
        family = psutil.Process(process.pid).children(recursive=True)
        assert bool(family) == (kind == "ray")
        process.send_signal(number)
        rest = process.stdout.read()
    assert process.returncode == 128 + number
    told = rest[rest.rindex("interrupted") :]
    assert re.fullmatch(r"interrupted after round \d+; to continue:\n  fedsim resume \S+\n", told)
    (folder,) = (tmp_path / "runs" / "small").iterdir()
    assert load(folder).manifest["status"] == "interrupted"
    assert len(load(folder).rounds) >= 3
    assert not [each for each in family if private.is_alive(each)]
    assert left_by_others.issuperset(base.glob("fsray-*"))


SEARCH = {"space": {"train.optimizer.lr": [0.1, 0.2]}, "objectives": {"accuracy": "max"}}


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("run", "gcs_server"),
        pytest.param("tune", "raylet", marks=pytest.mark.night),
        pytest.param("run", "raylet", marks=pytest.mark.night),
    ],
)
def test_the_loss_of_a_process_of_ray_s_own_is_told(tmp_path: Path, name: str, lost: str) -> None:
    experiment = small_experiment(train={"rounds": 100_000}, engine={"kind": "ray"})
    search = f"search: {json.dumps({**SEARCH, 'trials': 2})}\n" if name == "tune" else ""
    (tmp_path / "small.yaml").write_text(experiment.to_yaml() + search)
    with command(name, "small.yaml", tmp_path) as process:
        for line in process.stdout:
            if line.startswith(("round 3/", "2 runs")):
                break
        family = psutil.Process(process.pid).children(recursive=True)
        named = {}
        for each in family:
            with suppress(psutil.NoSuchProcess):  # a worker may just have ended
                named[each.name()] = each
        named[lost].kill()
        rest = process.stdout.read()
    assert process.returncode == 1
    assert re.fullmatch(
        rf"error: Ray's {lost} process on this machine was lost \(killed, or out of memory\?\)\n"
        rf"failed.*; to continue:\n  fedsim resume \S+\n",
        rest[rest.rindex("error: ") :],
    )
    assert not [each for each in family if private.is_alive(each)]


def test_folders_of_processes_that_were_killed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "fsray-old" / "session").mkdir(parents=True)
    (tmp_path / "somebody").mkdir()
    (tmp_path / "fsray-link").symlink_to(tmp_path / "somebody")
    with private.scratch("fsray-") as one, private.scratch("fsray-") as other:
        assert {path.name for path in tmp_path.iterdir()} == {
            *("somebody", "fsray-link", Path(one).name, Path(other).name)
        }
        assert Path(one).stat().st_mode & 0o777 == 0o700
    assert {path.name for path in tmp_path.iterdir()} == {"somebody", "fsray-link"}


def test_the_token_is_its_owner_s_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / ".ray" / "auth_token"
    private._make_token()
    content = token.read_text()
    assert (len(content), token.stat().st_mode & 0o777) == (64, 0o600)
    token.chmod(0o644)  # as Ray makes it
    private._make_token()
    assert (token.read_text(), token.stat().st_mode & 0o777) == (content, 0o600)
