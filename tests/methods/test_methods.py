"""Methods' equivalences, and their own mathematics."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from experiments import (
    Driven,
    federation,
    server_states,
    small_experiment,
)
from fedsim import Experiment, Run
from fedsim.federation import LocalEngine
from fedsim.launch.prepare import prepare
from fedsim.methods.scaffold import steps_worth
from fedsim.objectives import Classification
from fedsim.support.rng import keyed_rng
from fedsim.training import Optimizer

Finish = Callable[..., Run]

RESNET = {"name": "resnet8", "width": 2}


class TestEquivalences:
    def test_fedprox_without_its_term_is_fedavg(self, finish: Finish) -> None:
        prox = finish(method={"name": "fedprox", "mu": 0.0})
        assert prox.result_hash == finish().result_hash

    @pytest.mark.parametrize(
        "method",
        [
            {"name": "moon", "mu": 0.0},
            {"name": "fedsam", "rho": 0.0},
            {"name": "fedsam", "rho": 0.0, "variant": "asam"},
            {"name": "feddisco", "a": 0.0, "b": 0.0},
        ],
        ids=lambda m: "-".join(map(str, m.values())),
    )
    @pytest.mark.parametrize("model", [{"name": "mlp", "hidden": [16]}, RESNET])
    def test_without_its_own_term_a_method_is_fedavg(
        self, method: dict[str, Any], model: dict[str, Any]
    ) -> None:
        # In small batches batch norm makes much of how a step is rounded.
        train = {"rounds": 3, "participation": 0.5, "batch_size": 64, "optimizer": {"lr": 0.02}}
        common: dict[str, Any] = {"model": model, "train": train}
        plain = server_states(small_experiment(**common))
        without = server_states(small_experiment(**common, method=method))
        np.testing.assert_array_equal(without[0].weights, plain[0].weights)
        for a, b in zip(plain[1:], without[1:], strict=True):
            # Rounding may take an example over a ReLU's kink, so by the distance covered.
            covered = np.linalg.norm(a.weights - plain[0].weights)
            assert np.linalg.norm(b.weights - a.weights) < 1e-3 * covered

    def test_the_first_step_of_feddyn_on_all_data_is_plain(self) -> None:
        """With h = 0, at w = w_server, the linear and the quadratic term cancel."""
        common: dict[str, Any] = {
            "partition": {"kind": "iid", "clients": 1},
            "train": {"rounds": 1, "batch_size": 2000},
        }
        _, plain = server_states(small_experiment(**common))
        _, dynamic = server_states(
            small_experiment(**common, method={"name": "feddyn", "alpha": 0.5})
        )
        np.testing.assert_allclose(dynamic.weights, plain.weights, atol=1e-6)

    def test_privacyised_is_fedavg_on_one_client(self) -> None:
        """But for the order of the examples, which does not matter to one batch of all."""
        train = {"rounds": 3, "batch_size": 2000, "optimizer": {"lr": 0.3}}
        alone = {"kind": "iid", "clients": 1}
        *_, one = server_states(small_experiment(partition=alone, train=train))
        *_, union = server_states(small_experiment(method={"name": "centralised"}, train=train))
        np.testing.assert_allclose(union.weights, one.weights, atol=1e-5)

    def test_fedavgm_without_momentum_is_fedavg(self) -> None:
        plain = server_states(small_experiment(train={"rounds": 3}))
        momentum = server_states(
            small_experiment(method={"name": "fedavgm", "beta": 0.0}, train={"rounds": 3})
        )
        for a, b in zip(plain, momentum, strict=True):
            np.testing.assert_allclose(a.weights, b.weights, atol=1e-6)

    def test_first_round_of_scaffold_is_fedavg_with_equal_weights(self) -> None:
        # Equal sizes, so that FedAvg weighs clients equally too.
        even: dict[str, Any] = {
            "data": {"name": "synthetic", "samples": 200, "test_samples": 20},
            "partition": {"kind": "iid", "clients": 10},
            "train": {"rounds": 1},
        }
        _, plain = server_states(small_experiment(**even))
        _, scaffold = server_states(small_experiment(**even, method={"name": "scaffold"}))
        np.testing.assert_allclose(plain.weights, scaffold.weights, atol=1e-6)

    def test_fedavg_on_one_client_is_plain_sgd(self) -> None:
        experiment = small_experiment(
            partition={"kind": "iid", "clients": 1},
            train={
                "rounds": 3,
                "local_epochs": 2,
                "batch_size": 32,
                "optimizer": {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3},
            },
        )
        dataset, splits, spec = prepare(experiment)
        network = spec.build_model()
        x = torch.tensor(dataset.x)[splits.train[0]]
        y = torch.tensor(dataset.y)[splits.train[0]]
        for t in (1, 2, 3):
            rng = keyed_rng(experiment.seed, "local_update/batches", t, 0)
            sgd = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
            for _ in range(2):
                order = torch.tensor(rng.permutation(len(y)))
                for batch in order.split(32):
                    sgd.zero_grad()
                    nn.functional.cross_entropy(network(x[batch]), y[batch]).backward()
                    sgd.step()
        expected = torch.cat([p.detach().reshape(-1) for p in network.parameters()])
        *_, last = server_states(experiment)
        np.testing.assert_allclose(last.weights, expected.numpy(), atol=2e-6)


SGD: list[dict[str, Any]] = [
    {},
    {"momentum": 0.5},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
]


class TestMathematics:
    """Each method against its formulas, written out client by client in plain PyTorch."""

    def local(self, experiment: Experiment, w: np.ndarray, t: int, k: int, change: Any) -> Any:
        """w_k after local SGD from w, with each step's gradient changed; and τ_k."""
        dataset, splits, spec = prepare(experiment)
        network = spec.build_model()
        flat = torch.tensor(w, dtype=torch.float32)
        nn.utils.vector_to_parameters(flat, network.parameters())
        x = torch.tensor(dataset.x)[splits.train[k]]
        y = torch.tensor(dataset.y)[splits.train[k]]
        rng = keyed_rng(experiment.seed, "local_update/batches", t, k)
        steps = 0
        for _ in range(experiment.train.local_epochs):
            for batch in torch.tensor(rng.permutation(len(y))).split(experiment.train.batch_size):
                loss = nn.functional.cross_entropy(network(x[batch]), y[batch])
                grads = torch.autograd.grad(loss, list(network.parameters()))
                g = torch.cat([part.reshape(-1) for part in grads])
                now = nn.utils.parameters_to_vector(network.parameters()).detach()
                step = now - experiment.train.optimizer.lr * change(g, now)
                nn.utils.vector_to_parameters(step, network.parameters())
                steps += 1
        return nn.utils.parameters_to_vector(network.parameters()).detach().double().numpy(), steps

    def test_scaffold(self) -> None:
        experiment = small_experiment(
            method={"name": "scaffold", "server_lr": 0.7},
            train={"rounds": 3, "participation": 0.4, "local_epochs": 2},
        )
        states = server_states(experiment)
        fed = federation(experiment)
        K, eta = 10, experiment.train.optimizer.lr
        x = states[0].weights.astype(np.float64)
        c, own = np.zeros_like(x), {k: np.zeros_like(x) for k in range(K)}
        for t in (1, 2, 3):
            deltas, changes = [], []
            for k in fed.sample(t):
                correction = torch.tensor(c - own[k], dtype=torch.float32)
                y, steps = self.local(experiment, x, t, k, lambda g, w, d=correction: g + d)
                new = own[k] - c + (x - y) / (steps * eta)
                deltas.append(y - x)
                changes.append(new - own[k])
                own[k] = new
            x = x + 0.7 * np.mean(deltas, axis=0)
            c = c + np.sum(changes, axis=0) / K
            np.testing.assert_allclose(states[t].weights, x, atol=1e-5)
            np.testing.assert_allclose(states[t].control, c, atol=1e-4)
            # What the server keeps is the mean of what all clients keep.
            np.testing.assert_allclose(c, np.mean(list(own.values()), axis=0), atol=1e-12)

    def test_fedprox(self) -> None:
        experiment = small_experiment(
            method={"name": "fedprox", "mu": 0.5}, train={"rounds": 1, "local_epochs": 3}
        )
        before, after = server_states(experiment)
        anchor = torch.tensor(before.weights)
        sizes = federation(experiment).server.num_samples
        trained = [
            self.local(experiment, before.weights, 1, k, lambda g, w: g + 0.5 * (w - anchor))[0]
            for k in range(10)
        ]
        expected = np.average(trained, axis=0, weights=sizes)
        np.testing.assert_allclose(after.weights, expected, atol=1e-5)

    def test_fedavgm(self) -> None:
        experiment = small_experiment(
            method={"name": "fedavgm", "beta": 0.6, "server_lr": 0.5}, train={"rounds": 3}
        )
        states = server_states(experiment)
        sizes = federation(experiment).server.num_samples
        w, v = states[0].weights.astype(np.float64), 0.0
        for t in (1, 2, 3):
            trained = [self.local(experiment, w, t, k, lambda g, _: g)[0] for k in range(10)]
            v = 0.6 * v + (w - np.average(trained, axis=0, weights=sizes))
            w = w - 0.5 * v
            np.testing.assert_allclose(states[t].weights, w, atol=1e-5)

    @pytest.mark.parametrize("optimizer", SGD, ids=str)
    def test_scaffold_keeps_gradients(self, optimizer: dict[str, Any]) -> None:
        """Of a linear loss, c_k⁺ is its gradient in every round, and c is their mean."""
        experiment = small_experiment(
            method={"name": "scaffold"},
            model={"name": "mlp", "hidden": []},
            objective={"name": "networks:LinearLoss"},
            train={"rounds": 3, "local_epochs": 7, "batch_size": 2000, "lr_decay": 0.5}
            | {"optimizer": {"lr": 0.1, **optimizer}},
        )
        fed, method = federation(experiment), experiment.method
        dataset, splits, _ = prepare(experiment)
        gradients = []
        for k in range(10):
            x, y = dataset.x[splits.train[k]], dataset.y[splits.train[k]]
            chosen = np.eye(10)[y]
            g = -chosen.T @ x.reshape(len(x), -1) / len(x)
            gradients.append(np.concatenate([g.ravel(), -chosen.mean(axis=0)]))
        state = method.init(fed)
        for t in (1, 2, 3):
            fed.runner.begin(t)
            state = method.round(fed, state, t)
            for k, handle in fed.runner.states().items():
                own = fed.runner.fetch(handle)["control"]
                np.testing.assert_allclose(own, gradients[k], atol=2e-5)
            np.testing.assert_allclose(state.control, np.mean(gradients, axis=0), atol=2e-5)

    @pytest.mark.parametrize("steps", [1, 2, 20, 300])
    @pytest.mark.parametrize("optimizer", SGD, ids=str)
    def test_what_local_steps_are_worth(self, optimizer: dict[str, Any], steps: int) -> None:
        """w_0 − w_τ = η·worth·g, by the optimiser itself and by the closed forms."""
        settings = Optimizer.model_validate(optimizer)
        g = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        w = nn.Parameter(torch.zeros_like(g))
        sgd = settings.build(w, lr=0.01)
        for _ in range(steps):
            (w.grad,) = torch.autograd.grad(g @ w, [w])
            sgd.step()
        worth = steps_worth(steps, settings)
        np.testing.assert_allclose(-w.detach(), 0.01 * worth * g, rtol=1e-9)
        m = settings.momentum
        lag = (m if settings.nesterov else 1) * m * (1 - m**steps) / (1 - m)
        assert worth == pytest.approx((steps - lag) / (1 - m), rel=1e-9)
        if not m:
            assert worth == steps

    def test_feddyn(self) -> None:
        experiment = small_experiment(
            method={"name": "feddyn", "alpha": 0.1},
            train={"rounds": 3, "participation": 0.4, "local_epochs": 2},
        )
        states = server_states(experiment)
        fed = federation(experiment)
        K, n = 10, fed.server.num_samples
        w = states[0].weights.astype(np.float64)
        h = {k: np.zeros_like(w) for k in range(K)}
        for t in (1, 2, 3):
            trained = []
            for k in fed.sample(t):
                alpha = 0.1 / (K * n[k] / n.sum())
                linear = torch.tensor(h[k] - w, dtype=torch.float32)
                own, _ = self.local(
                    experiment, w, t, k, lambda g, v, a=alpha, b=linear: g + a * b + a * v
                )
                h[k] += own - w
                trained.append(own)
            mean_h = np.mean(list(h.values()), axis=0)
            w = np.mean(trained, axis=0) + mean_h
            np.testing.assert_allclose(states[t].weights, w - mean_h, atol=1e-5)
            np.testing.assert_allclose(states[t].server, w, atol=1e-5)
            np.testing.assert_allclose(states[t].h, mean_h, atol=1e-5)

    def test_feddyn_as_in_the_paper_scales_all_alike(self) -> None:
        common: dict[str, Any] = {"train": {"rounds": 2, "local_epochs": 2}}
        one, other = (
            server_states(
                small_experiment(method={"name": "feddyn", "alpha": 0.1, "scale": s}, **common)
            )
            for s in ("none", "samples")
        )
        assert not np.allclose(one[2].weights, other[2].weights, atol=1e-4)
        even = {"kind": "iid", "clients": 10, "server_fraction": 7 / 1437}  # 143 each
        one, other = (
            server_states(
                small_experiment(
                    partition=even, method={"name": "feddyn", "alpha": 0.1, "scale": s}, **common
                )
            )
            for s in ("none", "samples")
        )
        assert set(federation(small_experiment(partition=even)).server.num_samples) == {143}
        np.testing.assert_array_equal(one[2].weights, other[2].weights)

    def test_moon_s_loss(self) -> None:
        torch.manual_seed(0)
        experiment = small_experiment(
            method={"name": "moon", "mu": 3.0, "tau": 0.4},
            model={"name": "mlp", "hidden": [12], "projection": 6},
        )
        fed = federation(experiment)
        network = fed.server.model.module
        assert network.head.in_features == 6  # type: ignore[union-attr]
        x, y = torch.randn(5, 1, 8, 8), torch.arange(5)
        others = [
            fed.server.model.vector + 0.3 * torch.randn(fed.server.model.size) for _ in range(2)
        ]
        context = {"global": others[0], "previous": others[1], "mu": torch.tensor([3.0])}
        found = experiment.method.loss(Classification(), network, x, y, context)  # type: ignore[attr-defined]
        zs = []
        for weights in (fed.server.model.vector, *others):
            twin = prepare(experiment)[2].build_model()
            nn.utils.vector_to_parameters(weights, twin.parameters())
            zs.append(twin.features(x).detach().double().numpy())  # type: ignore[operator]
        logits = network(x).detach().double().numpy()
        for i in range(5):
            z, z_global, z_previous = (part[i] for part in zs)
            near, far = (
                np.exp(z @ v / (np.linalg.norm(z) * np.linalg.norm(v)) / 0.4)
                for v in (z_global, z_previous)
            )
            task = np.log(np.exp(logits[i]).sum()) - logits[i, y[i]]
            expected = task - 3.0 * np.log(near / (near + far))
            assert found[i].item() == pytest.approx(expected, rel=1e-4)

    def test_moon_contrasts_once_it_has_a_previous_model(self) -> None:
        """Without one a client's first round is FedAvg's."""
        plain = server_states(small_experiment(train={"rounds": 2}))
        moon = server_states(
            small_experiment(method={"name": "moon", "mu": 5.0}, train={"rounds": 2})
        )
        np.testing.assert_allclose(moon[1].weights, plain[1].weights, atol=1e-6)
        assert not np.allclose(moon[2].weights, plain[2].weights, atol=1e-4)

    @pytest.mark.parametrize("variant", ["sam", "asam"])
    def test_fedsam_s_perturbation(self, variant: str) -> None:
        experiment = small_experiment(
            method={"name": "fedsam", "rho": 0.3, "variant": variant, "eta": 0.05},
            train={"rounds": 1},
        )
        _, after = server_states(experiment)
        dataset, splits, spec = prepare(experiment)
        trained = []
        for k in range(10):
            network = spec.build_model()
            x = torch.tensor(dataset.x)[splits.train[k]]
            y = torch.tensor(dataset.y)[splits.train[k]]
            rng = keyed_rng(experiment.seed, "local_update/batches", 1, k)
            for batch in torch.tensor(rng.permutation(len(y))).split(16):

                def gradient(w: Any, batch: Any = batch, network: Any = network) -> Any:
                    nn.utils.vector_to_parameters(w, network.parameters())
                    loss = nn.functional.cross_entropy(network(x[batch]), y[batch])  # noqa: B023
                    parts = torch.autograd.grad(loss, list(network.parameters()))
                    return torch.cat([part.reshape(-1) for part in parts])

                w = nn.utils.parameters_to_vector(network.parameters()).detach().clone()
                g = gradient(w)
                if variant == "sam":
                    step = 0.3 * g / torch.sqrt((g**2).sum())
                else:
                    T = w.abs() + 0.05
                    step = 0.3 * T**2 * g / torch.sqrt(((T * g) ** 2).sum())
                w = w - 0.1 * gradient(w + step)
                nn.utils.vector_to_parameters(w, network.parameters())
            trained.append(nn.utils.parameters_to_vector(network.parameters()).detach().numpy())
        expected = np.average(trained, axis=0, weights=federation(experiment).server.num_samples)
        np.testing.assert_allclose(after.weights, expected, atol=1e-5)

    def test_feddisco_s_weights(self) -> None:
        experiment = small_experiment(
            method={"name": "feddisco", "a": 0.8, "b": 0.02},
            train={"rounds": 2, "participation": 0.6},
        )
        states = server_states(experiment)
        fed = federation(experiment)
        dataset, splits, _ = prepare(experiment)
        dropped = 0
        for t in (1, 2):
            cohort, raw = fed.sample(t), []
            for k in cohort:
                shares = np.bincount(dataset.y[splits.train[k]], minlength=10) / len(
                    splits.train[k]
                )
                raw.append(sum(q * np.log(q / 0.1) for q in shares if q > 0))
            n = fed.server.num_samples[cohort]
            counts = [
                max(0.0, p - 0.8 * d / sum(raw) + 0.02)
                for p, d in zip(n / sum(n), raw, strict=True)
            ]
            dropped += counts.count(0.0)
            w = states[t - 1].weights
            trained = [self.local(experiment, w, t, k, lambda g, _: g)[0] for k in cohort]
            expected = np.average(trained, axis=0, weights=counts)
            np.testing.assert_allclose(states[t].weights, expected, atol=1e-5)
        assert dropped  # the case of the ReLU

    def test_feddisco_falls_back_on_sample_shares(self) -> None:
        method = small_experiment(method={"name": "feddisco", "a": 50.0, "b": 0.0}).method
        n, d = np.array([10, 30]), np.array([0.5, 0.5])
        np.testing.assert_allclose(method.shares(n, d), [0.25, 0.75])  # type: ignore[attr-defined]
        np.testing.assert_allclose(method.shares(n, 0 * d), [0.25, 0.75])  # type: ignore[attr-defined]

    def test_fedbabu_trains_the_body_alone(self) -> None:
        experiment = small_experiment(
            method={"name": "fedbabu"},
            train={"rounds": 3, "optimizer": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}},
        )
        fed = federation(experiment)
        head = fed.server.model.part("head")
        states = server_states(experiment)
        for before, after in pairwise(states):
            np.testing.assert_array_equal(after.weights[head], before.weights[head])
            assert (after.weights != before.weights).mean() > 0.5

    def test_fedbabu_averages_with_equal_weights(self) -> None:
        experiment = small_experiment(method={"name": "fedbabu"}, train={"rounds": 1})
        before, after = server_states(experiment)
        body = np.arange(len(before.weights)) < 64 * 32 + 32
        trained = [
            self.local(
                experiment, before.weights, 1, k, lambda g, w: g * torch.tensor(body).float()
            )[0]
            for k in range(10)
        ]
        np.testing.assert_allclose(after.weights, np.mean(trained, axis=0), atol=1e-5)

    def test_fedbabu_fine_tunes_for_each_client(self, finish: Finish) -> None:
        accuracy = {}
        for fine_tune in ("nothing", "head", "all"):
            done = finish(
                method={"name": "fedbabu", "fine_tune": fine_tune},
                partition={"test_fraction": 0.3, "alpha": 0.1, "min_samples": 4},
                train={"rounds": 6, "participation": 0.5},
                evaluate={"clients": True, "every": 6},
            )
            accuracy[fine_tune] = done.rounds["client_accuracy"].iloc[-1]
            # Fine-tuning is no training of the federation's.
            assert (done.rounds["clients"] == 5).all()
        assert accuracy["nothing"] < accuracy["head"]
        assert accuracy["nothing"] < accuracy["all"]


STACKED = [
    {"name": "fedavg"},
    {"name": "fedavgm"},
    {"name": "fedprox", "mu": 0.5},
    {"name": "scaffold"},
    {"name": "feddyn", "alpha": 0.1},
    {"name": "feddisco"},
    {"name": "fedbabu"},
    {"name": "fedsam"},
    {"name": "fedsam", "variant": "asam"},
    {"name": "moon"},
]


@pytest.mark.parametrize("method", STACKED, ids=lambda m: "-".join(map(str, m.values())))
class TestStacks:
    """Runs whose clients are trained three at once, against the same runs in a loop."""

    @pytest.mark.parametrize(
        ("model", "optimizer"),
        [
            ("mlp", {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.01}),
            ("cnn", {"name": "adam", "lr": 0.003}),
            ("networks:regularised", {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.01}),
        ],
    )
    def test_a_stacked_run_is_the_loop(
        self, method: dict[str, Any], model: str, optimizer: dict[str, Any]
    ) -> None:
        if method["name"] == "scaffold":
            optimizer = {"lr": 0.05, "momentum": 0.5}
        states = {}
        for V in (1, 3):
            experiment = small_experiment(
                method=method,
                model={"name": model, **({"hidden": [16]} if model == "mlp" else {})},
                partition={"alpha": 0.3, "min_samples": 2},
                train={"rounds": 2, "participation": 0.7, "optimizer": optimizer},
            )
            dataset, splits, spec = prepare(experiment)
            engine = LocalEngine(experiment.engine, spec, dataset, splits)
            fed = Driven(spec, dataset, splits, engine, clients_per_step=V)
            states[V] = experiment.method.init(fed)
            for t in (1, 2):
                fed.runner.begin(t)
                states[V] = experiment.method.round(fed, states[V], t)
            engine.close()
            assert not engine.notices  # nothing fell back on the loop
        one, three = states[1].weights, states[3].weights
        scale = np.abs(one - fed.initial_weights()).max()
        # Adam's first steps enlarge rounding errors; by how much differs between processors.
        np.testing.assert_allclose(three, one, atol=1e-2 * scale)
