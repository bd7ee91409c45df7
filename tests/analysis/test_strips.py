"""Strips: one input's explanations by round and model, their numbers, pictures and alt texts."""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import KINDS, Say, by_day, ran, refusal, with_method
from fedsim import Run, explanations, report
from fedsim.analysis.replay import ModelSnapshot, client_models, replay
from fedsim.analysis.strips import Strip
from fedsim.explain.pictures.canvas import alt_of


def strip_of(run: Run, **asked: Any) -> Strip:
    (found,) = explanations(run, "occlusion", row=0, strip=True, **{"progress": False, **asked})
    assert isinstance(found, Strip)
    return found


def texts(path: Path) -> str:
    found = re.findall(r"<text[^>]*>(.*?)</text>", path.read_text(), re.DOTALL)
    return html.unescape("\n".join(found))


@pytest.mark.parametrize("kind", ["images", "numbers", "documents"])
def test_cells_are_the_explanations_one_by_one(kind: str, tmp_path: Path) -> None:
    run = ran(**KINDS[kind], train={"rounds": 3}, evaluate={"every": 1})
    asked: dict[str, Any] = {"row": 0, "progress": False}
    (strip,) = found = explanations(run, "occlusion", client=1, strip=True, **asked)
    assert isinstance(strip, Strip)
    assert (strip.models, strip.rounds) == (("global", "client 1"), (1, 2, 3))
    for client, cells in zip((None, 1), strip.cells, strict=True):
        alone: Any = explanations(run, "occlusion", client=client, after=[1, 2, 3], **asked)
        for cell, one in zip(cells, alone, strict=True):
            assert np.array_equal(cell.relevance, one.relevance)
    assert found.frame[["model", "round"]].to_numpy().tolist() == [
        [model, t] for model in strip.models for t in strip.rounds
    ]
    assert found.frame["like_last"].tolist()[2::3] == [1, 1]
    png, svg = found.save(tmp_path)
    assert (png.suffix, svg.suffix) == (".png", ".svg")
    said = texts(svg)
    for words in ("global", "client 1", "round 1", "round 3", "one scale for all"):
        assert words in said
    largest = max(row["largest"] for row in strip.rows())
    assert f"+{largest:.3g}" in said
    for row in strip.rows():
        chance = "" if row["probability"] is None else f" ({row['probability']:.0%})"
        assert f"{row['decision']}{chance}" in said
        assert row["right"] == (row["decision"] == row["label"] if kind != "numbers" else None)
    assert alt_of(png) == alt_of(svg)
    assert alt_of(svg).startswith(f"Row 0 (true {'value' if kind == 'numbers' else 'class'} ")
    assert alt_of(svg).count("round 2 ") == 2


@pytest.mark.parametrize(
    "method", by_day(["ditto", "fedbn", "fedavg_ft", "apfl", "ifca"], ("ditto", "ifca"))
)
def test_personal_models_do_not_change_the_rounds_after_them(method: str) -> None:
    run = ran(**with_method(method, train={"rounds": 3}))
    found, again = {}, None
    for t in (1, 2, 3):
        found[t], again = client_models(run, [0, 2], t, of="personal", again=again)
    for t, models in found.items():
        for k, alone in client_models(run, [0, 2], t, of="personal")[0].items():
            assert np.array_equal(np.asarray(models[k]), np.asarray(alone))
    assert strip_of(run, client=0).models[-1] == "client 0's own"


def test_a_later_checkpoint_is_used(tmp_path: Path) -> None:
    run = ran(train={"rounds": 4}, checkpoint={"every": 1, "keep": "all"})
    begun: list[int] = []
    first = replay(run, 1)
    assert replay(run, 4, begun.append, again=first).after == 4
    assert begun == []
    assert ModelSnapshot.of(run, None, 1, again=first).again is first


def test_rounds_are_repeated_once() -> None:
    lines = list[str]()
    strip_of(ran(train={"rounds": 4}), client=[1, 2], after=[3, 1, 2], progress=lines.append)
    assert lines == [f"[{t}/{t}] recomputing round {t}" for t in (1, 2, 3)]


def test_a_client_that_did_not_take_part(say: Say) -> None:
    run = ran(train={"rounds": 4, "participation": 0.2})
    took = {k: set(rows["round"]) for k, rows in run.clients.groupby("client")}
    client, t = next((k, t) for k in took for t in range(1, 5) if t not in took[k])
    told = refusal(lambda: strip_of(run, client=client, after=[t]))
    assert told.startswith(f"client {client} was not trained in round {t}; it did in")
    assert set(strip_of(run, client=client).rounds) <= took[client]
    out = say.printed("explain", str(run.path), "--strip", "--row", "0", "--out", "one.png")
    assert "  model   round  predicted" in out
    assert [path.name for path in Path().glob("one*")] == ["one.png"]
    many = {"after": [*range(1, 14)]}
    told = refusal(lambda: strip_of(ran(train={"rounds": 13}), **many))
    assert told == "strip: at most 12 rounds, not 13"


def test_an_explainer_without_maps() -> None:
    run = ran(**KINDS["rules"], train={"rounds": 1})
    told = refusal(lambda: explanations(run, row=0, strip=True))
    assert told.startswith("strip: draws maps of relevance, and explainer rules ")


@pytest.mark.usefixtures("undrawn")
def test_a_report_shows_its_svg_with_an_alternative_text(tmp_path: Path) -> None:
    shutil.copytree(ran(train={"rounds": 2}).path, tmp_path / "run")
    found = explanations(tmp_path / "run", "gradient", row=0, strip=True, progress=False)
    (picture,) = {path.stem for path in found.save()}
    page = report(tmp_path / "run", out=tmp_path / "report.html").read_text()
    (shown,) = re.findall(r'<img src="data:image/([a-z]+)[^"]*" alt="(Row 0[^"]*)"', page)
    assert shown[0] == "svg"
    assert "global: round 1 " in shown[1]
    assert picture.replace("_", " ").replace("-", " ") in page
    assert 'alt="Row 0 (true class' in found._repr_html_()
