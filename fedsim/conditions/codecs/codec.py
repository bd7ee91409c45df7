"""The base class of codecs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedsim.config.registry import Component, Registry
from fedsim.errors import ExperimentError

Vector = NDArray[np.float32]
Shapes = Sequence[tuple[int, ...]]


class Codec(Component, ABC):
    """Lossy compression of a flat vector.

    A codec that extends this class can be named in an experiment as `package.module:Name`. A
    vector whose message would be no shorter than the vector itself is sent as it is.

    Args:
        error_feedback: each client keeps what its messages lost, v − decode(encode(v)), and adds
            it to what it sends next (Karimireddy et al. 2019, Algorithm 2). For `uplink` only, and
            for codecs that lose less than they are given: ‖v − decode(encode(v))‖ < ‖v‖ on
            average. An unbiased codec has to shrink what it decodes.

    Attributes:
        for_models: whether it encodes a whole model well, and not only a change of one, so that
            it can be the `downlink`.

    Example:
        >>> class Halved(Codec):
        ...     name: str = "my_codec:Halved"
        ...     def encode(self, vector, shapes, rng):
        ...         return vector[::2]
        ...     def decode(self, message, shapes):
        ...         return np.repeat(message, 2)[: size_of(shapes)]
    """

    name: str
    error_feedback: bool = False
    for_models: ClassVar[bool] = False

    def check_downlink(self) -> None:
        """Refuse codecs of changes, and error feedback: the server sends the model itself."""
        if not self.for_models:
            known = ", ".join(name for name, one in codecs.items() if one.for_models)
            raise ExperimentError(
                f"downlink.name={self.name} compresses changes of a model, and the server sends "
                f"the model itself; codecs for it: {known}"
            )
        if self.error_feedback:
            raise ExperimentError(
                "downlink.error_feedback: the server keeps no account of what was lost; it is for "
                "`uplink`"
            )

    @abstractmethod
    def encode(self, vector: Vector, shapes: Shapes, rng: np.random.Generator) -> Any:
        """The message that stands for a vector.

        Args:
            vector: (n,) float32, finite.
            shapes: of the arrays that the vector consists of, in order, such as the layers of a
                network.
            rng: random stream of this client (or the server) and round.

        Returns:
            All that `decode` needs: an array, or a nest of dicts, lists and tuples of arrays. It
            counts with the bytes of its arrays; a boolean takes one bit.
        """

    @abstractmethod
    def decode(self, message: Any, shapes: Shapes) -> Vector:
        """(n,) float32, the vector that the receiver makes of a message."""


def size_of(shapes: Shapes) -> int:
    """How many numbers arrays of these shapes hold."""
    return sum(math.prod(shape) for shape in shapes)


def layers(vector: Vector, shapes: Shapes) -> Iterator[Vector]:
    """The arrays that a vector consists of."""
    start = 0
    for shape in shapes:
        end = start + math.prod(shape)
        yield vector[start:end].reshape(shape)
        start = end


codecs: Registry[Codec] = Registry("codec", Codec)  # type: ignore[type-abstract]
