"""A data source whose arrays have unusual strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.data import Dataset, Source

LAYOUTS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "fortran": np.asfortranarray,
    "channels_last": lambda x: (
        np.ascontiguousarray(np.moveaxis(x, 1, -1)).swapaxes(1, -1)
        if x.ndim < 4
        else np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    ),
    "reversed": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "every_other_row": lambda x: np.repeat(x, 2, axis=0)[::2],
    "odd_stride_of_one_channel": lambda x: np.lib.stride_tricks.as_strided(
        x, strides=(x.strides[0], x.itemsize, *x.strides[2:])
    ),
}


class Strided(Source):
    """Random examples whose arrays have the strides of a user's own pre-processing."""

    name: str = "strided:Strided"
    shape: tuple[int, ...]
    layout: str

    def load(self) -> Dataset:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((180, *self.shape), dtype=np.float32)
        y = rng.integers(0, 3, 180)
        x, test_x = (LAYOUTS[self.layout](part) for part in (x[:120].copy(), x[120:].copy()))
        return Dataset(x, y[:120], test_x, y[120:], ("a", "b", "c"))
