"""Every method × every kind of model × every condition: trains, or is refused in one line."""

from __future__ import annotations

import re
import zlib
from itertools import cycle, product
from pathlib import Path

import pytest
from matrix import CONDITIONS, METHODS, MODELS, PAGE, TRAINING, model_of, outcome, page, reason


def on_the_page() -> dict[tuple[str, str], tuple[str, str]]:
    """What the page says of each method and condition: that it trains, or why it is refused."""
    text = PAGE.read_text(encoding="utf-8")
    reasons = dict(re.findall(r'<a id="note-(\d+)"></a>\d+\. (.*)\.  ', text))
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.M)
    marks = {
        (m, c): v for m, row in rows for c, v in zip(CONDITIONS, row.split(" | "), strict=True)
    }
    return {
        cell: ("trains", "") if mark == "✓" else ("refused", reasons[mark[1:].partition("]")[0]])
        for cell, mark in marks.items()
    }


def test_the_page_is_written_as_by_the_script() -> None:
    assert page(on_the_page()) == PAGE.read_text(encoding="utf-8")


@pytest.mark.night
@pytest.mark.parametrize("method", METHODS)
def test_trains_or_is_refused_before_the_start(method: str, tmp_path: Path) -> None:
    """Cells of the page or without a condition, and a fifth of others; tests/matrix.py has all."""
    said, found, other = on_the_page(), {}, {}
    for model, condition in product(MODELS, {**TRAINING, **CONDITIONS}):
        shown = model == model_of(method) and condition in CONDITIONS
        drawn = zlib.crc32(f"{method} {model} {condition}".encode()) % 5 == 0
        if shown or drawn or condition == "none":
            out = tmp_path / f"{model} {condition}"
            state, line = found[model, condition] = outcome(method, model, condition, out)
            told = (state, reason(method, line) if state == "refused" else "")
            if shown and told != said[method, condition]:
                other[condition] = line
    failed = {cell: line for cell, (state, line) in found.items() if state == "fails"}
    assert (failed, other) == ({}, {})
    assert any(state == "trains" for state, _ in found.values())


CELLS = (("moon", "dropout"), ("ditto", "mlp"), ("fedrnl", "rationale"))


@pytest.mark.parametrize(
    ("condition", "cell"), zip([*TRAINING, *CONDITIONS], cycle(CELLS), strict=False)
)
def test_a_sample(condition: str, cell: tuple[str, str], tmp_path: Path) -> None:
    state, line = outcome(*cell, condition, tmp_path)
    assert state != "fails", line
