"""Progress of what is called from Python: a bar in a terminal or a notebook, nothing elsewhere."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from experiments import small_experiment
from fedsim import resume, run
from fedsim.errors import RunFolderError
from fedsim.launch import progress
from fedsim.launch.progress import LineProgress

LINES = ["3 runs, 2 at a time", "[1/3] a <b>: accuracy 0.5", "[3/3] c: failed"]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, highlight=False)
    monkeypatch.setattr(progress, "_bar", lambda: progress.TerminalBar(console))
    return screen


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a notebook's element shows, one content after another."""
    shown: list[str] = []

    def display(content: str, display_id: bool) -> Any:
        assert display_id
        return SimpleNamespace(update=shown.append)

    ipython = SimpleNamespace(HTML=str, display=display, get_ipython=lambda: shell)
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(progress.sys.modules, "IPython", ipython)  # type: ignore[arg-type]
    monkeypatch.setitem(progress.sys.modules, "IPython.display", ipython)  # type: ignore[arg-type]
    return shown


def test_a_run_in_a_terminal(terminal: io.StringIO, tmp_path: Any) -> None:
    done = run(small_experiment(train={"rounds": 3}), tmp_path)
    text = terminal.getvalue()
    assert "3/3" in text
    assert f"accuracy {done.rounds['accuracy'].iloc[-1]:.4f}" in text
    assert re.search(r"[\d.]+ kB sent", text)


def test_a_run_in_a_notebook(notebook: list[str], tmp_path: Any) -> None:
    done = run(small_experiment(train={"rounds": 3}), tmp_path)
    assert '<progress value="0" max="3"' in notebook[0]
    assert '<progress value="3" max="3"' in notebook[-1]
    assert f"accuracy {done.rounds['accuracy'].iloc[-1]:.4f}" in notebook[-1]


def test_a_grid_in_a_notebook(notebook: list[str]) -> None:
    with LineProgress(True) as shown:
        for line in LINES:
            shown(line)
    assert notebook[0].startswith("<div>3 runs, 2 at a time</div>")
    assert '<progress value="3" max="3"' in notebook[-1]
    assert notebook[-1].endswith("c: failed</div>")
    assert not any("<b>" in content for content in notebook)


def test_a_grid_in_a_terminal(terminal: io.StringIO) -> None:
    with LineProgress(True) as shown:
        for line in LINES:
            shown(line)
    assert "3 runs, 2 at a time" in terminal.getvalue()
    assert "3/3" in terminal.getvalue()


def test_elsewhere_nothing_is_shown(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run(small_experiment(train={"rounds": 1}), tmp_path)
    assert capsys.readouterr() == ("", "")


def test_a_function_is_told_instead(terminal: io.StringIO, tmp_path: Any) -> None:
    told: list[Any] = []
    done = run(small_experiment(train={"rounds": 2}), tmp_path, progress=told.append)
    assert [row["round"] for row in told] == [1, 2]
    assert not terminal.getvalue()
    run(small_experiment(train={"rounds": 1}), tmp_path, progress=False)
    assert not terminal.getvalue()
    with pytest.raises(RunFolderError, match="the run is finished; there is nothing to resume"):
        resume(done.path)


def test_a_run_that_starts_is_handed_out(tmp_path: Any) -> None:
    seen: list[Any] = []
    done = run(
        small_experiment(train={"rounds": 1}),
        tmp_path,
        on_start=lambda started: seen.append((started.path, started.status, len(started.rounds))),
    )
    assert seen == [(done.path, "running", 0)]
