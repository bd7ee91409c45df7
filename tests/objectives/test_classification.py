"""Classification: scores in batches, and the weights of classes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from experiments import small_experiment
from fedsim.launch.prepare import prepare
from fedsim.objectives import Batch, Classification, evaluate
from fedsim.training import FlatModel


@pytest.mark.parametrize("n", [1, 500, 501, 1203])
def test_evaluate_is_one_big_batch(n: int) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
    flat = FlatModel(nn.Sequential(*layers), torch.device("cpu"))
    flat.module(torch.randn(50, 5))  # batch norm's statistics are not those of a new network
    before = flat.weights()
    x, y = torch.randn(n, 5), torch.randint(3, (n,))
    totals = evaluate(Classification(), flat.module, Batch(x, y))
    logits = flat.module.eval()(x).detach()
    chances = torch.softmax(logits.double(), dim=1)[torch.arange(n), y]
    assert totals["loss"] == pytest.approx(-float(torch.log(chances).sum()), rel=1e-4)
    assert totals["right"] == int((logits.argmax(dim=1) == y).sum())
    np.testing.assert_array_equal(flat.weights(), before)


def test_balanced_weights_are_one_on_average() -> None:
    objective = {"name": "classification", "class_weights": "balanced"}
    dataset, _, spec = prepare(small_experiment(objective=objective))
    assert isinstance(spec.objective, Classification)
    weights = np.array(spec.objective.class_weights)
    counts = np.bincount(dataset.y)
    np.testing.assert_allclose(weights * counts, weights[0] * counts[0])
    assert weights[dataset.y].mean() == pytest.approx(1)
