"""Gradients in parts (`train.accumulate`), small batches, and what cannot be trained so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from experiments import (
    LATE,
    NETWORK_METHODS,
    WHOLE,
    Finish,
    by_day,
    federation,
    small_experiment,
    with_method,
)
from fedsim.analysis.replay import ModelSnapshot
from fedsim.training import FlatModel, Hooks, Train, TrainingJob, part_sizes, train

CPU = torch.device("cpu")
NORMALISED = {"name": "networks:normalised"}

# XPFL's teachers, generators and students draw random numbers in the network for each part anew;
# FedBN's batch normalisation is that of a part.
ALIKE = set(NETWORK_METHODS) - {"xpfl", "fedbn"}


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 60), st.booleans())
def test_parts_cover_a_batch(n: int, parts: int, most: int, normalised: bool) -> None:
    layers = [nn.Linear(2, 2), *([nn.BatchNorm1d(2)] if normalised else [])]
    sizes = part_sizes(FlatModel(nn.Sequential(*layers), CPU), n, parts, most)
    assert sum(sizes) == n
    assert len(sizes) <= max(parts, -(-n // min(most, -(-n // parts))))
    if normalised:
        assert min(sizes) >= 2 or n == 1
        assert len(sizes) >= min(-(-n // most), n // 2)  # no fewer than need be
    else:
        assert max(sizes) <= most


@pytest.mark.parametrize("name", by_day(sorted(ALIKE), ("apfl", "fedgen", "pfedme", "semifl")))
def test_a_method_does_not_depend_on_the_number_of_parts(finish: Finish, name: str) -> None:
    """Batches of 16 in one part, and in three."""
    data = {"name": "digits", "subset": 0.2}
    rounds = 4 if name in LATE else 2

    def weights(accumulate: int, **sections: Any) -> dict[str, np.ndarray]:
        train = {**sections.pop("train", {}), "rounds": rounds, "accumulate": accumulate}
        done = finish(**with_method(name, data=data, train=train, **sections))
        if done.experiment.method.has_global_model:
            return done.weights()
        clients = ModelSnapshot.of_clients(done, range(done.manifest["clients"]))
        return {
            f"{k}: {layer}": np.asarray(w, np.float64)
            for k, client in enumerate(clients)
            for layer, w in client.network().state_dict().items()
        }

    # Distances that rounding alone opens up: what a change of 1e-7 of the rate comes to.
    whole, parts = weights(1), weights(3)
    rate = small_experiment(**with_method(name)).train.optimizer.lr * (1 + 1e-6)
    other = weights(1, train={**with_method(name).get("train", {}), "optimizer": {"lr": rate}})
    for layer, w in whole.items():
        bound = 10 * np.abs(other[layer] - w).max() + 1e-4 * np.abs(w).max() + 1e-6
        assert np.abs(parts[layer] - w).max() <= bound, layer


def test_what_a_loss_draws_is_drawn_once_for_a_batch() -> None:
    asked: list[int] = []

    def draw(x: torch.Tensor, y: torch.Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        asked.append(len(y))
        row = torch.arange(len(y), dtype=torch.float32) + 100 * len(asked)
        return {"row": row}, {"batch": torch.tensor(float(len(asked)))}

    seen: list[tuple[list[float], float]] = []

    def loss(network: nn.Module, x: Any, y: Any, context: Any) -> torch.Tensor:
        seen.append((context["row"].tolist(), float(context["batch"])))
        return network(x)[:, 0] * context["row"]

    model = FlatModel(nn.Linear(3, 1), CPU)
    x, y = torch.randn(7, 3), torch.zeros(7)
    rng = np.random.default_rng(0)
    job = TrainingJob(model.vector.clone(), x, y, 0.1, 1, rng, Hooks(loss, draw=draw))
    train(model, job, Train(batch_size=4, accumulate=3))
    assert asked == [4, 3]
    assert seen == [
        *(([100, 101], 1), ([102, 103], 1)),
        *(([200], 2), ([201], 2), ([202], 2)),
    ]


@pytest.mark.parametrize("private", [False, True])
def test_what_is_prepared_goes_with_its_examples(private: bool) -> None:
    """It is prepared once, whatever the order, the epochs and the parts of a batch."""
    x = torch.arange(7.0)[:, None].repeat(1, 3)
    seen: list[float] = []

    def loss(network: nn.Module, x: Any, y: Any, context: Any) -> torch.Tensor:
        assert torch.equal(context["square"], x[:, 0] ** 2 + context["more"])
        seen.extend(x[:, 0].tolist())
        return network(x)[:, 0]

    def prepare(network: nn.Module, x: Any, context: Any) -> dict[str, Any]:
        seen.append(-1)
        return {"square": x[:, 0] ** 2 + context["more"]}

    model, rng = FlatModel(nn.Linear(3, 1), CPU), np.random.default_rng(0)
    job = TrainingJob(
        *(model.vector.clone(), x, torch.zeros(7), 0.1, 2, rng, Hooks(loss, prepare=prepare)),
        context={"more": torch.ones(1)},
        dp_sgd=(1.0, 0.0) if private else None,
    )
    train(model, job, Train(batch_size=4, accumulate=1 if private else 3))
    assert seen[0] == -1
    assert -1 not in seen[1:]
    assert private or sorted(seen[1:]) == sorted([*range(7), *range(7)])


@pytest.mark.parametrize(
    "name", by_day(["fedavg", "perfedavg", "pfedme", "apfl", "fedsam", "mime_lite"], ["perfedavg"])
)
def test_batch_norm_gets_two_examples(finish: Finish, name: str) -> None:
    sections: dict[str, Any] = {"model": NORMALISED, "method": {"name": name}}
    done = finish(**sections, train={"rounds": 1, "accumulate": 16, "batch_size": 11})
    assert np.isfinite(done.rounds["loss"]).all()


def test_small_clients_can_be_skipped() -> None:
    partition = {"clients": 100, "alpha": 0.1, "min_samples": 1}
    skip = {"on_client_error": "skip"}
    federation(small_experiment(data=WHOLE, model=NORMALISED, partition=partition, train=skip))
