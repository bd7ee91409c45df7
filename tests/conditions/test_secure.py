"""Secure aggregation: masks cancel to the bit, dropouts are recovered, and its bytes count."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.csgraph import connected_components

from experiments import Finish, examples, federation, small_experiment
from fedsim import Update
from fedsim.conditions.secure import MaskedMean, Masks, Words, buffer_of_words
from fedsim.federation.reduction import InvalidUpdate, Mean, NothingToReduce, WeightedMean
from fedsim.methods.fedavg import FedAvg

Graph = Any  # "complete", or a number of neighbours

P = 64 * 32 + 32 + 32 * 10 + 10
# of a reduction by itself


def updates(n: int) -> dict[int, Update]:
    """By client, with weights and vectors of two names."""
    generator = torch.Generator().manual_seed(n)
    return {
        10 + k: Update(
            weight=3 + k / 4,
            a=torch.randn(5, generator=generator),
            b=torch.randn(40_000, generator=generator),
        )
        for k in range(n)
    }


def folded(mean: WeightedMean, sent: dict[int, Update]) -> WeightedMean:
    """Each in a block of its own, and in a copy of its own, as actors do."""
    for k, update in sent.items():
        mean.check(update)
        mean.fold(k, update, {})
        mean.end_block()
    return mean


def masked(
    sent: dict[int, Update],
    dropped: Iterable[int] = (),
    graph: Graph = "complete",
    threshold: float = 0.6,
) -> MaskedMean:
    return MaskedMean(Masks(7, "sum", 1, list(sent), graph), frozenset(dropped), threshold)


def same(one: Mean, other: Mean) -> bool:
    return (
        one.clients == other.clients
        and one.count == other.count
        and np.array_equal(one.a, other.a)
        and np.array_equal(one.b, other.b)
    )


def test_what_the_server_gets_is_masked() -> None:
    """Every sum of masked updates but the unmasked one looks like random words."""
    sent = updates(4)
    total, plain = masked(sent), WeightedMean()
    for k, update in sent.items():
        folded(total, {k: update})
        folded(plain, {k: update})
        for what in ("high", "low"):
            words = getattr(total.sums["b", 40_000], what).view(np.uint64)
            assert np.unpackbits(words.view(np.uint8)).mean() == pytest.approx(0.5, abs=2e-3)
            assert len(np.unique(words)) == 40_000
            assert not np.isin(words, getattr(plain.sums["b", 40_000], what)).any()
    assert not total.weights  # they are masked as well


def words_of(stream: Any, count: int) -> Any:
    return stream.next(count, buffer_of_words()).copy()


@pytest.mark.parametrize(("n", "graph"), [(3, "complete"), (3, 2), (7, 2), (8, 4), (9, 6)])
def test_pairs_cancel_and_rounds_differ(n: int, graph: Graph) -> None:
    cohort = [3, 8, 9, 11, 20, 21, 22, 40, 41][:n]
    masks = Masks(7, "sum", 1, cohort, graph)
    total = np.zeros(50, dtype=np.uint64)
    for k in cohort:
        others = masks.of(k)[1:]
        assert len(others) == (n - 1 if graph == "complete" else graph)
        assert all(k in masks.neighbours(other) for other in masks.neighbours(k))
        for sign, stream in others:
            words = words_of(stream, 50)
            total = total + words if sign == 1 else total - words
    assert not total.any()
    assert masks.connect(cohort)
    words = {
        words_of(Masks(seed, purpose, t, cohort, graph).pair(3, other)[1], 1)[0]
        for seed in (7, 8)
        for purpose in ("sum", "another")
        for t in (1, 2)
        for other in (8, 9)
    }
    assert len(words) == 16


def test_words_are_those_of_aes_in_counter_mode() -> None:
    """Its keystream is the ciphertext of the numbers 0, 1, ... of blocks (NIST SP 800-38A)."""
    key = bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c")
    cipher = Cipher(AES(key), ECB()).encryptor()
    expected = cipher.update(b"".join(k.to_bytes(16, "big") for k in range(40)))
    words, buffer = Words(key), buffer_of_words()
    found = b"".join(words.next(count, buffer).tobytes() for count in (1, 2, 5, 32))
    assert found == expected[: 8 * 40]


def test_a_ring_of_neighbours_differs_between_rounds() -> None:
    rings = {tuple(Masks(7, "sum", t, range(30), 4).neighbours(0)) for t in range(10)}
    assert len(rings) == 10


def weighted(*weights: float) -> dict[int, Update]:
    """Updates with these weights."""
    ones = torch.ones(1)
    return {k: Update(weight=weight, a=ones, b=ones) for k, weight in enumerate(weights)}


@pytest.mark.parametrize("graph", ["complete", 4])
@pytest.mark.parametrize(
    ("sent", "dropped"),
    [
        (updates(6), set()),
        (updates(6), {10}),
        (updates(6), {12, 15}),
        ({**updates(4), 10: Update(), 11: Update()}, set()),  # who sends nothing still helps
        (dict.fromkeys(range(4), Update()), set()),
        (weighted(*(0.1 * (k + 1) for k in range(9))), set()),  # which are summed exactly
    ],
    ids=["all", "but one", "but two", "two silent", "all silent", "uneven weights"],
)
def test_the_masked_mean_is_that_of_those_who_are_left(
    sent: dict[int, Update], dropped: set[int], graph: Graph
) -> None:
    rest = {k: update for k, update in sent.items() if k not in dropped and update.vectors}
    expected = folded(WeightedMean(), rest or sent).result({}, {})
    assert expected.count == len(rest)
    told = folded(masked(sent, dropped, graph), sent).result({}, {})
    failed = {k: update for k, update in sent.items() if k not in dropped}  # for any reason
    absent = folded(masked(sent, (), graph), failed).result({}, {})
    for found in (told, absent):
        assert same(found, expected) if rest else found.count == 0


def test_sums_that_cannot_be_had() -> None:
    sent, nothing = updates(6), weighted(0, 0, 0)
    message = "3 of 6 clients are left to unmask the sum, and .*threshold=0.6 takes 4"
    with pytest.raises(NothingToReduce, match=message):
        folded(masked(sent, {10, 11, 12}), sent).result({}, {})
    with pytest.raises(NothingToReduce, match="one client alone has sent an update"):
        folded(masked(sent), {**dict.fromkeys(sent, Update()), 10: sent[10]}).result({}, {})
    with pytest.raises(NothingToReduce, match="of any weight"):
        folded(masked(nothing), nothing).result({}, {})
    with pytest.raises(InvalidUpdate, match="weight is 1e\\+12; with secure_aggregation, which"):
        masked(sent).check(Update(weight=1e12, a=torch.zeros(1)))


def test_dropouts_that_leave_a_ring_too_thin() -> None:
    sent = updates(9)
    order = ring(masked(sent, (), 2).masks)
    message = f"1 of 3 clients around client {order[1]} are left .*threshold=0.6 takes 2"
    with pytest.raises(NothingToReduce, match=message):
        folded(masked(sent, {order[0], order[2]}, 2), sent).result({}, {})
    with pytest.raises(NothingToReduce, match=r"cut the clients apart.*raise .*graph"):
        folded(masked(sent, {order[0], order[4]}, 2, 0.1), sent).result({}, {})
    kept = folded(masked(sent, {order[0], order[4]}, 4, 0.1), sent).result({}, {})
    assert kept.count == 7


@examples(30)
@given(st.data())
def test_whoever_drops_out_the_sum_is_right_or_refused(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 12))
    graph = data.draw(st.sampled_from(["complete", 2, 4, 6]))
    dropped = data.draw(st.sets(st.sampled_from(range(10, 10 + n))))
    sent = {
        k: Update(weight=1.5 * k, a=torch.full((3,), 0.1 * k), b=torch.ones(1))
        for k in range(10, 10 + n)
    }
    rest = {k: update for k, update in sent.items() if k not in dropped}
    total = masked(sent, dropped, graph, 0.3)
    neighbours = {k: set(total.masks.neighbours(k)) for k in sent}
    groups = [({k} | around) & rest.keys() for k, around in neighbours.items()]
    least = max(2, math.ceil(0.3 * (1 + len(neighbours[10])) - 1e-9))
    pairs = np.array([[j in neighbours[k] for j in rest] for k in rest])
    if (
        len(rest) < 2
        or any(0 < len(left) < least for left in groups)
        or connected_components(pairs)[0] > 1
    ):
        with pytest.raises(NothingToReduce):
            folded(total, sent).result({}, {})
    else:
        assert same(
            folded(total, sent).result({}, {}), folded(WeightedMean(), rest).result({}, {})
        )


def ring(masks: Masks) -> list[int]:
    """The clients of a graph of two neighbours, in order."""
    order = [masks.cohort[0]]
    while len(order) < len(masks.cohort):
        order.append(next(k for k in masks.neighbours(order[-1])[::-1] if k not in order))
    return order


# of runs


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"rounds": 3, "participation": 0.5}},
        {"method": {"name": "scaffold"}, "train": {"rounds": 2}},
        {
            "method": {"name": "misbehaving_methods:FailsNowAndThen"},
            "train": {"rounds": 3, "on_client_error": "skip"},
        },
        {"downlink": {"name": "qsgd"}, "train": {"rounds": 2}},
        {"train": {"rounds": 2}},
    ],
    ids=["fedavg", "scaffold", "failures", "downlink", "few neighbours"],
)
def test_a_masked_run_has_the_hash_of_the_unmasked_one(
    finish: Finish, sections: dict[str, Any]
) -> None:
    few = sections == {"train": {"rounds": 2}}
    graph = {"graph": 4} if few else {}
    plain, secure = finish(**sections), finish(**sections, secure_aggregation=graph)
    assert secure.result_hash == plain.result_hash
    for way in ("bytes_up", "bytes_down"):
        without = secure.rounds[way] - secure.rounds[f"protocol_{way}"]
        assert without.equals(plain.rounds[way])
        total = secure.rounds[f"total_{way}"] - secure.rounds[f"protocol_total_{way}"]
        assert total.equals(plain.rounds[f"total_{way}"])
    assert set(secure.rounds["protocol_rounds"]) == {4}
    if not few and "participation" not in sections["train"]:
        return
    n = 5  # clients of a cohort, or neighbours and oneself
    up = 2 * 32 + 92 * (n - 1) + 16 * (P + 1) + 32 * n
    down = 64 * (n - 1) + 92 * (n - 1) + 1
    assert set(secure.clients["bytes_up"]) == {up}
    assert set(secure.clients["bytes_down"]) == {4 * P + down}
    assert set(secure.clients["protocol_bytes_up"]) == {up - 4 * P}
    assert set(secure.clients["protocol_bytes_down"]) == {down}
    assert set(secure.rounds["bytes_up"]) == {(10 if few else n) * up}


def test_dropouts_of_a_run() -> None:
    made = small_experiment(secure_aggregation={"dropout": 0.3, "threshold": 0.4})
    fed, exact = federation(made), federation(small_experiment())
    fed.runner.begin(1)
    exact.runner.begin(1)
    weights = fed.initial_weights()
    mean = fed.mean(FedAvg().local_update, range(10), weights=weights)
    left = sorted(mean.clients)
    assert 4 <= len(left) < 10
    expected = exact.mean(FedAvg().local_update, left, weights=weights)
    np.testing.assert_array_equal(mean.weights, expected.weights)
    record, tables = fed.runner.records()
    assert record["protocol_dropped"] == 10 - len(left)
    setup = 2 * 32 + 92 * 9
    sent = {row["client"]: row["bytes_up"] for row in tables["clients"]}
    assert sent == {k: setup + (16 * (P + 1) + 320) * (k in left) for k in range(10)}
