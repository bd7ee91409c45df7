"""Reductions: the package's, and a user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import permutations
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from own_components import CoordinateMedian

from experiments import WHOLE, Finish, server_states, small_experiment
from fedsim.conditions.adversaries.on_updates import SignFlip
from fedsim.conditions.aggregators import aggregators
from fedsim.conditions.noise import NoisyMean
from fedsim.conditions.privacy import Privacy
from fedsim.conditions.robust import GatheredMean
from fedsim.conditions.secure import MaskedMean, Masks
from fedsim.errors import Diverged
from fedsim.federation import Update
from fedsim.federation.reduction import (
    Discard,
    Gather,
    InvalidUpdate,
    MergeTotals,
    NothingToReduce,
    Reduction,
    WeightedMean,
)


def plain(result: Any) -> Any:
    if isinstance(result, tuple):
        return [plain(part) for part in result]
    if hasattr(result, "clients"):
        return {"v": result.v, "count": result.count, "clients": sorted(result.clients)}
    return result


NOBODY = frozenset[int]()
RNG = np.random.default_rng(0)
MEANS: dict[str, Callable[[], WeightedMean]] = {
    "plain": WeightedMean,
    "masked": lambda: MaskedMean(Masks(0, "", 1, [0, 1]), frozenset(), 0.6),
    "noisy": lambda: NoisyMean(Privacy(clip=1e10, noise_multiplier=0), 2, RNG),
    "robust": lambda: GatheredMean(aggregators.parse({"name": "median"}), None, NOBODY, {}, RNG),
    "forged": lambda: GatheredMean(None, SignFlip(), NOBODY, {}, RNG),
}


REDUCTIONS: dict[str, tuple[Callable[[], Reduction], Callable[[torch.Tensor], Any]]] = {
    **{
        kind: (made, lambda v: Update(v=v, weight=float(v.abs().sum() + 1)))
        for kind, made in MEANS.items()
        if kind != "noisy"
    },
    "masked": (
        lambda: MaskedMean(Masks(0, "", 1, [*range(6)]), NOBODY, 0.6),
        lambda v: Update(v=v, weight=float(v.abs().sum() + 1)),
    ),
    "gather": (Gather, lambda v: {"v": v}),
    "both": (WeightedMean, lambda v: Update(v=v, weight=2.0, message={"v": 3 * v})),
    "discard": (Discard, lambda v: None),
    "totals": (MergeTotals, lambda v: {"": {"loss": float(v.sum()), "y": v.numpy()}}),
    "median": (CoordinateMedian, lambda v: v),
}


@pytest.mark.parametrize("kind", MEANS)
def test_what_is_sent_in_64_bits_is_averaged_in_64(kind: str) -> None:
    """Up to the last bit of whole numbers, beside vectors of 32 bits."""
    wide = torch.tensor([2.0**29 + 2.0**-23, -1.0], dtype=torch.float64)
    made = MEANS[kind]()
    for id, sign in enumerate((1, -1)):
        message = Update(wide=sign * wide + id, narrow=torch.tensor([0.1, 0.1]))
        made.check(message)
        made.fold(id, message, {})
        made.end_block()
    mean = made.result({}, {})
    assert (mean.wide.dtype, mean.narrow.dtype) == (np.float64, np.float32)
    assert mean.wide.tolist() == [0.5, 0.5]
    other = WeightedMean()
    other.fold(0, Update(wide=wide), {})
    other.end_block()
    merged = WeightedMean()
    merged.merge(other)
    assert merged.result({}, {}).wide.tolist() == wide.tolist()


@pytest.mark.parametrize("name", REDUCTIONS)
def test_who_computes_what_changes_no_bit(name: str) -> None:
    make, message = REDUCTIONS[name]
    vectors = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))

    def carried_out(blocks: list[list[int]], workers: int) -> Any:
        template, copies = make(), [make() for _ in range(workers)]
        for b, block in enumerate(blocks):
            mine = copies[b % workers]
            for id in block:
                mine.check(message(vectors[id]))
                mine.fold(id, message(vectors[id]), {})
            mine.end_block()
        total = copy.deepcopy(template)
        for part in reversed(copies):
            total.merge(part)
        return plain(total.result({}, {}))

    blocks = [[0, 3], [1, 4], [2, 5]]
    expected = carried_out(blocks, 1)
    for order in permutations(blocks):
        for workers in (1, 2, 3):
            np.testing.assert_equal(carried_out(list(order), workers), expected)


@given(st.lists(st.lists(st.floats(-10, 10), min_size=3, max_size=3), min_size=1, max_size=9))
def test_the_mean_is_the_written_out_mean(rows: list[list[float]]) -> None:
    vectors = torch.tensor(rows)
    mean = WeightedMean()
    for id, vector in enumerate(vectors):
        mean.check(Update(v=vector, weight=id + 1))
        mean.fold(id, Update(v=vector, weight=id + 1), {})
    mean.end_block()
    weights = np.arange(1, len(rows) + 1)
    expected = (weights[:, None] * vectors.double().numpy()).sum(axis=0) / weights.sum()
    np.testing.assert_allclose(mean.result({}, {}).v, expected, atol=1e-5)


def test_nobody_who_sent_is_not_nobody_who_answered() -> None:
    silent = WeightedMean()
    silent.fold(0, Update(), {})
    assert silent.result({}, {1: "failed"}).count == 0
    with pytest.raises(NothingToReduce, match="the weights of the cohort's updates sum to 0"):
        WeightedMean().result({}, {1: "failed"})


def test_vectors_of_updates_are_gathered_by_name() -> None:
    gathered, v = Gather(), torch.arange(3.0)
    assert gathered.size(Update(v=v, w=v[:1])) == 16
    for id in (4, 1):
        gathered.fold(id, Update(v=v[:id], weight=id), {})
    v.zero_()  # copies are kept
    found = gathered.result({}, {})
    assert [(k, one["v"].tolist()) for k, one in found.items()] == [(1, [0]), (4, [0, 1, 2])]
    with pytest.raises(InvalidUpdate, match="NaN values"):
        gathered.check(Update(v=torch.tensor([float("nan")])))
    with pytest.raises(InvalidUpdate, match="an Update with a message, which is for means"):
        gathered.check(Update(v=v, message=1))


def test_a_mean_with_messages_is_both() -> None:
    both, mean, gathered = WeightedMean(), WeightedMean(), Gather()
    for id, v in ((4, torch.ones(3)), (1, torch.zeros(3))):
        both.fold(id, Update(v=v, weight=id, message=[v - 1]), {})
        mean.fold(id, Update(v=v, weight=id), {})
        gathered.fold(id, [v - 1], {})
        assert both.size(Update(v=v, message=[v, 2])) == 12 + 12
    both.fold(2, Update(message=[3]), {})  # counts nothing, and says something
    gathered.fold(2, [3], {})
    both.end_block()
    mean.end_block()
    found = both.result({}, {3: "failed"})
    assert list(found.messages) == [1, 2, 4]
    np.testing.assert_equal(found.messages, gathered.result({}, {}))
    np.testing.assert_equal(found.vectors, mean.result({}, {}).vectors)
    assert found.count == 2


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ((torch.zeros(2), {}), "must return an Update, not tuple"),
        (Update(v=torch.tensor([np.inf]), message={}), "infinite values in 'v'"),
        (Update(message={"w": np.array([np.nan])}), "NaN values in its message"),
    ],
)
def test_both_parts_are_checked(message: Any, problem: str) -> None:
    with pytest.raises(InvalidUpdate, match=problem):
        WeightedMean().check(message)


def test_vectors_of_different_lengths_are_refused() -> None:
    mean, other = WeightedMean(), WeightedMean()
    mean.fold(0, Update(v=torch.zeros(3)), {})
    other.fold(1, Update(v=torch.zeros(4)), {})
    for part in (mean, other):
        part.end_block()
    mean.merge(other)
    with pytest.raises(InvalidUpdate, match=r"sends vectors of these lengths: {'v': 4}") as error:
        mean.result({}, {})
    assert error.value.client == 1


@pytest.mark.parametrize(
    ("entry", "weight", "problem"),
    [
        (2.0**29, 1.0, None),  # though the vector is longer than 2^30
        (2.0**19, 1000.0, None),
        (-(2.0**30), 1.0, r"^values up to 1.07e\+09 in 'v'$"),
        (2.0**21, 1000.0, r"values up to 2.1e\+06"),
        (8.0, 2.0**28, r"'v' is out of range: \|value\| up to 8 with weight 2.68e\+08"),
        (1e30, 1.0, r"values up to 1e\+30"),  # the square of its length is infinite
        (float("inf"), 1.0, "infinite values in 'v'"),
        (float("nan"), 0.0, "NaN values in 'v'"),
    ],
)
def test_which_entries_fit_into_a_mean(entry: float, weight: float, problem: str | None) -> None:
    v = torch.full((100,), min(abs(entry), 2.0**29) / max(weight, 1.0))
    v[50] = entry
    mean = WeightedMean()
    if problem is not None:
        with pytest.raises(InvalidUpdate, match=problem):
            mean.check(Update(v=v, weight=weight))
    else:
        mean.check(Update(v=v, weight=weight))
        mean.fold(0, Update(v=v, weight=weight), {})
        mean.end_block()
        assert np.array_equal(mean.result({}, {}).v, v.numpy())


def test_a_message_in_double_precision_stays_as_it_is() -> None:
    v = torch.ones(3, dtype=torch.float64)
    mean = WeightedMean()
    for id in range(2):
        mean.fold(id, Update(v=v, weight=5.0), {})
    assert v.tolist() == [1.0] * 3


class TestOwn:
    METHOD: ClassVar[dict[str, Any]] = {"name": "own_components:FedMedian"}

    def test_a_method_of_ten_lines_uses_it(self, finish: Finish) -> None:
        done = finish(data=WHOLE, method=self.METHOD, partition={"kind": "iid", "clients": 7})
        assert done.rounds["accuracy"].iloc[-1] > 0.8

    def test_it_is_the_median_of_what_clients_send(self) -> None:
        sections: dict[str, Any] = {"partition": {"clients": 5}, "train": {"rounds": 1}}
        _, median = server_states(small_experiment(method=self.METHOD, **sections))
        alone = []
        for k in range(5):
            one = small_experiment(method={"name": "own_components:Only", "client": k}, **sections)
            alone.append(server_states(one)[1].weights)
        np.testing.assert_array_equal(median.weights, np.median(alone, axis=0))

    def test_what_cannot_be_reduced_is_the_clients_fault(self, finish: Finish) -> None:
        with pytest.raises(Diverged, match=r"round 1: client \d: NaN values in its message; l"):
            finish(method={"name": "own_components:Broken"}, train={"rounds": 1})
