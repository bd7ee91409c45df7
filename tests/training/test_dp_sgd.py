"""DP-SGD: differential privacy of each example (`privacy.level=example`)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from experiments import (
    KINDS,
    Finish,
    federation,
    interrupted,
    refusal,
    small_experiment,
    with_method,
)
from fedsim import Experiment, Run, resume, run
from fedsim.conditions.privacy import Privacy
from fedsim.errors import ClientError
from fedsim.methods.fedsam import FedSAM
from fedsim.objectives import Classification
from fedsim.training import FlatModel, Hooks, Train, TrainingJob
from fedsim.training import train as train_job
from fedsim.training.dp_sgd import PerExample
from fedsim.training.dropout import replace_dropout
from fedsim.training.job import DrawnBatch

PRIVACY: dict[str, Any] = {"level": "example", "clip": 0.5, "noise_multiplier": 1.0}
LOSS = Classification().loss


def network() -> FlatModel:
    torch.manual_seed(0)
    return FlatModel(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), CPU)


CPU = torch.device("cpu")
X = torch.randn(23, 5, generator=torch.Generator().manual_seed(1))
Y = torch.arange(23) % 3


def job(model: FlatModel, clip: float, z: float, **fields: Any) -> TrainingJob:
    given = (model.vector.clone(), X, Y, 0.3, 2, np.random.default_rng(5), Hooks(LOSS))
    return TrainingJob(*given, dp_sgd=(clip, z), **fields)


def by_hand(model: FlatModel, clip: float, z: float, B: int) -> Tensor:
    """Algorithm 1 of the paper, an example at a time."""
    rng, w, n = np.random.default_rng(5), model.vector.clone(), len(Y)
    for _ in range(2 * math.ceil(n / B)):
        rows = np.flatnonzero(rng.random(n) < B / n)
        total = z * clip * torch.from_numpy(rng.standard_normal(len(w), dtype=np.float32))
        for i in rows:
            model.load(w)
            g = model.gradient(LOSS(model.module, X[i : i + 1], Y[i : i + 1], {}).sum()).clone()
            total += g / max(1.0, float(g.norm()) / clip)
        w = w - 0.3 * total / B
    return w


@pytest.mark.parametrize("z", [0.0, 1.3])
@pytest.mark.parametrize("clip", [0.1, 100.0])
def test_steps_are_those_of_the_paper(clip: float, z: float) -> None:
    model = network()
    expected = by_hand(network(), clip, z, 4)
    done = train_job(model, job(model, clip, z), Train(batch_size=4, local_epochs=2))
    torch.testing.assert_close(done.weights, expected, rtol=1e-4, atol=1e-5)
    assert done.steps == 12
    limited = train_job(network(), job(model, clip, z, most_steps=3), Train(batch_size=4))
    assert limited.steps == 3


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    train = {"rounds": 4, "participation": 0.5, "local_epochs": 2, "optimizer": {"lr": 2.0}}
    return small_experiment(
        partition={"kind": "iid", "clients": 4},
        privacy={**PRIVACY, "noise_multiplier": 0.5},
        train=train,
        checkpoint={"every": 1},
    )


@pytest.fixture(scope="module")
def done(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(experiment, tmp_path_factory.mktemp("runs"), progress=False)


def test_epsilon_of_each_client_is_on_record(done: Run) -> None:
    privacy, spent = done.experiment.privacy, dict.fromkeys(range(4), 0)
    assert isinstance(privacy, Privacy)
    largest = 0.0
    for t, rows in done.clients.groupby("round"):
        for row in rows.to_dict("records"):
            n = row["samples"]
            spent[row["client"]] += 2 * math.ceil(n / 16)
            q = min(1.0, 16 / n)
            expected = privacy.epsilon({(q, 1): spent[row["client"]]})
            assert row["epsilon"] == pytest.approx(expected)
            largest = max(largest, expected)
        assert done.rounds["epsilon"][int(t) - 1] == pytest.approx(largest)


def test_resumed_it_knows_what_it_has_spent(
    done: Run, experiment: Experiment, tmp_path: Path
) -> None:
    folder = interrupted(experiment, tmp_path, 2)
    assert resume(folder, progress=False).result_hash == done.result_hash


def test_it_learns(done: Run) -> None:
    assert done.rounds["accuracy"].iloc[-1] > 0.6


class Branches(nn.Linear):
    """A layer that does not run under vmap."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.detach().sum()) > -1e9 else x


def test_each_example_has_a_dropout_mask_of_its_own() -> None:
    """Equal examples have different gradients, and no two clients' masks are the same."""
    torch.manual_seed(0)
    model = FlatModel(nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 3)), CPU)
    replace_dropout(model.module)
    model.train()
    x, y = X[:1].expand(8, 5).contiguous(), Y[:1].expand(8)
    batch = DrawnBatch(x, y, {}, {})
    g, _ = PerExample(model, 1.0)._at_once(LOSS, batch)
    assert len(torch.unique(g, dim=0)) == 8


@pytest.mark.parametrize("z", [0.0, 1.3])
def test_networks_beyond_vmap_take_one_example_after_another(z: float) -> None:
    torch.manual_seed(0)
    slow = FlatModel(nn.Sequential(Branches(5, 6), nn.Tanh(), nn.Linear(6, 3)), CPU)
    expected = train_job(network(), job(network(), 0.1, z), Train(batch_size=4))
    done = train_job(slow, job(slow, 0.1, z), Train(batch_size=4))
    torch.testing.assert_close(done.weights, expected.weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sections", [{"method": {"name": "scaffold"}}, KINDS["documents"]])
def test_other_methods_and_networks_that_draw(finish: Finish, sections: dict[str, Any]) -> None:
    done = finish(**sections, privacy=PRIVACY, train={"rounds": 2})
    assert done.clients["epsilon"].gt(0).all()


def test_what_it_does_not_cover(monkeypatch: pytest.MonkeyPatch) -> None:
    own_loops = ("xpfl", "centralised", "fedfed", "mime_lite", "qfedavg", "ifca", "pfedme")
    # Explanations of examples, images, scores of features; examples mixed in a loss; gradients.
    for name in (*own_loops, "xfedalign", "fedxds", "fedaux", "semifl", "fedsam"):
        told = refusal(lambda name=name: small_experiment(**with_method(name, privacy=PRIVACY)))
        assert f"privacy.level=example: method.name={name} has clients compute more, or" in told
    monkeypatch.setattr(FedSAM, "private_by_example", True)  # as a careless method would say
    fed = federation(small_experiment(method={"name": "fedsam"}, privacy=PRIVACY))
    fed.runner.begin(1)
    with pytest.raises(ClientError, match="does not cover `perturb`, which gets gradients"):
        fed.mean(
            fed.runner.context.spec.functions.local_update, [0], weights=fed.initial_weights()
        )
