"""Real reviews, written in their publishers' layout so that `beer` and `hotel` read them.

Those that were prepared for rationales are to be had of their publishers alone. What is taken
here in their place has ratings, and no words that people have marked:

- beer/beeradvocate_2469.lei_format.txt.gz: five ratings from 0 to 1, a tab, and tokens;
- beer/beer_annotation_reviews_994.jsonl.gz: `tokens`, a rating for `appearance`, and the places
  of the words that the model of Lei, Barzilay and Jaakkola (2016) has chosen for each aspect,
  `rnp_appearance`, `rnp_smell`, `rnp_palate`; these stand where people's marks would;
- hotel/tripadvisor_1000.jsonl.gz: `text`, and ratings from 1 to 5 for `location`, `cleanliness`.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

from fedsim.data.sources.files import data_root

CHOSEN = ("rnp_appearance", "rnp_smell", "rnp_palate")
UNKNOWN = 0.5  # a rating in the middle: of that aspect the review is not read
EACH = 5  # each so-manieth review is kept for testing


def write(folder: Path) -> None:
    """The files of both, below a folder, from those below $FEDSIM_DATA.

    Raises:
        OSError: a file is not there.
    """
    data = data_root(None)
    beer, hotel = folder / "beer", folder / "hotel"
    for part in (beer, hotel):
        part.mkdir(parents=True, exist_ok=True)
    parts = _parted(_lines(data / "beer/beeradvocate_2469.lei_format.txt.gz"))
    for ending, lines in zip(("train", "heldout"), parts, strict=True):
        for k in range(len(CHOSEN)):
            (beer / f"reviews.aspect{k}.{ending}.txt").write_text("\n".join(lines) + "\n")
    annotated = map(json.loads, _lines(data / "beer/beer_annotation_reviews_994.jsonl.gz"))
    (beer / "annotations.json").write_text("".join(_annotation(item) for item in annotated))
    rated = [json.loads(line) for line in _lines(data / "hotel/tripadvisor_1000.jsonl.gz")]
    for aspect in ("location", "cleanliness"):
        # The same reviews are kept for testing, of either aspect.
        for ending, items in zip(("train", "dev"), _parted(rated), strict=True):
            lines = [row for item in items for row in _rated(item, aspect)]
            text = "\n".join(["task\tlabel\ttext", *lines, ""])
            (hotel / f"hotel_{aspect.capitalize()}.{ending}").write_text(text)


def _lines(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def _parted(reviews: list[Any]) -> tuple[list[Any], list[Any]]:
    """Those to train on, and those to test on."""
    return [review for k, review in enumerate(reviews) if k % EACH], reviews[::EACH]


def _annotation(item: dict[str, Any]) -> str:
    """A line of annotations.json."""
    ranges = {
        str(k): [[place, place + 1] for place in item[name]] for k, name in enumerate(CHOSEN)
    }
    ratings = [item["appearance"], UNKNOWN, UNKNOWN]
    return json.dumps({"x": item["tokens"], "y": ratings, **ranges}) + "\n"


def _rated(item: dict[str, Any], aspect: str) -> list[str]:
    """A line of a hotel's file; none for three stars."""
    stars = float(item[aspect])
    if stars == 3:
        return []
    words = re.findall(r"\w+|[^\w\s]", str(item["text"]).lower())
    return [f"{aspect}\t{int(stars > 3)}\t{' '.join(words)}"]
