"""Sums are exact, and the same bits in any order."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsim.federation.sums import BLOCK_LIMIT, ExactSum, check_block

LARGEST = math.nextafter(BLOCK_LIMIT, 0)
entries = st.floats(-LARGEST, LARGEST) | st.floats(-1, 1) | st.floats(-1e-15, 1e-15)
SIZE = 3
blocks = st.lists(st.lists(entries, min_size=SIZE, max_size=SIZE), min_size=1, max_size=12)


def exact(total: ExactSum) -> list[Fraction]:
    """What the two parts stand for, before it is rounded to a float."""
    return [
        Fraction(int(high), 2**12) + Fraction(int(low), 2**56)
        for high, low in zip(*total.parts(), strict=True)
    ]


def summed(parts: list[list[float]]) -> ExactSum:
    total = ExactSum.zeros(SIZE)
    for part in parts:
        total.add(np.array(part))
    return total


def bits(total: ExactSum) -> bytes:
    high, low = total.parts()
    return high.tobytes() + low.tobytes() + total.value().tobytes()


@given(blocks)
def test_the_sum_is_that_of_fractions(parts: list[list[float]]) -> None:
    total = summed(parts)
    for k, kept in enumerate(exact(total)):
        expected = sum(Fraction(part[k]) for part in parts)
        assert abs(kept - expected) <= Fraction(len(parts), 2**57)
        assert total.value()[k] == pytest.approx(float(expected), rel=1e-15, abs=1e-15)


@given(blocks, st.randoms(use_true_random=False))
def test_any_order_and_any_grouping(parts: list[list[float]], random: object) -> None:
    expected = bits(summed(parts))
    shuffled = parts.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    workers = [summed([]) for _ in range(4)]
    for part in shuffled:
        random.choice(workers).add(np.array(part))  # type: ignore[attr-defined]
    random.shuffle(workers)  # type: ignore[attr-defined]
    while len(workers) > 1:
        first = workers.pop()
        random.choice(workers).merge(first)  # type: ignore[attr-defined]
    assert bits(workers[0]) == expected
    workers[0].clear()
    assert bits(workers[0]) == bits(summed([]))


@pytest.mark.parametrize("size", [0, 1, 32767, 32768, 32769, 100_000])
def test_long_vectors(size: int) -> None:
    rng = np.random.default_rng(size)
    parts = [rng.standard_normal(size) * 10.0**k for k in range(-3, 4)]
    total = ExactSum.zeros(size)
    for part in parts:
        before = part.copy()
        total.add(part)
        np.testing.assert_array_equal(part, before)
    expected = [math.fsum(column) for column in zip(*parts, strict=True)]
    np.testing.assert_allclose(total.value(), expected, rtol=0, atol=2.0**-33)


@pytest.mark.parametrize("sign", [1, -1])
def test_room_for_32767_of_the_largest_blocks(sign: int) -> None:
    total, power = ExactSum.zeros(1), ExactSum.zeros(1)
    power.add(np.array([sign * LARGEST]))
    for k in range(15):  # 1 + 2 + 4 + ... + 2^14
        if k:
            power.merge(power)
        total.merge(power)
    assert total.value()[0] == pytest.approx(sign * LARGEST * 32767, rel=1e-15)


@pytest.mark.parametrize("value", [BLOCK_LIMIT, -BLOCK_LIMIT, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 40_000])
def test_what_is_out_of_range_is_refused(value: float, place: int) -> None:
    block: NDArray[np.float64] = np.zeros(50_000)
    block[place] = value
    with pytest.raises(OverflowError, match="out of range, infinite or NaN"):
        check_block(block)
