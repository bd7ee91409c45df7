"""Memory layouts: torch chooses kernels by strides, and pickling for an actor resets them.

Runs on actors are in tests/test_same_bits.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from strided import LAYOUTS, Strided


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        (shape, layout)
        for shape in ((1, 12, 12), (3, 12, 12), (9,), (1,))
        for layout in LAYOUTS
        if shape[0] == 1 or not layout.startswith("odd")  # what has any stride is of length 1
    ],
)
def test_rows_have_the_strides_of_a_new_array(shape: tuple[int, ...], layout: str) -> None:
    data = Strided(shape=shape, layout=layout).load()
    plain = np.zeros((7, *shape), dtype=np.float32)
    for x in (data.x, data.test_x):
        assert x[np.arange(7)].strides == x[:7].strides == plain.strides
