"""Blocks of clients: who works together is decided by the cohort alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim.federation import cohort_size
from fedsim.federation.cohort import cut_blocks

cohorts = st.dictionaries(st.integers(0, 10**6), st.integers(1, 1000), min_size=1, max_size=200)


def cut(costs: dict[int, int]) -> list[list[int]]:
    return cut_blocks(np.array(list(costs)), np.array(list(costs.values())))


@given(cohorts)
def test_blocks_are_a_partition_of_the_cohort(costs: dict[int, int]) -> None:
    blocks = cut(costs)
    assert sorted(id for block in blocks for id in block) == sorted(costs)
    assert all(block == sorted(block) for block in blocks)
    assert all(blocks)


@given(cohorts)
def test_blocks_are_balanced(costs: dict[int, int]) -> None:
    """The bound of the greedy rule: no two blocks differ by more than a client's cost."""
    loads = [sum(costs[id] for id in block) for block in cut(costs)]
    assert loads == sorted(loads, reverse=True)
    average, largest = sum(loads) / len(loads), max(costs.values())
    assert loads[0] <= average + largest
    assert loads[0] - loads[-1] <= largest


@given(cohorts, st.randoms(use_true_random=False))
def test_the_order_of_the_cohort_does_not_matter(costs: dict[int, int], random: object) -> None:
    items = list(costs.items())
    random.shuffle(items)  # type: ignore[attr-defined]
    assert cut(dict(items)) == cut(costs)


@pytest.mark.parametrize(
    ("clients", "blocks"),
    [(0, 0), (1, 1), (16, 16), (17, 16), (100, 16), (128, 16), (129, 17), (136, 17), (1000, 125)],
)
def test_how_many_blocks(clients: int, blocks: int) -> None:
    cut_even = cut_blocks(np.arange(clients), np.ones(clients, dtype=np.int64))
    assert len(cut_even) == blocks
    sizes = [len(block) for block in cut_even]
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    assert max(sizes, default=0) <= 8


def test_stacks_are_of_clients_with_about_the_same_cost() -> None:
    cohort, costs = np.arange(10, 20), np.array([5, 1, 9, 1, 7, 3, 2, 8, 6, 4])
    blocks = cut_blocks(cohort, costs, 4)
    assert blocks == [[12, 14, 17, 18], [10, 15, 19], [11, 13, 16]]
    assert cut_blocks(cohort[:0], costs[:0], 4) == []


@given(st.floats(0, 1), st.integers(1, 10_000))
def test_cohorts_are_a_share_of_all(participation: float, clients: int) -> None:
    size = cohort_size(participation, clients)
    assert 0 <= size <= clients
    assert math.isclose(size, participation * clients, abs_tol=0.5 + 1e-9)
