"""A codec that sends matrices as products of two thin ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedsim.conditions.codecs.codec import Codec, Shapes, Vector, codecs, layers


@codecs.register
class LowRank(Codec):
    """Each layer's matrix M (n, m) as P·Qᵀ of rank r, by one step of subspace iteration.

    P (n, r) is an orthonormal basis of M·S for a random S (m, r), and Q = Mᵀ·P. A kernel of a
    convolution is a matrix of its first dimension by all others. Layers that would not get
    shorter, biases among them, are sent as they are.

    In PowerSGD all workers agree on P, and start from the last Q. Here each client encodes its
    update by itself, as it takes part in few rounds, and starts from a random S.

    Args:
        rank: r.

    Source:
        Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for
        Distributed Optimization, NeurIPS 2019, Algorithm 1.
    """

    name: str = "lowrank"
    rank: int = Field(2, ge=1)
    error_feedback: bool = True

    def encode(self, vector: Vector, shapes: Shapes, rng: np.random.Generator) -> Any:
        return [self._factors(layer, rng) for layer in layers(vector, shapes)]

    def decode(self, message: Any, shapes: Shapes) -> Vector:
        parts = [m[0] @ m[1].T if isinstance(m, tuple) else m for m in message]
        return np.concatenate([part.reshape(-1) for part in parts])

    def _factors(
        self, layer: NDArray[np.float32], rng: np.random.Generator
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]] | NDArray[np.float32]:
        n = layer.shape[0] if layer.ndim > 1 else 1
        m = math.prod(layer.shape[1:]) if layer.ndim > 1 else layer.size
        if self.rank * (n + m) >= n * m:
            return layer
        matrix = layer.reshape(n, m).astype(np.float64)
        basis, _ = np.linalg.qr(matrix @ rng.standard_normal((m, self.rank)))
        return basis.astype(np.float32), (matrix.T @ basis).astype(np.float32)
