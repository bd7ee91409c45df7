"""Codecs that send every entry with fewer bits."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedsim.conditions.codecs.codec import Codec, Shapes, Vector, codecs, layers, size_of


@codecs.register
class Qsgd(Codec):
    """QSGD: each entry is rounded at random to one of s levels of its bucket's norm.

    In a bucket v of d entries, v_i arrives as ‖v‖₂·sgn(v_i)·ξ_i, where ξ_i is one of the two
    multiples of 1/s next to |v_i|/‖v‖₂, at random such that the expectation is the vector itself.

    An entry takes ⌈log₂(2s + 1)⌉ bits and a bucket 4 bytes for its norm. The paper's Elias code
    is shorter for sparse vectors, but then the length depends on the numbers.

    With error feedback a bucket arrives multiplied by 1/(1 + ω), ω = min(d/s², √d/s), which bounds
    the error relative to the square of the norm (Lemma 3.1): errors above the vector itself would
    add up (Richtárik, Sokolov and Fatkhullin, EF21, NeurIPS 2021, section 2).

    Args:
        levels: s; 1, 3, 7, ... 127 make use of all values of 2, 3, 4, ... 8 bits but one.
        bucket: d, entries that share a norm. The error grows with √d.

    Source:
        Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding,
        NeurIPS 2017, equation 4; buckets as in section 4.
    """

    name: str = "qsgd"
    levels: int = Field(7, ge=1, le=2**30)
    bucket: int = Field(512, ge=1)
    for_models: ClassVar[bool] = True

    def encode(self, vector: Vector, shapes: Shapes, rng: np.random.Generator) -> Any:
        d = self._bucket(len(vector))
        starts = np.arange(0, len(vector), d)
        squares = np.add.reduceat(vector.astype(np.float64) ** 2, starts)
        norms = np.sqrt(squares).astype(np.float32)
        norm = np.repeat(norms, d)[: len(vector)].astype(np.float64)
        scaled = np.divide(
            np.abs(vector) * float(self.levels), norm, out=np.zeros_like(norm), where=norm > 0
        )
        level = np.floor(scaled)
        level += rng.random(len(vector)) < scaled - level
        signed = np.copysign(np.minimum(level, self.levels), vector).astype(np.int64)
        return norms, _as_bits(signed + self.levels, self._bits)

    def decode(self, message: Any, shapes: Shapes) -> Vector:
        norms, bits = message
        n = size_of(shapes)
        norm = np.repeat(norms, self._bucket(n))[:n].astype(np.float64)
        if self.error_feedback:
            d, s = self._bucket(n), self.levels
            norm /= 1 + min(d / s**2, math.sqrt(d) / s)
        return (norm * ((_of_bits(bits) - self.levels) / self.levels)).astype(np.float32)

    @property
    def _bits(self) -> int:
        return (2 * self.levels).bit_length()

    def _bucket(self, n: int) -> int:
        return min(self.bucket, n)


def _as_bits(numbers: NDArray[np.int64], bits: int) -> NDArray[np.bool_]:
    """(bits, n) booleans for n numbers in [0, 2^bits), the lowest bit first."""
    found = np.empty((bits, len(numbers)), dtype=np.bool_)
    for k in range(bits):
        found[k] = (numbers >> k) & 1
    return found


def _of_bits(bits: NDArray[np.bool_]) -> NDArray[np.int64]:
    """(n,) what `_as_bits` was given."""
    found = np.zeros(bits.shape[1], dtype=np.int64)
    for k, plane in enumerate(bits):
        found |= plane.astype(np.int64) << k
    return found


@codecs.register
class Sign(Codec):
    """One bit an entry: each layer v of d entries arrives as (‖v‖₁/d)·sgn(v), with sgn(0) = 1.

    The server averages these, rather than take the majority of the signs.

    Source:
        Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, ICML 2018; the
        scale, and the need for error feedback: Karimireddy et al., Error Feedback Fixes SignSGD
        and other Gradient Compression Schemes, ICML 2019.
    """

    name: str = "sign"
    error_feedback: bool = True

    def encode(self, vector: Vector, shapes: Shapes, rng: np.random.Generator) -> Any:
        means = [np.abs(v).mean(dtype=np.float64) if v.size else 0 for v in layers(vector, shapes)]
        return np.array(means, dtype=np.float32), vector >= 0

    def decode(self, message: Any, shapes: Shapes) -> Vector:
        scales, positive = message
        scale = _by_layer(scales, shapes)
        return np.where(positive, scale, -scale)


@codecs.register
class Float16(Codec):
    """Each entry as a 16-bit float: 11 significant bits. Entries beyond ±65504 become that."""

    name: str = "float16"
    for_models: ClassVar[bool] = True

    def encode(self, vector: Vector, shapes: Shapes, rng: np.random.Generator) -> Any:
        largest = np.finfo(np.float16).max
        return vector.clip(-largest, largest).astype(np.float16)

    def decode(self, message: Any, shapes: Shapes) -> Vector:
        found: Vector = message.astype(np.float32)
        return found


@codecs.register
class Int8(Codec):
    """Each entry as an integer of 8 bits, rounded to nearest, and 4 bytes for each layer's scale.

    The scale of a layer v is max|v|/127.
    """

    name: str = "int8"
    for_models: ClassVar[bool] = True

    def encode(self, vector: Vector, shapes: Shapes, rng: np.random.Generator) -> Any:
        largest = [np.abs(v).max(initial=0) for v in layers(vector, shapes)]
        scales = np.array(largest, dtype=np.float32) / np.float32(127)
        scale = _by_layer(scales, shapes)
        ratio = np.divide(vector, scale, out=np.zeros_like(vector), where=scale > 0)
        return scales, np.rint(ratio).clip(-127, 127).astype(np.int8)

    def decode(self, message: Any, shapes: Shapes) -> Vector:
        scales, entries = message
        found: Vector = entries * _by_layer(scales, shapes)
        return found


def _by_layer(scales: Vector, shapes: Shapes) -> Vector:
    """(n,) the scale of the layer of each entry."""
    return np.repeat(scales, [size_of([shape]) for shape in shapes])
