"""Robust aggregation in the federation, and what adversaries send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from one_round import changes, one_mean

from experiments import (
    Driven,
    Finish,
    federation,
    server_states,
    small_experiment,
)
from fedsim import Update
from fedsim.conditions.aggregators import aggregators
from fedsim.conditions.robust import GatheredMean, RobustAggregation
from fedsim.errors import NobodyAnswers, RunError
from fedsim.federation import LocalEngine, Mean, NotCounted
from fedsim.federation.reduction import TooFewUpdates
from fedsim.launch.prepare import prepare

FLIPS = {"share": 0.2, "attack": {"name": "sign_flip", "scale": 3}}


class TestMean:
    COHORT = (0, 2, 3, 5, 7)

    def test_a_rule_is_applied_to_changes(self) -> None:
        made = small_experiment(aggregation={"name": "norm_clipping", "clip": 0.2})
        start, cohort = federation(made).initial_weights().astype(np.float64), list(self.COHORT)
        counts = [len(prepare(made)[1].train[k]) for k in cohort]
        clipped = [c * min(1, 0.2 / np.linalg.norm(c)) for c in changes()[cohort]]
        found = one_mean(made, cohort)
        expected = start + np.average(clipped, axis=0, weights=counts)
        np.testing.assert_allclose(found.weights, expected, atol=1e-7)
        assert (found.count, found.clients) == (5, frozenset(self.COHORT))

    def test_all_vectors_of_a_client_are_one(self) -> None:
        """Krum takes both of the same client, and what came under other names is the change."""
        sections: dict[str, Any] = {"method": {"name": "scaffold"}}
        own = {k: one_mean(small_experiment(**sections), [k]) for k in self.COHORT}
        flat = np.stack([np.concatenate([m.delta, m.delta_control]) for m in own.values()])
        krum = aggregators.parse({"name": "krum"})
        best = krum.aggregate(flat.astype(np.float64), np.ones(5))
        found = one_mean(small_experiment(**sections, aggregation=krum), list(self.COHORT))
        (winner,) = (k for k in self.COHORT if np.array_equal(own[k].delta, found.delta))
        assert np.array_equal(own[winner].delta_control, found.delta_control)
        together = np.concatenate([found.delta, found.delta_control])
        np.testing.assert_array_equal(together, best.astype(np.float32))

    @pytest.mark.parametrize("counted", [True, False])
    def test_forged_updates_are_in_the_weighted_mean(self, counted: bool) -> None:
        """Changes refer to what was sent, also if its bytes are not counted."""
        made = small_experiment(adversaries=FLIPS)
        _, splits, _ = prepare(made)
        fed = federation(made)
        fed.runner.begin(1)
        start = fed.initial_weights()
        sent = changes().copy()
        sent[list(splits.adversaries)] *= -3
        update = made.method.local_update  # type: ignore[attr-defined]
        found = fed.mean(update, range(10), weights=start if counted else NotCounted(start))
        expected = start + np.average(sent, axis=0, weights=splits.train.lengths)
        np.testing.assert_allclose(found.weights, expected, atol=1e-6)

    def test_colluding_adversaries_know_the_updates_of_others(self) -> None:
        alie = {"share": 0.3, "attack": {"name": "alie", "z": 2}}
        made = small_experiment(adversaries=alie, aggregation={"name": "median"})
        there = list(prepare(made)[1].adversaries)
        sent, own = changes().copy(), changes()[there]
        sent[there] = own.mean(axis=0) - 2 * own.std(axis=0)
        expected = federation(made).initial_weights() + np.median(sent, axis=0)
        np.testing.assert_allclose(one_mean(made, range(10)).weights, expected, atol=1e-6)

    def test_each_mean_of_a_round_has_noise_of_its_own(self) -> None:
        made = small_experiment(adversaries={"share": 0.2, "attack": {"name": "gaussian"}})
        fed = federation(made)
        fed.runner.begin(1)
        update = made.method.local_update  # type: ignore[attr-defined]
        sent = {"weights": fed.initial_weights()}
        one, two = (fed.mean(update, range(10), **sent).weights for _ in range(2))
        assert not np.allclose(one, two)
        assert np.array_equal(one_mean(made, range(10)).weights, one)

    @pytest.mark.parametrize("name", ["fedavg", "fedper"])
    def test_statistics_of_batch_norm_are_not_forged(self, name: str) -> None:
        """Neither those of the whole model nor of the part that is sent."""
        sections: dict[str, Any] = {
            "model": {"name": "resnet8", "width": 1},
            "method": {"name": name},
            "train": {"rounds": 1, "batch_size": 128},
        }
        P = federation(small_experiment(**sections)).server.model.num_parameters
        plain, forged = (
            server_states(small_experiment(**sections, **adversaries))[1].weights
            for adversaries in ({}, {"adversaries": FLIPS})
        )
        assert len(plain) > P
        assert np.array_equal(plain[P:], forged[P:])
        assert not np.allclose(plain[:P], forged[:P])

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


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({}, RunError, "round 1: aggregation.name=krum: with f = 1 "),
        (
            {"devices": {"dropout": 0.1}},
            NobodyAnswers,
            "round 1 changes nothing: aggregation.name=krum: ",
        ),
    ],
    ids=["stops the run", "changes nothing with devices that fail"],
)
def test_a_round_with_too_few_answers(
    sections: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        one_mean(small_experiment(aggregation={"name": "krum"}, **sections), [3])


def test_methods_that_gather_can_be_poisoned_all_the_same(finish: Finish) -> None:
    flips = {"share": 0.2, "attack": {"name": "label_flip"}}
    done = finish(method={"name": "local"}, train={"rounds": 1}, adversaries=flips)
    assert done.clients["adversary"].sum() == 2


# whole runs


def test_a_sampled_cohort_has_the_adversaries_that_it_has(finish: Finish) -> None:
    done = finish(train={"rounds": 5, "participation": 0.3}, adversaries=FLIPS)
    there = set(done.manifest["adversaries"])
    for t, own in done.clients.groupby("round"):
        (count,) = done.rounds.loc[done.rounds["round"] == t, "adversaries"]
        assert count == len(there & set(own["client"]))
    assert done.rounds["adversaries"].nunique() > 1
