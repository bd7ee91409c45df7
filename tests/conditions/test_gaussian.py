"""Calibrations of Gaussian noise against their definition, and clipping."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fedsim.conditions.gaussian import (
    analytic_epsilon,
    analytic_sigma,
    classical_epsilon,
    clip,
    delta,
    guarantee,
)
from fedsim.errors import ExperimentError

EPSILONS = (1e-4, 1e-2, 0.5, 1.0, 5.0, 40.0, 700.0)
SIGMAS = (1e-3, 0.02, 0.15, 1.0, 3.0, 40.0, 1e3)
DELTAS = (1e-12, 1e-9, 1e-5, 1e-2, 0.1, 0.5)


def logarithmic(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


sigmas = logarithmic(1e-3, 1e3)
deltas = logarithmic(1e-12, 0.5)
sensitivities = logarithmic(1e-2, 1e2)


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    """No warning, and nothing of NumPy's or mpmath's settings left behind."""
    with warnings.catch_warnings(), mpmath.workdps(60):
        warnings.simplefilter("error")
        yield


def exact(epsilon: float, sigma: float, sensitivity: float = 1.0) -> mpmath.mpf:
    """δ(ε) as it is written in Theorem 8, in 60 digits."""
    e, s, d = mpmath.mpf(epsilon), mpmath.mpf(sigma), mpmath.mpf(sensitivity)

    def phi(x: mpmath.mpf) -> mpmath.mpf:
        return mpmath.erfc(-x / mpmath.sqrt(2)) / 2

    return phi(d / (2 * s) - e * s / d) - mpmath.exp(e) * phi(-d / (2 * s) - e * s / d)


@pytest.mark.parametrize("sensitivity", [1, 3])
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_delta_keeps_its_digits(epsilon: float, sensitivity: float) -> None:
    for sigma in SIGMAS:
        expected = float(exact(epsilon, sigma, sensitivity))
        found = delta(epsilon, sigma, sensitivity)
        assert found == pytest.approx(expected, rel=1e-10, abs=1e-250)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_analytic_sigma_is_where_delta_is_met(epsilon: float) -> None:
    for d in DELTAS:
        sigma = analytic_sigma(epsilon, d)
        assert exact(epsilon, sigma * (1 - 1e-9)) > d > exact(epsilon, sigma * (1 + 1e-9))


@given(sigmas, deltas, sensitivities)
def test_from_sigma_to_epsilon_and_back(sigma: float, d: float, sensitivity: float) -> None:
    epsilon = analytic_epsilon(sigma, d, sensitivity)
    if epsilon > 1e-4:
        assert analytic_sigma(epsilon, d, sensitivity) == pytest.approx(sigma, rel=1e-9)
        assert delta(epsilon, sigma, sensitivity) == pytest.approx(d, rel=1e-9)
    else:
        assert delta(1e-4, sigma, sensitivity) <= d * (1 + 1e-9)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (lambda: delta(1e300, 1e10), 0),
        (lambda: delta(1, 1e-3, 1e9), 1),
        (lambda: delta(1e-300, 1, 1), 0.38292492254802624),
        (lambda: analytic_epsilon(1e-3, 0.1, 1e17), 5e39),
        (lambda: analytic_epsilon(1, 1 - 1e-16), 0),
        (lambda: analytic_sigma(1e300, 1e-5), 1 / math.sqrt(2e300)),
        (lambda: 1 / analytic_sigma(1e-300, 0.1), 2 * 0.12566134685507402),
    ],
)
def test_far_beyond_what_anyone_asks(found: Callable[[], float], expected: float) -> None:
    assert found() == pytest.approx(expected, rel=1e-12)


rows = st.integers(1, 5).flatmap(
    lambda d: st.lists(
        st.lists(st.floats(-1e4, 1e4, width=16), min_size=d, max_size=d), min_size=1, max_size=5
    )
)
dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


@given(rows, dtypes, logarithmic(1e-2, 1e4))
@example([[1.0]], torch.float64, math.exp(9))  # of which torch's norm / norm is not 1
def test_clip(values: list[list[float]], dtype: torch.dtype, norm: float) -> None:
    x = torch.tensor(values, dtype=dtype)
    before = x.clone()
    clipped = clip(x, norm)
    assert torch.equal(x, before)
    assert (clipped.dtype, clipped.shape, clipped.device) == (x.dtype, x.shape, x.device)
    # Rounding errs by eps/2 of an entry, or of the least normal number; in double, a few times.
    info = torch.finfo(dtype)
    tiny = info.smallest_normal * info.eps * math.sqrt(x.shape[1])
    for row, result in zip(x.double(), clipped.double(), strict=True):
        size = float(row.norm())
        if size <= norm:
            assert torch.equal(result, row)
        else:
            assert float(result.norm()) == pytest.approx(norm, rel=4 * info.eps, abs=tiny)
            atol = 4 * info.eps * norm + tiny
            torch.testing.assert_close(result, row * (norm / size), rtol=0, atol=atol)


def test_clip_keeps_bits_zeros_and_the_shape() -> None:
    x = torch.tensor([[-0.0, 3.0, 4.0], [0.0, 0.0, 0.0], [6e4, 6e4, 6e4]], dtype=torch.float16)
    clipped = clip(x, 5.0)
    assert clipped[:2].numpy().tobytes() == x[:2].numpy().tobytes()
    assert torch.equal(clipped[2], torch.full((3,), 5 / math.sqrt(3), dtype=torch.float16))
    assert torch.equal(clip(torch.tensor([-3.0, 0.5]), 1.0), torch.tensor([-1.0, 0.5]))
    assert clip(torch.zeros(0, 3, 2, 2), 1.0).shape == (0, 3, 2, 2)
    spread = torch.arange(12.0).reshape(2, 2, 3).permute(1, 2, 0)
    assert torch.equal(clip(spread, 1.0), clip(spread.contiguous(), 1.0))


def test_guarantee_of_fedxds() -> None:
    """The published code's noise and clipping."""
    found = guarantee(0.15, 1e-5, clip_norm=10)
    assert found.per_unit.distance == 1
    assert found.per_unit.classical == pytest.approx(32.2987, abs=1e-4)
    assert exact(found.per_unit.analytic, 0.15) == pytest.approx(1e-5, rel=1e-9)
    assert found.farthest is not None
    assert found.farthest.distance == 20
    assert found.farthest.classical == pytest.approx(20 * found.per_unit.classical)
    assert exact(found.farthest.analytic, 0.15, 20) == pytest.approx(1e-5, rel=1e-9)
    assert found.farthest.analytic > 20 * found.per_unit.analytic
    words = found.in_words()
    assert "ε = 49.88 (analytic calibration)" in words
    assert "32.3, which is proven for ε < 1 only" in words
    assert "at 20, the largest distance that clipping leaves, ε = 9457" in words
    assert "THE SAME mask" in words
    assert "not 1-Lipschitz" in words
    assert max(len(line) for line in words.splitlines()) < 160


def test_guarantee_without_clipping() -> None:
    found = guarantee(6, 1e-5)
    assert found.farthest is None
    words = found.in_words()
    assert "the classical formula says 0.8075\n" in words  # which holds
    assert "not clipped: ε has no bound" in words


POSITIVE = ("must be a positive number, and finite", (0, -1, math.inf, math.nan))
BETWEEN = ("must lie between 0 and 1, both excluded", (0, 1, -0.1, 1.5, math.inf, math.nan))
USUAL = {"epsilon": 0.5, "sigma": 1.0, "delta": 1e-5, "sensitivity": 1.0, "clip_norm": 1.0}
CALLS = (analytic_epsilon, analytic_sigma, classical_epsilon, delta, guarantee)


@pytest.mark.parametrize(
    ("call", "name"), [(call, name) for call in CALLS for name in signature(call).parameters]
)
def test_refuses_what_is_not_positive_or_no_probability(call: Any, name: str) -> None:
    given = {each: USUAL[each] for each in signature(call).parameters}
    what, values = BETWEEN if name == "delta" else POSITIVE
    for bad in values:
        with pytest.raises(ExperimentError) as refused:
            call(**{**given, name: bad})
        assert str(refused.value) == f"{name}={bad:g}: {what}"
    with pytest.raises(ExperimentError, match="norm=0: must be a positive number"):
        clip(torch.ones(2, 2), 0)


@pytest.mark.parametrize("call", [lambda s, d: delta(1, s, d), lambda s, d: guarantee(s, d)])
def test_refuses_a_ratio_beyond_all_numbers(call: Callable[[float, float], object]) -> None:
    with pytest.raises(ExperimentError, match="sensitivity/sigma=inf: must be a positive"):
        call(5e-324, 0.5)
