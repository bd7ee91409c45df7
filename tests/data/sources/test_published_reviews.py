"""Reviews of beers and hotels, from files in their official layouts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.data import Dataset, datasets
from fedsim.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore:.*words get random vectors")

RATED = [
    "0.9 0.4 0.5\tA golden beer , musty .",
    "0.6 0.3 0.1\tfoam and tin",
    "0.4 0.8 0.5\tpale ; fresh hops",
    "0.5 0.5 0.5\tso so",
]
HOTEL = "task\tlabel\ttext"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    beer, hotel = tmp_path / "beer", tmp_path / "hotel"
    for k in range(3):
        beer.mkdir(exist_ok=True)
        with gzip.open(beer / f"reviews.aspect{k}.train.txt.gz", "wt") as file:
            file.write("\n".join(RATED) + "\n")
        (beer / f"reviews.aspect{k}.heldout.txt").write_text(RATED[0] + "\n")
    first = {"x": ["a", "golden", "head", ",", "musty"], "y": [0.9, 0.2, 0.5]}
    marked: list[dict[str, Any]] = [
        {**first, "0": [[1, 3]], "1": [[4, 5]], "2": []},
        {"x": ["dull"], "y": [0.2, 0.5, 0.5], "0": [[0, 1]], "1": [], "2": []},
        {"x": ["no", "ranges"], "y": [0.2, 0.9, 0.9], "0": [], "1": [[0, 1], [1, 2]], "2": []},
    ]
    (beer / "annotations.json").write_text("\n".join(map(json.dumps, marked)) + "\n")
    (hotel / "annotations").mkdir(parents=True)
    for name in ("Location", "Service", "Cleanliness"):
        rows = [f"hotel_{name}\t1\tgood {name.lower()}", f"hotel_{name}\t0\tbad !"]
        for ending in ("train", "dev"):
            text = "\n".join([HOTEL, *rows, f"hotel_{name}\t1\tas good"])
            (hotel / f"hotel_{name}.{ending}").write_text(text + "\n")
        (hotel / "annotations" / f"hotel_{name}.train").write_text(
            f"{HOTEL}\trationale\nhotel_{name}\t0\tbad {name.lower()} too\t1 1 0\n"
        )
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


RATINGS, MARKS = "beer/reviews.aspect1.train.txt", "beer/annotations.json"
SERVICE, RATIONALES = "hotel/hotel_Service.train", "hotel/annotations/hotel_Service.train"
TOO_FAR = '{"x": ["a"], "y": [1, 1, 1], "0": [[0, 2]], "1": [], "2": []}\n'
SHORT = f"{HOTEL}\trationale\nx\t1\tvery good\t1\n"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (RATINGS, "0.5\tx\n", "train.txt:1: begins with '0.5'"),
        (RATINGS, "a b\tx\n", "expected ratings of appearance"),
        (RATINGS, "5 4 3\tx\n", "the rating 4 is outside 0"),
        (RATINGS, "0 nan 3\tx\n", "the rating nan"),
        (MARKS, "{}\n", "annotations.json:1: must have tokens 'x'"),
        (MARKS, "x\n", "annotations.json: cannot be read"),
        (MARKS, TOO_FAR, r"annotations.json:1: marks \[0, 2\) of 1 tokens"),
        (SERVICE, "a\tb\n", "line has no column 'label'"),
        (SERVICE, f"{HOTEL}\nx\t1\n", ":2: has 2 columns of 3"),
        (SERVICE, f"{HOTEL}\nx\t2\tok\n", "the label '2', expected 0"),
        (RATIONALES, SHORT, ":2: its rationale is not a 0 or 1 for each of the 2 tokens"),
    ],
)
def test_files_that_are_damaged(root: Path, file: str, content: str, message: str) -> None:
    (root / file).write_text(content)
    with pytest.raises(DataError, match=message):
        load(root, file.partition("/")[0])


@pytest.mark.parametrize(
    ("name", "file"), [("beer", "annotations.json"), ("hotel", "annotations/hotel_Service.train")]
)
def test_files_that_are_missing(root: Path, name: str, file: str) -> None:
    (root / name / file).unlink()
    with pytest.raises(DataError, match=f"has .* but no {file}"):
        load(root, name)
    (root / "nowhere").mkdir()
    with pytest.raises(DataError, match=r"no file '.*' \(nor .gz, .xz\) in any of"):
        load(root / "nowhere", name)


def test_tokens_stay_as_they_are(root: Path) -> None:
    item = {"x": ["a", "golden\u00a0ale", "", "is", "nice"], "y": [0.9, 0.5, 0.5]}
    line = json.dumps({**item, "0": [[4, 5], [2, 2]], "1": [], "2": []})
    (root / "beer" / "annotations.json").write_text(line + "\n")
    data = load(root, "beer", aspects=["appearance"])
    assert data.spaced
    assert [data.words[w] for w in data.test_x[0][data.truth["signal"][0]]] == ["nice"]


def test_nothing_is_left(root: Path) -> None:
    with pytest.raises(DataError, match="beer: no positive review is about palate, which leaves"):
        load(root, "beer", aspects=["palate"])
    with pytest.raises(DataError, match="beer: has no test reviews; see"):
        load(root, "beer", aspects=["palate"], balance=False)
