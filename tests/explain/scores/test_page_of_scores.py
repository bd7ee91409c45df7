"""The page of scores (docs/guides/scores.md) says what their registry and a run say."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fedsim
from experiments import ran
from fedsim.explain import scores
from fedsim.explain.section import SCORES, SIMILARITIES

PAGE = Path(fedsim.__file__).parents[1] / "docs" / "guides" / "scores.md"
HEAD = ["score", "what it says", "range", "better", "by chance", "needs", "source"]


def rows() -> dict[str, dict[str, str]]:
    """The cells of each score, by its column."""
    found: dict[str, dict[str, str]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == len(HEAD) and cells != HEAD and set(cells) != {"---"}:
            name = re.sub(r"[`*]|_<\w+>", "", cells[0])
            assert name not in found, name
            found[name] = dict(zip(HEAD, cells, strict=True))
    return found


ROWS: Mapping[str, Mapping[str, str]] = rows()


def test_it_has_each_score_once_and_names_similarities() -> None:
    assert {*ROWS} == {*SCORES}
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{how}`" in text for how in SIMILARITIES)


@pytest.mark.parametrize("name", SCORES)
def test_it_says_what_the_registry_says(name: str) -> None:
    row, score = ROWS[name], SCORES[name]
    suffix = {"input": "", "truth": "_<kind>"}.get(score.about, "_<how>")
    assert row["score"] == f"`{name}{suffix}`" + "*" * (not score.usual)
    assert row["better"] == {"max": "more", "min": "less"}[score.best]
    assert (row["needs"] == "images") == score.images
    assert (row["needs"] == "no documents") == score.numbers
    assert (row["needs"] == "a network") == score.weights
    assert bool(row["needs"]) >= (score.about != "input" or bool(score.of))
    chance = {
        "random map": "" if score.of else "random",
        "similarity": "1; of `top_k` 1 − k/P" if name == "drift" else "0; of `top_k` k/P",
        math.sqrt(2): "√2",
        0.0: "0",
    }.get(score.chance, score.chance)
    assert row["by chance"] == chance


def test_sources_are_those_of_the_formulas() -> None:
    folder = Path(scores.__file__).parent
    code = " ".join("\n".join(file.read_text("utf-8") for file in folder.glob("*.py")).split())
    for row in ROWS.values():
        assert row["source"].rstrip(")") in code, row["score"]


def test_scores_of_a_run_are_in_these_ranges() -> None:
    centred = {"name": "gradient_x_input", "baseline": {"clients": 1}}
    explain: dict[str, Any] = {
        "explainers": [centred, "integrated_gradients", "random"],
        **{"every": 1, "inputs": 3, "clients": 2, "scores": [*SCORES], "reference": "centralised"},
    }
    data = {"name": "shortcut", "of": {"name": "digits"}}
    done = ran(data=data, train={"rounds": 2}, explain=explain)
    table = done.explanations
    ranges = {"0 to 1": (0, 1), "−1 to 1": (-1, 1), "0 to 2": (0, 2)}
    ranges |= {"1 to P": (1, 64), "≥ 0": (0, math.inf)}
    for name, row in ROWS.items():
        columns = [c for c in table if re.fullmatch(rf"{name}(_\w+)?", c)]
        assert columns, name
        low, high = ranges[row["range"]]
        found = table[columns].stack().dropna()
        assert len(found), name
        assert found.between(low - 1e-9, high + 1e-9).all(), name
        many = [c for c in columns if c.endswith("_top_k")]
        assert table[many].stack().dropna().between(0, 1).all(), name
