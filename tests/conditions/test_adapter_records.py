"""The gap that averaging adapters leaves, against its formula."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from experiments import FEW, federation, small_experiment
from fedsim.conditions.adapters import AdapterRecords, gap_of_means
from fedsim.federation import Update
from fedsim.training.adapters import pairs

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


def test_what_a_client_notes_is_as_large_as_its_adapters() -> None:
    adapters = {"adapters": {"r": 2}, "model": {"name": "mlp", "hidden": [16]}}
    fed = federation(small_experiment(method={"name": "fedavg"}, data=FEW, **adapters))
    model = fed.server.model
    client: Any = SimpleNamespace(model=model, trained=model.vector, notes={})
    sent: Any = SimpleNamespace(message=Update(weights=model.vector, weight=3.0))
    AdapterRecords().sent(client, sent)
    factors = sum(np.prod([r, out + within]) for out, r, within in (p.shape for p in pairs(model)))
    weight, own = client.notes["adapters"]
    before = {layer: [f.copy() for f in both] for layer, both in own.items()}
    model.vector.zero_()  # as the next client's weights take its place
    for layer, both in before.items():
        for noted, was in zip(own[layer], both, strict=True):
            np.testing.assert_array_equal(noted, was)
    assert weight == 3.0
    assert len(pickle.dumps(own)) < 4 * factors + 1000
