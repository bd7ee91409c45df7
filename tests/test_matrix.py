"""Every method × every kind of model × every condition: trains, or is refused in one line."""

from __future__ import annotations

import zlib
from itertools import cycle, product
from pathlib import Path

import pytest
from matrix import CONDITIONS, METHODS, MODELS, PAGE, TRAINING, outcome, outcomes, page


@pytest.mark.night
@pytest.mark.parametrize("method", METHODS)
def test_trains_or_is_refused_before_the_start(method: str, tmp_path: Path) -> None:
    """A fifth of the cells with a condition; tests/matrix.py goes through all of them."""
    found = {}
    for model, condition in product(MODELS, {**TRAINING, **CONDITIONS}):
        if condition != "none" and zlib.crc32(f"{method} {model} {condition}".encode()) % 5:
            continue
        out = tmp_path / f"{model} {condition}"
        found[model, condition] = outcome(method, model, condition, out)
    failed = {cell: line for cell, (state, line) in found.items() if state == "fails"}
    assert not failed
    assert any(state == "trains" for state, _ in found.values())


@pytest.mark.night
def test_the_page_is_what_the_script_writes(tmp_path: Path) -> None:
    assert page(outcomes(METHODS, tmp_path)) == PAGE.read_text(encoding="utf-8")


CELLS = (("moon", "dropout"), ("ditto", "mlp"), ("fedrnl", "rationale"))


@pytest.mark.parametrize(
    ("condition", "cell"), zip([*TRAINING, *CONDITIONS], cycle(CELLS), strict=False)
)
def test_a_sample(condition: str, cell: tuple[str, str], tmp_path: Path) -> None:
    state, line = outcome(*cell, condition, tmp_path)
    assert state != "fails", line
