"""Scores of relevances alone: each against its formula, one row at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from scipy.stats import entropy, spearmanr

from fedsim.explain.scores.relevance import (
    Scores,
    cosine,
    effective_parts,
    places,
    pointing_game,
    rank_correlation,
    relevance_mass,
    relevance_rank,
    silence,
    sparseness,
    top_k_overlap,
)

Row = NDArray[Any]
Truth = NDArray[np.bool_]

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 12))
# Whole numbers, with ties and rows of zeros, or none that are alike.
VALUES = st.sampled_from([st.integers(-2, 2).map(float), st.floats(-9, 9, width=16)])
SAME_SHAPE = st.tuples(SHAPES, VALUES).flatmap(
    lambda drawn: arrays(np.float64, (2, *drawn[0]), elements=drawn[1])
)
WIDE = st.floats(-1e300, 1e300, allow_subnormal=False)


# the formulas, of one row


def gini(row: Row) -> float:
    """Half of the mean difference between any two, by their mean."""
    size = np.abs(row)
    differences = np.abs(np.subtract.outer(size, size))
    return float(differences.mean() / 2 / size.mean()) if row.any() else 0


def exponential_of_entropy(row: Row) -> float:
    return math.exp(entropy(np.abs(row))) if row.any() else len(row)


def spearman(a: Row, b: Row) -> float:
    if len(a) == 1:
        return 1 if a[0] == b[0] else math.nan
    return float(spearmanr(a, b).statistic) if min(np.ptp(a), np.ptp(b)) > 0 else 0


def cosine_of(a: Row, b: Row) -> float:
    return float(a @ b / math.sqrt(a @ a) / math.sqrt(b @ b)) if a.any() and b.any() else 0


def among(row: Row, k: int) -> Row:
    """How often each part is among the first k, over all orders of equal ones."""
    left = k - np.sum(row > row[:, None], axis=1)
    return np.clip(left / np.sum(row == row[:, None], axis=1), 0, 1)


def common_part(a: Row, b: Row, k: int) -> float:
    if (a == b).all() and np.ptp(a) > 0:
        return 1
    return float(among(a, k) @ among(b, k) / k)


def mass_inside(row: Row, truth: Truth) -> float:
    for_it = row.clip(min=0)
    return float(for_it[truth].sum() / for_it.sum() if for_it.any() else truth.mean())


def ranked_inside(row: Row, truth: Truth) -> float:
    return float(among(row, truth.sum())[truth].mean())


def points_inside(row: Row, truth: Truth) -> float:
    return float(truth[row == row.max()].mean())


@given(both=SAME_SHAPE)
def test_are_their_formulas(both: Row) -> None:
    a, b = both
    truth = b > 0

    def check(score: Callable[..., Scores], formula: Callable[..., float], *about: Any) -> None:
        found = score(*about)
        assert found.dtype == np.float64
        expected = [formula(*rows) for rows in zip(*about, strict=True)]
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)

    check(sparseness, gini, a)
    check(effective_parts, exponential_of_entropy, a)
    check(rank_correlation, spearman, a, b)
    check(cosine, cosine_of, a, b)
    for k in {1, (a.shape[1] + 1) // 2, a.shape[1]}:
        check(
            lambda *rows, k=k: top_k_overlap(*rows, k),
            lambda *rows, k=k: common_part(*rows, k),
            *(a, b),
        )
    for score, formula in {
        relevance_mass: mass_inside,
        relevance_rank: ranked_inside,
        pointing_game: points_inside,
    }.items():
        known = truth.any(axis=1)
        check(score, formula, a[known], truth[known])
        assert np.isnan(score(a, truth)[~known]).all()


@given(
    relevance=SHAPES.flatmap(lambda shape: arrays(np.float64, shape, elements=WIDE)),
    scale=st.floats(1e-200, 1e200),
)
def test_no_size_overflows(relevance: Row, scale: float) -> None:
    P = relevance.shape[1]
    assert ((sparseness(relevance) >= 0) & (sparseness(relevance) <= (P - 1) / P + 1e-12)).all()
    parts = effective_parts(relevance)
    assert ((parts >= 1) & (parts <= P)).all()
    itself = cosine(relevance, relevance)
    np.testing.assert_allclose(itself, relevance.any(axis=1), rtol=1e-12)
    whole = np.sign(relevance)
    np.testing.assert_allclose(cosine(scale * whole, whole), whole.any(axis=1), rtol=1e-12)
    mass = relevance_mass(relevance, np.ones(relevance.shape, bool))
    np.testing.assert_allclose(mass, 1, rtol=1e-12)


def test_equal_parts_have_no_order() -> None:
    """The mean over all orders, by trying them."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        a, b = (rng.integers(0, 3, 4).astype(float) for _ in range(2))
        truth = rng.random(4) < 0.5
        truth[0] = True
        found: dict[str, list[float]] = {"rank": [], "points": [], "top": []}
        for order in itertools.permutations(range(4)):
            one = a + 1e-6 * np.array(order)
            found["rank"].append(ranked_inside(one, truth))
            found["points"].append(points_inside(one, truth))
            for other in itertools.permutations(range(4)):
                found["top"].append(common_part(one, b + 1e-6 * np.array(other), 2))
        about = a[None], truth[None]
        assert relevance_rank(*about)[0] == pytest.approx(np.mean(found["rank"]))
        assert pointing_game(*about)[0] == pytest.approx(np.mean(found["points"]))
        assert top_k_overlap(a[None], b[None], 2)[0] == pytest.approx(np.mean(found["top"]))


def test_places_of_ties_go_by_index() -> None:
    many = np.tile([0.0, 1], 500)
    falling = np.argsort(-many, kind="stable")
    assert places(many[None])[0, falling].tolist() == list(range(1000))
    assert places(np.array([[0, -0.0, 0.0]])).tolist() == [[0, 1, 2]]


def test_there_must_be_k_parts() -> None:
    for k in (0, 16):
        with pytest.raises(ValueError, match=rf"^k={k}: must be from 1 to 15"):
            top_k_overlap(np.eye(15), np.eye(15), k)


@pytest.mark.parametrize(
    ("relevance", "words"),
    [
        ([2.0, 1.0], ""),
        ([[2.0, 1.0], [2.0, 2.0]], ""),
        ([2.0], ""),
        ([0.0, 0.0], "no part of it is relevant"),
        ([], "no part of it is relevant"),
        ([0.25, 0.25, 0.25], "all of its words are equally relevant (0.25)"),
        ([-3.0, -3.0 * (1 + 1e-7)], "all of its words are equally relevant (-3)"),
        ([np.nan, 1.0], "the relevance of some of its words is not finite"),
        ([np.inf, np.inf], "the relevance of some of its words is not finite"),
    ],
)
def test_why_a_map_says_nothing(relevance: list[float], words: str) -> None:
    assert silence(np.array(relevance), "words") == words
