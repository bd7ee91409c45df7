"""Made-up reviews, with the words that their label is about; and who holds which aspect."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedsim.data import Dataset, datasets, partitions
from fedsim.data.sources.reviews import ADVERBS, DOMAINS, SPURIOUS

pytestmark = pytest.mark.filterwarnings("ignore:.*words get random vectors")


@cache
def planted(**fields: Any) -> Dataset:
    small = {"name": "planted_reviews", "reviews": 60, "test_reviews": 40, "dimension": 4}
    return datasets.parse({**small, **fields}).load()


def texts(data: Dataset, rows: NDArray[np.generic]) -> list[list[str]]:
    return [[data.words[w] for w in row if w] for row in rows.tolist()]


@pytest.mark.parametrize("domain", ["beer", "hotel"])
def test_marks_are_the_phrase_on_the_aspect_of_the_label(domain: str) -> None:
    data = planted(domain=domain)
    aspects = DOMAINS[domain]
    assert data.classes == ("negative", "positive")
    assert len(data.y) == 60 * len(aspects)
    assert Counter(data.columns["aspect"]) == dict.fromkeys(aspects, 60)
    for name in aspects:  # half of each aspect's reviews are positive
        assert data.y[data.columns["aspect"] == name].mean() == 0.5
    assert data.truth["signal"].shape == data.test_x.shape
    about = data.test_columns["aspect"]
    for words, marks, y, name in zip(
        texts(data, data.test_x), data.truth["signal"], data.test_y, about, strict=True
    ):
        places = np.flatnonzero(marks)
        assert (np.diff(places) == 1).all()
        phrase = [words[i] for i in places]
        said = aspects[name].positive if y else aspects[name].negative
        assert phrase[-2] in said
        assert phrase[-1] in aspects[name].nouns
        assert phrase[:-2] == [] or (len(phrase) == 3 and phrase[0] in ADVERBS)
        for other, aspect in aspects.items():  # and a phrase on each other aspect
            if other != name:
                found = [w for w in words if w in (*aspect.positive, *aspect.negative)]
                assert len(found) == 1


def agreement(data: Dataset, part: str) -> float:
    rows, y, about = (
        (data.x, data.y, data.columns["aspect"])
        if part == "train"
        else (data.test_x, data.test_y, data.test_columns["aspect"])
    )
    alike = []
    for words, label, name in zip(texts(data, rows), y, about, strict=True):
        for other, aspect in DOMAINS["beer"].items():
            if other != name:
                good = any(w in aspect.positive for w in words)
                alike.append(good == bool(label))
    return float(np.mean(alike))


@pytest.mark.parametrize(("in_tests", "expected"), [({}, 0.5), ({"test_agreement": 0.85}, 0.85)])
def test_other_aspects_agree_in_training(in_tests: dict[str, float], expected: float) -> None:
    data = planted(agreement=0.9, reviews=120, test_reviews=120, **in_tests)
    assert agreement(data, "train") == pytest.approx(0.9, abs=0.04)
    assert agreement(data, "test") == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("others", [0, 1, 2, 3])
def test_as_many_other_aspects_as_asked_for(others: int) -> None:
    data = planted(others=others, reviews=100)
    mentioned: Counter[str] = Counter()
    for words, name in zip(texts(data, data.x), data.columns["aspect"], strict=True):
        found = {
            aspect
            for aspect, known in DOMAINS["beer"].items()
            if {*words} & {*known.positive, *known.negative}
        }
        assert name in found
        assert len(found) == others + 1
        mentioned.update(found - {name})
    if others:  # each as often as another
        shares = np.array([mentioned[name] for name in DOMAINS["beer"]]) / (400 * others / 4)
        np.testing.assert_allclose(shares, 1, atol=0.25)


def test_by_default_a_review_mentions_all() -> None:
    np.testing.assert_array_equal(planted().x, planted(others=3).x)


def test_the_word_that_says_nothing_goes_with_a_class_in_training_alone() -> None:
    data = planted(spurious=0.95, reviews=120, test_reviews=120)

    def share(rows: NDArray[np.generic]) -> float:
        return float(np.mean([SPURIOUS in words for words in texts(data, rows)]))

    assert share(data.x[data.y == 1]) == pytest.approx(0.95, abs=0.05)
    assert share(data.x[data.y == 0]) == pytest.approx(0.5, abs=0.08)
    assert share(data.test_x[data.test_y == 1]) == pytest.approx(0.5, abs=0.08)
    assert SPURIOUS not in planted().words


def test_marks_end_where_documents_are_cut() -> None:
    data = planted(length=10)
    assert data.truth["signal"].shape == data.test_x.shape == (160, 10)
    whole = planted(length=1000)
    assert whole.shape[0] > 10
    np.testing.assert_array_equal(data.truth["signal"], whole.truth["signal"][:, :10])


def test_the_test_set_is_the_same_however_one_trains() -> None:
    one, other = planted(), planted(reviews=20, agreement=0.9)
    np.testing.assert_array_equal(planted.__wrapped__().x, one.x)  # made anew
    assert not np.array_equal(planted(seed=1).x, one.x)
    assert texts(one, one.test_x) == texts(other, other.test_x)
    np.testing.assert_array_equal(one.test_y, other.test_y)
    np.testing.assert_array_equal(one.test_columns["aspect"], other.test_columns["aspect"])
    for a, b in zip(one.truth["signal"], other.truth["signal"], strict=True):
        np.testing.assert_array_equal(np.flatnonzero(a), np.flatnonzero(b))


@pytest.mark.parametrize("clients", [4, 8, 40])
def test_each_client_holds_a_tenth_of_an_aspect(clients: int) -> None:
    data = planted()
    made = partitions.parse({"kind": "aspects", "clients": clients})
    shares = list(made.deal(data, 0).train)
    names = sorted(DOMAINS["beer"])
    for k, rows in enumerate(shares):
        assert set(data.columns["aspect"][rows]) == {names[k % 4]}
        assert len(rows) == 6
        assert data.y[rows].mean() == 0.5
    everything = np.concatenate(shares)
    assert len(np.unique(everything)) == len(everything) == 6 * clients
    again, other = (list(made.deal(data, seed).train) for seed in (0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(shares, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(shares, other, strict=True))
