"""FLoRA-NA: combinations of clients' factors whose product is near the mean of their products."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_hetlora import arrays
from test_lora import finished

from experiments import examples
from fedsim.analysis.replay import ModelSnapshot
from fedsim.methods.flora_na import surrogates

Array = NDArray[np.float64]


def mean_of_products(A: Array, B: Array, w: Array) -> Array:
    return np.einsum("k,kor,kri->oi", w, B, A)


def missed(A: Array, B: Array, w: Array, p: Array, q: Array) -> float:
    combined = np.tensordot(p, B, 1) @ np.tensordot(q, A, 1)
    return float(np.linalg.norm(mean_of_products(A, B, w) - combined))


def drawn(seed: int, n: int, r: int = 2, apart: float = 1.0) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(r, 7)) + apart * rng.normal(size=(n, r, 7))
    B = rng.normal(size=(9, r)) + apart * rng.normal(size=(n, 9, r))
    w = rng.uniform(0.1, 1, n)
    return A, B, w / w.sum()


@examples(60)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 6),
    r=st.integers(1, 3),
    apart=st.sampled_from([0, 1e-4, 0.1, 1, 100]),
)
def test_never_further_than_averages_nor_nearer_than_any(
    seed: int, n: int, r: int, apart: float
) -> None:
    A, B, w = drawn(seed, n, r, apart)
    p, q, gap, norm = surrogates(A, B, w)
    found = missed(A, B, w, p, q)
    assert norm == pytest.approx(np.linalg.norm(mean_of_products(A, B, w)))
    assert found == pytest.approx(gap, abs=1e-6 * norm)
    assert found <= missed(A, B, w, w, w) + 1e-9 * norm
    singular = np.linalg.svd(mean_of_products(A, B, w), compute_uv=False)
    assert found >= np.linalg.norm(singular[r:]) - 1e-9 * norm


@pytest.mark.parametrize("case", ["the same A", "multiples of B", "opposite", "one alone"])
def test_nothing_is_missed_where_the_mean_has_such_factors(case: str) -> None:
    A, B, w = drawn(1, 1 if case == "one alone" else 4)
    if case == "the same A":
        A[:] = A[0]
    if case == "multiples of B":
        B = np.multiply.outer(np.array([1.0, -2.0, 0.5, 3.0]), B[0])
    if case == "opposite":  # both averages are 0
        A, B, w = A[[0, 0]] * [[[1]], [[-1]]], B[[0, 0]] * [[[1]], [[-1]]], np.full(2, 0.5)
    p, q, gap, norm = surrogates(A, B, w)
    assert missed(A, B, w, p, q) < 1e-9 * norm
    assert gap < 1e-6 * norm


def test_before_anything_is_learnt_averages_stay() -> None:
    A, B, w = drawn(2, 3)
    p, q, gap, norm = surrogates(A, 0 * B, w)
    np.testing.assert_array_equal([p, q], [w, w])
    assert (gap, norm) == (0, 0)


def test_gradient_steps_come_no_nearer() -> None:
    """Those of the paper, from the averages."""
    A, B, w = drawn(0, 4, apart=0.5)
    tensors = [torch.tensor(v) for v in (A, B, mean_of_products(A, B, w))]
    p, q = (torch.tensor(w, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.Adam([p, q], lr=0.01)
    for _ in range(1000):
        optimizer.zero_grad()
        a, b = torch.tensordot(q, tensors[0], 1), torch.tensordot(p, tensors[1], 1)
        loss = (tensors[2] - b @ a).square().sum()
        loss.backward()
        optimizer.step()
    assert surrogates(A, B, w)[2] <= float(loss.detach().sqrt()) + 1e-6
    assert surrogates(A, B, w)[2] < 0.98 * missed(A, B, w, w, w)


def test_a_run_as_written_out() -> None:
    run, averaged = (finished(name) for name in ("flora_na", "fedavg"))
    for t in (1, 2):
        rows = run.clients.query("round == @t").set_index("client")["samples"]
        models = ModelSnapshot.of_clients(run, list(rows.index), t)
        own, w = [arrays(model) for model in models], (rows / rows.sum()).to_numpy()
        new = arrays(ModelSnapshot.of(run, after=t))
        gaps, norms = [], []
        for layer in ("features.1", "features.3"):
            parts = [f"{layer}.lora_{factor}" for factor in "AB"]
            A, B = (np.stack([each[part] for each in own]) for part in parts)
            p, q, *_ = surrogates(A, B, w)
            for part, expected in zip(
                parts, (np.tensordot(q, A, 1), np.tensordot(p, B, 1)), strict=True
            ):
                np.testing.assert_allclose(new[part], expected, atol=1e-6)
            mean = mean_of_products(A, B, w)
            gaps.append(np.linalg.norm(mean - new[parts[1]] @ new[parts[0]]))
            norms.append(np.linalg.norm(mean))
        row = run.rounds.set_index("round").loc[t]
        gap = np.linalg.norm(gaps) / np.linalg.norm(norms)
        assert row["surrogate_gap"] == pytest.approx(gap, rel=1e-3)
        assert row["surrogate_gap"] < row["adapter_gap"]
        head = np.average([each["head.weight"] for each in own], axis=0, weights=w)
        np.testing.assert_allclose(new["head.weight"], head, atol=1e-6)
    # Of the same factors, averaging misses as much as it says; and no more is sent.
    first = [each.rounds.iloc[0] for each in (run, averaged)]
    assert first[0]["adapter_gap"] == first[1]["adapter_gap"]
    for way in ("bytes_up", "bytes_down"):
        assert run.rounds[way].tolist() == averaged.rounds[way].tolist()
