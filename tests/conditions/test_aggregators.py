"""Aggregation rules, against their formulas written out."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import minimize

from experiments import small_experiment
from fedsim.conditions.aggregators import Aggregator, aggregators
from fedsim.errors import FedsimWarning
from fedsim.launch.prepare import prepare

NAMES = [name for name, _ in aggregators.items()]
Array = NDArray[np.float64]


def rule(name: str, **keys: Any) -> Aggregator:
    found = aggregators.parse({"name": name, **keys})
    assert isinstance(found, Aggregator)
    return found


def drawn(n: int, P: int, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, P)), rng.uniform(1, 9, n)


def krum_scores(changes: Array, f: int) -> list[float]:
    """Of each client, the sum over its n − f − 2 nearest."""
    n = len(changes)
    scores = []
    for i in range(n):
        others = [float(sum((changes[i] - changes[j]) ** 2)) for j in range(n) if j != i]
        scores.append(sum(sorted(others)[: n - f - 2]))
    return scores


def by_hand(name: str, changes: Array, weights: Array, f: int) -> Array:
    n, P = changes.shape
    if name == "median":
        return np.array([np.median(changes[:, j]) for j in range(P)])
    if name == "trimmed_mean":
        return np.array([sum(sorted(changes[:, j])[f : n - f]) / (n - 2 * f) for j in range(P)])
    if name == "norm_clipping":
        norms = [math.sqrt(sum(change**2)) for change in changes]
        clip = float(np.median(norms))
        terms = [
            w * min(1, clip / norm) * change
            for w, norm, change in zip(weights, norms, changes, strict=True)
        ]
        return np.asarray(sum(terms) / sum(weights))
    order = sorted(range(n), key=krum_scores(changes, f).__getitem__)
    return changes[order[0]] if name == "krum" else changes[order[: n - f]].mean(axis=0)


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "norm_clipping", "krum", "multi_krum"])
@pytest.mark.parametrize(("n", "f"), [(7, 2), (10, 2), (11, 3)])  # f = ⌈0.2·n⌉
def test_the_formula(name: str, n: int, f: int) -> None:
    changes, weights = drawn(n, 5, seed=n)
    found = rule(name).aggregate(changes, weights)
    np.testing.assert_allclose(found, by_hand(name, changes, weights, f), rtol=1e-12)


def test_the_geometric_median_minimises_the_sum_of_distances() -> None:
    changes, weights = drawn(8, 3)

    def distances(v: Array) -> float:
        return float(weights @ np.sqrt(((changes - v) ** 2).sum(axis=1)))

    found = rule("geometric_median", iterations=200).aggregate(changes, weights)
    best = minimize(distances, np.zeros(3), method="Nelder-Mead", options={"xatol": 1e-9})
    np.testing.assert_allclose(found, best.x, atol=1e-4)
    once = rule("geometric_median", iterations=1).aggregate(changes, weights)
    start = np.median(changes, axis=0)
    beta = weights / np.sqrt(((changes - start) ** 2).sum(axis=1))
    np.testing.assert_allclose(once, beta @ changes / beta.sum(), rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_of_identical_changes_it_is_that_change(name: str) -> None:
    changes, weights = drawn(1, 6)
    found = rule(name).aggregate(np.repeat(changes, 5, axis=0), np.repeat(weights, 5))
    np.testing.assert_allclose(found, changes[0], rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_it_withstands_as_many_outliers_as_it_says(name: str) -> None:
    changes, _ = drawn(15, 4)
    weights = np.ones(15)
    made = rule(name)
    made.check(15)
    f = made.max_adversaries(15)
    assert f == (3 if name in ("krum", "multi_krum", "trimmed_mean") else 7)
    changes[:f] = 1e9
    found = made.aggregate(changes, weights)
    assert np.abs(found).max() < 100
    assert np.abs(changes.mean(axis=0)).max() > 1e8


def test_multi_krum_that_selects_one_is_krum() -> None:
    changes, weights = drawn(9, 3)
    one = rule("multi_krum", selected=1).aggregate(changes, weights)
    assert one.tolist() == rule("krum").aggregate(changes, weights).tolist()


def test_a_norm_that_nobody_exceeds_clips_nothing() -> None:
    changes, weights = drawn(6, 3)
    found = rule("norm_clipping", clip=100).aggregate(changes, weights)
    np.testing.assert_allclose(found, weights @ changes / weights.sum(), rtol=1e-12)
    short = rule("norm_clipping", clip=0.5).aggregate(changes, weights)
    assert np.linalg.norm(short) <= 0.5
    nothing = rule("norm_clipping").aggregate(np.zeros((3, 2)), np.ones(3))
    assert nothing.tolist() == [0, 0]


def test_shares_are_rounded_up_but_not_by_rounding_errors() -> None:
    assert [rule("trimmed_mean", trim=0.1).max_adversaries(n) for n in (30, 31, 5)] == [3, 4, 1]


@pytest.mark.parametrize("name", ["geometric_median", "norm_clipping"])
@pytest.mark.parametrize("hostile", [True, False])
def test_rules_that_follow_weights_warn_of_clients_that_decide_alone(
    name: str, hostile: bool
) -> None:
    """One client of five holds more than half of the examples."""
    partition = {"kind": "quantity", "clients": 5, "sigma": 3}
    sections: dict[str, Any] = {"partition": partition, "aggregation": {"name": name}}
    if hostile:  # with this seed, the client that holds so many
        sections |= {"adversaries": {"share": 0.2, "attack": {"name": "sign_flip"}}, "seed": 10}
    with pytest.warns(FedsimWarning, match="follows the weights of updates, and .* they decide"):
        prepare(small_experiment(**sections))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(small_experiment(**{**sections, "aggregation": {"name": "median"}}))
