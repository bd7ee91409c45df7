"""Server optimisers, normalised and fair averaging: their formulas, client by client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import ByHand, close
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments import Finish, federation, server_states, small_experiment
from fedsim.errors import ClientError, Diverged
from fedsim.objectives import Classification

Floats = NDArray[np.float64]

# Without a ReLU, at whose kink rounding would show; little data with clients of many sizes.
TABLE = {"name": "synthetic", "shape": [6], "classes": 3, "samples": 200, "test_samples": 20}
LITTLE: dict[str, Any] = {"data": TABLE, "model": {"name": "mlp", "hidden": []}}
# Of clients with 200 / 10 examples each.
EVEN: dict[str, Any] = {**LITTLE, "partition": {"kind": "iid", "clients": 10}}
SECOND: dict[str, Callable[[Floats, Floats], Floats]] = {
    "fedadagrad": lambda v, square: v + square,
    "fedadam": lambda v, square: 0.8 * v + 0.2 * square,
    "fedyogi": lambda v, square: np.where(v > square, v - 0.2 * square, v + 0.2 * square),
}


def by_hand(method: dict[str, Any], train: dict[str, Any]) -> ByHand:
    return ByHand(small_experiment(**LITTLE, method=method, train=train))


@pytest.mark.parametrize("name", SECOND)
def test_server_optimizers(name: str) -> None:
    """With a warm-up over a round, and then a third after each."""
    method: dict[str, Any] = {"name": name, "server_lr": 0.05, "beta1": 0.7, "tau": 0.01}
    method["server_schedule"] = {"name": "step", "warmup": 1, "every": 1, "gamma": 1 / 3}
    if name != "fedadagrad":
        method["beta2"] = 0.8
    hand = by_hand(method, {"rounds": 3})
    x = hand.initial.numpy()
    m, v = np.zeros_like(x), np.full_like(x, 0.01**2)
    for t, _, state, _ in hand.rounds():
        delta = hand.fedavg(x, t).numpy() - x
        m = 0.7 * m + 0.3 * delta
        v = SECOND[name](v, delta**2)
        x = x + (1 / 2, 1, 1 / 3)[t - 1] * 0.05 * m / (np.sqrt(v) + 0.01)
        close(state.m, m, 1e-6)
        close(state.v, v, 1e-6)
        close(state.weights, x)


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_fednova(finish: Finish, momentum: float) -> None:
    method: dict[str, Any] = {"name": "fednova"}
    train: dict[str, Any] = {"rounds": 2, "local_epochs": 2, "batch_size": 4}
    train |= {"optimizer": {"lr": 0.05, "momentum": momentum}}
    hand = by_hand(method, train)
    w, p, effective = hand.initial, hand.n / hand.n.sum(), []
    for t, _, state, _ in hand.rounds():
        directions, norms = [], []
        for k in range(10):
            velocity, count = torch.zeros_like(w), 0

            def step(g: Tensor, _: Tensor) -> Tensor:
                nonlocal velocity, count
                velocity, count = momentum * velocity + g, count + 1
                return velocity

            change = hand.trained(w, t, k, step) - w
            # a_k: how often each gradient counts in the change.
            a = [sum(momentum**i for i in range(count - s)) for s in range(count)]
            norms.append(sum(a))
            directions.append(change / sum(a))
        effective.append(np.average(norms, weights=p))
        w = w + effective[-1] * hand.mean(directions, p)
        close(state.weights, w)
    assert len(set(norms)) > 3
    assert finish(**LITTLE, method=method, train=train).rounds[
        "tau_eff"
    ].tolist() == pytest.approx(effective)


def test_qfedavg() -> None:
    q, L = 0.7, 1 / 0.1
    hand = by_hand({"name": "qfedavg", "q": q}, {"rounds": 3})
    w = hand.initial
    for t, _, state, _ in hand.rounds():
        above, below = torch.zeros_like(w), 0.0
        for k in range(10):
            F, change = hand.loss(w, k), L * (w - hand.trained(w, t, k))
            h = q * F ** (q - 1) * (change**2).sum() + L * F**q
            above += hand.n[k] * F**q * change
            below += hand.n[k] * h
        w = w - above / below
        close(state.weights, w)


class TestAFL:
    def test_the_mixture_and_the_model(self) -> None:
        hand = by_hand({"name": "afl", "mixture_lr": 1.0}, {"rounds": 3})
        w, mixture = hand.initial, hand.n / hand.n.sum()
        np.testing.assert_array_equal(hand.experiment.method.init(hand.fed).mixture, mixture)
        for t, _, state, _ in hand.rounds():
            losses = np.array([hand.loss(w, k) for k in range(10)])
            w = hand.mean([hand.trained(w, t, k) for k in range(10)], mixture)
            mixture = nearest_mixture(mixture + 1.0 * losses)
            close(state.weights, w)
            close(state.mixture, mixture)
        assert mixture.min() == 0  # the case of the projection

    def test_a_client_without_a_share_does_not_train(self, finish: Finish) -> None:
        done = finish(
            method={"name": "afl", "mixture_lr": 5.0},
            train={"rounds": 4, "participation": 0.5},
            **LITTLE,
        )
        idle = done.clients["mixture"] == 0
        assert 0 < idle.sum() < len(idle)
        assert (done.clients["bytes_up"][idle] == 0).all()
        assert done.clients["steps"][idle].isna().all()
        model = 4 * (6 * 3 + 3)
        assert (done.clients["bytes_up"][~idle] == model).all()
        assert (done.clients["bytes_down"] == model).all()

    def test_nobody_in_the_cohort_has_a_share(self) -> None:
        experiment = small_experiment(
            method={"name": "afl", "mixture_lr": 1.0},
            train={"rounds": 1, "participation": 0.3},
            **LITTLE,
        )
        fed, method = federation(experiment), experiment.method
        before = method.init(fed)
        cohort = fed.sample(1)
        mixture = np.full(10, 1 / 7)
        mixture[cohort] = 0
        fed.runner.begin(1)
        after = method.round(fed, type(before)(before.weights, mixture), 1)
        np.testing.assert_array_equal(after.weights, before.weights)
        assert after.mixture[cohort].max() > 0  # whose loss is the highest

    def test_clients_that_are_not_drawn_keep_their_share(self) -> None:
        experiment = small_experiment(
            method={"name": "afl"}, train={"rounds": 1, "participation": 0.3}, **LITTLE
        )
        before, after = server_states(experiment)
        drawn = np.isin(np.arange(10), federation(experiment).sample(1))
        np.testing.assert_allclose(after.mixture[~drawn], before.mixture[~drawn], atol=1e-12)
        assert (np.abs(after.mixture - before.mixture)[drawn] > 1e-5).all()


def nearest_mixture(v: Floats) -> Floats:
    """The projection onto the simplex: max(v − θ, 0), where θ makes the largest k sum to 1."""
    theta = ((np.sort(v)[::-1].cumsum() - 1) / np.arange(1, len(v) + 1)).max()
    return np.maximum(v - theta, 0)


class TestMimeLite:
    def test_momentum_of_the_server_in_every_local_step(self) -> None:
        beta, eta, decay = 0.7, 0.1, 0.01
        train: dict[str, Any] = {"rounds": 3, "participation": 0.5, "local_epochs": 2}
        train |= {"optimizer": {"lr": eta, "weight_decay": decay}}
        hand = by_hand({"name": "mime_lite", "beta": beta}, train)
        x, m = hand.initial, torch.zeros(())
        for t, cohort, state, _ in hand.rounds():
            own = [
                hand.trained(x, t, k, lambda g, y, m=m: (1 - beta) * (g + decay * y) + beta * m)
                for k in cohort
            ]
            gradients = [hand.gradient(x, hand.data(k)) + decay * x for k in cohort]
            m = beta * m + (1 - beta) * hand.mean(gradients)
            x = hand.mean(own)
            close(state.weights, x)
            close(state.momentum, m)

    @pytest.mark.parametrize("deadline", [None, 1.2])
    def test_the_gradient_takes_time(self, finish: Finish, deadline: float | None) -> None:
        """That of a pass over the examples, which partial work leaves to fewer local steps."""
        devices = {"speed": 40, "deadline": deadline, "partial_work": deadline is not None}
        lite, plain = (
            finish(
                method={"name": name},
                train={"rounds": 1, "local_epochs": 3, "batch_size": 4},
                devices=devices,
                **EVEN,
            ).clients
            for name in ("mime_lite", "fedavg")
        )
        if deadline is None:
            link = 8 * plain["bytes_down"] / 20e6 + 8 * plain["bytes_up"] / 5e6
            np.testing.assert_allclose(plain["simulated_seconds"] - link, 60 / 40)
            np.testing.assert_allclose(lite["simulated_seconds"] - 2 * link, 80 / 40)
        else:
            assert (plain["steps"] < 3 * 20 / 4).all()
            assert (lite["steps"] == plain["steps"] - 20 / 4).all()


class Endless(Classification):
    """An infinite loss with the gradient of a finite one."""

    name: str = "test_server_steps:Endless"

    def loss(self, network: nn.Module, x: Tensor, y: Tensor, context: Any) -> Tensor:
        return super().loss(network, x, y, context) + torch.inf

    def output_gradient(self) -> None:
        return None


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("afl", Diverged, "training diverged in round 1: the loss of client 0 is inf"),
        ("qfedavg", ClientError, "the update's weight is inf"),
    ],
)
def test_losses_that_are_not_finite_stop_a_run(
    name: str, error: type[Exception], message: str
) -> None:
    endless = small_experiment(
        method={"name": name}, objective={"name": Endless.model_fields["name"].default}, **LITTLE
    )
    with pytest.raises(error, match=message):
        server_states(endless)
