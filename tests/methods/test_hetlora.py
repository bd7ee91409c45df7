"""HetLoRA: ranks by client, against its formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from experiments import Finish, by_day
from fedsim import Run
from fedsim.analysis.replay import ModelSnapshot, replay
from fedsim.methods.hetlora import HetLoRA
from fedsim.models import Classifier
from fedsim.models.adapters import Adapters
from fedsim.objectives import Classification
from fedsim.training import FlatModel

R, INTO, OUT, HEAD = 4, (64, 24), (24, 12), 12 * 10 + 10


def finished(finish: Finish, rounds: int = 3, lr: float = 0.1, **method: Any) -> Run:
    return finish(
        model={"name": "mlp", "hidden": [24, 12]},
        adapters={"r": R, "alpha": 8},
        method={"name": "hetlora", **method},
        train={"rounds": rounds, "participation": 1.0, "optimizer": {"lr": lr}},
        checkpoint={"every": 1},  # where replays begin
    )


def arrays(model: ModelSnapshot) -> dict[str, NDArray[np.float64]]:
    network = model.network()
    return {
        name.replace(".default.weight", ""): p.detach().double().numpy()
        for name, p in network.named_parameters()
        if "lora" in name or name.startswith("head")
    }


def trained(run: Run, t: int) -> dict[int, dict[str, NDArray[np.float64]]]:
    """What each client has sent in a round."""
    models = ModelSnapshot.of_clients(run, range(10), t, of="cohort")
    return {model.client: arrays(model) for model in models if model.client is not None}


LAYERS = [("features.1.lora_A", "features.1.lora_B"), ("features.3.lora_A", "features.3.lora_B")]


def product(own: dict[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """B·A of all layers, as a vector."""
    return np.concatenate([(own[b] @ own[a]).ravel() for a, b in LAYERS])


@pytest.mark.parametrize("gamma", by_day([1, 0.5], [0.5]))
def test_truncated_and_weighted_by_norms(finish: Finish, gamma: float) -> None:
    run = finished(finish, ranks=[1, 2, 4], gamma=gamma, lam=1.0)
    for t in (1, 2, 3):
        rows = run.clients.query("round == @t").set_index("client")
        own = trained(run, t)
        ranks = replay(run, t).state.ranks
        for k, rank in enumerate(ranks):
            for name, array in own[k].items():
                if "lora" in name:
                    assert not (array[rank:] if "lora_A" in name else array[:, rank:]).any()
            for way, held in (("up", rank), ("down", rows["rank"][k])):
                assert rows[f"bytes_{way}"][k] == 4 * (HEAD + sum(INTO + OUT) * held)
        s = np.array([np.linalg.norm(product(own[k])) for k in own])
        for name, array in arrays(ModelSnapshot.of(run, after=t)).items():
            expected = np.average([own[k][name] for k in own], axis=0, weights=s)
            np.testing.assert_allclose(array, expected, atol=1e-6)
        mean = np.average([product(own[k]) for k in own], axis=0, weights=s)
        of_means = product(arrays(ModelSnapshot.of(run, after=t)))
        gap = np.linalg.norm(mean - of_means) / np.linalg.norm(mean)
        assert run.rounds["adapter_gap"][t - 1] == pytest.approx(gap, rel=1e-3)
    assert run.clients["rank"][:10].tolist() == [1, 2, 4] * 3 + [1]
    assert (ranks[:3].tolist() == [1, 2, 4]) == (gamma == 1)


def last_norms(model: dict[str, NDArray[np.float64]], rank: int, gamma: float) -> float:
    """Σ ‖B_{:, γr:r}‖·‖A_{γr:r, :}‖."""
    rows = slice(max(1, math.floor(gamma * rank)), rank)
    norm = np.linalg.norm
    return sum(float(norm(model[b][:, rows]) * norm(model[a][rows])) for a, b in LAYERS)


def test_ranks_go_where_the_last_norms_shrink(finish: Finish) -> None:
    """As the client compares what it has got with what it has trained, before it gives them up."""
    gamma, pruned = 0.5, 0
    run = finished(finish, rounds=4, gamma=gamma, lam=0.3, ranks=[4])
    ranks = [replay(run, t).state.ranks for t in range(1, 5)]
    assert (ranks[0] == 4).all()  # B was 0
    for t in (2, 3, 4):
        before = arrays(ModelSnapshot.of(run, after=t - 1))
        for k, after in trained(run, t).items():
            rank, new = ranks[t - 2][k], ranks[t - 1][k]
            if new == rank:
                assert last_norms(after, rank, gamma) >= last_norms(before, rank, gamma)
            else:
                assert new == max(1, rank // 2)
                assert last_norms(after, rank, gamma) == 0
                pruned += 1
    assert pruned
    rows = run.clients.pivot(index="client", columns="round", values="rank")
    for t in (2, 3, 4):
        assert rows[t].tolist() == ranks[t - 2].tolist()


def test_the_regulariser() -> None:
    torch.manual_seed(0)
    network = Classifier(nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 3))
    model = FlatModel(
        Adapters(r=4).applied(network, fixed=False, added=False), torch.device("cpu")
    )
    model.vector.copy_(torch.randn(model.size))
    last = torch.zeros(model.size)
    views = model.named(last)
    a, b = "features.0.lora_A.default.weight", "features.0.lora_B.default.weight"
    views[a][2:], views[b][:, 2:] = 1, 1
    x, y = torch.randn(7, 6), torch.randint(0, 3, (7,))
    objective, method = Classification(), HetLoRA(lam=0.7)
    found = method.loss(objective, model.module, x, y, {"last": last})
    own = model.named(model.vector)
    penalty = own[b][:, 2:].norm() * own[a][2:].norm()
    plain = objective.loss(model.module, x, y, {})
    torch.testing.assert_close(found, plain + 0.7 * penalty)
    model.vector.copy_(torch.where(last == 1, 0, model.vector))  # has a gradient at 0
    gradient = model.gradient(method.loss(objective, model.module, x, y, {"last": last}).mean())
    assert torch.isfinite(gradient).all()


def test_nobody_has_learnt_anything(finish: Finish) -> None:
    """Where every norm is 0, all count alike."""
    run = finished(finish, rounds=1, lr=1e-300, ranks=[4])
    model, own = arrays(ModelSnapshot.of(run, after=1)), trained(run, 1)
    assert not product(model).any()
    for name, array in model.items():
        np.testing.assert_allclose(array, own[0][name], atol=1e-7)


def test_clients_predict_with_the_ranks_that_they_have(finish: Finish) -> None:
    run = finish(
        adapters={"r": 3},
        method={"name": "hetlora", "ranks": [1, 3]},
        partition={"test_fraction": 0.3, "min_samples": 4},
        train={"rounds": 2},
        evaluate={"clients": True},
    )
    common, one, three = (arrays(ModelSnapshot.of(run, client=k, after=2)) for k in (None, 0, 1))
    for name, array in common.items():
        np.testing.assert_array_equal(three[name], array)
        if "lora_A" in name:
            np.testing.assert_array_equal(one[name], array * [[1], [0], [0]])
        if "lora_B" in name:
            np.testing.assert_array_equal(one[name], array * [1, 0, 0])
