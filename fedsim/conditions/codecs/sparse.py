"""Codecs that send some entries: the largest ones, or random ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedsim.conditions.codecs.codec import Codec, Shapes, Vector, codecs, size_of


@codecs.register
class TopK(Codec):
    """The k entries of the largest magnitude; all others arrive as 0.

    Of entries with the same magnitude the first are sent. Their positions are sent as 4 bytes
    each, or as one bit for each entry of the vector, whichever is shorter.

    Args:
        fraction: k as a share of the entries; at least one is sent.

    Source:
        Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, NeurIPS 2018.
    """

    name: str = "topk"
    fraction: float = Field(0.01, gt=0, le=1)
    error_feedback: bool = True

    def encode(self, vector: Vector, shapes: Shapes, rng: np.random.Generator) -> Any:
        k = _count(self.fraction, len(vector))
        size = np.abs(vector)
        # Not argpartition: which of equal entries it takes depends on the processor.
        least = np.partition(size, len(size) - k)[len(size) - k]
        chosen = size > least
        equal = np.flatnonzero(size == least)
        chosen[equal[: k - int(chosen.sum())]] = True
        where = np.flatnonzero(chosen).astype(np.uint32)
        return vector[where], where if where.nbytes <= -(-len(vector) // 8) else chosen

    def decode(self, message: Any, shapes: Shapes) -> Vector:
        values, where = message
        return _scattered(values, where, size_of(shapes))


@codecs.register
class RandomK(Codec):
    """k random entries; all others arrive as 0. The positions are sent as a seed of 8 bytes.

    Without error feedback the entries arrive multiplied by n/k, so that the expectation is the
    vector itself; with it they arrive as they are.

    Args:
        fraction: k as a share of the n entries; at least one is sent.

    Source:
        Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, NeurIPS 2018.
    """

    name: str = "randomk"
    fraction: float = Field(0.01, gt=0, le=1)
    error_feedback: bool = True

    def encode(self, vector: Vector, shapes: Shapes, rng: np.random.Generator) -> Any:
        seed = rng.integers(2**63, size=1, dtype=np.uint64)
        return vector[self._chosen(seed, len(vector))], seed

    def decode(self, message: Any, shapes: Shapes) -> Vector:
        values, seed = message
        n = size_of(shapes)
        scale = 1.0 if self.error_feedback else n / len(values)
        return _scattered(values * np.float32(scale), self._chosen(seed, n), n)

    def _chosen(self, seed: NDArray[np.uint64], n: int) -> NDArray[np.int64]:
        rng = np.random.Generator(np.random.Philox(key=int(seed[0])))
        return rng.choice(n, _count(self.fraction, n), replace=False, shuffle=False)


def _count(fraction: float, n: int) -> int:
    return max(1, round(fraction * n))


def _scattered(values: Vector, where: NDArray[Any], n: int) -> Vector:
    found = np.zeros(n, dtype=np.float32)
    found[where] = values
    return found
