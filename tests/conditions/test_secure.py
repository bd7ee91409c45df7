"""Secure aggregation: masks cancel to the bit, dropouts are recovered, and its bytes count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from experiments import federation, server_states, small_experiment, with_method
from fedsim import Client, Federation, Run, State, Update
from fedsim.conditions.secure import MaskedMean, Masks
from fedsim.errors import BadInput, ClientError, RunError
from fedsim.federation.reduction import InvalidUpdate, Mean, NothingToReduce, WeightedMean
from fedsim.methods.fedavg import FedAvg
from fedsim.testing import check_method

Finish = Callable[..., Run]

P = 64 * 32 + 32 + 32 * 10 + 10
SECURE: dict[str, Any] = {"secure_aggregation": {}}

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


def masked(sent: dict[int, Update], dropped: set[int] = frozenset(), t: int = 1) -> MaskedMean:  # type: ignore[assignment]
    return MaskedMean(Masks(7, "sum", t, list(sent)), frozenset(dropped), 0.6)


def same(one: Mean, other: Mean) -> bool:
    return (
        one.clients == other.clients
        and one.count == other.count
        and np.array_equal(one.a, other.a)
        and np.array_equal(one.b, other.b)
    )


def test_the_masked_mean_is_the_mean() -> None:
    sent = updates(6)
    expected = folded(WeightedMean(), sent).result({}, {})
    assert same(folded(masked(sent), sent).result({}, {}), expected)
    first, second = masked(sent), masked(sent)
    items = list(sent.items())
    folded(first, dict(items[4:]))
    folded(second, dict(items[3::-1]))
    second.merge(first)
    assert same(second.result({}, {}), expected)


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


def test_pairs_cancel_and_rounds_differ() -> None:
    cohort = [3, 8, 9]
    masks = Masks(7, "sum", 1, cohort)
    total = np.zeros(50, dtype=np.uint64)
    for k in cohort:
        for sign, stream in masks.of(k)[1:]:
            words = stream.random_raw(50)
            total = total + words if sign == 1 else total - words
    assert not total.any()
    words = {
        Masks(seed, purpose, t, cohort).pair(3, other)[1].random_raw(1)[0]
        for seed in (7, 8)
        for purpose in ("sum", "another")
        for t in (1, 2)
        for other in (8, 9)
    }
    assert len(words) == 16


@pytest.mark.parametrize("dropped", [{10}, {12, 15}])
def test_the_masks_of_those_who_drop_out_are_recovered(dropped: set[int]) -> None:
    sent = updates(6)
    rest = {k: update for k, update in sent.items() if k not in dropped}
    expected = folded(WeightedMean(), rest).result({}, {})
    assert same(folded(masked(sent, dropped), sent).result({}, {}), expected)
    absent = folded(masked(sent), rest)  # failed, for whatever reason
    assert same(absent.result({}, {}), expected)


def test_with_too_few_left_there_is_no_sum() -> None:
    sent = updates(6)
    message = "3 of 6 clients are left to unmask the sum, and .*threshold=0.6 takes 4"
    with pytest.raises(NothingToReduce, match=message):
        folded(masked(sent, {10, 11, 12}), sent).result({}, {})


def test_who_has_nothing_to_send_still_helps() -> None:
    sent = {**updates(4), 10: Update(), 11: Update()}
    rest = {k: sent[k] for k in (12, 13)}
    expected = folded(WeightedMean(), rest).result({}, {})
    assert same(folded(masked(sent), sent).result({}, {}), expected)
    nobody = dict.fromkeys(sent, Update())
    assert folded(masked(nobody), nobody).result({}, {}).count == 0


def test_weights_are_summed_exactly_and_must_be_in_range() -> None:
    sent = {k: Update(weight=0.1 * (k + 1), a=torch.ones(1), b=torch.ones(1)) for k in range(9)}
    expected = folded(WeightedMean(), sent).result({}, {})
    assert same(folded(masked(sent), sent).result({}, {}), expected)
    with pytest.raises(InvalidUpdate, match="weight is 1e\\+12; with secure_aggregation, which"):
        masked(sent).check(Update(weight=1e12, a=torch.zeros(1)))
    nothing = {k: Update(weight=0, a=torch.ones(1)) for k in range(3)}
    with pytest.raises(NothingToReduce, match="of any weight"):
        folded(masked(nothing), nothing).result({}, {})


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
    ],
    ids=["fedavg", "scaffold", "failures", "downlink"],
)
def test_a_masked_run_has_the_hash_of_the_unmasked_one(
    finish: Finish, sections: dict[str, Any]
) -> None:
    plain, secure = finish(**sections), finish(**sections, **SECURE)
    assert secure.result_hash == plain.result_hash
    for way in ("bytes_up", "bytes_down"):
        without = secure.rounds[way] - secure.rounds[f"protocol_{way}"]
        assert without.equals(plain.rounds[way])
        total = secure.rounds[f"total_{way}"] - secure.rounds[f"protocol_total_{way}"]
        assert total.equals(plain.rounds[f"total_{way}"])
    assert set(secure.rounds["protocol_rounds"]) == {4}


def test_a_masked_run_keeps_the_contract() -> None:
    """Interrupted and resumed, and in stacks."""
    check_method({"name": "fedavg"}, train={"rounds": 7, "participation": 0.5}, **SECURE)


def test_blocks_of_several_clients_differ_by_rounding_alone() -> None:
    sections: dict[str, Any] = {
        "partition": {"kind": "iid", "clients": 40},
        "train": {"rounds": 1},
    }
    plain, secure = (
        server_states(small_experiment(**sections, **more))[-1].weights for more in ({}, SECURE)
    )
    np.testing.assert_allclose(secure, plain, atol=1e-6)


def test_bytes_of_the_protocol(finish: Finish) -> None:
    n = 5
    done = finish(train={"rounds": 1, "participation": 0.5}, **SECURE)
    up = 2 * 32 + 92 * (n - 1) + 16 * (P + 1) + 32 * n
    down = 64 * (n - 1) + 92 * (n - 1) + 1
    assert set(done.clients["bytes_up"]) == {up}
    assert set(done.clients["bytes_down"]) == {4 * P + down}
    assert set(done.clients["protocol_bytes_up"]) == {up - 4 * P}
    assert set(done.clients["protocol_bytes_down"]) == {down}
    assert done.rounds["bytes_up"].tolist() == [n * up]


def test_dropouts_of_a_run(finish: Finish) -> None:
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


def test_a_round_that_loses_too_many_ends_the_run(finish: Finish) -> None:
    message = r"round 1: \d of 10 clients are left to unmask the sum, and .*=1 takes 10"
    with pytest.raises(RunError, match=message):
        finish(secure_aggregation={"dropout": 0.5, "threshold": 1})


# what does not fit


class Gathers(FedAvg):
    """Says nothing of what it gathers."""

    name: str = "test_secure:Gathers"

    def round(self, fed: Federation, state: State, t: int) -> State:
        fed.gather(self.count, fed.sample(t))
        return state

    def count(self, client: Client) -> int:
        return client.num_samples


class OneByOne(FedAvg):
    name: str = "test_secure:OneByOne"

    def round(self, fed: Federation, state: State, t: int) -> State:
        return State(weights=fed.mean(self.local_update, [0], weights=state.weights).weights)


class Heavy(FedAvg):
    name: str = "test_secure:Heavy"

    def local_update(self, client: Client, weights: torch.Tensor) -> Update:
        return Update(weights=0 * weights, weight=1e12)


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        (
            Gathers,
            RunError,
            r"gathers each client's message \(count\), which `secure_aggregation` hi",
        ),
        (OneByOne, RunError, "round 1: a cohort of 1, and secure_aggregation hides a client"),
        (Heavy, ClientError, "the update's weight is 1e\\+12"),
    ],
    ids=["gathers", "one by one", "heavy"],
)
def test_what_a_method_may_not_do(
    finish: Finish, method: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        finish(method=method, **SECURE)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            with_method("feddf"),
            "method.name=feddf asks for what each client sends, which secure_aggregation hides",
        ),
        (
            {"method": {"name": "feddyn"}},
            "secure_aggregation: hides clients' numbers of samples, .* set method.scale=none",
        ),
        (
            {"privacy": {"clip": 1, "noise_multiplier": 1}},
            "secure_aggregation: the clipping of `privacy` needs the clients' updates; leave out",
        ),
        ({"uplink": {"name": "sign"}}, "secure_aggregation: masked updates cannot be compressed"),
        (
            {"explain": {"explainers": ["occlusion"], "share": {"noise": 0.1}}},
            "explain.share: .* covers only averages; leave out `explain.share`, or `sec",
        ),
        (
            {"secure_aggregation": {"threshold": 0}},
            "secure_aggregation.threshold: must be greater",
        ),
        (
            {"secure_aggregation": {"dropout": 1}},
            "secure_aggregation.dropout: must be less than 1",
        ),
        ({"secure_aggregation": {"drop": 0.1}}, "secure_aggregation.drop: unknown key"),
    ],
)
def test_bad_input(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        small_experiment(**{**SECURE, **sections})


def test_a_cohort_of_one_is_refused_before_anything_starts(finish: Finish) -> None:
    with pytest.raises(BadInput, match=r"samples one; 0\.2 samples two"):
        finish(train={"participation": 0.1}, **SECURE)
