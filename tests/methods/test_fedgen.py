"""FedGen: its losses written out in plain PyTorch, what it sends, and its equivalence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from by_hand import load
from test_fedftg import Cohort, by_pairs
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments import PARAMETERS, Finish, federation, server_states, small_experiment
from fedsim.launch.prepare import prepare
from fedsim.methods.fedgen import FedGen
from fedsim.support.rng import keyed_rng

SMALL = {"name": "fedgen", "hidden": 16, "noise_size": 5}
SLOW = {"lr": 0.01}  # the paper's learning rate
WEIGHTS = 4 * PARAMETERS  # bytes of the small experiment's model
GENERATOR = 4 * ((64 + 10) * 512 + 512 + 4 * 512 + 512 * 32 + 32)  # with the statistics, 2·512


def one_hot(y: Tensor) -> Tensor:
    return torch.eye(10)[y]


class TestMathematics:
    @pytest.mark.parametrize("noise", ["uniform", "gaussian"])
    def test_the_servers_steps(self, noise: str) -> None:
        """Two rounds of them, which one Adam makes."""
        method = {**SMALL, "noise": noise, "generator_steps": 3, "generator_batch_size": 8}
        method |= {"generator_lr": 1e-3, "decay": 0.5, "diversity": 0.3}
        experiment = small_experiment(
            method=method,
            partition={"kind": "dirichlet", "clients": 10, "alpha": 0.05},
            train={"rounds": 2, "participation": 0.2, "optimizer": SLOW},
        )
        fed, states = federation(experiment), server_states(experiment)

        first = fed.server.network("generator", FedGen(**method).build(fed.server.model)).named(
            torch.tensor(states[0].generator)
        )
        hidden, norm, last = nn.Linear(15, 16), nn.BatchNorm1d(16), nn.Linear(16, 32)
        G = nn.Sequential(hidden, norm, nn.ReLU(), last)
        G.load_state_dict({n.removeprefix("layers."): v for n, v in first.items()}, strict=False)
        adam = torch.optim.Adam(G.parameters(), lr=1e-3, weight_decay=1e-2)
        for t in (1, 2):
            adam.param_groups[0]["lr"] = 1e-3 * 0.5 ** (t - 1)
            last_state = states[t - 1]
            received = {
                name: getattr(last_state, name) if t == 2 else None
                for name in ("generator", "classes")
            }
            cohort = Cohort(experiment, fed, last_state.weights, t, **received)
            held = np.flatnonzero(cohort.counts.sum(axis=0))
            assert len(held) < 10  # and no other class is drawn
            assert np.flatnonzero(states[t].classes).tolist() == held.tolist()
            rng = keyed_rng(experiment.seed, "server/generator", t)
            for _ in range(3):
                y = torch.tensor(rng.choice(held, 8))
                drawn = rng.random if noise == "uniform" else rng.standard_normal
                eps = torch.tensor(drawn((8, 5), dtype=np.float32))
                z = G(torch.cat([eps, one_hot(y)], dim=1))
                loss = 0.3 * by_pairs(eps, z)
                for k, weights in enumerate(cohort.models):
                    network: Any = cohort.network(weights)
                    ce = cross_entropy(network.head(z), y, reduction="none")
                    loss = loss + (cohort.share(k, y) * ce).mean()
                adam.zero_grad()
                loss.backward()
                adam.step()
            expected = [p.detach().reshape(-1) for p in G.parameters()]
            expected += [norm.running_mean, norm.running_var]
            np.testing.assert_allclose(states[t].generator, torch.cat(expected), atol=1e-5)

    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"noise": "gaussian", "teaching_epochs": 1},
            {"a": 0.5, "b": 0.0, "decay": 1e-9, "generator_batch_size": 4},  # a_2 is the floor
        ],
    )
    def test_a_clients_steps(self, settings: dict[str, Any]) -> None:
        method = FedGen.model_validate({**SMALL, **settings})
        experiment = small_experiment(
            method={**SMALL, **settings},
            train={"rounds": 2, "local_epochs": 2, "optimizer": SLOW},
        )
        dataset, splits, spec = prepare(experiment)
        fed, states = federation(experiment), server_states(experiment)
        fed.runner.begin(2)
        classes = np.arange(10) % 3 == 0
        arguments = {"generator": states[1].generator, "classes": classes}
        sent = fed.gather(method.local_update, [4], weights=states[1].weights, **arguments)

        network = load(spec.build_model(), fed.server.model, states[1].weights)
        flat = fed.server.network("generator", method.build(fed.server.model))
        flat.load(torch.tensor(states[1].generator))
        G = flat.module.eval()
        x = torch.tensor(dataset.x)[splits.train[4]]
        y = torch.tensor(dataset.y)[splits.train[4]]
        batches = keyed_rng(experiment.seed, "local_update/batches", 2, 4)
        rng = keyed_rng(experiment.seed, "local_update/generator", 2, 4)
        sgd = torch.optim.SGD(network.parameters(), lr=0.01)
        a, b = (max(first * method.decay, 1e-4) if first else 0 for first in (method.a, method.b))
        for epoch in range(2):
            for batch in torch.tensor(batches.permutation(len(y))).split(16):
                logits = network(x[batch])
                loss = cross_entropy(logits, y[batch])
                if epoch < method.teaching_epochs:
                    drawn = torch.tensor(rng.choice([0, 3, 6, 9], method.generator_batch_size))
                    labels = torch.cat([y[batch], drawn])
                    kind = rng.random if method.noise == "uniform" else rng.standard_normal
                    eps = torch.tensor(kind((len(labels), 5), dtype=np.float32))
                    z = G.layers(torch.cat([eps, one_hot(labels)], dim=1)).detach()
                    ce = cross_entropy(network.head(z[len(batch) :]), drawn)
                    loss = loss + a * method.generator_batch_size / 16 * ce
                    target = network.head(z[: len(batch)]).softmax(dim=1).detach()
                    p = logits.softmax(dim=1)
                    loss = loss + b * (target * (target / p).log()).sum() / len(batch)
                sgd.zero_grad()
                loss.backward()
                sgd.step()
        expected = nn.utils.parameters_to_vector(network.parameters()).detach()
        np.testing.assert_allclose(sent[4]["weights"], expected, atol=2e-6)

    def test_epochs_are_told_apart_where_batch_norm_leaves_a_batch_out(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = []
        monkeypatch.setattr(
            FedGen, "draw_noise", lambda *args: calls.append(args[2]) or torch.rand(args[2], 5)
        )
        experiment = small_experiment(
            method={**SMALL, "teaching_epochs": 2, "generator_batch_size": 4},
            data={"name": "synthetic", "samples": 90, "shape": [1, 8, 8]},
            partition={"kind": "iid", "clients": 10},
            model={"name": "resnet8", "width": 1},
            train={"local_epochs": 3, "batch_size": 4, "optimizer": SLOW},
        )
        fed, method = federation(experiment), experiment.method
        fed.runner.begin(2)
        generator, classes = method.init(fed).generator, np.ones(10, dtype=bool)
        arguments = {"generator": generator, "classes": classes}
        fed.gather(method.local_update, [0], weights=fed.initial_weights(), **arguments)
        assert calls == [8] * 4  # nine examples: two steps in each of two epochs


def test_counts_its_bytes(finish: Finish) -> None:
    train = {"rounds": 3, "participation": 0.5, "optimizer": SLOW}
    done = finish(method={"name": "fedgen"}, train=train)
    assert (done.clients["bytes_up"] == WEIGHTS + 4 * 10).all()
    down = done.clients.groupby("round")["bytes_down"].unique()
    # The generator goes down once it is trained, with a bit for each class.
    assert [list(values) for values in down] == [
        [WEIGHTS],
        [WEIGHTS + GENERATOR + 2],
        [WEIGHTS + GENERATOR + 2],
    ]
