"""The command that checks a card, without one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from snippets import ROOT

SCRIPT = ROOT / "experiments" / "benchmarks" / "card.py"


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import card

    yield card
    del sys.modules["card"]


def test_without_a_card_it_says_so(
    card: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["card.py", "--out", str(tmp_path / "out")])
    monkeypatch.setattr(card.signal, "signal", lambda *_: None)
    monkeypatch.setattr(card.torch.cuda, "is_available", lambda: False)
    told = "there is no card here; --device cpu --smoke tries the script without one"
    with pytest.raises(SystemExit, match=f"^{told}$"):
        card.main()
    assert not (tmp_path / "out").exists()


def test_its_parts_take_25_minutes_at_most(card: Any) -> None:
    assert sum(card.PARTS.values()) <= 25 * 60
    assert card.PARTS.keys() <= vars(import_module("card_parts")).keys()


def test_finished_parts_are_not_repeated(
    card: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    interrupted, failing = ["stacks"], ["resume"]  # the first time

    def carry_out(name: str, device: str, smoke: bool, out: Path) -> dict[str, Any]:
        asked.append(name)
        if name in interrupted:
            interrupted.remove(name)
            raise KeyboardInterrupt
        error = None
        if name in failing:
            failing.remove(name)
            error = "another hash"
        return {"rows": [["of " + name, "1 ms"]], "error": error, "seconds": 6.0}

    def main(*words: str) -> None:
        given = ["card.py", "--out", str(tmp_path), "--device", "cpu", "--smoke", *words]
        monkeypatch.setattr(sys, "argv", given)
        card.main()

    monkeypatch.setattr(card, "carry_out", carry_out)
    parts = list(card.PARTS)
    with pytest.raises(KeyboardInterrupt):
        main()
    assert asked == parts[: parts.index("stacks") + 1]
    with pytest.raises(SystemExit, match="1"):
        main("--only", "data")
    printed = capsys.readouterr().out
    assert "| resume | **failed** | another hash |" in printed
    assert "| stacks | | not run yet |" in printed
    asked.clear()
    with pytest.raises(SystemExit, match="0"):
        main()
    assert asked == ["resume", "stacks", "cifar", "precision"]
    printed = capsys.readouterr().out
    assert all(f"| {name} | of {name} | 1 ms |" in printed for name in parts)
    assert "\n0.9 minutes." in printed


@pytest.mark.night
def test_every_part_runs_in_small(tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--device", "cpu", "--smoke"]
    there = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=there, capture_output=True, text=True)
    parts = json.loads((tmp_path / "card.json").read_text())["parts"]
    assert {name: found["error"] for name, found in parts.items()} == dict.fromkeys(parts)
    assert done.returncode == 0
    assert "not run yet" not in done.stdout
    found = done.stdout
    assert "| methods | methods that keep the contract | 1 of 1 |" in found
    assert "| actors | 2 actors |" in found
    assert re.search(r"\| memory \|.*not enough memory to train 8 clients at once", found)
