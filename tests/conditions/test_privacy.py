"""Client-level differential privacy: clipping, noise, the accountant, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from hypothesis import example, given
from hypothesis import strategies as st
from one_round import changes, one_mean

from experiments import (
    MECHANISMS,
    NETWORK_METHODS,
    Finish,
    by_day,
    examples,
    federation,
    server_states,
    small_experiment,
    with_method,
)
from fedsim import Experiment
from fedsim.conditions.gaussian import analytic_epsilon
from fedsim.conditions.privacy import Privacy, clipped
from fedsim.errors import BadInput
from fedsim.federation import draw_cohort
from fedsim.launch.prepare import prepare
from fedsim.methods import methods

TRAIN = {"rounds": 2, "local_epochs": 1, "batch_size": 16, "optimizer": {"lr": 0.1}}


def experiment(
    clip: float = 1.0, z: float = 1.0, participation: float = 0.5, **sections: Any
) -> Experiment:
    train = {**TRAIN, "participation": participation, **sections.pop("train", {})}
    privacy = {"clip": clip, "noise_multiplier": z}
    return small_experiment(privacy=privacy, train=train, **sections)


# clipping

vectors = st.lists(st.floats(-100, 100), min_size=1, max_size=5).map(
    lambda entries: torch.tensor(entries, dtype=torch.float32)
)


@given(vectors, vectors, st.floats(0.01, 200))
def test_all_that_a_client_changes_is_within_the_norm(
    a: torch.Tensor, b: torch.Tensor, norm: float
) -> None:
    reference = torch.ones_like(a)
    found = clipped({"weights": a, "control": b}, {"weights": reference}, norm)
    plain = np.concatenate([(a - reference).double().numpy(), b.double().numpy()])
    length = np.sqrt((plain**2).sum())
    got = torch.cat([found["weights"], found["control"]]).numpy()
    assert np.linalg.norm(got) <= norm * (1 + 1e-12)
    np.testing.assert_allclose(got, plain * min(1, norm / length) if length else plain, rtol=1e-6)


def test_a_reference_of_another_size_is_none() -> None:
    found = clipped({"w": torch.tensor([3.0, 4.0])}, {"w": torch.ones(3)}, 10.0)
    assert found["w"].tolist() == [3, 4]


# the mean


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_without_noise_it_is_the_mean_of_clipped_changes(kind: Any) -> None:
    """Of what was sent, an array or a tensor."""
    made = experiment(clip=0.3, z=0.0, participation=1.0)
    fed = federation(made)
    fed.runner.begin(1)
    sent = fed.initial_weights()
    norms = np.linalg.norm(changes(), axis=1)
    assert min(norms) < 0.3 < max(norms)
    expected = sent + (changes() * np.minimum(1, 0.3 / norms)[:, None]).mean(axis=0)
    found = fed.mean(made.method.local_update, range(10), weights=kind(sent))
    np.testing.assert_allclose(found.weights, expected, atol=1e-6)


def test_the_sum_is_divided_by_the_expected_number() -> None:
    made = experiment(clip=1e6, z=0.0, participation=0.35)
    fed = federation(made)
    cohort = fed.sample(1)
    expected = fed.initial_weights() + changes()[cohort].sum(axis=0) / 3.5
    np.testing.assert_allclose(one_mean(made, cohort).weights, expected, atol=1e-5)


def test_noise_has_its_size_and_is_another_each_time() -> None:
    quiet, noisy = (experiment(clip=0.5, z=z, participation=1.0) for z in (0.0, 4.0))
    fed, without = federation(noisy), one_mean(quiet, range(10)).weights
    fed.runner.begin(1)
    drawn = []
    for _ in range(2):
        mean = fed.mean(noisy.method.local_update, range(10), weights=fed.initial_weights())
        drawn.append(mean.weights - without)
    for noise in drawn:
        assert noise.std() == pytest.approx(4 * 0.5 / 10, rel=0.05)
        assert abs(noise.mean()) < 0.2 / 10
    assert abs(np.corrcoef(*drawn)[0, 1]) < 0.1
    fed.runner.records()
    assert fed.runner.ledger("privacy")["releases"] == [[1.0, 2, 1]]


def test_cohorts_are_drawn_client_by_client() -> None:
    cohorts = [draw_cohort(0, 0.3, 50, t, independent=True) for t in range(400)]
    sizes = [len(c) for c in cohorts]
    assert np.var(sizes) == pytest.approx(50 * 0.3 * 0.7, rel=0.25)
    often = np.bincount(np.concatenate(cohorts), minlength=50) / 400
    assert np.abs(often - 0.3).max() < 0.1


def test_a_round_without_anybody_is_noise_alone() -> None:
    made = experiment(participation=0.1, train={"rounds": 30})
    fed = federation(made)
    (t, *_) = [t for t in range(1, 31) if len(fed.sample(t)) == 0]
    states = server_states(made)
    change = states[t].weights - states[t - 1].weights
    assert change.std() == pytest.approx(1.0 / (0.1 * 10), rel=0.1)


def test_nothing_is_kept_or_told_of_who_only_shows_what_would_be_sent() -> None:
    made = experiment(participation=0.1, train={"rounds": 30}, method={"name": "scaffold"})
    fed = federation(made)
    state = made.method.init(fed)
    (t, *_) = [t for t in range(1, 31) if len(fed.sample(t)) == 0]
    fed.runner.begin(t)
    made.method.round(fed, state, t)
    record, tables = fed.runner.records()
    assert (set(record), tables["clients"], fed.runner.states()) == ({"epsilon"}, [], {})
    assert fed.runner.ledger("privacy")["releases"] == [[0.1, 1, 1]]


# the accountant


def test_epsilon_of_one_sum_is_a_bound_that_is_not_loose() -> None:
    for z in (1.0, 3.0, 10.0):
        exact = analytic_epsilon(z, 1e-5)
        found = Privacy(clip=1, noise_multiplier=z).epsilon({(1.0, 1): 1})
        assert exact <= found <= 1.2 * exact


@examples(15, by_night=200)
@given(
    st.lists(
        st.tuples(st.floats(-6, 0), st.integers(1, 3), st.integers(1, 5000)),
        min_size=1,
        max_size=2,
    ),
    st.floats(0.3, 30),
    st.sampled_from([1e-8, 1e-5, 1e-2]),
)
@example([(math.log10(0.5131392532740474), 1, 3818)], 10.160137795163077, 1e-5)  # digits are lost
@example([(math.log10(0.5), 1, 5000)], 20.0, 1e-5)  # most low fractions are given up
@example([(0.0, 1, 5000)], 0.3, 1e-5)
@example([(-3.0, 1, 1)], 0.5, 1e-2)  # ε = 0 by low orders alone
@example([(-6.0, 1, 1)], 0.5, 1e-5)
@example([(-1.0, 1, 3), (-0.6, 2, 7), (0.0, 1, 1), (-1.0, 3, 5)], 1.3, 1e-5)
def test_epsilon_is_the_least_of_all_orders(
    drawn: list[tuple[float, int, int]], z: float, delta: float
) -> None:
    """Though only those are computed that may give it."""
    releases = {(10**q, r): rounds for q, r, rounds in drawn}
    accountant = RdpAccountant()
    for (q, r), rounds in releases.items():
        noise = dp_accounting.GaussianDpEvent(z / math.sqrt(r))
        accountant.compose(dp_accounting.PoissonSampledDpEvent(q, noise), rounds)
    privacy = Privacy(clip=1, noise_multiplier=z, delta=delta)
    expected = accountant.get_epsilon(delta)
    for _ in range(2):  # divergences that were kept are added up to the same bits
        assert privacy.epsilon(releases) == expected


def test_epsilon_of_no_sum_and_of_no_noise() -> None:
    assert Privacy(clip=1, noise_multiplier=2).epsilon({}) == 0
    assert Privacy(clip=1, noise_multiplier=0).epsilon({(0.1, 1): 1}) == math.inf


def test_epsilon_is_on_record(finish: Finish) -> None:
    done = finish(privacy={"clip": 1, "noise_multiplier": 1}, train={"participation": 0.5})
    privacy = Privacy(clip=1, noise_multiplier=1)
    expected = [privacy.epsilon({(0.5, 1): t}) for t in range(1, 11)]
    assert done.rounds["epsilon"].tolist() == pytest.approx(expected)


# what it covers


def sections_of(name: str, **sections: Any) -> dict[str, Any]:
    if name == "feddyn":
        sections["method"] = {"name": name, "scale": "none"}
    if name == "fedadagrad":  # of a rate at which no step is longer than the mean change
        sections["method"] = {"name": name, "server_lr": 2e-3, "tau": 1e-3}
    return with_method(name, **sections)


# What is refused, by the reason.
REFUSED = {
    name: "/".join(methods.find(name).learns.asks) or "averages no updates"
    for name in NETWORK_METHODS
    if methods.find(name).learns.asks or not methods.find(name).learns.averages
} | {"fednova": "clip", "fedbuff": "finish first"}
COVERED = [name for name in NETWORK_METHODS if name not in REFUSED]


@pytest.mark.parametrize("name", by_day(COVERED, [*MECHANISMS, "fedavg", "fedadam"]))
def test_a_method_is_covered(name: str) -> None:
    """Each vector that it sends has its reference.

    Without noise and clipping it does what it does, here of clients with equally many samples.
    Clipped, a model moves no further than the norm in a round, but for the server's own steps.
    """
    sections = sections_of(
        name,
        data={"name": "synthetic", "samples": 400},
        partition={"kind": "iid", "clients": 10},
        train={**TRAIN, "rounds": 3},
    )
    plain, private, clipped, noisy = (
        server_states(small_experiment(**sections, **privacy))
        for privacy in (
            {},
            *(
                {"privacy": {"clip": clip, "noise_multiplier": z}}
                for clip, z in ((1e5, 0), (1e-3, 0), (1, 0.1))
            ),
        )
    )
    for one, other in zip(plain, private, strict=True):
        np.testing.assert_allclose(one.weights, other.weights, atol=2e-6)
    before, after = (state.weights.astype(np.float64) for state in clipped[:2])
    assert 0 < np.linalg.norm(after - before) < 1.01e-3
    assert np.isfinite(noisy[-1].weights).all()


@pytest.mark.parametrize("name", REFUSED)
def test_a_method_that_is_not_covered_is_refused(name: str) -> None:
    message = rf"method.name={name} .*(privacy|take another)"
    with pytest.raises(BadInput, match=message):
        prepare(experiment(**sections_of(name, train={"rounds": 4})))
