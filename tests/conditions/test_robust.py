"""Robust aggregation in the federation, and what adversaries send."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from experiments import (
    Driven,
    federation,
    server_states,
    small_experiment,
)
from fedsim import Experiment, Federation, Run, Update
from fedsim.conditions.aggregators import aggregators
from fedsim.conditions.robust import GatheredMean, RobustAggregation
from fedsim.errors import BadInput, ClientError, NobodyAnswers, RunError
from fedsim.federation import LocalEngine, Mean, NotCounted
from fedsim.federation.reduction import TooFewUpdates
from fedsim.launch.prepare import prepare
from fedsim.testing import check_method

Finish = Callable[..., Run]
IID = {"kind": "iid", "clients": 10}
FLIPS = {"share": 0.2, "attack": {"name": "sign_flip", "scale": 3}}


def one_mean(made: Experiment, cohort: list[int]) -> Mean:
    """One round's mean from the initial weights."""
    fed = federation(made)
    fed.runner.begin(1)
    arguments: dict[str, Any] = {"weights": fed.initial_weights()}
    if made.method.name == "scaffold":
        arguments["control"] = np.zeros(fed.server.model.num_parameters, np.float32)
    return fed.mean(made.method.local_update, cohort, **arguments)  # type: ignore[attr-defined]


def alone(k: int, **sections: Any) -> Mean:
    return one_mean(small_experiment(**sections), [k])


class TestMean:
    COHORT = (0, 2, 3, 5, 7)

    def test_a_rule_is_applied_to_changes(self) -> None:
        made = small_experiment(aggregation={"name": "norm_clipping", "clip": 0.2})
        start = federation(made).initial_weights().astype(np.float64)
        changes = [alone(k).weights - start for k in self.COHORT]
        counts = [len(prepare(made)[1].train[k]) for k in self.COHORT]
        clipped = [c * min(1, 0.2 / np.linalg.norm(c)) for c in changes]
        expected = start + np.average(clipped, axis=0, weights=counts)
        found = one_mean(made, list(self.COHORT))
        np.testing.assert_allclose(found.weights, expected, atol=1e-7)
        assert (found.count, found.clients) == (5, frozenset(self.COHORT))

    def test_all_vectors_of_a_client_are_one(self) -> None:
        """Krum takes both of the same client, and what came under other names is the change."""
        sections: dict[str, Any] = {"method": {"name": "scaffold"}}
        own = {k: alone(k, **sections) for k in self.COHORT}
        flat = np.stack([np.concatenate([m.delta, m.delta_control]) for m in own.values()])
        krum = aggregators.parse({"name": "krum"})
        best = krum.aggregate(flat.astype(np.float64), np.ones(5))
        found = one_mean(small_experiment(**sections, aggregation=krum), list(self.COHORT))
        (winner,) = (k for k in self.COHORT if np.array_equal(own[k].delta, found.delta))
        assert np.array_equal(own[winner].delta_control, found.delta_control)
        together = np.concatenate([found.delta, found.delta_control])
        np.testing.assert_array_equal(together, best.astype(np.float32))

    def test_forged_updates_are_in_the_weighted_mean(self) -> None:
        made = small_experiment(adversaries=FLIPS)
        _, splits, _ = prepare(made)
        start = federation(made).initial_weights().astype(np.float64)
        everyone = range(10)
        changes = [alone(k).weights - start for k in everyone]
        for k in splits.adversaries:
            changes[k] = -3 * changes[k]
        expected = start + np.average(changes, axis=0, weights=splits.train.lengths)
        np.testing.assert_allclose(one_mean(made, list(everyone)).weights, expected, atol=1e-6)

    def test_colluding_adversaries_know_the_updates_of_others(self) -> None:
        made = small_experiment(
            adversaries={"share": 0.3, "attack": {"name": "alie", "z": 2}},
            aggregation={"name": "median"},
        )
        there = prepare(made)[1].adversaries
        start = federation(made).initial_weights().astype(np.float64)
        sent = np.stack([alone(k).weights - start for k in range(10)])
        own = sent[list(there)]
        sent[list(there)] = own.mean(axis=0) - 2 * own.std(axis=0)
        found = one_mean(made, list(range(10)))
        np.testing.assert_allclose(found.weights, start + np.median(sent, axis=0), atol=1e-6)

    def test_without_adversaries_in_a_cohort_it_is_the_exact_mean(self) -> None:
        dataset, splits, spec = prepare(small_experiment())
        means = []
        for conditions in ((), (RobustAggregation(),)):
            own = replace(spec, conditions=conditions)
            engine = LocalEngine(small_experiment().engine, own, dataset, splits)
            fed = Driven(own, dataset, splits, engine)
            fed.runner.begin(1)
            weights = fed.initial_weights()
            means.append(fed.mean(own.functions.local_update, range(10), weights=weights).weights)
        assert np.array_equal(*means)

    def test_statistics_of_batch_norm_are_not_forged(self) -> None:
        sections: dict[str, Any] = {
            "model": {"name": "resnet8", "width": 1},
            "train": {"batch_size": 128},
        }
        honest = small_experiment(**sections)
        P = federation(honest).server.model.num_parameters
        plain = one_mean(honest, list(range(10))).weights
        forged = one_mean(small_experiment(**sections, adversaries=FLIPS), list(range(10))).weights
        assert len(plain) > P
        assert np.array_equal(plain[P:], forged[P:])
        assert not np.allclose(plain[:P], forged[:P])

    def test_nor_are_they_in_a_part_of_the_model(self) -> None:
        sections: dict[str, Any] = {
            "model": {"name": "resnet8", "width": 1},
            "method": {"name": "fedper"},
            "train": {"rounds": 1, "batch_size": 128},
        }
        P = federation(small_experiment(**sections)).server.model.num_parameters
        plain, forged = (
            server_states(small_experiment(**sections, **adversaries))[1].weights
            for adversaries in ({}, {"adversaries": FLIPS})
        )
        assert np.array_equal(plain[P:], forged[P:])
        assert not np.allclose(plain[:P], forged[:P])

    def test_changes_refer_to_what_was_sent_also_if_it_is_not_counted(self) -> None:
        made = small_experiment(adversaries=FLIPS)
        fed = federation(made)
        fed.runner.begin(1)
        update, weights = made.method.local_update, fed.initial_weights()  # type: ignore[attr-defined]
        counted, not_counted = (
            fed.mean(update, range(10), weights=sent) for sent in (weights, NotCounted(weights))
        )
        assert np.array_equal(counted.weights, not_counted.weights)

    def test_each_mean_of_a_round_has_noise_of_its_own(self) -> None:
        made = small_experiment(adversaries={"share": 0.2, "attack": {"name": "gaussian"}})
        fed = federation(made)
        fed.runner.begin(1)
        update = made.method.local_update  # type: ignore[attr-defined]
        sent = {"weights": fed.initial_weights()}
        one, two = (fed.mean(update, range(10), **sent).weights for _ in range(2))
        assert not np.allclose(one, two)
        fed.runner.begin(1)
        assert np.array_equal(fed.mean(update, range(10), **sent).weights, one)


class TestReduction:
    """What a run meets now and then."""

    @staticmethod
    def reduction(name: str | None = "median", attack: Any = None) -> GatheredMean:
        rule = None if name is None else aggregators.parse({"name": name})
        return GatheredMean(rule, attack, frozenset({1}), {}, np.random.default_rng(0))

    @staticmethod
    def folded(made: GatheredMean, updates: Mapping[int, Update]) -> Mean:
        for id, update in updates.items():
            made.check(update)
            made.fold(id, update, {})
        made.end_block()
        return made.result({}, {})

    def test_a_client_of_no_weight_has_no_say(self) -> None:
        values = {1: 5.0, 2: 6.0, 3: 100.0}
        updates = {k: Update(weight=k < 3, w=torch.tensor([v])) for k, v in values.items()}
        found = self.folded(self.reduction(), updates)
        assert found.w.tolist() == [5.5]
        assert found.count == 3

    def test_a_client_that_sends_nothing_is_left_out(self) -> None:
        found = self.folded(self.reduction(), {1: Update(), 2: Update(w=torch.ones(2))})
        assert found.w.tolist() == [1, 1]
        assert found.clients == frozenset({2})
        assert self.folded(self.reduction(), {1: Update()}).count == 0

    def test_too_few_answers(self) -> None:
        with pytest.raises(TooFewUpdates, match=r"aggregation\.name=krum: with f = 1 .* are 1$"):
            self.folded(self.reduction("krum"), {1: Update(w=torch.ones(2))})

    def test_copies_are_merged_in_any_order(self) -> None:
        found = []
        for order in ((1, 2, 3), (3, 1, 2)):
            whole = self.reduction("norm_clipping")
            for k in order:
                part = self.reduction("norm_clipping")
                part.fold(k, Update(weight=k, w=torch.tensor([0.1 * k, 0.7])), {})
                whole.merge(part)
            found.append(whole.result({}, {}).w.tolist())
        assert found[0] == found[1]


def too_few(**sections: Any) -> Federation:
    """A federation in whose round fewer clients answer than Krum needs."""
    made = small_experiment(aggregation={"name": "krum"}, **sections)
    fed = federation(made)
    fed.runner.begin(1)
    return fed


def test_a_round_with_too_few_answers_stops_the_run() -> None:
    fed = too_few()
    update = fed.runner.context.spec.functions.local_update
    with pytest.raises(RunError, match=r"^round 1: aggregation\.name=krum: with f = 1 "):
        fed.mean(update, [3], weights=fed.initial_weights())


def test_with_devices_that_fail_it_changes_nothing() -> None:
    fed = too_few(devices={"dropout": 0.1})
    update = fed.runner.context.spec.functions.local_update
    with pytest.raises(NobodyAnswers, match=r"^round 1 changes nothing: aggregation\.name=krum: "):
        fed.mean(update, [3], weights=fed.initial_weights())


def test_huge_noise_names_the_attack() -> None:
    attack = {"name": "gaussian", "std": 1e12}
    made = small_experiment(adversaries={"share": 0.2, "attack": attack})
    with pytest.raises(ClientError, match=r"name=gaussian forges values up to .*'weights'$"):
        one_mean(made, list(range(10)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Short", r"name=own_robust:Short: must return an array of shape \(2410,\), not \(3,\)"),
        ("Undefined", "name=own_robust:Undefined: returns numbers that are NaN or infinite"),
    ],
)
def test_rules_of_the_users_own(name: str, message: str) -> None:
    made = small_experiment(aggregation={"name": f"own_robust:{name}"})
    with pytest.raises(RunError, match=message):
        one_mean(made, [1, 2])


# what is refused


def test_a_rule_is_checked_against_the_buffer_of_fedbuff() -> None:
    sections: dict[str, Any] = {
        "aggregation": {"name": "krum"},
        "devices": {"speed": 100},
        "train": {"rounds": 1, "participation": 0.2},
    }
    prepare(small_experiment(method={"name": "fedbuff", "buffer": 5}, **sections))
    with pytest.raises(BadInput, match=r"aggregation\.name=krum: .* are 4"):
        prepare(small_experiment(method={"name": "fedbuff", "buffer": 4}, **sections))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"aggregation": {"name": "median"}, "adversaries": {**FLIPS, "share": 0.5}},
            "adversaries.share=0.5: about 5 of the 10 clients of a cohort are adversaries, and "
            "aggregation.name=median withstands 4 (f < n/2)",
        ),
        (
            {"aggregation": {"name": "trimmed_mean", "trim": 0.1}, "adversaries": FLIPS},
            "aggregation.name=trimmed_mean withstands 1 (f ≤ ⌈trim·n⌉)",
        ),
        (
            {"aggregation": {"name": "krum"}, "adversaries": {**FLIPS, "share": 0.4}},
            "withstands 2 (f as assumed by aggregation.adversaries, and n ≥ 2f + 3)",
        ),
        (
            {"aggregation": {"name": "krum"}, "train": {"participation": 0.4}},
            "aggregation.name=krum: with f = 1 adversaries (aggregation.adversaries=0.2) it needs "
            "n ≥ 2f + 3 = 5 clients, and there are 4",
        ),
    ],
)
def test_more_adversaries_than_a_rule_withstands(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as refused:
        prepare(small_experiment(**sections))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"aggregation": {"name": "median"}, "privacy": {"clip": 1, "noise_multiplier": 1}},
            "aggregation.name=median: `privacy` covers sums of honest clients alone; leave out",
        ),
        (
            {"adversaries": FLIPS, "privacy": {"clip": 1, "noise_multiplier": 1}},
            "leave out `adversaries`, or `privacy`",
        ),
        (
            {"aggregation": {"name": "median"}, "method": {"name": "local"}},
            "aggregation.name=median: method.name=local does not average clients' updates, so",
        ),
        (
            {"adversaries": FLIPS, "method": {"name": "local"}},
            "adversaries.attack.name=sign_flip: method.name=local does not average clients'",
        ),
        ({"aggregation": {"name": "medain"}}, "unknown aggregation rule 'medain'; did you mean"),
    ],
)
def test_what_does_not_go_together(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as refused:
        small_experiment(**sections)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_methods_that_gather_can_be_poisoned_all_the_same(finish: Finish) -> None:
    flips = {"share": 0.2, "attack": {"name": "label_flip"}}
    done = finish(method={"name": "local"}, train={"rounds": 1}, adversaries=flips)
    assert done.clients["adversary"].sum() == 2


# whole runs


@pytest.mark.parametrize(
    "attack",
    [{"name": "label_flip"}, {"name": "sign_flip", "scale": 3}],
    ids=lambda attack: attack["name"],
)
def test_the_median_suffers_less_than_the_mean(finish: Finish, attack: dict[str, Any]) -> None:
    common: dict[str, Any] = {
        "partition": IID,
        "train": {"rounds": 6},
        "adversaries": {"share": 0.4, "attack": attack},
    }
    mean, median = (
        finish(**common, aggregation=rule).rounds["accuracy"].iloc[-1]
        for rule in (None, {"name": "median"})
    )
    assert median > mean + 0.1


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_runs_keep_the_contract(name: str) -> None:
    """Also interrupted and resumed, and in stacks."""
    check_method(
        {"name": name},
        aggregation={"name": "multi_krum"},
        adversaries={"share": 0.2, "attack": {"name": "gaussian", "std": 0.1}},
        train={"participation": 0.7, "rounds": 4},
    )


def test_a_sampled_cohort_has_the_adversaries_that_it_has(finish: Finish) -> None:
    done = finish(train={"rounds": 5, "participation": 0.3}, adversaries=FLIPS)
    there = set(done.manifest["adversaries"])
    for t, own in done.clients.groupby("round"):
        (count,) = done.rounds.loc[done.rounds["round"] == t, "adversaries"]
        assert count == len(there & set(own["client"]))
    assert done.rounds["adversaries"].nunique() > 1
