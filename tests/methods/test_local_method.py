"""Training without a federation: each client alone, as written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from experiments import small_experiment
from fedsim import Run
from fedsim.errors import Diverged, RunError
from fedsim.launch.prepare import prepare
from fedsim.support.rng import keyed_rng

Finish = Callable[..., Run]
LOCAL: dict[str, Any] = {
    "method": {"name": "local"},
    "train": {"rounds": 2, "batch_size": 16, "optimizer": {"lr": 0.1}},
}


def accuracy_alone(k: int, rounds: list[int]) -> float:
    """What client k's own model comes to on the central test set, in plain PyTorch."""
    experiment = small_experiment(**LOCAL)
    dataset, splits, spec = prepare(experiment)
    network = spec.build_model()
    sgd = torch.optim.SGD(network.parameters(), lr=0.1)
    x = torch.tensor(dataset.x[splits.train[k]])
    y = torch.tensor(dataset.y[splits.train[k]])
    for t in rounds:
        rng = keyed_rng(experiment.seed, "local_training/batches", t, k)
        for batch in torch.tensor(rng.permutation(len(y))).split(16):
            sgd.zero_grad()
            nn.functional.cross_entropy(network(x[batch]), y[batch]).backward()
            sgd.step()
    with torch.no_grad():
        right = network(torch.tensor(dataset.test_x)).argmax(dim=1).numpy() == dataset.test_y
    return float(right.mean())


def test_each_client_trains_alone(finish: Finish) -> None:
    done = finish(**LOCAL)
    expected = np.mean([accuracy_alone(k, [1, 2]) for k in range(10)])
    assert done.rounds["accuracy"].iloc[-1] == pytest.approx(expected, abs=1e-3)
    assert done.rounds["total_bytes_up"].iloc[-1] == 0


def test_clients_that_have_not_trained_do_not_count(finish: Finish) -> None:
    done = finish(**{**LOCAL, "train": {**LOCAL["train"], "rounds": 1, "participation": 0.3}})
    trained = done.clients.dropna(subset="loss")["client"]
    assert len(trained) == 3
    expected = np.mean([accuracy_alone(int(k), [1]) for k in trained])
    assert done.rounds["accuracy"].iloc[-1] == pytest.approx(expected, abs=1e-3)


def test_a_model_that_diverges_is_told(finish: Finish) -> None:
    wild = {**LOCAL, "train": {**LOCAL["train"], "optimizer": {"lr": 1e20}}}
    with pytest.raises(
        Diverged, match=r"diverged in round 1: client \d: NaN or infinite weights; lo"
    ):
        finish(**wild)
    wild["train"] = {**wild["train"], "on_client_error": "skip"}
    with pytest.raises(RunError, match="round 1: no client has a model: all were skipped"):
        finish(**wild)
