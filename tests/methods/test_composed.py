"""Methods that send more than a model, under conditions on what is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from experiments import (
    MECHANISMS,
    NETWORK_METHODS,
    Finish,
    by_day,
    federation,
    server_states,
    small_experiment,
    with_method,
)
from fedsim.conditions.aggregators import aggregators
from fedsim.errors import ExperimentError
from fedsim.federation import Federation
from fedsim.methods import methods

CLIENTS = range(10)


class Sent:
    """What each client sends in round 1, from calls of a single client each."""

    def __init__(self, made: Any) -> None:
        self.fed: Federation = federation(made)
        self.fed.runner.begin(1)
        self.method, self.start = made.method, made.method.init(self.fed)
        seen: list[dict[str, Any]] = []
        plain = self.fed.mean

        def alone(function: Any, cohort: Any, **arguments: Any) -> Any:
            seen.append({k: plain(function, [int(k)], **arguments) for k in cohort})
            return plain(function, cohort, **arguments)

        self.fed.mean = alone  # type: ignore[method-assign]
        self.after = self.method.round(self.fed, self.start, 1)
        (self.of,) = seen

    @property
    def weights(self) -> np.ndarray:
        """(n,) the clients' weights in a mean, written out."""
        n = self.fed.server.num_samples.astype(np.float64)
        return n / n.sum() if self.method.name == "afl" else n

    def server_step(self, aggregated: np.ndarray) -> np.ndarray:
        """(size,) the next weights, by the method's formula."""
        w = self.start.weights.astype(np.float64)
        if self.method.name != "fednova":
            return w + aggregated
        n = self.fed.server.num_samples
        tau = sum(n[k] * float(self.of[k].worth[0]) for k in CLIENTS) / n.sum()
        return w + tau * aggregated

    def changes(self) -> np.ndarray:
        """(n, size) what clients' vectors say that the model should change by."""
        name = "change" if self.method.name == "fednova" else "weights"
        base = 0 if name == "change" else self.start.weights.astype(np.float64)
        return np.stack([getattr(self.of[k], name) - base for k in CLIENTS])


NAMES = ("fednova", "afl", "xfedalign")
STEPS = {"rounds": 1, "local_epochs": 2}


@pytest.mark.parametrize("rule", [None, {"name": "median"}, {"name": "trimmed_mean"}])
@pytest.mark.parametrize("name", NAMES)
def test_with_a_rule(name: str, rule: dict[str, Any] | None) -> None:
    sent = Sent(small_experiment(**with_method(name, train=STEPS)))
    changes, weights = sent.changes(), sent.weights
    if rule is None:
        together, found = np.average(changes, axis=0, weights=weights), sent.after
    else:
        together = aggregators.parse(rule).aggregate(changes, weights)
        found = server_states(
            small_experiment(**with_method(name, train=STEPS, aggregation=rule))
        )[1]
    np.testing.assert_allclose(found.weights, sent.server_step(together), atol=2e-6)
    if name == "afl":  # of the losses, whatever becomes of the models
        np.testing.assert_array_equal(found.mixture, sent.after.mixture)
        assert not np.array_equal(found.mixture, sent.start.mixture)
    if name == "xfedalign":
        np.testing.assert_array_equal(found.prior, sent.after.prior)
        assert found.prior.any()


@pytest.mark.parametrize("name", NAMES)
def test_with_a_codec(name: str) -> None:
    """The twentieth part of each change that is largest arrives, and what is sent beside."""
    codec = {"name": "topk", "fraction": 0.05, "error_feedback": False}
    sent = Sent(small_experiment(**with_method(name, train=STEPS)))
    changes = sent.changes()
    k = round(0.05 * changes.shape[1])
    small = np.argsort(np.argsort(-np.abs(changes), axis=1, kind="stable"), axis=1) >= k
    together = np.average(np.where(small, 0, changes), axis=0, weights=sent.weights)
    found = server_states(small_experiment(**with_method(name, train=STEPS, uplink=codec)))[1]
    wrong = np.abs(found.weights - sent.server_step(together)) > 2e-6
    assert wrong.mean() < 1e-3  # ties of rounding
    assert (found.weights != sent.start.weights).mean() < 10 * 0.05
    if name == "xfedalign":
        np.testing.assert_array_equal(found.prior, sent.after.prior)


MASKED = [n for n in NETWORK_METHODS if methods.find(n).learns.averages and n != "feddyn"]


@pytest.mark.parametrize("name", by_day(MASKED, [*MECHANISMS, "fedavg", "fednova", "moon"]))
def test_with_masks(name: str) -> None:
    """To the bit what it is without, or refused for what the server would have to see."""
    sections = with_method(name, train={"rounds": 4})
    if {"messages", "sizes", "data"} & {*methods.find(name).learns.asks}:
        with pytest.raises(ExperimentError, match="which secure_aggregation hides"):
            small_experiment(**sections, secure_aggregation={})
        return
    plain = server_states(small_experiment(**sections))
    masked = server_states(small_experiment(**sections, secure_aggregation={}))
    for one, other in zip(plain, masked, strict=True):
        np.testing.assert_array_equal(one.weights, other.weights)


def test_an_attack_forges_no_message(finish: Finish) -> None:
    """Of AFL, losses are those of what adversaries have trained, as all that is on record."""
    flips = {"share": 0.2, "attack": {"name": "sign_flip", "scale": 5.0}}
    made = with_method("afl", train=STEPS)
    plain, attacked = (
        server_states(small_experiment(**made, **more))[1] for more in ({}, {"adversaries": flips})
    )
    np.testing.assert_array_equal(plain.mixture, attacked.mixture)
    assert not np.array_equal(plain.weights, attacked.weights)
