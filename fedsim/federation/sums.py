"""Sums that do not depend on the order.

Floating-point addition rounds, so a sum of floats depends on the order, and thus on the number and
speed of actors. Addition of integers does not round. Each block of clients is therefore added in
client order in 64-bit floats and then written as a fixed-point number, and fixed-point numbers are
added across blocks: the same bits for any number of actors, any order of arrival and any retry.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# A block's sum x is kept as high·2^-12 + low·2^-56, two 64-bit integers an entry. With |x| < 2^36,
# |high| ≤ 2^48 and |low| ≤ 2^43, so that 2^14 blocks can be added without overflow. The error is
# under 2^-57 ≈ 7e-18 per block, far below the rounding of float32 weights.
HIGH_SCALE = 2.0**12
LOW_SCALE = 2.0**56
BLOCK_LIMIT = 2.0**36
# The largest |weight × value| of one client: a block of 64 such clients stays in range.
CLIENT_LIMIT = 2.0**30
_CHUNK = 32768  # entries at a time, so that temporaries stay in the cache
_LONG = 1 << 18  # likewise, where the library computes in parts of its own
# The last of the 52 bits of a float in [2^40, 2^41) counts 2^-12, in [2^-4, 2^-3) 2^-56. So adding
# such a number rounds to multiples of that; and the bits of the sum, read as an integer, are the
# multiple plus a constant. This is twice as fast as rounding and converting.
_HIGH_SHIFT = np.float64(1.5 * 2.0**40)
_LOW_SHIFT = np.float64(1.5 * 2.0**-4)
_BOTH_SHIFTS = _HIGH_SHIFT + _LOW_SHIFT  # exactly
_HIGH_ZERO, _LOW_ZERO = int(_HIGH_SHIFT.view(np.int64)), int(_LOW_SHIFT.view(np.int64))


@dataclass
class ExactSum:
    """A running sum of vectors in two-part fixed point.

    Attributes:
        high, low: (size,) each, modulo 2^64, including the constants of all blocks.
        blocks: number of blocks added.
    """

    high: NDArray[np.int64]
    low: NDArray[np.int64]
    blocks: int = 0

    @classmethod
    def zeros(cls, size: int) -> ExactSum:
        return cls(np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64))

    def add(self, block: NDArray[np.float64]) -> None:
        """Add a block's sum, (size,) float64 with every |entry| < 2^36: see `check_block`."""
        shifted = np.empty(_CHUNK)
        for start in range(0, len(block), _CHUNK):
            x = block[start : start + _CHUNK]
            a = shifted[: len(x)]
            bits = a.view(np.int64)
            np.add(x, _HIGH_SHIFT, out=a)
            self.high[start : start + _CHUNK] += bits
            np.subtract(a, _BOTH_SHIFTS, out=a)
            np.subtract(x, a, out=a)  # the remainder, rounded by the second shift
            self.low[start : start + _CHUNK] += bits
        self.blocks += 1

    def merge(self, other: ExactSum) -> None:
        """Add another sum of the same size; the order of merges does not matter."""
        self.high += other.high
        self.low += other.low
        self.blocks += other.blocks

    def copy(self) -> ExactSum:
        return ExactSum(self.high.copy(), self.low.copy(), self.blocks)

    def clear(self) -> None:
        """Reset to zero."""
        self.high[:], self.low[:], self.blocks = 0, 0, 0

    def parts(self, entries: slice = slice(None)) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The sum of some entries as high·2^-12 + low·2^-56."""
        return (
            self.high[entries] - _modulo(self.blocks * _HIGH_ZERO),
            self.low[entries] - _modulo(self.blocks * _LOW_ZERO),
        )

    def value(self, weight: float = 1.0) -> NDArray[np.float64]:
        """The sum divided by a weight, (size,) float64."""
        total = np.empty(len(self.high))
        for start in range(0, len(total), _CHUNK):
            entries = slice(start, start + _CHUNK)
            high, low = self.parts(entries)
            np.divide(high, HIGH_SCALE, out=total[entries])
            total[entries] += low / LOW_SCALE
            total[entries] /= weight
        return total


def _modulo(integer: int) -> np.int64:
    """An integer wrapped to 64 bits."""
    return np.uint64(integer % 2**64).view(np.int64)


def check_block(block: NDArray[np.float64]) -> None:
    """Reject a sum that `ExactSum.add` cannot take.

    Raises:
        OverflowError: an entry is out of range, infinite or NaN.
    """
    # NaN fails both comparisons.
    if len(block) and not (block.max() < BLOCK_LIMIT and block.min() > -BLOCK_LIMIT):
        raise OverflowError("a block's sum is out of range, infinite or NaN")


def add_scaled(total: Tensor | None, vector: Tensor, weight: float) -> Tensor:
    """total + weight·vector, (size,) in 64-bit floats, in the total's place if there is one."""
    found = vector.new_empty(len(vector), dtype=torch.float64) if total is None else total
    for start in range(0, len(vector), _LONG):  # torch makes a copy of what it converts
        part, to = vector[start : start + _LONG], found[start : start + _LONG]
        if total is None:
            to.copy_(part).mul_(weight)
        else:
            to.add_(part, alpha=weight)
    return found
