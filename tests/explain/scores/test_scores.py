"""Scores of relevances alone: each against its formula written out, and what must hold of it."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from scipy.stats import spearmanr

from fedsim.explain.scores import relevance as scores
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

Localisation = Callable[[NDArray[Any], NDArray[np.bool_]], Scores]

SHAPES = st.tuples(st.integers(1, 4), st.integers(2, 12))
LOCALISATIONS = (relevance_mass, relevance_rank, pointing_game)
WIDE = st.floats(-1e300, 1e300, allow_subnormal=False)


def maps(seed: int = 0, n: int = 6, P: int = 15) -> NDArray[np.float64]:
    """Signed relevances, of some rows with many ties."""
    found = np.random.default_rng(seed).standard_normal((n, P))
    found[::2] = found[::2].round()
    return found


def masks(seed: int = 9, n: int = 6, P: int = 15) -> NDArray[np.bool_]:
    found = np.random.default_rng(seed).random((n, P)) < 0.3
    found[:, 3] = True
    return found


def by_falling(row: NDArray[np.float64]) -> list[int]:
    """Parts by falling relevance, ties by index."""
    return sorted(range(len(row)), key=lambda p: (-row[p], p))


def signed(elements: st.SearchStrategy[float] = WIDE) -> st.SearchStrategy[NDArray[Any]]:
    return SHAPES.flatmap(lambda shape: arrays(np.float64, shape, elements=elements))


def pairs(elements: st.SearchStrategy[int]) -> st.SearchStrategy[NDArray[Any]]:
    return SHAPES.flatmap(lambda shape: arrays(np.int64, (2, *shape), elements=elements))


def test_examples_run() -> None:
    found = doctest.testmod(scores)
    assert found.attempted
    assert not found.failed


class TestComplexity:
    def test_sparseness_is_the_mean_difference(self) -> None:
        """Gini's own definition: half of the mean difference between any two, by their mean."""
        for row, found in zip(maps(), sparseness(maps()), strict=True):
            size = np.abs(row)
            P = len(size)
            differences = sum(abs(r - s) for r in size for s in size)
            assert found == pytest.approx(differences / (2 * P**2 * size.mean()))

    def test_effective_parts(self) -> None:
        for row, found in zip(maps(), effective_parts(maps()), strict=True):
            q = [abs(r) / sum(map(abs, row)) for r in row]
            assert found == pytest.approx(math.exp(-sum(p * math.log(p) for p in q if p)))

    @pytest.mark.parametrize("P", [1, 2, 7, 100])
    def test_one_part_alone_and_all_alike(self, P: int) -> None:
        alone = -3 * np.eye(P)
        assert sparseness(alone) == pytest.approx((P - 1) / P)
        assert effective_parts(alone).tolist() == [1] * P
        alike = np.outer([5.0, -0.1, 0.0], np.ones(P))
        assert sparseness(alike).tolist() == [0, 0, 0]
        assert effective_parts(alike) == pytest.approx(P)

    def test_equal_parts_beside_none(self) -> None:
        """m of P parts: 1 - m/P, and m."""
        some = np.array([[1, 1, -1, 0, 0, 0, 0, 0]])
        assert sparseness(some) == pytest.approx(5 / 8)
        assert effective_parts(some) == pytest.approx(3)

    @given(relevance=signed())
    def test_within_bounds_whatever_the_size(self, relevance: NDArray[np.float64]) -> None:
        P = relevance.shape[1]
        gini, parts = sparseness(relevance), effective_parts(relevance)
        assert gini.dtype == parts.dtype == np.float64
        assert ((gini >= 0) & (gini <= (P - 1) / P + 1e-12)).all()
        assert ((parts >= 1) & (parts <= P)).all()

    @given(relevance=signed(st.floats(-10, 10, allow_subnormal=False)), scale=st.floats(0.1, 1e6))
    def test_sign_scale_and_order_do_not_matter(
        self, relevance: NDArray[np.float64], scale: float
    ) -> None:
        for score in (sparseness, effective_parts):
            other = score(-scale * relevance[:, ::-1])
            np.testing.assert_allclose(other, score(relevance), rtol=1e-9, atol=1e-12)


class TestSimilarity:
    def test_rank_correlation_is_scipys(self) -> None:
        a, b = maps(0), maps(1)
        expected = [spearmanr(*rows).statistic for rows in zip(a, b, strict=True)]
        assert rank_correlation(a, b) == pytest.approx(expected, abs=1e-12)

    @given(both=pairs(st.integers(-3, 3)))
    def test_rank_correlation_is_scipys_with_ties(self, both: NDArray[np.int64]) -> None:
        for a, b, found in zip(*both, rank_correlation(*both), strict=True):
            if (a == b).all():
                assert found == 1
            elif min(np.ptp(a), np.ptp(b)) == 0:
                assert np.isnan(found)
            else:
                assert found == pytest.approx(spearmanr(a, b).statistic, abs=1e-12)

    def test_no_order_to_compare(self) -> None:
        a = np.array([[0, 0, 0], [2, 2, 2], [1, 2, 3], [0, 0, 0]])
        b = np.array([[0, 0, 0], [2, 2, 2], [4, 4, 4], [1, 1, 1]])
        np.testing.assert_array_equal(rank_correlation(a, b), [1, 1, np.nan, np.nan])

    def test_top_k_overlap(self) -> None:
        a, b = maps(0), maps(1)
        for k in (1, 4, 15):
            for *rows, found in zip(a, b, top_k_overlap(a, b, k), strict=True):
                both = set.intersection(*(set(by_falling(row)[:k]) for row in rows))
                assert found == len(both) / k

    def test_ties_go_by_index(self) -> None:
        assert places(np.array([[0, 0, 0], [1, 2, 2]])).tolist() == [[0, 1, 2], [2, 0, 1]]
        many = np.tile([0.0, 1], 500)
        assert places(many[None])[0, by_falling(many)].tolist() == list(range(1000))
        a, b = np.array([[1.0, 1, 0]]), np.array([[0, 0.0, -0.0]])
        assert top_k_overlap(a, b, 2).tolist() == [1]

    @pytest.mark.parametrize("k", [-1, 0, 16])
    def test_there_must_be_k_parts(self, k: int) -> None:
        with pytest.raises(ValueError, match=rf"^k={k}: must be from 1 to 15"):
            top_k_overlap(maps(), maps(), k)

    def test_cosine(self) -> None:
        a, b = maps(0), maps(1)
        for x, y, found in zip(a, b, cosine(a, b), strict=True):
            assert found == pytest.approx(x @ y / math.sqrt(x @ x) / math.sqrt(y @ y))

    def test_cosine_of_zeros(self) -> None:
        a, b = np.array([[0, 0], [0, 0], [3, 4]]), np.array([[0, 0], [1, 2], [0, 0]])
        assert cosine(a, b).tolist() == [1, 0, 0]

    @given(relevance=signed())
    def test_a_map_is_like_itself(self, relevance: NDArray[np.float64]) -> None:
        n, P = relevance.shape
        assert rank_correlation(relevance, relevance).tolist() == [1] * n
        assert top_k_overlap(relevance, relevance, P // 2).tolist() == [1] * n
        np.testing.assert_allclose(cosine(relevance, relevance), 1, rtol=1e-12)

    @given(both=pairs(st.integers(-9, 9)), steps=st.lists(st.floats(0.01, 9), min_size=19))
    def test_only_order_matters_to_ranks(
        self, both: NDArray[np.int64], steps: list[float]
    ) -> None:
        """A rising map of the relevances of either changes nothing."""
        a, b = both
        risen = np.cumsum(steps)[a + 9] - 20
        k = a.shape[1] // 2
        assert top_k_overlap(risen, b, k).tolist() == top_k_overlap(a, b, k).tolist()
        some = ~(a == b).all(axis=1)
        np.testing.assert_array_equal(
            rank_correlation(risen[some], b[some]), rank_correlation(a[some], b[some])
        )

    @given(both=pairs(st.integers(-9, 9)), scale=st.floats(1e-200, 1e200))
    def test_scale_does_not_matter_to_cosine(self, both: NDArray[np.int64], scale: float) -> None:
        a, b = both
        np.testing.assert_allclose(cosine(scale * a, b), cosine(a, b), rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(cosine(a, b), cosine(b, a))

    def test_what_is_reversed(self) -> None:
        a = maps()
        assert rank_correlation(a, -a) == pytest.approx(-1)
        assert cosine(a, -a) == pytest.approx(-1)


class TestLocalisation:
    def test_relevance_mass(self) -> None:
        for row, truth, found in zip(
            maps(), masks(), relevance_mass(maps(), masks()), strict=True
        ):
            inside = sum(r for r, t in zip(row, truth, strict=True) if r > 0 and t)
            assert found == pytest.approx(inside / sum(r for r in row if r > 0))

    def test_relevance_rank(self) -> None:
        for row, truth, found in zip(
            maps(), masks(), relevance_rank(maps(), masks()), strict=True
        ):
            first = by_falling(row)[: truth.sum()]
            assert found == sum(truth[p] for p in first) / truth.sum()

    def test_pointing_game(self) -> None:
        for row, truth, found in zip(maps(), masks(), pointing_game(maps(), masks()), strict=True):
            assert found == truth[by_falling(row)[0]]

    @pytest.mark.parametrize("score", LOCALISATIONS)
    @given(truth=SHAPES.flatmap(lambda shape: arrays(bool, shape)))
    def test_the_truths_own_mask(self, score: Localisation, truth: NDArray[np.bool_]) -> None:
        known = truth.any(axis=1)
        found = score(0.1 * truth, truth)
        assert (found[known] == 1).all()
        assert np.isnan(found[~known]).all()
        outside = score(-1.0 * truth, truth)[known & ~truth.all(axis=1)]
        assert (outside < 1).all()

    @pytest.mark.parametrize("score", LOCALISATIONS)
    def test_a_random_map_scores_its_chance(self, score: Localisation) -> None:
        rng = np.random.default_rng(0)
        truth = np.zeros((4000, 10), bool)
        truth[:, [1, 4, 5]] = True
        found = score(rng.standard_normal(truth.shape), truth)
        assert found.mean() == pytest.approx(0.3, abs=0.03)  # 4 standard errors, for pointing

    @pytest.mark.parametrize("score", LOCALISATIONS)
    def test_nothing_found_and_nothing_to_find(self, score: Localisation) -> None:
        relevance = np.array([[0.0, 0, 0], [3, 2, 1]])
        assert score(relevance, np.ones((2, 3), bool)).tolist() == [0, 1]
        assert np.isnan(score(relevance, np.zeros((2, 3), bool))).all()

    def test_only_positive_relevance_is_mass(self) -> None:
        truth = np.array([[True, True, False]])
        assert relevance_mass(np.array([[1, -9, 3]]), truth).tolist() == [0.25]
        assert relevance_mass(np.array([[-1, -9, -3]]), truth).tolist() == [0]


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
