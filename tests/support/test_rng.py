"""Random streams that go by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsim.support.rng import keyed_rng, keyed_torch_rng, torch_seed

names = st.tuples(
    st.integers(0, 2**40), st.text("ab/0", max_size=4), st.integers(-1, 20), st.integers(-1, 20)
)


@given(names, names)
def test_streams_go_by_name(one: Any, other: Any) -> None:
    def draws(name: Any) -> tuple[list[int], int, list[float]]:
        with keyed_torch_rng(*name):
            noise = torch.rand(4).tolist()
        return keyed_rng(*name).integers(2**62, size=4).tolist(), torch_seed(*name), noise

    assert draws(one) == draws(one)
    if one != other:
        assert all(a != b for a, b in zip(draws(one), draws(other), strict=True))


def test_streams_leave_no_trace() -> None:
    def numbers() -> tuple[torch.Tensor, Any]:
        return torch.rand(3), np.random.rand(3)

    torch.manual_seed(5)
    np.random.seed(5)
    expected = numbers()
    torch.manual_seed(5)
    np.random.seed(5)
    with keyed_torch_rng(1, "init"):
        torch.rand(10)
    keyed_rng(1, "batches").random(10)
    with pytest.raises(ZeroDivisionError), keyed_torch_rng(1, "init"):
        torch.rand(10 // 0)
    found = numbers()
    assert torch.equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])
