"""SAGE: Shapley values of the loss, against their definition."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from by_hand import shapley
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.data import Dataset
from fedsim.explain import ExplainedData, ExplainedModel
from fedsim.explain.baselines import Background
from fedsim.explain.explainers.sage import Sage, shapley_of_loss
from fedsim.explain.groups import group_parts
from fedsim.models import models

CLASSES = 3
SHAPES = {"table": (4,), "series": (2, 2), "images": (2, 4, 3)}  # four features each, size 2


def network(shape: tuple[int, ...]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first = nn.Linear(math.prod(shape), 7)
        return nn.Sequential(nn.Flatten(), first, nn.Tanh(), nn.Linear(7, CLASSES)).eval()


def inputs(shape: tuple[int, ...], n: int, seed: int) -> Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def loss(net: nn.Module, x: Tensor, y: int, background: Tensor, there: NDArray[np.bool_]) -> float:
    """Cross-entropy of the mean prediction, by the definition."""
    mixed = torch.where(torch.from_numpy(there), x, background)  # all channels of a pixel alike
    return -math.log(net(mixed).double().softmax(dim=1).mean(dim=0)[y])


def parts(kind: str) -> NDArray[np.int64]:
    if kind != "images":
        return np.arange(4).reshape(SHAPES[kind])
    return np.array([[0, 0, 1], [0, 0, 1], [2, 2, 3], [2, 2, 3]])


def subject(shape: tuple[int, ...], background: Tensor) -> tuple[ExplainedModel, ExplainedData]:
    """A model and its data, of which the client holds the background."""
    x = background.numpy()
    y = np.arange(len(x)) % CLASSES
    data = Dataset(x, y, x, y, ("a", "b", "c"))
    model = ExplainedModel(models.parse({"name": "mlp"}), "", 1, 0, 2, network=network(shape))
    return model, ExplainedData(data, torch.from_numpy, x)


@pytest.mark.parametrize("kind", SHAPES)
def test_all_orders_give_the_exact_values(kind: str) -> None:
    shape = SHAPES[kind]
    net, x, background = network(shape), inputs(shape, 3, 1), inputs(shape, 5, 2)
    y = torch.tensor([2, 0, 1])
    np.testing.assert_array_equal(group_parts(shape, 2).index, parts(kind))
    orders = np.array([[order] * 3 for order in itertools.permutations(range(4))])
    feature_of = torch.from_numpy(parts(kind))
    with torch.no_grad():
        absent = Background(background[:, None], np.ones(5))
        found = shapley_of_loss(net, x, y, absent, feature_of, orders)
    of = parts(kind)
    for k, c in enumerate(y.tolist()):
        lost = partial(loss, net, x[k], c, background)
        expected = shapley(lambda there, lost=lost: -lost(np.isin(of, there)), 4)
        np.testing.assert_allclose(found[k], expected, atol=1e-6)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("permutations", [1, 3])
def test_the_sum_is_what_all_features_take_off_the_loss(kind: str, permutations: int) -> None:
    shape = SHAPES[kind]
    x, background, y = inputs(shape, 6, 1), inputs(shape, 5, 2), torch.arange(6) % CLASSES
    model, data = subject(shape, background)
    made = Sage(permutations=permutations, baseline={"train": 9}, size=2)
    found = made.relevances(model, data, x, y, np.random.default_rng(0))
    assert found.dtype == np.float32
    assert found.shape == ((6, 4, 3) if kind == "images" else x.shape)
    net, of = network(shape), parts(kind)
    for k in range(6):
        absent, there = (
            loss(net, x[k], int(y[k]), background, np.full(of.shape, mask))
            for mask in (False, True)
        )
        assert found[k].sum() == pytest.approx(absent - there, abs=1e-5)
        # Spread over the pixels of each square.
        assert all(len({*found[k][of == i].tolist()}) == 1 for i in range(4))
