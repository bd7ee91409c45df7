"""SemiFL against its formulas in plain PyTorch, and what its clients and server may see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from experiments import QUARTER, RESNET, WHOLE, Driven, Finish, small_experiment
from fedsim import Experiment
from fedsim.data import Dataset
from fedsim.data.augment import strong, weak
from fedsim.federation import Federation, LocalEngine
from fedsim.launch.prepare import prepare
from fedsim.support.rng import keyed_rng

Relabel = Callable[[Dataset, Any], Dataset]

SHARE = {"server_fraction": 0.1}
WITH_BATCH_NORM: dict[str, Any] = {
    "data": QUARTER,
    "model": RESNET,
    "train": {"rounds": 2, "optimizer": {"lr": 0.01}},
}


def semifl(**sections: Any) -> Experiment:
    """A small SemiFL experiment with a server's share; `method` gives further parameters."""
    method = {"name": "semifl", **sections.pop("method", {})}
    return small_experiment(**{"data": WHOLE, "partition": SHARE, **sections}, method=method)


def federation(experiment: Experiment, relabel: Relabel | None = None) -> Federation:
    dataset, splits, spec = prepare(experiment)
    if relabel is not None:
        dataset = relabel(dataset, splits)
    engine = LocalEngine(experiment.engine, spec, dataset, splits)
    return Driven(spec, dataset, splits, engine)


def server_states(
    experiment: Experiment, relabel: Relabel | None = None
) -> tuple[list[Any], list[list[dict[str, Any]]]]:
    """The server's state before the first round and after each; and the clients' records."""
    fed, method = federation(experiment, relabel), experiment.method
    states, rows = [method.init(fed)], []
    for t in range(1, experiment.train.rounds + 1):
        fed.runner.begin(t)
        states.append(method.round(fed, states[-1], t))
        rows.append(fed.runner.records()[1]["clients"])
    return states, rows


class Plain:
    """SemiFL written out, for networks without batch norm and data without normalisation."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self.method = experiment, experiment.method
        dataset, self.splits, spec = prepare(experiment)
        self.network = spec.build_model()
        self.x, self.y = torch.tensor(dataset.x), torch.tensor(dataset.y)

    def stream(self, purpose: str, t: int, k: int = -1) -> np.random.Generator:
        return keyed_rng(self.experiment.seed, purpose, t, k)

    def batches(
        self, rng: np.random.Generator, n: int, epochs: int, size: int
    ) -> list[NDArray[np.int64]]:
        orders = [rng.permutation(n) for _ in range(epochs)]
        return [order[i : i + size] for order in orders for i in range(0, n, size)]

    def client(self, w: Tensor, t: int, k: int) -> tuple[Tensor | None, int]:
        """w_k, or None for a client that is left out; and of how many images it is sure."""
        train, optimizer = self.experiment.train, self.experiment.train.optimizer
        own = self.splits.unlabelled[k]
        own = own if len(own) or len(self.splits.server) == 0 else self.splits.train[k]
        images = self.x[own]
        vector_to_parameters(w.clone(), self.network.parameters())
        with torch.no_grad():
            seen = weak(images, self.stream("local_update/pseudo-labels", t, k))
            odds = torch.exp(self.network(seen)) if len(seen) else torch.ones(0, 10)
        probabilities = odds / odds.sum(dim=1, keepdim=True)
        guesses = probabilities.argmax(dim=1)
        fix = torch.nonzero(probabilities.amax(dim=1) >= self.method.threshold)[:, 0]
        if len(fix) == 0:
            return None, 0
        sgd = torch.optim.SGD(
            self.network.parameters(), lr=train.lr(t), momentum=optimizer.momentum
        )
        rng = self.stream("local_update/augment", t, k)
        order = self.stream("local_update/batches", t, k)
        for batch in self.batches(order, len(fix), train.local_epochs, train.batch_size):
            here = fix[batch]
            mix = torch.tensor(rng.integers(len(images), size=len(here)))
            lam = rng.beta(self.method.alpha, self.method.alpha)
            mixed = lam * weak(images[here], rng)
            mixed = mixed + (1 - lam) * weak(images[mix], rng)
            loss = cross_entropy(self.network(strong(images[here], rng)), guesses[here])
            loss = loss + lam * cross_entropy(self.network(mixed), guesses[here])
            loss = loss + (1 - lam) * cross_entropy(self.network(mixed), guesses[mix])
            sgd.zero_grad()
            loss.backward()
            sgd.step()
        return parameters_to_vector(self.network.parameters()).detach(), len(fix)

    def server(self, w: Tensor, t: int, size: int) -> Tensor:
        """w after the supervised epochs."""
        held = self.splits.server
        held = held if len(held) else np.sort(self.splits.train.values)
        x, y = self.x[held], self.y[held]
        vector_to_parameters(w.clone(), self.network.parameters())
        settings = self.method.server.optimizer
        sgd = torch.optim.SGD(
            self.network.parameters(),
            lr=settings.lr * self.experiment.train.lr_decay ** (t - 1),
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            weight_decay=settings.weight_decay,
        )
        rng, order = self.stream("server/augment", t), self.stream("server/batches", t)
        for batch in self.batches(order, len(y), self.method.server.epochs, size):
            sgd.zero_grad()
            cross_entropy(self.network(weak(x[batch], rng)), y[batch]).backward()
            sgd.step()
        return parameters_to_vector(self.network.parameters()).detach()


class TestMathematics:
    def test_a_run_written_out(self) -> None:
        """At first nobody is sure of anything, then some of some images, then all."""
        optimizer = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
        experiment = semifl(
            method={
                "threshold": 0.3,
                "alpha": 0.5,
                "momentum": 0.7,
                "server": {"epochs": 2, "optimizer": optimizer},
            },
            train={
                "rounds": 4,
                "participation": 0.4,
                "local_epochs": 2,
                "lr_decay": 0.9,
                "optimizer": {"lr": 0.05, "momentum": 0.5},
            },
        )
        states, rows = server_states(experiment)
        plain, fed = Plain(experiment), federation(experiment)
        w, v = torch.tensor(states[0].weights), torch.zeros(len(states[0].weights))
        sure = []
        for t in (1, 2, 3, 4):
            clients = [plain.client(w, t, k) for k in fed.sample(t)]
            sure.append([count for _, count in clients])
            assert [row["pseudo_labels"] for row in rows[t - 1]] == sure[-1]
            trained = [w_k for w_k, _ in clients if w_k is not None]
            if trained:
                v = 0.7 * v + (w - torch.stack(trained).mean(dim=0))
                w = w - v
            np.testing.assert_allclose(states[t].velocity, v, atol=2e-5)
            w = plain.server(w, t, size=10)
            np.testing.assert_allclose(states[t].weights, w, atol=2e-5)
        assert not any(sure[0])
        assert 0 in sure[2]
        assert any(sure[2])
        assert all(sure[3])

    def test_a_client_without_images_is_left_out(self) -> None:
        """Of 42 examples, all but 0.42 are labelled: none is left for the client's own part."""
        experiment = semifl(
            partition={"labelled_fraction": 0.99},
            method={"threshold": 0.0, "server": {"epochs": 1}},
            train={"rounds": 1, "optimizer": {"lr": 0.05}},
        )
        plain = Plain(experiment)
        lengths = plain.splits.unlabelled.lengths
        assert 0 < (lengths == 0).sum() < 10
        (first, second), rows = server_states(experiment)
        assert [row["pseudo_labels"] for row in rows[0]] == lengths.tolist()
        w = torch.tensor(first.weights)
        trained = [plain.client(w, 1, k)[0] for k in range(10) if lengths[k]]
        w = plain.server(torch.stack(trained).mean(dim=0), 1, size=250)
        np.testing.assert_allclose(second.weights, w, atol=2e-5)

    @pytest.mark.parametrize(("asked", "size"), [("auto", 250), (32, 32)])
    def test_the_servers_batches(self, asked: int | str, size: int) -> None:
        """250 of more than 1,000 examples, unless asked for otherwise."""
        experiment = semifl(
            partition={"server_fraction": 0.75},
            method={"threshold": 1.0, "server": {"epochs": 1, "batch_size": asked}},
            train={"rounds": 1},
        )
        (first, second), _ = server_states(experiment)
        w = Plain(experiment).server(torch.tensor(first.weights), 1, size)
        np.testing.assert_allclose(second.weights, w, atol=1e-5)


class TestBatchNorm:
    def test_statistics_are_those_of_the_servers_examples(self) -> None:
        experiment = semifl(method={"threshold": 0.3}, **WITH_BATCH_NORM)
        dataset, splits, _ = prepare(experiment)
        x = torch.tensor(dataset.x[splits.server])
        assert len(x) < 250  # one batch, so that its statistics are the statistics
        model = federation(experiment).server.model
        layers = [m for m in model.module.modules() if isinstance(m, nn.BatchNorm2d)]
        for layer in layers:
            layer.momentum = 1.0  # of the last batch alone
        states, rows = server_states(experiment)
        assert any("steps" in row for row in rows[1])
        for state in states:
            model.load(torch.tensor(state.weights))
            for layer in layers:
                layer.reset_running_stats()
            with torch.no_grad():
                model.module.train()(x)
            np.testing.assert_allclose(model.weights(), state.weights, rtol=1e-4, atol=1e-5)

    def test_pseudo_labels_are_made_with_them(self) -> None:
        experiment = semifl(method={"threshold": 0.3}, **WITH_BATCH_NORM)
        dataset, splits, _ = prepare(experiment)
        states, rows = server_states(experiment)
        model = federation(experiment).server.model
        for t in (1, 2):
            model.load(torch.tensor(states[t - 1].weights))
            model.module.eval()
            for k, row in enumerate(rows[t - 1]):
                rng = keyed_rng(experiment.seed, "local_update/pseudo-labels", t, k)
                with torch.no_grad():
                    logits = model.module(weak(torch.tensor(dataset.x[splits.train[k]]), rng))
                sure = logits.log_softmax(dim=1).amax(dim=1) >= np.log(0.3)
                assert row["pseudo_labels"] == int(sure.sum())
        assert sum(row["pseudo_labels"] for row in rows[1]) > 0

    def test_they_never_travel_up(self, finish: Finish) -> None:
        method = {"name": "semifl", "threshold": 0.2}  # so that someone is sure of two
        done = finish(method=method, partition=SHARE, **WITH_BATCH_NORM)
        model = federation(semifl(**WITH_BATCH_NORM)).server.model
        assert model.num_parameters < model.size
        sent = (done.clients["pseudo_labels"] > 1) * 4 * model.num_parameters
        assert sent.any()
        assert (done.clients["bytes_up"] == sent).all()
        assert (done.clients["bytes_down"] == 4 * model.size).all()

    def test_a_client_that_is_sure_of_one_image_is_left_out(self) -> None:
        """Statistics of a batch need two."""
        experiment = semifl(
            partition={"labelled_fraction": 0.98},
            method={"threshold": 0.0, "server": {"epochs": 1}},
            **{**WITH_BATCH_NORM, "train": {"rounds": 1, "optimizer": {"lr": 0.01}}},
        )
        _, rows = server_states(experiment)
        sure = [row["pseudo_labels"] for row in rows[0]]
        assert 1 in sure
        assert [count for row, count in zip(rows[0], sure, strict=True) if "steps" in row] == [
            count for count in sure if count > 1
        ]


@pytest.mark.parametrize("part", ["train", "unlabelled"])
def test_what_clients_do_not_know_changes_nothing(part: str) -> None:
    """Labels of all they hold where the server has a share; else those that are hidden."""
    experiment = semifl(
        partition=SHARE if part == "train" else {"labelled_fraction": 0.2},
        method={"threshold": 0.5},
        train={"rounds": 4},
    )

    def relabel(dataset: Dataset, splits: Any) -> Dataset:
        y, hidden = dataset.y.copy(), getattr(splits, part).values
        assert len(hidden) > 1000
        y[hidden] = np.random.default_rng(0).permutation(y[hidden])
        return replace(dataset, y=y)

    states, rows = server_states(experiment)
    others, _ = server_states(experiment, relabel)
    assert sum(row["pseudo_labels"] for row in rows[-1]) > 0
    np.testing.assert_array_equal(states[-1].weights, others[-1].weights)
