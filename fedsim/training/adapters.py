"""Where the adapters of a network lie in its flat vector of weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.models.adapters import ADDED, A, B
from fedsim.training.flat import FlatModel


@dataclass(frozen=True)
class Pair:
    """Where the adapters of a layer lie in the flat vector of weights.

    Args:
        layer: its name.
        a: of A (r, in); None if A is frozen.
        b: of B (out, r).
        added: of the sum (out, in) beside the frozen weight, if it has one.
        scale: α/r.
    """

    layer: str
    a: slice | None
    b: slice
    added: slice | None
    shape: tuple[int, int, int]
    scale: float

    def factors(self, weights: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """A (r, in) and B (out, r) of a vector, as float64."""
        assert self.a is not None
        out, r, within = self.shape
        a, b = (weights[where].astype(np.float64) for where in (self.a, self.b))
        return a.reshape(r, within), b.reshape(out, r)


def pairs(model: FlatModel) -> Iterator[Pair]:
    """The adapters of a network, in the order of its layers; none if it has none."""
    places, start = dict[str, slice](), 0
    for name, shape in model.shapes.items():
        places[name] = slice(start, start + math.prod(shape))
        start = places[name].stop
    for name, where in places.items():
        if name.endswith(f".{B}"):
            layer = name.removesuffix(f".{B}")
            module: Any = model.module.get_submodule(layer)
            out, r = module.lora_B["default"].weight.shape
            yield Pair(
                layer,
                places.get(f"{layer}.{A}"),
                where,
                places.get(f"{layer}.{ADDED}"),
                (out, r, module.in_features),
                module.scaling["default"],
            )
