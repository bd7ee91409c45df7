"""Pictures of explanations as files: captions, names, scales, formats."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from PIL import Image

from experiments import Say, by_day, ran, refusal
from fedsim import Run, explanations
from fedsim.analysis.explanations import _clients
from fedsim.analysis.replay import ModelSnapshot
from fedsim.errors import FedsimWarning
from fedsim.explain.explainers import attributed, tasks
from fedsim.explain.explainers.gradients import Gradient
from fedsim.explain.inputs import Inputs
from fedsim.explain.pictures import canvas, images
from fedsim.explain.pictures import rule_bases as figures
from fedsim.results.maps import importance, relevance_maps
from fedsim.support.words import client_name

SITES = ("Kiel", "St. Mary's", "Ulm")


class Mine(Gradient):
    """A user's own, whose name has a colon."""

    name: str = f"{__name__}:Mine"


@pytest.fixture(scope="module")
def clinics(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three hospitals, whose names the data know, and thirteen features."""
    folder = tmp_path_factory.mktemp("clinics")
    values = np.random.default_rng(0).random((90, 13)).round(3)
    table = pd.DataFrame(values, columns=[f"marker{k}" for k in range(13)])
    table.assign(site=SITES * 30, ill=values[:, 0] > 0.5).to_csv(folder / "it.csv", index=False)
    path = str(folder / "it.csv")
    return ran(
        data={"name": "table", "path": path, "label": "ill", "columns": ["site"]},
        partition={"kind": "natural", "column": "site", "test_fraction": 0.3},
        model={"name": "mlp", "hidden": [4]},
        train={"rounds": 1},
        evaluate={"clients": True},
        explain={"explainers": ["gradient"], "inputs": 3, "maps": True},
    )


@pytest.fixture(scope="module")
def digits() -> Run:
    return ran(train={"rounds": 1}, model={"name": "mlp", "hidden": [4]})


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures that were saved, with everything in its place."""
    found: list[Figure] = []
    original = canvas.save

    def save(figure: Figure, path: Path, title: str = "") -> None:
        original(figure, path, title)
        found.append(figure)

    for module in (figures, images, tasks):
        monkeypatch.setattr(module, "save", save)
    return found


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Texts that run into each other."""
    texts = [axes.title for axes in figure.axes] + [axes._left_title for axes in figure.axes]  # type: ignore[attr-defined]
    texts += [text for axes in figure.axes for text in axes.texts] + figure.texts
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts if t.get_text()]
    return [(a, b) for (a, x), (b, y) in itertools.combinations(boxes, 2) if x.overlaps(y)]


@pytest.mark.parametrize(
    "names",
    [
        [f"row {k}" for k in range(9)],
        [f"IMG_20260101_{k:06}_of-the-second-ward_edited.jpeg" for k in range(9)],
        ["a $name$ of several words, which takes more than two lines"] * 9,
    ],
)
def test_captions_stay_apart(
    names: list[str], digits: Run, drawn: list[Figure], tmp_path: Path
) -> None:
    x = np.random.default_rng(0).random((9, 1, 8, 8)).astype(np.float32)
    inputs = Inputs(x, tuple(names), ("a very long name of a class",) * 9)
    explanations(digits, "gradient", input=inputs).save(tmp_path)
    (figure,) = drawn
    assert overlapping(figure) == []


def test_wide_images_have_frames_and_maps_close_below(drawn: list[Figure], tmp_path: Path) -> None:
    images.draw_relevances([np.ones((3, 10, 30))], [np.eye(10, 30)], ["a"], tmp_path / "a.png")
    image, heatmap, _ = drawn[0].axes
    boxes = [axes.get_window_extent() for axes in (image, heatmap)]
    assert boxes[0].y0 - boxes[1].y1 < 0.1 * boxes[0].height
    assert all(spine.get_visible() for spine in image.spines.values())
    assert image.axison


def test_a_hundred_are_drawn(digits: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, str]] = []

    def draw(images: list[Any], *about: Any) -> None:
        drawn.append((len(images), about[-2]))

    monkeypatch.setattr(attributed, "draw_relevances", draw)
    for count in (100, 101):
        explanations(digits, "gradient", row=list(range(count))).save(tmp_path)
    title = "the global model after round 1, gradient"
    assert drawn == [(100, title), (100, f"{title} (the first 100 of 101 inputs)")]


def test_bars_of_hospitals_have_one_scale(
    clinics: Run, drawn: list[Figure], tmp_path: Path
) -> None:
    found = explanations(clinics, "gradient", client=[0, 1, 2], row=[0, 1])
    paths = found.save(tmp_path)
    assert len(paths) == len(drawn) == 3
    panels = [axes for figure in drawn for axes in figure.axes]
    assert len(panels) == 6
    assert len({axes.get_xlim() for axes in panels}) == 1
    orders = {tuple(label.get_text() for label in axes.get_yticklabels()) for axes in panels}
    assert len(orders) == 1
    (order,) = orders
    largest = np.abs(np.concatenate([each.relevance for each in found])).max(axis=0)  # type: ignore[attr-defined]
    expected = [f"marker{k}" for k in np.argsort(-largest, kind="stable")[:12]]
    assert list(reversed(order)) == expected
    for axes, row in zip(panels[:2], found[0].relevance, strict=True):  # type: ignore[attr-defined]
        values = [text.get_text() for text in axes.texts]
        told = [f"{row[int(name.removeprefix('marker'))]:+.3g}" for name in order]
        assert [value.replace("−", "-") for value in values] == told
    assert "12 most relevant of 13 features" in panels[1].get_xlabel()
    for figure, site in zip(drawn, SITES, strict=True):
        assert f"({site})" in figure.texts[-1].get_text().replace("\n", " ")
        assert overlapping(figure) == []


def test_clients_by_name(clinics: Run) -> None:
    for asked, expected in [("Ulm", [2]), (["St. Mary's", 0], [1, 0]), ("2", [2]), (1, [1])]:
        frame = explanations(clinics, "gradient", client=asked, row=0).frame  # type: ignore[arg-type]
        assert frame["client"].tolist() == expected
        assert frame["client_name"].tolist() == [SITES[k] for k in expected]
    for name, message in {
        "Uln": "there is no client 'Uln'; did you mean 'Ulm'?",
        "Rome": "there is no client 'Rome'; known: Kiel, St. Mary's, Ulm",
        "7": f"there is no client 7; there are 3, counted from 0; by name: {', '.join(SITES)}",
    }.items():
        assert refusal(lambda name=name: explanations(clinics, client=name)) == message


def test_a_number_in_another_clients_name(clinics: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(clinics.manifest, "client_names", ["site 1", "site 2", "site 5"])
    line = "client 1, counted from 0, is site 2; for the other write client 'site 1'"
    with pytest.warns(FedsimWarning, match=f"^{re.escape(line)}$"):
        assert _clients(clinics, "1") == [1]
    assert _clients(clinics, [0, "site 1"]) == [0, 0]  # none is called 0


def test_names_on_the_command_line_and_in_the_report(clinics: Run, say: Say) -> None:
    text = say.printed("explain", str(clinics.path), "--client", "Ulm", "--out", "ulm.svg")
    assert "\n\nclient 2 (Ulm)'s model" in text
    assert Path("ulm.svg").read_text().count("<svg") == 1
    say.printed("report", str(clinics.path), "--out", "page.html")
    page = Path("page.html").read_text(encoding="utf-8")
    assert re.search("worst (Kiel|Ulm|St. Mary)", page)


def test_clients_have_their_names(clinics: Run, drawn: list[Figure], tmp_path: Path) -> None:
    """Where they are known: in tables of maps, of trees, and in pictures of tasks and images."""
    assert [*relevance_maps(clinics, "gradient")] == ["global", *SITES]
    table = importance(clinics, "gradient")
    assert [*table.index] == ["global", *SITES, "all clients"]
    assert table.loc["all clients"].to_numpy() == pytest.approx(table.loc[[*SITES]].mean())
    about = ModelSnapshot.of(clinics, 1).data()
    assert tuple(about.clients) == SITES
    one = np.zeros((1, 4, 4), np.float32)
    examples = [images.Example(k, 0, one, one[0], one[0], one) for k in (0, 2)]
    images.draw_shared(examples, ["a"], tmp_path / "shared.png", called=SITES)
    seen = {"seen": True, "task": 0, "round": 1, "accuracy": 0.5}
    frame = pd.DataFrame([{"client": k, **seen} for k in (0, 2)])
    tasks.draw_curves(frame, tmp_path / "tasks.png", names=SITES)
    shared, curves = drawn
    texts = [text.get_text() for text in shared.texts]
    assert {"Kiel", "Ulm"} <= {*texts}
    assert [axes.get_ylabel() for axes in curves.axes] == ["Kiel", "Ulm"]
    assert client_name(1, SITES) == "St. Mary's"
    assert client_name(3) == "client 3"
    with patch.dict(clinics.manifest, client_names=["global", "b", "c"]):  # not the global model
        assert [*relevance_maps(clinics, "gradient")] == ["global", "client 0", "b", "c"]


def test_files_have_no_colons_and_folders_any_name(digits: Run, tmp_path: Path) -> None:
    (tmp_path / "a.folder").mkdir()
    (path,) = explanations(digits, Mine(), row=0).save(tmp_path / "a.folder")
    assert path.name == f"{__name__}-Mine-round-1-row-0.png"
    assert Image.open(path).format == "PNG"
    told = refusal(lambda: explanations(digits, "gradient", row=0).save(tmp_path / "x.npy"))
    assert "x.npy: the name of a picture must end in .png, " in told


FORMATS = {".png": b"\x89PNG", ".SVG": b"<?xml", ".pdf": b"%PDF", ".jpg": b"\xff\xd8"}
FORMATS[".eps"] = b"%!PS"


@pytest.mark.parametrize("ending", by_day(FORMATS, (".SVG", ".pdf")))
def test_formats_by_the_ending(ending: str, digits: Run, tmp_path: Path) -> None:
    begins = FORMATS[ending]
    (path,) = explanations(digits, "gradient", row=0).save(tmp_path / "new" / f"one{ending}")
    assert path == tmp_path / "new" / f"one{ending}"
    assert path.read_bytes().startswith(begins)
    several = explanations(digits, "gradient", row=0, client=[1, 2]).save(tmp_path / f"a{ending}")
    assert [path.name for path in several] == [
        f"a-gradient-client-{k}-round-1-row-0{ending.lower()}" for k in (1, 2)
    ]
    assert all(path.read_bytes().startswith(begins) for path in several)
    assert sorted(tmp_path.iterdir()) == sorted([*several, tmp_path / "new"])
