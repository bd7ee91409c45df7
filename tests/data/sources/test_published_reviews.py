"""Reviews of beers and hotels, from files in their official layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import reviews, write

from fedsim.data import Dataset, datasets

pytestmark = pytest.mark.filterwarnings("ignore:.*words get random vectors")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, content in reviews().items():
        write(tmp_path / name, content)
    return tmp_path


def load(root: Path, name: str, **fields: Any) -> Dataset:
    data: Dataset = datasets.parse({"name": name, "root": root, "dimension": 3, **fields}).load()
    return data


def texts(data: Dataset, part: str) -> list[tuple[str, str, str]]:
    """Aspect, class, words."""
    x, y, columns = (
        (data.x, data.y, data.columns)
        if part == "train"
        else (data.test_x, data.test_y, data.test_columns)
    )
    return [
        (str(aspect), data.classes[label], " ".join(data.words[w] for w in row if w))
        for aspect, label, row in zip(columns["aspect"], y, x.tolist(), strict=True)
    ]


def test_beer(root: Path) -> None:
    data = load(root, "beer", balance=False)
    assert texts(data, "train") == [
        ("appearance", "positive", "A golden beer , musty ."),
        ("appearance", "positive", "foam and tin"),
        ("appearance", "negative", "pale ; fresh hops"),
        ("aroma", "negative", "A golden beer , musty ."),
        ("aroma", "negative", "foam and tin"),
        ("aroma", "positive", "pale ; fresh hops"),
        ("palate", "negative", "foam and tin"),
    ]
    assert (
        texts(data, "test")
        == [
            ("appearance", "positive", "a golden head , musty"),
            ("appearance", "negative", "dull"),
            ("aroma", "negative", "a golden head , musty"),
            ("aroma", "positive", "no ranges"),
        ]  # of the palate nobody has marked a word
    )
    marked = [
        [w for w, m in zip(row.tolist(), own, strict=True) if m]
        for row, own in zip(data.test_x, data.truth["signal"], strict=True)
    ]
    words = [" ".join(data.words[w] for w in row) for row in marked]
    assert words == ["golden head", "dull", "musty", "no ranges"]


def test_classes_are_balanced(root: Path) -> None:
    data = load(root, "beer", aspects=["appearance", "aroma"])
    for aspect in ("appearance", "aroma"):
        own = data.y[data.columns["aspect"] == aspect]
        assert own.tolist() in ([0, 1], [1, 0])
    again = load(root, "beer", aspects=["appearance", "aroma"])
    np.testing.assert_array_equal(data.x, again.x)
    assert texts(load(root, "beer", aspects=["aroma"], test="heldout"), "test") == [
        ("aroma", "negative", "A golden beer , musty .")
    ]
    assert load(root, "beer", test="heldout", aspects=["aroma"]).truth == {}


def test_reviews_kept_aside_of_all_aspects_at_once(root: Path) -> None:
    data = load(root, "beer", test="heldout", balance=False)
    assert texts(data, "test") == [
        ("appearance", "positive", "A golden beer , musty ."),
        ("aroma", "negative", "A golden beer , musty ."),
    ]  # which says nothing of the palate
    tested = texts(load(root, "hotel", test="heldout"), "test")
    assert [aspect for aspect, _, _ in tested] == [
        name for name in ("location", "service", "cleanliness") for _ in range(3)
    ]


def test_hotel(root: Path) -> None:
    data = load(root, "hotel", aspects=["location", "service"])
    assert len(texts(data, "train")) == 4  # of two positive ones, one is left out
    assert ("location", "negative", "bad !") in texts(data, "train")
    assert texts(data, "test") == [
        ("location", "negative", "bad location too"),
        ("service", "negative", "bad service too"),
    ]
    assert data.truth["signal"][:, :3].tolist() == [[True, True, False]] * 2
    tested = texts(load(root, "hotel", test="heldout", aspects=["service"]), "test")
    assert tested[0] == ("service", "positive", "good service")
    assert len(tested) == 3


def test_tokens_stay_as_they_are(root: Path) -> None:
    item = {"x": ["a", "golden\u00a0ale", "", "is", "nice"], "y": [0.9, 0.5, 0.5]}
    line = json.dumps({**item, "0": [[4, 5], [2, 2]], "1": [], "2": []})
    (root / "beer" / "annotations.json").write_text(line + "\n")
    data = load(root, "beer", aspects=["appearance"])
    assert data.spaced
    assert [data.words[w] for w in data.test_x[0][data.truth["signal"][0]]] == ["nice"]
