"""FedFTG: its losses written out in plain PyTorch, its images, and its equivalence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import load
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments import federation, server_states, small_experiment
from fedsim.federation import Federation
from fedsim.launch.prepare import prepare
from fedsim.methods.fedftg import ImageGenerator
from fedsim.support.rng import keyed_rng
from fedsim.training import FlatModel

SMALL = {"name": "fedftg", "width": 4, "noise_size": 6, "batch_size": 12, "iterations": 2}


class Cohort:
    """What the server has in hand in a round: the clients' models, and who holds what."""

    def __init__(
        self, experiment: Any, fed: Federation, weights: Any, t: int, **further: Any
    ) -> None:
        dataset, splits, self.spec = prepare(experiment)
        fed.runner.begin(t)
        update = experiment.method.local_update
        sent = fed.gather(update, fed.sample(t), weights=weights, **further)
        self.clients = [*sent]
        self.models = [message["weights"] for message in sent.values()]
        labels = [dataset.y[splits.train[k]] for k in sent]
        self.average = np.average(self.models, axis=0, weights=[len(y) for y in labels])
        self.counts = np.array([[(y == c).sum() for c in range(10)] for y in labels])
        self.fed = fed

    def network(self, weights: Any) -> nn.Module:
        return load(self.spec.build_model(), self.fed.server.model, weights)

    def share(self, k: int, y: Tensor) -> Tensor:
        """w_{y,k}"""
        return torch.tensor((self.counts[k, y] / self.counts[:, y].sum(axis=0)).astype(np.float32))


def by_pairs(noise: Tensor, x: Tensor) -> Tensor:
    """The diversity term, of each pair."""
    apart = (noise[:, None] - noise).square().mean(dim=2)
    return torch.exp(-(apart * (x[:, None] - x).abs().flatten(2).mean(dim=2)).mean())


def draw(experiment: Any, cohort: Cohort, t: int) -> tuple[Tensor, Tensor]:
    """The labels and the noise of the first iteration of a round."""
    rng = keyed_rng(experiment.seed, "server/generator", t)
    of_label = cohort.counts.sum(axis=0) / cohort.counts.sum()
    y = torch.tensor(rng.choice(10, 12, p=of_label))
    return y, torch.tensor(rng.standard_normal((12, 6), dtype=np.float32))


MODELS = [{"name": "mlp", "hidden": [32]}, {"name": "resnet8", "width": 2}]


class TestMathematics:
    @pytest.mark.parametrize("model", MODELS)
    def test_the_first_steps_of_the_generator(
        self, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]
    ) -> None:
        """The loss with each of the first two clients, Adam's first step between them."""
        experiment = small_experiment(
            method={**SMALL, "cls": 0.8, "dis": 0.6},
            model=model,
            train={"rounds": 1, "participation": 0.3, "optimizer": {"lr": 0.01}},
        )
        losses, gradient = [], FlatModel.gradient

        def spy(self: FlatModel, loss: Tensor) -> Tensor:
            losses.append(float(loss.detach()))
            return gradient(self, loss)

        fed = federation(experiment)
        first = experiment.method.init(fed)
        cohort = Cohort(experiment, fed, first.weights, 1)
        monkeypatch.setattr(FlatModel, "gradient", spy)
        averaged = replace(first, weights=cohort.average.astype(np.float32))
        experiment.method.fine_tune(fed, averaged, cohort.models, cohort.counts)

        G = ImageGenerator(6, 10, 4, (1, 8, 8), "standardised")
        load(G, experiment.method.generator(fed), first.generator).train()
        adam = torch.optim.Adam(G.parameters(), lr=0.01)
        student = cohort.network(cohort.average).eval()
        y, z = draw(experiment, cohort, 1)
        for k in range(2):
            x = G(z, y)
            w, t = cohort.share(k, y), cohort.network(cohort.models[k]).eval()(x)
            apart = (w * (student(x) - t.detach()).abs().mean(dim=1)).mean()
            loss = -apart + 0.8 * w.mean() * cross_entropy(t, y) + 0.2 * by_pairs(z, x)
            assert losses[k] == pytest.approx(float(loss.detach()), rel=2e-4)
            adam.zero_grad()
            loss.backward()
            adam.step()
        assert len(losses) == 2 * (3 + 5)

    @pytest.mark.parametrize("model", MODELS)
    def test_the_students_steps(self, model: dict[str, Any]) -> None:
        """In round 2, with learning rates that decay, on the images of the trained generator."""
        experiment = small_experiment(
            method={**SMALL, "iterations": 1, "student_weight_decay": 0.1},
            model=model,
            train={
                "rounds": 2,
                "participation": 0.3,
                "lr_decay": 0.5,
                "optimizer": {"lr": 0.02},
            },
        )
        _, first, second = server_states(experiment)
        fed = federation(experiment)
        cohort = Cohort(experiment, fed, first.weights, 2)
        G = ImageGenerator(6, 10, 4, (1, 8, 8), "standardised")
        load(G, experiment.method.generator(fed), second.generator).eval()
        y, z = draw(experiment, cohort, 2)
        x = G(z, y).detach()
        target = torch.zeros(12, 10)
        for k, weights in enumerate(cohort.models):
            logits = cohort.network(weights).eval()(x).detach()
            target += cohort.share(k, y)[:, None] * logits.softmax(dim=1)
        student = cohort.network(cohort.average).train()
        sgd = torch.optim.SGD(student.parameters(), lr=0.05, weight_decay=0.1)
        for _ in range(5):
            p = student(x).softmax(dim=1)
            loss = -(target * p.log()).sum() / (12 * 10)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
        found = fed.server.model.named(torch.tensor(second.weights))
        expected = student.state_dict()
        for name, values in found.items():
            torch.testing.assert_close(values, expected[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (2, 7, 10), (1, 3, 1)])
def test_images_have_the_shape_of_the_data(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    y = torch.arange(20) % 4
    for pixels in ("standardised", "unit"):
        G = ImageGenerator(6, 4, 5, shape, pixels)
        x = G(torch.randn(20, 6), y)
        assert x.shape == (20, *shape)
        if pixels == "unit":
            assert ((x > 0) & (x < 1)).all()
        else:
            torch.testing.assert_close(x.mean(dim=(0, 2, 3)), torch.zeros(shape[0]))
            assert ((x.var(dim=(0, 2, 3), unbiased=False) - 1).abs() < 0.01).all()


def test_dropout_of_the_student_does_not_depend_on_the_process() -> None:
    experiment = small_experiment(
        method=SMALL, model={"name": "faults:dropout_net"}, train={"rounds": 2}
    )
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(server_states(experiment)[-1].weights)
    np.testing.assert_array_equal(*found)
