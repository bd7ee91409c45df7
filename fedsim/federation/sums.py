"""Sums that do not care for order.

Floating-point addition rounds, so a sum of floats depends on who adds what first, and with it on
how many actors there are and which is quickest. Addition of integers does not round. Each block
of clients is therefore added in client order in 64-bit floats and then written as a fixed-point
number, and fixed-point numbers are added across blocks: the same bits for any number of actors,
any order of arrival and any retry.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# A block's sum x is kept as high·2^-12 + low·2^-56, two 64-bit integers an entry. With |x| < 2^36,
# |high| ≤ 2^48 and |low| ≤ 2^43, so that 2^14 blocks can be added and neither overflows.
# What is lost is under 2^-57 ≈ 7e-18 a block, far below the rounding of the float32 weights.
HIGH_SCALE = 2.0**12
LOW_SCALE = 2.0**56
BLOCK_LIMIT = 2.0**36
# The largest |weight × value| of one client: a block of 64 such clients stays in range.
CLIENT_LIMIT = 2.0**30
_CHUNK = 8192  # entries converted at a time, so that all temporaries stay in the cache


@dataclass
class ExactSum:
    """A running sum of vectors in two-part fixed point, (size,) each part."""

    high: NDArray[np.int64]
    low: NDArray[np.int64]

    @classmethod
    def zeros(cls, size: int) -> ExactSum:
        return cls(np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64))

    def add(self, block: NDArray[np.float64]) -> None:
        """Add a block's sum, (size,) float64 with every |entry| < 2^36.

        Raises:
            OverflowError: an entry is out of range, infinite or NaN.
        """
        coarse, rest = np.empty(_CHUNK), np.empty(_CHUNK)
        for start in range(0, len(block), _CHUNK):
            x = block[start : start + _CHUNK]
            if not np.abs(x).max(initial=0.0) < BLOCK_LIMIT:
                raise OverflowError("a block's sum is out of range, infinite or not a number")
            a, b = coarse[: len(x)], rest[: len(x)]
            np.multiply(x, HIGH_SCALE, out=a)
            np.rint(a, out=a)
            self.high[start : start + _CHUNK] += a.astype(np.int64)
            np.multiply(a, 1 / HIGH_SCALE, out=a)
            np.subtract(x, a, out=b)
            np.multiply(b, LOW_SCALE, out=b)
            np.rint(b, out=b)
            self.low[start : start + _CHUNK] += b.astype(np.int64)

    def merge(self, other: ExactSum) -> None:
        """Add another sum of the same size; the order of merges does not matter."""
        self.high += other.high
        self.low += other.low

    def value(self) -> NDArray[np.float64]:
        """The sum, (size,) float64."""
        return self.high / HIGH_SCALE + self.low / LOW_SCALE
