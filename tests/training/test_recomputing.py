"""Activations computed again: the same steps, from less memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsim import Run
from fedsim.models import models
from fedsim.training import blocks_of
from fedsim.training.recomputing import recomputed

IMAGES = {"name": "digits", "subset": 0.1}
VIT = {"name": "vit", "dim": 16, "depth": 2, "dropout": 0.2}
RESNET = {"name": "resnet8", "width": 4}


def network(name: str, **keys: Any) -> nn.Module:
    return models.parse({"name": name, **keys}).build((1, 8, 8), 3)


@pytest.mark.parametrize(
    ("built", "count"),
    [
        (lambda: network(**VIT), 2),
        (lambda: network(**RESNET), 4),
        (lambda: network("mlp"), 0),
        (lambda: network("cnn"), 0),
        (lambda: importlib.import_module("torchvision.models").resnet18(), 8),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 3), 3),
        (lambda: nn.Sequential(*(nn.ModuleList([nn.ReLU(), nn.ReLU()]) for _ in range(3))), 3),
    ],
)
def test_what_blocks_are(built: Callable[[], nn.Module], count: int) -> None:
    assert len(blocks_of(built())) == count


def gradients(model: nn.Module, x: Tensor, wanted: bool) -> tuple[list[Tensor], int]:
    """Gradients and buffers after a pass, and how many numbers it kept."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    torch.manual_seed(0)
    context = recomputed(model) if wanted else nullcontext()
    with context, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(x).square().sum()
        count = sum(kept.values())
        found = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
    buffers = [b.clone() for b in model.buffers()]
    return [t for t in (*found, *buffers) if t is not None], count


@pytest.mark.parametrize("section", [VIT, RESNET], ids=["dropout", "batch norm"])
def test_gradients_are_the_same_and_less_is_kept(section: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = network(**section).train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.rand(8, 1, 8, 8)
    plain, much = gradients(model, x, False)
    model.load_state_dict(state)
    found, little = gradients(model, x, True)
    for one, other in zip(plain, found, strict=True):
        assert torch.equal(one, other)
    assert little < 0.6 * much
    assert "forward" not in {name for module in model.modules() for name in vars(module)}


@pytest.mark.parametrize(
    "given",
    [
        {"model": VIT, "adapters": {"r": 2, "dropout": 0.1}},
        pytest.param(
            {"model": VIT, "train": {"accumulate": 2, "precision": "bfloat16"}},
            marks=pytest.mark.night,
        ),
        pytest.param({"model": RESNET, "method": {"name": "fedsam"}}, marks=pytest.mark.night),
        {"model": RESNET, "method": {"name": "perfedavg"}},
        # Whose loss runs the network with other weights than it has when the gradient is taken.
        {"model": VIT, "method": {"name": "apfl"}},
    ],
)
def test_runs_have_the_same_result(finish: Callable[..., Run], given: dict[str, Any]) -> None:
    train = {"rounds": 1, "batch_size": 8, **given.get("train", {})}
    plain, found = (
        finish(**{**given, "data": IMAGES, "train": {**train, "checkpoint_activations": wanted}})
        for wanted in (False, True)
    )
    assert plain.result_hash == found.result_hash
