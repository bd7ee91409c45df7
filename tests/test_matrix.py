"""Every method × every kind of model × every condition: trains, or is refused in one line."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from matrix import CONDITIONS, METHODS, MODELS, outcome


@pytest.mark.night
@pytest.mark.parametrize("method", METHODS)
def test_trains_or_is_refused_before_the_start(method: str, tmp_path: Path) -> None:
    found = {}
    for model, condition in product(MODELS, CONDITIONS):
        out = tmp_path / f"{model} {condition}"
        found[model, condition] = outcome(method, model, condition, out)
    failed = {cell: line for cell, (state, line) in found.items() if state == "fails"}
    assert not failed
    assert method in ("fedseit", "fedweit") or any(
        state == "trains" for state, _ in found.values()
    )


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_sample(condition: str, tmp_path: Path) -> None:
    for method, model in (("moon", "dropout"), ("fedgen", "cnn"), ("fedrnl", "rationale")):
        state, line = outcome(method, model, condition, tmp_path / method)
        assert state != "fails", (method, model, line)
