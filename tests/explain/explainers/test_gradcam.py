"""Grad-CAM, against Captum's, and against its formula on tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from networks import Written
from torch import Tensor, nn
from torch.nn import functional

from experiments import Later
from fedsim.errors import ExperimentError
from fedsim.explain.explainers.attribution import attributions
from fedsim.models import models

attr: Any = Later("captum.attr")
CLASS = torch.tensor([2, 0, 1])


def built(shape: tuple[int, ...], **section: Any) -> nn.Module:
    torch.manual_seed(0)
    return models.parse(section).build(shape, 4).eval()


def images(*shape: int) -> Tensor:
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))


def explain(network: nn.Module, x: Tensor, layer: str | None = None) -> Tensor:
    chosen = attributions.parse({"name": "gradcam", "layer": layer})
    return chosen.relevance(network, x, CLASS, np.random.default_rng(0))


class Functions(nn.Module):
    """Convolutions whose outputs `forward` changes, perhaps in place."""

    def __init__(self, inplace: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inplace = inplace
        self.first, self.second = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 5, (3, 1))
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = functional.relu(self.first(x), inplace=self.inplace)
        features = functional.relu(self.second(features), inplace=self.inplace)
        return self.head(features.mean(dim=(2, 3)))


@pytest.mark.parametrize(
    ("make", "shape", "usual"),
    [
        (lambda: built((1, 28, 28), name="cnn"), (1, 28, 28), "features.3"),
        (lambda: built((3, 16, 24), name="resnet8", width=4), (3, 16, 24), "features.6"),
        (Functions, (1, 9, 12), "second"),
    ],
    ids=["cnn", "resnet8", "functions"],
)
@pytest.mark.parametrize("named", [False, True])
def test_convolutions_against_captum(
    make: Callable[[], nn.Module], shape: tuple[int, ...], usual: str, named: bool
) -> None:
    network, x = make().eval(), images(*shape)
    other = Functions(inplace=False).eval() if isinstance(network, Functions) else network
    layers = [name for name, one in network.named_modules() if isinstance(one, nn.Conv2d)]
    for layer in layers if named else [usual]:
        cam = attr.LayerGradCam(other, other.get_submodule(layer)).attribute(
            x, CLASS, relu_attributions=True
        )
        expected = functional.interpolate(cam, shape[1:], mode="bilinear")[:, 0].detach()
        found = explain(network, x, layer if named else None)
        assert found.shape == x.shape
        assert torch.allclose(found.sum(dim=1), expected, rtol=1e-5, atol=1e-7)
        assert torch.equal(found, found[:, :1].expand_as(found))
    assert expected.amax() > 0


@pytest.mark.parametrize(("depth", "last"), [(3, "blocks.1"), (2, "blocks.0"), (1, "tokens")])
def test_tokens_before_a_class_token_is_read(depth: int, last: str) -> None:
    """The last block's patches do not reach the output, so that of the one before it counts."""
    section = {"name": "vit", "patch": 2, "dim": 8, "depth": depth, "heads": 2}
    network, x = built((1, 8, 12), **section), images(1, 8, 12)
    kept: dict[str, Tensor] = {}

    def keep(_: nn.Module, __: Any, found: Any) -> None:
        kept["A"] = found if isinstance(found, Tensor) else found[0]

    handle = network.get_submodule(f"features.{last}").register_forward_hook(keep)
    logits = network(x.requires_grad_()).gather(1, CLASS[:, None]).sum()
    handle.remove()
    A = kept["A"]
    (slope,) = torch.autograd.grad(logits, A)
    special = 0 if last == "tokens" else 1  # a class token
    found = explain(network, x.detach())[:, 0]
    alpha = slope[:, special:].mean(dim=1, keepdim=True)
    cam = (alpha * A[:, special:]).sum(dim=2).relu().view(3, 1, 4, 6)
    expected = functional.interpolate(cam, (8, 12), mode="bilinear")[:, 0]
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    named = explain(network, x.detach(), f"features.{last}")
    assert torch.equal(named[:, 0], found)


SMALL_VIT = {"img_size": 64, "depth": 2, "embed_dim": 24}
SMALL_SWIN = {"depths": (1, 1, 2, 1), "embed_dim": 12, "num_heads": (1, 1, 2, 2)}


@pytest.mark.parametrize(
    ("name", "pixels", "small", "kind"),
    [
        ("vit_tiny_patch16_224", 64, SMALL_VIT, "tokens after a class token"),
        ("deit_tiny_distilled_patch16_224", 64, SMALL_VIT, "after two special tokens"),
        ("swin_tiny_patch4_window7_224", 224, SMALL_SWIN, "maps with channels last"),
        ("resnet18", 32, {}, "residual blocks"),
    ],
)
def test_networks_of_timm(name: str, pixels: int, small: dict[str, Any], kind: str) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    network = timm.create_model(name, num_classes=4, **small).eval()
    x = images(3, pixels, pixels)[:1]
    for parameter in network.parameters():  # some begin with zeros
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    chosen = attributions.parse({"name": "gradcam"})
    found = chosen.relevance(network, x, CLASS[:1], np.random.default_rng(0))
    assert found.shape == x.shape
    assert found.std() > 0, kind


def test_maps_with_channels_last_are_read_as_such() -> None:
    torch.manual_seed(2)
    convolution, head = nn.Conv2d(1, 7, 4, 4), nn.Linear(7, 4)

    def network(*order: int) -> nn.Module:
        """Whose maps have their axes in that order."""
        places = tuple(k for k in range(1, 4) if order[k] > 1)
        block = Written(lambda net, x: net.conv(x).tanh().permute(order), conv=convolution)
        return Written(lambda net, x: net.head(net.block(x).mean(places)), block=block, head=head)

    x = images(1, 12, 20)
    one, other = (explain(network(*o).eval(), x) for o in ((0, 1, 2, 3), (0, 2, 3, 1)))
    assert torch.allclose(one, other, atol=1e-7)
    assert one.std() > 0


def test_a_layer_that_is_not_called() -> None:
    network = built((1, 8, 8), name="cnn")
    network.spare = nn.Conv2d(1, 1, 1)
    with pytest.raises(ExperimentError, match="layer 'spare' is not called; leave out `layer`"):
        explain(network, images(1, 8, 8), "spare")
