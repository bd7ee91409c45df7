"""What messages cost, and how they travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsim.federation.wire import NotCounted, nbytes, same, to_arrays, to_tensors

CPU = torch.device("cpu")
ENTRY = {"float32": 4, "float16": 2, "float64": 8, "uint8": 1, "int16": 2, "int64": 8}


@pytest.mark.parametrize("make", [torch.zeros, np.zeros], ids=["tensor", "array"])
@given(shape=st.lists(st.integers(0, 9), max_size=3), dtype=st.sampled_from(sorted(ENTRY)))
def test_dense_messages_count_by_their_type(make: Any, shape: list[int], dtype: str) -> None:
    library = torch if make is torch.zeros else np
    entries = int(np.prod(shape, dtype=int))
    assert nbytes(make(tuple(shape), dtype=getattr(library, dtype))) == ENTRY[dtype] * entries


@given(st.lists(st.booleans(), max_size=40))
def test_booleans_are_a_bit_each(mask: list[bool]) -> None:
    expected = len(mask) // 8 + (len(mask) % 8 > 0)
    assert nbytes(np.array(mask, dtype=bool)) == expected
    assert nbytes(torch.tensor(mask, dtype=torch.bool)) == expected


leaves = st.sampled_from([3, 2.5, "text", None, True, np.float32(1), NotCounted(np.zeros(9))])
vectors = st.integers(0, 5).map(lambda n: np.zeros(n, dtype=np.float32))


@given(
    st.recursive(
        leaves | vectors,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.integers() | st.text(max_size=2), inner, max_size=3)
            | st.tuples(inner, inner)
        ),
    )
)
def test_nests_count_their_arrays_only(message: Any) -> None:
    def flat(part: Any) -> list[Any]:
        if isinstance(part, dict):
            part = list(part.values())
        if isinstance(part, list | tuple):
            return [leaf for inner in part for leaf in flat(inner)]
        return [part]

    arrays = [leaf for leaf in flat(message) if isinstance(leaf, np.ndarray)]
    assert nbytes(message) == sum(4 * len(array) for array in arrays)


def test_tensors_travel_as_copies() -> None:
    weights = torch.ones(3, requires_grad=True)
    sent = to_arrays({"w": weights, "parts": [weights * 2, (weights, 5)], "name": "x"})
    with torch.no_grad():
        weights.fill_(9)
    assert isinstance(sent["w"], np.ndarray)
    assert sent["w"].tolist() == [1, 1, 1]
    assert sent["parts"][0].tolist() == [2, 2, 2]
    assert isinstance(sent["parts"][1], tuple)
    assert (sent["parts"][1][1], sent["name"]) == (5, "x")


def test_arrays_arrive_as_tensors_of_one_s_own() -> None:
    shared = np.arange(3, dtype=np.float32)
    shared.flags.writeable = False
    got = to_tensors({"w": shared, "parts": [shared, (shared, 5)]}, CPU)
    got["w"].fill_(9)
    assert shared.tolist() == [0, 1, 2]
    assert torch.equal(got["parts"][1][0], torch.tensor([0.0, 1.0, 2.0]))
    assert got["parts"][1][1] == 5


@pytest.mark.parametrize("dtype", [*sorted(ENTRY), "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
def test_there_and_back(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype=dtype)
    back = to_arrays(to_tensors(array, CPU))
    assert (back.dtype, back.shape, back.tolist()) == (array.dtype, shape, array.tolist())


ZEROS = np.zeros(6, np.float32)


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        (ZEROS.copy(), True),
        (ZEROS.reshape(2, 3), False),
        (ZEROS.astype(np.int32), False),  # of the same bytes
        (ZEROS[:5], False),
        (-ZEROS, False),
        ([0.0] * 6, False),
    ],
)
def test_what_is_the_same_to_the_bit(other: Any, alike: bool) -> None:
    assert same(ZEROS, other) is alike
    assert same({"a": [ZEROS, 1]}, {"a": [other, 1]}) is alike
    assert same(np.float32("nan"), np.float32("nan"))
