"""FLoRA-NA: combinations of clients' factors whose product is near the mean of their products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from experiments import FEW, Finish, examples
from fedsim.analysis.replay import ModelSnapshot
from fedsim.methods.flora_na import surrogates

Array = NDArray[np.float64]

ADAPTED: dict[str, Any] = {
    "data": FEW,
    "model": {"name": "mlp", "hidden": [24, 12]},
    "adapters": {"r": 3, "alpha": 5},
    "train": {"rounds": 2, "participation": 1.0, "optimizer": {"lr": 0.3}},
}


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


def factors(model: ModelSnapshot) -> dict[str, tuple[Array, Array]]:
    return {
        name: tuple(
            part["default"].weight.detach().double().numpy()
            for part in (module.lora_A, module.lora_B)
        )
        for name, module in model.network().named_modules()
        if hasattr(module, "lora_A")
    }


def test_a_run_as_written_out(finish: Finish) -> None:
    run = finish(method={"name": "flora_na"}, **ADAPTED)
    averaged = finish(method={"name": "fedavg"}, **ADAPTED)
    for t in (1, 2):
        rows = run.clients.query("round == @t").set_index("client")["samples"]
        models = ModelSnapshot.of_clients(run, list(rows.index), t)
        own, w = [factors(model) for model in models], (rows / rows.sum()).to_numpy()
        new = ModelSnapshot.of(run, after=t)
        gaps, norms = [], []
        for layer, (a, b) in factors(new).items():
            A, B = (np.stack([each[layer][i] for each in own]) for i in (0, 1))
            p, q, *_ = surrogates(A, B, w)
            np.testing.assert_allclose(a, np.tensordot(q, A, 1), atol=1e-6)
            np.testing.assert_allclose(b, np.tensordot(p, B, 1), atol=1e-6)
            mean = mean_of_products(A, B, w)
            gaps.append(np.linalg.norm(mean - b @ a))
            norms.append(np.linalg.norm(mean))
        row = run.rounds.set_index("round").loc[t]
        gap = np.linalg.norm(gaps) / np.linalg.norm(norms)
        assert row["surrogate_gap"] == pytest.approx(gap, rel=1e-3)
        assert row["surrogate_gap"] < row["adapter_gap"]
        heads = [model.network().get_parameter("head.weight").detach() for model in models]
        expected = np.average(np.stack(heads), axis=0, weights=w)
        head = new.network().get_parameter("head.weight").detach()
        np.testing.assert_allclose(head, expected, atol=1e-6)
    # Of the same factors, averaging misses as much as it says; and no more is sent.
    first = [each.rounds.iloc[0] for each in (run, averaged)]
    assert first[0]["adapter_gap"] == first[1]["adapter_gap"]
    for way in ("bytes_up", "bytes_down"):
        assert run.rounds[way].tolist() == averaged.rounds[way].tolist()
