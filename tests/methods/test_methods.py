"""Every method: the conformance suite, its equivalences, and its own mathematics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import small_experiment
from torch import nn

from fedsim import Experiment, Run, resume, run
from fedsim.federation import Federation, LocalEngine
from fedsim.federation.checkpoint import Checkpoints
from fedsim.methods import methods
from fedsim.simulate import Progress, prepare
from fedsim.streams import numpy_stream

Finish = Callable[..., Run]
NAMES = [name for name, _ in methods.items()]

# Vectors of the model's size that travel each way in a round, for each client.
UP = {"fedavg": 1, "fedavgm": 1, "fedprox": 1, "scaffold": 2}
DOWN = {"fedavg": 1, "fedavgm": 1, "fedprox": 1, "scaffold": 2}


def federation(experiment: Experiment) -> Federation:
    dataset, holdings, setup = prepare(experiment)
    engine = LocalEngine(experiment.engine, setup, dataset, holdings)
    return Federation(setup, holdings, len(dataset.test_y), engine)


def server_states(experiment: Experiment) -> list[Any]:
    """The server's state before the first round and after each."""
    fed, method = federation(experiment), experiment.method
    states = [method.init(fed)]
    for t in range(1, experiment.train.rounds + 1):
        fed.begin_round(t)
        states.append(method.round(fed, states[-1], t))
    return states


@pytest.mark.parametrize("name", NAMES)
class TestEveryMethod:
    def test_learns(self, finish: Finish, name: str) -> None:
        done = finish(method={"name": name}, train={"rounds": 20, "local_epochs": 2})
        assert done.rounds["accuracy"].iloc[-1] > 0.8

    def test_counts_its_bytes(self, finish: Finish, name: str) -> None:
        done = finish(method={"name": name}, train={"rounds": 2, "participation": 0.5})
        size = sum(tensor.numel() for tensor in done.weights().values())
        assert (done.clients["bytes_up"] == 4 * size * UP[name]).all()
        assert (done.clients["bytes_down"] == 4 * size * DOWN[name]).all()
        assert len(done.clients) == 2 * 5
        assert done.rounds["total_bytes_up"].iloc[-1] == 10 * 4 * size * UP[name]

    def test_goes_on_where_it_was_interrupted(
        self, finish: Finish, tmp_path: Path, name: str
    ) -> None:
        common = {"method": {"name": name}, "train": {"participation": 0.5}}
        undisturbed = finish(**common)

        def interrupt(event: Progress) -> None:
            if isinstance(event, dict) and event["round"] == 7:
                raise KeyboardInterrupt

        out = tmp_path / "interrupted"
        with pytest.raises(KeyboardInterrupt):
            run(small_experiment(**common), out, interrupt)
        (folder,) = (out / "small").iterdir()
        events: list[Progress] = []
        resumed = resume(folder, events.append)
        assert events[0] == "going on after round 5"
        assert resumed.result_hash == undisturbed.result_hash
        times = ["seconds"]
        assert resumed.rounds.drop(columns=times).equals(undisturbed.rounds.drop(columns=times))
        assert resumed.clients.drop(columns=times).equals(undisturbed.clients.drop(columns=times))

    def test_state_is_pure_and_survives_a_checkpoint(self, tmp_path: Path, name: str) -> None:
        experiment = small_experiment(method={"name": name})
        fed, method = federation(experiment), experiment.method
        state = method.init(fed)
        for t in (1, 2):
            fed.begin_round(t)
            state = method.round(fed, state, t)
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(2, state, fed, {})
        fed.begin_round(3)
        third = method.round(fed, state, 3)

        other = federation(experiment)
        found = checkpoints.latest(method.init(other), other)
        assert found is not None
        other.begin_round(3)
        again = method.round(other, found[1], 3)
        for field in vars(third):
            np.testing.assert_array_equal(getattr(again, field), getattr(third, field))

    def test_batch_norm_statistics_are_averaged(self, name: str) -> None:
        experiment = small_experiment(
            method={"name": name},
            model={"name": "resnet8", "width": 2},
            train={"rounds": 2, "optimizer": {"lr": 0.01}},
        )
        fed = federation(experiment)
        P = fed.model.num_parameters
        assert 0 < P < fed.model.size
        _, first, second = server_states(experiment)
        assert np.isfinite(second.weights).all()
        variances = fed.model.named(torch.tensor(second.weights))["features.1.running_var"]
        assert (variances > 0).all()
        assert not np.array_equal(first.weights[P:], second.weights[P:])


class TestEquivalences:
    def test_fedprox_without_its_term_is_fedavg(self, finish: Finish) -> None:
        prox = finish(method={"name": "fedprox", "mu": 0.0})
        assert prox.result_hash == finish().result_hash

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
        dataset, holdings, setup = prepare(experiment)
        network = setup.build_model()
        x = torch.tensor(dataset.x)[holdings.train[0]]
        y = torch.tensor(dataset.y)[holdings.train[0]]
        for t in (1, 2, 3):
            rng = numpy_stream(experiment.seed, "local_update/batches", t, 0)
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


class TestMathematics:
    """Each method against its formulas, written out client by client in plain PyTorch."""

    def local(self, experiment: Experiment, w: np.ndarray, t: int, k: int, change: Any) -> Any:
        """w_k after local SGD from w, with each step's gradient changed; and τ_k."""
        dataset, holdings, setup = prepare(experiment)
        network = setup.build_model()
        flat = torch.tensor(w, dtype=torch.float32)
        nn.utils.vector_to_parameters(flat, network.parameters())
        x = torch.tensor(dataset.x)[holdings.train[k]]
        y = torch.tensor(dataset.y)[holdings.train[k]]
        rng = numpy_stream(experiment.seed, "local_update/batches", t, k)
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
        sizes = federation(experiment).num_samples
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
        sizes = federation(experiment).num_samples
        w, v = states[0].weights.astype(np.float64), 0.0
        for t in (1, 2, 3):
            trained = [self.local(experiment, w, t, k, lambda g, _: g)[0] for k in range(10)]
            v = 0.6 * v + (w - np.average(trained, axis=0, weights=sizes))
            w = w - 0.5 * v
            np.testing.assert_allclose(states[t].weights, w, atol=1e-5)

    def test_scaffold_allows_for_momentum(self) -> None:
        """With momentum m, c_k after a first round is still an average gradient in size."""
        norms = []
        for momentum in (0.0, 0.9):
            optimizer = {"lr": 0.001, "momentum": momentum}
            experiment = small_experiment(
                method={"name": "scaffold"},
                train={"rounds": 1, "local_epochs": 20, "optimizer": optimizer},
            )
            _, state = server_states(experiment)
            norms.append(np.linalg.norm(state.control))
        assert norms[1] == pytest.approx(norms[0], rel=0.3)
