"""t-SNE of features."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from experiments import examples
from fedsim.explain.explainers.embedding import divergence, embed


def clusters(noise: float) -> np.ndarray:
    spread = noise * np.random.default_rng(0).normal(size=(90, 8))
    return (10 * np.repeat(np.eye(3, 8), 30, axis=0) + spread).astype(np.float32)


def test_clusters_stay_together() -> None:
    found = embed(clusters(0.3), perplexity=10, iterations=500, seed=0)
    centres = found.places.reshape(3, 30, 2).mean(axis=1)
    own = np.repeat(np.arange(3), 30)
    distances = np.linalg.norm(found.places[:, None] - centres[None], axis=2)
    np.testing.assert_array_equal(distances.argmin(axis=1), own)


def by_definition(x: np.ndarray, places: np.ndarray, perplexity: float) -> float:
    """The divergence, with the conditional neighbourhoods found by bisection."""
    squares = ((x[:, None].astype(float) - x[None]) ** 2).sum(axis=2)
    np.fill_diagonal(squares, np.inf)
    P = np.zeros_like(squares)
    for i, row in enumerate(squares):
        low, high = 1e-20, 1e20
        for _ in range(200):
            beta = math.sqrt(low * high)
            p = np.exp(-beta * (row - row.min()))
            p /= p.sum()
            entropy = -(p[p > 0] * np.log(p[p > 0])).sum()
            low, high = (beta, high) if entropy > math.log(perplexity) else (low, beta)
        P[i] = p
    P = (P + P.T) / (2 * len(x))
    Q = 1 / (1 + ((places[:, None].astype(float) - places[None]) ** 2).sum(axis=2))
    np.fill_diagonal(Q, 0)
    Q /= Q.sum()
    here = P > 0
    return float((P[here] * np.log(P[here] / Q[here])).sum())


@pytest.mark.parametrize(
    ("repeated", "perplexity"), [(1, 25), (2, 30), (9, 30), (45, 25), (1, 2), (45, 2)]
)
def test_the_divergence_is_that_of_its_places(repeated: int, perplexity: float) -> None:
    """Also of rows that occur several times, whose places may coincide."""
    # Some with all or many neighbours, others with 7 of them.
    x = np.repeat(clusters(1.0)[::repeated], repeated, axis=0)[:90]
    found = embed(x, perplexity=perplexity, iterations=300, seed=0)
    expected = by_definition(x, found.places, perplexity)
    assert found.divergence >= 0
    if perplexity > 2 or repeated == 1:  # of more equal rows than neighbours, any are near
        assert found.divergence == pytest.approx(expected, rel=0.02 if perplexity > 2 else 0.15)


@given(
    arrays(np.float32, (12, 2), elements=st.sampled_from([0, 1, 1e-4, 3e3])),
    arrays(np.float32, (12, 2), elements=st.sampled_from([0, 1, -50])),
    st.sampled_from([1.5, 3.0, 3.6, 11.0]),
)
@examples(15, by_night=500)
def test_no_divergence_is_negative(x: np.ndarray, places: np.ndarray, perplexity: float) -> None:
    found = divergence(x, places, perplexity)
    assert found >= 0
    squares = np.square(x[:, None].astype(float) - x).sum(axis=2)
    np.fill_diagonal(squares, np.inf)
    nearest = squares <= squares.min(axis=1, keepdims=True) * (1 + 1e-12)
    # All others are neighbours, and no row has more that are nearest than the perplexity asks for:
    # of these any would do, and rounding decides.
    if 3 * perplexity + 1 >= 11 and nearest.sum(axis=1).max() <= perplexity:
        assert found == pytest.approx(by_definition(x, places, perplexity), rel=1e-3, abs=1e-6)


def test_equal_features_are_not_told_apart_and_one_is_enough() -> None:
    found = embed(np.ones((50, 8), dtype=np.float32), perplexity=5, iterations=300, seed=0)
    assert math.isnan(found.divergence)
    assert not found.places.any()
    x = np.linspace(0, 1, 60, dtype=np.float32)[:, None]
    assert embed(x, perplexity=5, iterations=300, seed=0).divergence < 2
