"""t-SNE of features."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedsim.errors import BadInput
from fedsim.explain.embedding import embed


def clusters(noise: float) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (10 * np.repeat(np.eye(3, 8), 30, axis=0) + noise * rng.normal(size=(90, 8))).astype(
        np.float32
    )


def test_clusters_stay_together() -> None:
    found = embed(clusters(0.3), perplexity=10, iterations=500, seed=0)
    centres = found.places.reshape(3, 30, 2).mean(axis=1)
    own = np.repeat(np.arange(3), 30)
    distances = np.linalg.norm(found.places[:, None] - centres[None], axis=2)
    np.testing.assert_array_equal(distances.argmin(axis=1), own)


def test_the_divergence_is_that_of_its_places() -> None:
    """Against the definition, with the conditional neighbourhoods found by bisection."""
    x = clusters(1.0)
    found = embed(x, perplexity=25, iterations=1000, seed=0)  # 3 · 25 neighbours: nearly all
    squares = ((x[:, None].astype(float) - x[None]) ** 2).sum(axis=2)
    P = np.zeros_like(squares)
    for i, row in enumerate(squares):
        low, high = 1e-9, 1e3
        for _ in range(200):
            beta = math.sqrt(low * high)
            p = np.exp(-beta * (row - np.delete(row, i).min()))
            p[i] = 0
            p /= p.sum()
            entropy = -(p[p > 0] * np.log(p[p > 0])).sum()
            low, high = (beta, high) if entropy > math.log(25) else (low, beta)
        P[i] = p
    P = (P + P.T) / (2 * len(x))
    Q = 1 / (1 + ((found.places[:, None] - found.places[None]) ** 2).sum(axis=2))
    np.fill_diagonal(Q, 0)
    Q /= Q.sum()
    here = P > 0
    divergence = (P[here] * np.log(P[here] / Q[here])).sum()
    assert found.divergence == pytest.approx(divergence, rel=0.05)


def test_too_few_examples_are_refused() -> None:
    with pytest.raises(BadInput, match="perplexity=90: must be below the number of examples, 90"):
        embed(clusters(1.0), perplexity=90, iterations=300, seed=0)


def test_equal_features_are_not_told_apart() -> None:
    found = embed(np.ones((50, 8), dtype=np.float32), perplexity=5, iterations=300, seed=0)
    assert math.isnan(found.divergence)
    assert not found.places.any()


def test_a_single_feature_is_embedded() -> None:
    x = np.linspace(0, 1, 60, dtype=np.float32)[:, None]
    assert embed(x, perplexity=5, iterations=300, seed=0).divergence < 2
