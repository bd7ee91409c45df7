"""Texts from the files of others are shown as text, and do not steer the terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from experiments import Say
from fedsim import Run
from fedsim.cli import _warn
from fedsim.cli.console import err, out, print_json, print_table
from fedsim.launch.progress import TerminalBar
from fedsim.support.words import CONTROL, visible

# To clear the screen, set the title, colour, ring, overwrite the line, reorder it, end it.
EVIL = [
    *("\x1b[2J", "\x1b]0;owned\x07", "\x1b[31mred", "\x07", "\rover", "\x08\x08", "\x9b31m"),
    *("\u202egnp", "\u2028", "\x00", "\x7f", "\u2066", "\x85", "\ud800"),
]
MARKUP = ["[red]red[/red]", "[/]", "[link=http://x]y[/link]", ":warning:", r"\[x]"]


@pytest.mark.parametrize("text", [*EVIL, *MARKUP])
@pytest.mark.parametrize("way", ["out", "err", "cell", "header", "json", "note", "warning"])
def test_texts_are_shown_as_text(capsys: pytest.CaptureFixture[str], text: str, way: str) -> None:
    ways: dict[str, Callable[[], None]] = {
        "out": lambda: out.print(f"a{text}b"),
        "err": lambda: err.print(f"a{text}b"),
        "cell": lambda: print_table(["name"], [[f"a{text}b"]]),
        "header": lambda: print_table([f"a{text}b"], [["value"]]),
        "json": lambda: print_json({"name": f"a{text}b"}),
        "note": lambda: TerminalBar(err).note(f"a{text}b"),
        "warning": lambda: _warn(f"a{text}b", UserWarning, "it.py", 1),
    }
    ways[way]()
    printed = "".join(capsys.readouterr())
    if way == "json":
        assert json.loads(printed) == {"name": f"a{text}b"}
    else:
        assert f"a{visible(text)}b" in printed
    assert not CONTROL.search(
        printed if way != "note" else re.sub(r"\x1b\[\S*?[a-zA-Z]|\r", "", printed)
    )


@pytest.mark.parametrize("evil", EVIL)
def test_logs_of_jobs_and_own_docstrings(
    say: Say, monkeypatch: pytest.MonkeyPatch, evil: str
) -> None:
    job = SimpleNamespace(id="1", kind="run", folder="it")
    monkeypatch.setattr("fedsim.sweep.submit.submit", lambda *_: (None, job))
    monkeypatch.setattr(
        "fedsim.sweep.submit.follow", lambda _cluster, _job, write: write(f"a{evil}b\nc\n")
    )
    monkeypatch.setattr("fedsim.cli.components.first_line", lambda _: f"a{evil}b")
    for command in (["submit", "it.yaml"], ["list", "codecs"]):
        printed = say(*command)[1]
        assert f"a{visible(evil)}b\n" in printed
        assert not CONTROL.search(printed)


@given(st.text())
def test_nothing_else_is_changed(text: str) -> None:
    assert not CONTROL.search(visible(text))
    assert visible(visible(text)) == visible(text)
    if not CONTROL.search(text):
        assert visible(text) == text
    if text.isascii() and text.isprintable():
        assert visible(text) == text


@pytest.mark.parametrize("evil", ["\x1b[2J\x1b]0;owned\x07", "[red]\r\x9b", "a\nb"])
def test_results_of_strangers(finish: Callable[..., Run], say: Say, evil: str) -> None:
    """In `ls`, `compare`, `report` and `verify`, of their manifest and experiment."""
    runs = [finish(train={"rounds": 1}), finish(train={"rounds": 2})]
    path = runs[0].path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest |= {"python": f"3{evil}", "result_hash": f"0{evil}", "error": f"it{evil}"}
    manifest["packages"] |= {"torch": f"2{evil}", f"it{evil}": "1"}
    manifest["hardware"]["processor"] = f"it{evil}"
    path.write_text(json.dumps(manifest))
    path = runs[0].path / "experiment.yaml"
    experiment = yaml.safe_load(path.read_text())
    experiment["name"] = f"it{evil}"
    path.write_text(yaml.safe_dump(experiment))
    folders = [str(run.path) for run in runs]
    for command in (
        ["ls", str(runs[0].path.parent)],
        ["compare", *folders],
        ["compare", *folders, "--json"],
        ["ls", str(runs[0].path.parent), "--json"],
        ["verify", folders[0]],
        ["report", *folders],
        ["explain", folders[0]],
    ):
        printed = "".join(map(str, say(*command)[1:]))
        assert printed
        assert not CONTROL.search(printed), command
        assert "\nb" not in printed
