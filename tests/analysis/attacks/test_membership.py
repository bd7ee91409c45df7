"""Membership inference against its definitions, and on a network that learns by heart."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import norm
from torch import Tensor, nn

from experiments import examples, refusal
from fedsim.analysis.attacks.membership import (
    Outcome,
    confidence,
    entropy_scores,
    fit,
    guessing,
    halves,
    lira_scores,
    log_norm,
    loss_scores,
    map_scores,
    norm_scores,
    outcome,
    shadow_models,
    variance_scores,
)
from fedsim.training import Train, logits

pytestmark = pytest.mark.filterwarnings("error")
CPU = torch.device("cpu")
SOON = Train.model_validate({"optimizer": {"name": "adam", "lr": 0.01}, "batch_size": 20})


def by_all_thresholds(members: list[int], others: list[int]) -> Outcome:
    """In whole numbers of pairs and of those above; the AUC as the share of pairs in order."""
    m, o = np.array(members), np.array(others)
    auc = (np.sign(np.subtract.outer(m, o)) + 1).mean() / 2
    thresholds = np.array([*members, *others, max(members + others) + 1])[:, None]
    tp, fp = (m >= thresholds).sum(axis=1), (o >= thresholds).sum(axis=1)
    best = ((tp / len(m) + 1 - fp / len(o)) / 2).max()
    return Outcome(auc, best, tp[100 * fp <= len(o)].max() / len(m))


few = st.lists(st.integers(-3, 3), min_size=1, max_size=12)  # so that there are ties
many = st.lists(st.integers(-3, 30), min_size=95, max_size=220)  # so that 1 % is some of them


@examples(80)
@given(few, few | many)
@example([9, 5, 4, 1], [5, 2, 0])
@example([2, 3], [0, 1])
@example([0, 1], [2, 3])
@example([0] * 3, [0] * 5)
@example([*range(200)], [*range(200)])  # all thresholds along a straight piece of the curve
@example([207, 205, 203, 197, 196, 195], [2 * k for k in range(100)])  # one false positive in 100
@example([207, 205, 203, 197, 196, 195], [2 * k for k in range(1, 100)])  # is more than 1 % of 99
@example([207, 205, 203, 197, 196, 195], [*range(0, 200, 2), 198])  # nor are two of 101 few enough
def test_outcome_is_that_of_all_thresholds_in_turn(members: list[int], others: list[int]) -> None:
    found = outcome(np.array(members, dtype=np.float64), np.array(others, dtype=np.float64))
    expected = astuple(by_all_thresholds(members, others))
    assert astuple(found) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("members", "others"), [(12, 10), (40, 40), (150, 400)])
def test_guessing_has_its_interval(members: int, others: int) -> None:
    rng = np.random.default_rng(0)
    found = [
        outcome(rng.standard_normal(members), rng.standard_normal(others)) for _ in range(600)
    ]
    for name, (low, high) in guessing(members, others).items():
        drawn = np.array([getattr(one, name) for one in found])
        assert ((low <= drawn) & (drawn <= high)).mean() > 0.93, name
        assert (drawn < high).mean() < 0.985, name


def test_fit_is_the_accuracy_inside_and_outside() -> None:
    logits = np.array([[1.0, 0], [0, 1], [1, 0], [1, 0]])
    found = fit(logits, np.array([0, 1, 1, 0]), np.array([True, True, True, False]))
    assert (found.inside, found.outside) == (2 / 3, 1.0)
    right, wrong = math.log1p(math.exp(-1)), math.log1p(math.e)
    assert (found.inside_loss, found.outside_loss) == pytest.approx(
        ((2 * right + wrong) / 3, right)
    )


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(logits)
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_scores_are_the_plain_formulas(classes: int) -> None:
    rng = np.random.default_rng(classes)
    logits = 3 * rng.standard_normal((50, classes))
    labels = rng.integers(classes, size=50)
    before = logits.copy()
    p = softmax(logits)
    own = p[np.arange(50), labels]
    np.testing.assert_allclose(loss_scores(logits, labels), np.log(own), rtol=1e-9)
    np.testing.assert_allclose(entropy_scores(logits), (p * np.log(p)).sum(axis=1), rtol=1e-9)
    expected = np.log(own / (1 - own))
    np.testing.assert_allclose(confidence(logits, labels), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(logits, before)


def test_scores_of_huge_logits() -> None:
    logits = np.array([[1000, -1000, 0], [1000, -1000, 0], [1000, 1000, -1000]], dtype=np.float32)
    labels = np.array([0, 1, 1])
    np.testing.assert_allclose(confidence(logits, labels), [1000, -2000, 0], atol=1e-12)
    np.testing.assert_allclose(loss_scores(logits, labels), [0, -2000, -math.log(2)], atol=1e-12)
    np.testing.assert_allclose(entropy_scores(logits), [0, 0, -math.log(2)], atol=1e-12)
    # And of probabilities that all round to one.
    scores = loss_scores(np.array([[40.0, 0], [50, 0], [60, 0]]), np.zeros(3, dtype=np.int64))
    np.testing.assert_allclose(scores, [-math.exp(-40), -math.exp(-50), -math.exp(-60)], rtol=1e-9)


@pytest.mark.parametrize("shadows", [2, 3, 8])
def test_lira_is_the_ratio_written_out(shadows: int) -> None:
    rng = np.random.default_rng(shadows)
    n = 7
    inside = halves(n, shadows, rng)
    confidences = rng.standard_normal((shadows, n)) + 2.0 * inside
    target = rng.standard_normal(n)
    density_in, density_out = (
        norm.logpdf(target, confidences.mean(axis=0, where=part), confidences[part].std())
        for part in (inside, ~inside)
    )
    found = lira_scores(target, confidences, inside)
    np.testing.assert_allclose(found, density_in - density_out, rtol=1e-10)
    # Where both densities are 0 as numbers, their logarithms still differ.
    assert np.isfinite(lira_scores(500 * target, confidences, inside)).all()


@examples(50)
@given(st.integers(0, 40), st.integers(2, 9), st.integers(0, 2**32 - 1))
def test_halves_have_each_example_in_half_of_the_sets(n: int, shadows: int, seed: int) -> None:
    inside = halves(n, shadows, np.random.default_rng(seed))
    assert inside.shape == (shadows, n)
    assert inside.dtype == np.bool_
    assert (inside.sum(axis=0) == shadows // 2).all()
    np.testing.assert_array_equal(inside, halves(n, shadows, np.random.default_rng(seed)))


def test_halves_are_random() -> None:
    kinds, counts = np.unique(
        halves(6000, 4, np.random.default_rng(0)), axis=1, return_counts=True
    )
    assert kinds.shape == (4, 6)  # all ways to choose two of four
    assert (abs(counts - 1000) < 150).all()


MAPS = np.array([[3.0, -1.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-2.0, -2.0, -2.0, -2.0]])


def test_scores_of_explanations_are_the_plain_formulas() -> None:
    # The mean of the first is 1: (4 + 4 + 1 + 1)/4.
    np.testing.assert_allclose(variance_scores(MAPS), [-2.5, 0, 0])
    np.testing.assert_allclose(norm_scores(MAPS), [-6, 0, -8])
    np.testing.assert_allclose(norm_scores(MAPS.astype(np.float32)), [-6, 0, -8])
    np.testing.assert_allclose(
        log_norm(-norm_scores(MAPS)), [math.log(6), math.log(6), math.log(8)]
    )
    np.testing.assert_array_equal(log_norm(np.zeros(2)), [0, 0])
    np.testing.assert_array_equal(log_norm(np.array([math.nan, 1])), [math.nan, 0])


def test_lira_on_maps_is_the_ratio_of_gaussians_written_out() -> None:
    rng = np.random.default_rng(0)
    target, inside, outside = rng.standard_normal((3, 20, 7))
    found = map_scores(target, inside, outside)
    for sigma in 0.5, 2.0:
        each = norm.logpdf(target, inside, sigma) - norm.logpdf(target, outside, sigma)
        np.testing.assert_allclose(found / (2 * sigma**2), each.sum(axis=1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))


def dropout_net() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


def points(n: int) -> tuple[Tensor, Tensor]:
    """Random points, with labels that have nothing to do with them."""
    rng = np.random.default_rng(n)
    x = rng.standard_normal((n, 20)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(rng.integers(2, size=n))


def shadow_confidences(
    build: Callable[[], nn.Module],
    x: Tensor,
    y: Tensor,
    inside: NDArray[np.bool_],
    section: Train,
    epochs: int,
    seed: int,
) -> NDArray[np.float64]:
    """(S, n) of shadow models, each asked before the next is trained."""
    found = []
    for model in shadow_models(build, x, y, inside, section, epochs, seed, CPU):
        assert not model.training
        found.append(confidence(logits(model, x), y.numpy()))
    return np.stack(found)


def test_shadow_models_are_the_same_whatever_was_drawn_before() -> None:
    x, y = points(30)
    inside = halves(30, 3, np.random.default_rng(0))

    def confidences(inside: NDArray[np.bool_], seed: int = 5) -> NDArray[np.float64]:
        return shadow_confidences(dropout_net, x, y, inside, SOON, 2, seed)

    first = confidences(inside)
    torch.rand(7)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    np.testing.assert_array_equal(confidences(inside), first)
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])
    np.testing.assert_array_equal(confidences(inside[:2]), first[:2])
    assert not np.isclose(confidences(inside, seed=6), first).all(axis=1).any()


def zeros() -> nn.Module:
    layer = nn.Linear(20, 2)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def test_shadow_models_have_streams_of_their_own() -> None:
    x, y = points(30)
    same = np.tile(np.arange(30) < 15, (2, 1))
    slow = Train.model_validate({"optimizer": {"lr": 1e-12}, "batch_size": 2})
    fast = Train.model_validate({"optimizer": {"lr": 0.1}, "batch_size": 2})
    # Initial weights alone, which hardly move, and the order of the batches alone.
    for build, section in (mlp, slow), (zeros, fast):
        drawn = [shadow_confidences(build, x, y, same, section, 1, seed) for seed in (0, 1)]
        first, second, third, fourth = np.concatenate(drawn)
        for other in second, third, fourth:
            assert not np.isclose(first, other).all()
        assert not np.isclose(third, fourth).all()


def test_shadow_models_learn_from_their_own_part_and_are_asked_about_all() -> None:
    x, y = points(1100)
    inside = halves(1100, 2, np.random.default_rng(0))
    calls: list[tuple[bool, bool, Tensor]] = []

    def watched() -> nn.Module:
        layer = nn.Linear(20, 2)
        layer.register_forward_hook(
            lambda own, given, _: calls.append((own.training, torch.is_grad_enabled(), given[0]))
        )
        return layer

    found = shadow_confidences(watched, x, y, inside, Train(batch_size=100), 3, 0)
    assert found.shape == (2, 1100)
    assert np.isfinite(found).all()
    place = {row.numpy().tobytes(): i for i, row in enumerate(x)}
    seen: list[list[int]] = [[], []]
    asked: list[Tensor] = []
    for training, gradients, batch in calls:
        assert training == gradients
        if training:
            seen[1 if asked else 0] += [place[row.numpy().tobytes()] for row in batch]
            assert len(batch) <= 100
        else:
            asked.append(batch)
            assert len(batch) <= 500
    assert torch.equal(torch.cat(asked), torch.cat([x, x]))
    for rows, part in zip(seen, inside, strict=True):
        assert sorted(rows) == sorted(3 * np.flatnonzero(part).tolist())  # three epochs


def test_shadow_models_take_the_steps_of_the_clients() -> None:
    """Epochs of a single full batch of plain SGD, on their part alone, from known weights."""
    x, y = points(10)
    part = np.arange(10) < 6
    section = Train.model_validate({"optimizer": {"lr": 0.3}, "lr_decay": 0.5})
    inputs, labels = x.double().numpy(), y.numpy()
    w, b = np.zeros((2, 20)), np.zeros(2)
    for epochs in (1, 2, 3):
        (found,) = shadow_confidences(zeros, x, y, part[np.newaxis], section, epochs, 0)
        g = softmax(inputs[part] @ w.T + b) - np.eye(2)[labels[part]]  # of cross-entropy
        w, b = w - 0.3 * g.T @ inputs[part] / 6, b - 0.3 * g.mean(axis=0)
        z = inputs @ w.T + b
        expected = z[range(10), labels] - z[range(10), 1 - labels]
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_each_shadow_model_needs_an_example() -> None:
    inside = np.array([[True, True], [False, False]])
    told = refusal(lambda: shadow_confidences(mlp, *points(2), inside, SOON, 1, 0))
    assert told == "inside: shadow model 1 has no training example"
