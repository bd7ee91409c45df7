"""Server optimisers, normalised and fair averaging: their formulas, client by client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments import federation, server_states, small_experiment
from fedsim import Experiment, Run
from fedsim.errors import ClientError, Diverged, ExperimentError
from fedsim.launch.prepare import prepare
from fedsim.methods.afl import onto_simplex
from fedsim.objectives import Classification
from fedsim.support.rng import keyed_rng

Finish = Callable[..., Run]
Floats = NDArray[np.float64]

# Without a ReLU, at whose kink rounding would show.
LITTLE: dict[str, Any] = {"model": {"name": "mlp", "hidden": []}}
# Of clients with 200 / 10 examples each.
EVEN: dict[str, Any] = {
    **LITTLE,
    "data": {"name": "synthetic", "samples": 200, "test_samples": 20},
    "partition": {"kind": "iid", "clients": 10},
}


class Locally:
    """The clients' side of an experiment in plain PyTorch, in double precision."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.fed = federation(experiment)
        self.n = self.fed.server.num_samples
        self.dataset, self.splits, spec = prepare(experiment)
        self.network = spec.build_model().double()

    def examples(self, k: int) -> tuple[Tensor, Tensor]:
        rows = self.splits.train[k]
        return torch.tensor(self.dataset.x)[rows].double(), torch.tensor(self.dataset.y)[rows]

    def loss(self, w: Floats, k: int) -> float:
        """F_k(w)."""
        nn.utils.vector_to_parameters(torch.tensor(w), self.network.parameters())
        x, y = self.examples(k)
        return float(cross_entropy(self.network(x), y).detach())

    def gradient(self, w: Floats, x: Tensor, y: Tensor) -> Floats:
        nn.utils.vector_to_parameters(torch.tensor(w), self.network.parameters())
        parts = torch.autograd.grad(
            cross_entropy(self.network(x), y), list(self.network.parameters())
        )
        return torch.cat([part.reshape(-1) for part in parts]).numpy()

    def steps(self, w: Floats, t: int, k: int, step: Callable[[Floats], Floats]) -> Floats:
        """w_k after local steps from w, each of which subtracts step(gradient)."""
        train = self.experiment.train
        rng = keyed_rng(self.experiment.seed, "local_update/batches", t, k)
        x, y = self.examples(k)
        for _ in range(train.local_epochs):
            for rows in torch.tensor(rng.permutation(len(y))).split(train.batch_size):
                w = w - step(self.gradient(w, x[rows], y[rows]))
        return w

    def sgd(self, w: Floats, t: int, k: int) -> Floats:
        """w_k after plain SGD."""
        eta = self.experiment.train.optimizer.lr
        return self.steps(w, t, k, lambda g: eta * g)

    def mean(self, w: Floats, t: int) -> Floats:
        """FedAvg's mean over all clients."""
        trained = [self.sgd(w, t, k) for k in range(10)]
        return np.average(trained, axis=0, weights=self.n)


SECOND: dict[str, Callable[[Floats, Floats], Floats]] = {
    "fedadagrad": lambda v, square: v + square,
    "fedadam": lambda v, square: 0.8 * v + 0.2 * square,
    "fedyogi": lambda v, square: np.where(v > square, v - 0.2 * square, v + 0.2 * square),
}


class TestServerOptimizers:
    @pytest.mark.parametrize("name", SECOND)
    def test_steps(self, name: str) -> None:
        method: dict[str, Any] = {"name": name, "server_lr": 0.05, "beta1": 0.7, "tau": 0.01}
        if name != "fedadagrad":
            method["beta2"] = 0.8
        experiment = small_experiment(method=method, train={"rounds": 3}, **LITTLE)
        locally, states = Locally(experiment), server_states(experiment)
        x = states[0].weights.astype(np.float64)
        m, v = np.zeros_like(x), np.full_like(x, 0.01**2)
        for t in (1, 2, 3):
            delta = locally.mean(x, t) - x
            m = 0.7 * m + 0.3 * delta
            v = SECOND[name](v, delta**2)
            x = x + 0.05 * m / (np.sqrt(v) + 0.01)
            np.testing.assert_allclose(states[t].m, m, atol=1e-6)
            np.testing.assert_allclose(states[t].v, v, atol=1e-6)
            np.testing.assert_allclose(states[t].weights, x, atol=1e-5)

    @pytest.mark.parametrize("name", SECOND)
    def test_with_a_large_tau_it_is_fedavg(self, name: str) -> None:
        """√v + τ stays 2τ then, for all parameters."""
        large = {"name": name, "tau": 1e3, "server_lr": 2e3, "beta1": 0}
        if name != "fedadagrad":
            large["beta2"] = 1 - 1e-9
        common: dict[str, Any] = {"train": {"rounds": 2}, **LITTLE}
        plain = server_states(small_experiment(**common))
        adaptive = server_states(small_experiment(method=large, **common))
        np.testing.assert_allclose(adaptive[2].weights, plain[2].weights, atol=1e-6)

    @pytest.mark.parametrize("name", ["fedavgm", "fedadam"])
    def test_schedule_of_the_server_s_learning_rate(self, name: str) -> None:
        """Warm-up over a round and then a third after each: 1/2, 1, 1/3."""
        schedule = {"name": "step", "warmup": 1, "every": 1, "gamma": 1 / 3}
        one, other = (
            server_states(
                small_experiment(
                    method={"name": name, "server_lr": 0.1, **further},
                    train={"rounds": 3},
                    **LITTLE,
                )
            )
            for further in ({}, {"server_schedule": schedule})
        )
        first = one[1].weights - one[0].weights
        np.testing.assert_allclose(other[1].weights - one[0].weights, first / 2, atol=1e-7)
        for t, factor in ((2, 1), (3, 1 / 3)):
            step = other[t].weights - other[t - 1].weights
            state = other[t]
            direction = (
                -state.velocity if name == "fedavgm" else state.m / (np.sqrt(state.v) + 1e-3)
            )
            np.testing.assert_allclose(step, 0.1 * factor * direction, atol=1e-6)

    @pytest.mark.parametrize("name", ["fedavgm", "fedyogi"])
    def test_a_warm_up_that_never_ends_is_refused(self, name: str) -> None:
        method = {"name": name, "server_schedule": {"warmup": 3}}
        message = "method.server_schedule.warmup=3 leaves none of train.rounds=3"
        with pytest.raises(ExperimentError, match=message):
            prepare(small_experiment(method=method, train={"rounds": 3}))


class TestFedNova:
    @pytest.mark.parametrize("momentum", [0.0, 0.6])
    def test_normalised_averaging(self, finish: Finish, momentum: float) -> None:
        sections: dict[str, Any] = {
            "method": {"name": "fednova"},
            "train": {
                **{"rounds": 2, "local_epochs": 2, "batch_size": 32},
                "optimizer": {"lr": 0.05, "momentum": momentum},
            },
            **LITTLE,
        }
        experiment = small_experiment(**sections)
        locally, states = Locally(experiment), server_states(experiment)
        w, p, effective = states[0].weights.astype(np.float64), locally.n / locally.n.sum(), []
        for t in (1, 2):
            directions, norms = [], []
            for k in range(10):
                velocity, count = np.zeros_like(w), 0

                def step(g: Floats) -> Floats:
                    nonlocal velocity, count
                    velocity, count = momentum * velocity + g, count + 1
                    return 0.05 * velocity

                change = locally.steps(w, t, k, step) - w
                # a_k: how often each gradient counts in the change.
                a = [sum(momentum**i for i in range(count - s)) for s in range(count)]
                norms.append(sum(a))
                directions.append(change / sum(a))
            effective.append(np.average(norms, weights=p))
            w = w + effective[-1] * np.average(directions, axis=0, weights=p)
            np.testing.assert_allclose(states[t].weights, w, atol=1e-5)
        assert len(set(norms)) > 3
        assert finish(**sections).rounds["tau_eff"].tolist() == pytest.approx(effective)

    def test_with_equally_many_steps_it_is_fedavg(self) -> None:
        common: dict[str, Any] = {"train": {"rounds": 2, "local_steps": 3}, **LITTLE}
        plain = server_states(small_experiment(**common))
        normalised = server_states(small_experiment(method={"name": "fednova"}, **common))
        np.testing.assert_allclose(normalised[2].weights, plain[2].weights, atol=1e-6)


class TestQFedAvg:
    def test_the_paper_s_step(self) -> None:
        q, L = 0.7, 1 / 0.1
        experiment = small_experiment(
            method={"name": "qfedavg", "q": q}, train={"rounds": 3}, **LITTLE
        )
        locally, states = Locally(experiment), server_states(experiment)
        w = states[0].weights.astype(np.float64)
        for t in (1, 2, 3):
            above, below = np.zeros_like(w), 0.0
            for k in range(10):
                F, change = locally.loss(w, k), L * (w - locally.sgd(w, t, k))
                h = q * F ** (q - 1) * np.sum(change**2) + L * F**q
                above += locally.n[k] * F**q * change
                below += locally.n[k] * h
            w = w - above / below
            np.testing.assert_allclose(states[t].weights, w, atol=1e-5)

    @pytest.mark.parametrize("model", [LITTLE["model"], {"name": "resnet8", "width": 2}])
    def test_with_q_0_it_is_fedavg(self, finish: Finish, model: dict[str, Any]) -> None:
        common = {
            **{"model": model, "partition": {"clients": 4}},
            "train": {"rounds": 2, "participation": 0.5, "batch_size": 256},
        }
        fair = finish(method={"name": "qfedavg", "q": 0}, **common)
        assert fair.result_hash == finish(**common).result_hash


class TestAFL:
    def test_the_mixture_and_the_model(self) -> None:
        experiment = small_experiment(
            method={"name": "afl", "mixture_lr": 1.0}, train={"rounds": 3}, **LITTLE
        )
        locally, states = Locally(experiment), server_states(experiment)
        w, mixture = states[0].weights.astype(np.float64), locally.n / locally.n.sum()
        np.testing.assert_array_equal(states[0].mixture, mixture)
        for t in (1, 2, 3):
            losses = np.array([locally.loss(w, k) for k in range(10)])
            trained = [locally.sgd(w, t, k) for k in range(10)]
            w = np.average(trained, axis=0, weights=mixture)
            mixture = nearest_mixture(mixture + 1.0 * losses)
            np.testing.assert_allclose(states[t].weights, w, atol=1e-5)
            np.testing.assert_allclose(states[t].mixture, mixture, atol=1e-5)
        assert mixture.min() == 0  # the case of the projection

    def test_without_ascent_it_is_fedavg(self) -> None:
        common: dict[str, Any] = {"train": {"rounds": 2, "participation": 0.5}, **LITTLE}
        plain = server_states(small_experiment(**common))
        still = server_states(small_experiment(method={"name": "afl", "mixture_lr": 0}, **common))
        np.testing.assert_allclose(still[2].weights, plain[2].weights, atol=1e-6)

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
        model = 4 * (64 * 10 + 10)
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

    def test_projection(self) -> None:
        rng = np.random.default_rng(0)
        for _ in range(20):
            v = rng.normal(0, 1, rng.integers(1, 9))
            np.testing.assert_allclose(onto_simplex(v), nearest_mixture(v), atol=1e-9)


def nearest_mixture(v: Floats) -> Floats:
    """The projection onto the simplex: max(v − θ, 0), with θ by bisection."""
    low, high = v.min() - 1, v.max()
    for _ in range(100):
        theta = (low + high) / 2
        low, high = (theta, high) if np.maximum(v - theta, 0).sum() > 1 else (low, theta)
    return np.maximum(v - low, 0)


class TestMimeLite:
    def test_momentum_of_the_server_in_every_local_step(self) -> None:
        beta, eta, decay = 0.7, 0.1, 0.01
        experiment = small_experiment(
            method={"name": "mime_lite", "beta": beta},
            train={
                **{"rounds": 3, "participation": 0.5, "local_epochs": 2},
                "optimizer": {"lr": eta, "weight_decay": decay},
            },
            **LITTLE,
        )
        locally, states = Locally(experiment), server_states(experiment)
        x = states[0].weights.astype(np.float64)
        m = np.zeros_like(x)
        for t in (1, 2, 3):
            trained, gradients = [], []
            for k in locally.fed.sample(t):
                y = x
                rng = keyed_rng(experiment.seed, "local_update/batches", t, int(k))
                inputs, labels = locally.examples(k)
                for _ in range(2):
                    for rows in torch.tensor(rng.permutation(len(labels))).split(16):
                        g = locally.gradient(y, inputs[rows], labels[rows]) + decay * y
                        y = y - eta * ((1 - beta) * g + beta * m)
                trained.append(y)
                gradients.append(locally.gradient(x, inputs, labels) + decay * x)
            x, m = np.mean(trained, axis=0), beta * m + (1 - beta) * np.mean(gradients, axis=0)
            np.testing.assert_allclose(states[t].weights, x, atol=1e-5)
            np.testing.assert_allclose(states[t].momentum, m, atol=1e-5)

    def test_without_momentum_it_is_fedavg_with_equal_weights(self) -> None:
        common: dict[str, Any] = {**EVEN, "train": {"rounds": 2}}
        plain = server_states(small_experiment(**common))
        without = server_states(
            small_experiment(method={"name": "mime_lite", "beta": 0}, **common)
        )
        np.testing.assert_allclose(without[2].weights, plain[2].weights, atol=1e-6)

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


@pytest.mark.parametrize(
    ("name", "optimizer", "message"),
    [
        ("fednova", {"name": "adam"}, r"needs train.optimizer.name=sgd: it divides .* adam's"),
        ("qfedavg", {"name": "adamw"}, r"needs train.optimizer.name=sgd: it estimates .* adamw"),
        ("mime_lite", {"name": "adam"}, r"needs train.optimizer.name=sgd and .*momentum=0: cl"),
        ("mime_lite", {"momentum": 0.9}, r"needs train.optimizer.name=sgd and .*momentum=0: cl"),
    ],
)
def test_optimisers_that_do_not_fit_are_refused(
    name: str, optimizer: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExperimentError, match=f"method.name={name} {message}"):
        prepare(small_experiment(method={"name": name}, train={"optimizer": optimizer}))


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
