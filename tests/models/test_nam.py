"""Neural additive models, against small networks that are written out feature by feature."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.data import DataSpec
from fedsim.models import models
from fedsim.models.nam import AdditiveClassifier

PARTS = np.array([0, 1, 1, 1, 2, 3, 3])  # two features of categories


def network(parts: Any = PARTS, outputs: int = 3, seed: int = 0, **fields: Any) -> Any:
    torch.manual_seed(seed)
    model = models.parse({"name": "nam", "hidden": [5, 4], **fields})
    own = None if len(np.unique(parts)) == len(parts) else parts
    data = DataSpec((len(parts),), outputs, np.dtype(np.float32), parts=own)
    found = model.build_for(data, outputs)
    assert isinstance(found, AdditiveClassifier)
    return found.eval()


def written_out(of: Any, x: Tensor, parts: Any) -> tuple[Tensor, Tensor]:
    """The outputs, and (B, F, C) what each feature adds, one feature after another."""
    first, *hidden = (layer for layer in of.features.layers if not isinstance(layer, nn.Dropout))
    H, added = of.features.size, []
    for f in range(parts.max() + 1):
        entries = np.flatnonzero(parts == f)
        own = x[:, entries]
        if first.units == "exu":
            h = sum(
                (own[:, [k]] - first.bias[w]) * torch.exp(first.weight[w])
                for k, w in enumerate(entries)
            )
            h = torch.minimum(torch.relu(h), torch.tensor(1.0))
        else:
            h = torch.relu(own @ first.weight[entries] + first.bias[f])
        for layer in hidden:
            h = torch.relu(nn.functional.linear(h, layer.weight[f].T, layer.bias[f]))
        added.append(h @ of.head.weight[:, f * H : (f + 1) * H].T)
    return torch.stack(added).sum(dim=0) + of.head.bias, torch.stack(added, dim=1)


@pytest.mark.parametrize("units", ["relu", "exu"])
@pytest.mark.parametrize("hidden", [[5], [5, 4], [6, 5, 4]])
@pytest.mark.parametrize("parts", [PARTS, np.arange(4)], ids=["categories", "numbers"])
def test_the_output_is_the_sum_of_small_networks(
    parts: Any, hidden: list[int], units: str
) -> None:
    of = network(parts, units=units, hidden=hidden)
    x = torch.randn(9, len(parts))
    outputs, added = written_out(of, x, parts)
    torch.testing.assert_close(of(x), outputs)
    found = of.contributions(x)
    torch.testing.assert_close(found.float(), added)
    bias = of.head.bias.double()
    torch.testing.assert_close((found.sum(dim=1) + bias).float(), of(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("units", ["relu", "exu"])
def test_a_feature_adds_the_same_whatever_the_others_are(units: str) -> None:
    of, x, other = network(units=units), torch.randn(6, 7), torch.randn(6, 7)
    for f in range(4):
        own = torch.from_numpy(f == PARTS)
        changed = of.contributions(torch.where(own, x, other))
        torch.testing.assert_close(changed[:, f], of.contributions(x)[:, f], rtol=0, atol=0)

    def gradient(at: Tensor) -> Tensor:
        at = at.clone().requires_grad_()
        (found,) = torch.autograd.grad(of(at)[:, 0].sum(), at)
        return found

    own = torch.from_numpy(PARTS == 1)
    mixed = gradient(torch.where(own, x, other))
    torch.testing.assert_close(mixed[:, own], gradient(x)[:, own])


def test_initial_weights_are_those_of_linear_layers() -> None:
    """Bounds by the entries of a feature, and by the width of the layer before."""
    of = network(hidden=[2000, 3])
    first, second = of.features.layers[0], of.features.layers[2]
    inputs = np.bincount(PARTS)
    for weight, bound in (
        *((first.weight[w], inputs[f] ** -0.5) for w, f in enumerate(PARTS)),
        *((first.bias[f], inputs[f] ** -0.5) for f in range(4)),
        (second.weight, 2000**-0.5),
    ):
        assert 0.99 * bound < weight.abs().max() <= bound
        assert abs(float(weight.detach().mean())) < 0.1 * bound


def test_dropout_of_features_drops_whole_features() -> None:
    of = network(feature_dropout=0.5).train()
    x = torch.randn(200, 7)
    found, whole = of.contributions(x), of.eval().contributions(x)
    kept = (found != 0).any(dim=2)
    torch.testing.assert_close(found, whole * 2 * kept[:, :, None])
    assert 0.4 < float(kept.double().mean()) < 0.6
