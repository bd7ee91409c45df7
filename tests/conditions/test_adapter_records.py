"""The gap that averaging adapters leaves, against its formula."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsim.conditions.adapters import gap_of_means

Layers = list[tuple[NDArray[np.float32], NDArray[np.float32]]]


def drawn(seed: int, K: int, shape: tuple[int, int, int], spread: float) -> Layers:
    """A and B of K clients, which differ by `spread`."""
    out, r, within = shape
    rng = np.random.default_rng(seed)
    A, B = rng.normal(size=(1, r, within)), rng.normal(size=(1, out, r))
    A = A + spread * rng.normal(size=(K, r, within))
    B = B + spread * rng.normal(size=(K, out, r))
    return list(zip(A.astype(np.float32), B.astype(np.float32), strict=True))


@given(
    st.integers(0, 10**6),
    st.integers(1, 9),
    st.tuples(st.integers(1, 30), st.integers(1, 5), st.integers(1, 30)),
    st.sampled_from([0.0, 1e-4, 1e-2, 1.0, 100.0]),
)
def test_the_dense_formula(seed: int, K: int, shape: tuple[int, int, int], spread: float) -> None:
    clients = drawn(seed, K, shape, spread)
    p = np.random.default_rng(seed).dirichlet(np.ones(K))
    A, B = (np.stack(each).astype(np.float64) for each in zip(*clients, strict=True))
    product = np.einsum("k,kor,kri->oi", p, B, A)
    gap = product - np.tensordot(p, B, 1) @ np.tensordot(p, A, 1)
    found = gap_of_means(p, clients)
    norm = np.linalg.norm(product)
    scale = max(norm, 1e-3 * sum(np.linalg.norm(b) * np.linalg.norm(a) for a, b in clients))
    np.testing.assert_allclose(found, [np.linalg.norm(gap), norm], atol=1e-9 * scale, rtol=0)


def test_large_layers_take_no_more_than_their_factors() -> None:
    """Whose product would take 20 GB."""
    clients = drawn(0, 3, (50_000, 2, 50_000), 0.1)
    gap, norm = gap_of_means(np.full(3, 1 / 3), clients)
    assert 0 < gap < norm


def test_one_client_leaves_none() -> None:
    assert gap_of_means(np.ones(1), drawn(0, 1, (6, 2, 5), 1.0))[0] == 0.0


@pytest.mark.filterwarnings("error")
def test_a_client_that_has_diverged() -> None:
    clients = drawn(0, 3, (6, 2, 5), 1.0)
    for value in (np.nan, np.inf):
        clients[1][0][0, 0] = value
        assert not np.isfinite(gap_of_means(np.full(3, 1 / 3), clients)).any()
