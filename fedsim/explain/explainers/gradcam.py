"""Grad-CAM: where the features of a layer speak for a class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from numpy.random import Generator
from torch import Tensor, nn
from torch.nn import functional

from fedsim.config.registry import nearest
from fedsim.errors import ExperimentError
from fedsim.explain.explainer import explainers
from fedsim.explain.explainers.attention import patch_grid
from fedsim.explain.explainers.attribution import (
    Attribution,
    attributions,
    batches,
    differentiable_rnn,
    evaluation,
)

_OTHERS = "for any differentiable network: gradient_x_input, integrated_gradients"


@dataclass(frozen=True)
class _Features:
    """What a layer returns for images: a map of features.

    Args:
        output: the tensor itself.
        kind: `channels first` (B, D, h, w), `channels last` (B, h, w, D) or `tokens` (B, n, D).
        special: tokens before those of the patches.
        rows: h.
    """

    output: Tensor
    kind: str
    special: int
    rows: int

    def map_of(self, values: Tensor) -> Tensor:
        """(B, D, h, w) values in the shape of the output, without special tokens."""
        if self.kind == "tokens":
            values = values[:, self.special :].reshape(len(values), self.rows, -1, values.shape[2])
        return values if self.kind == "channels first" else values.permute(0, 3, 1, 2)


@explainers.register
@attributions.register
class GradCam(Attribution):
    """Grad-CAM: R = ReLU(Σ_k α_k A_k) with α_k the mean of ∂f_y/∂A_k, upsampled to the image.

    A_k (h, w) are the features of a layer, and the mean is over their places. A transformer's
    tokens are the places of their patches; class tokens and registers are left out. The map is
    upsampled bilinearly, spread evenly over channels, and never negative: it only shows what
    speaks for the class. Only for images.

    Args:
        layer: a layer by its name in the network, such as `features.3`; see
            `network.named_modules()`. By default the last convolution, or the block that it is a
            part of, such as a residual one; of a transformer the last block whose patches the
            output depends on: the one before the last, if it is read from a class token.

    Source: Selvaraju et al. (ICCV 2017), Eq. 1 and 2.
    """

    name: str = "gradcam"
    differentiates: ClassVar[bool] = True
    layer: str | None = None

    def check_shape(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 3:
            raise self._refusal("explains images", "for others: occlusion, kernel_shap")

    def check_network(self, network: nn.Module) -> None:
        known = dict(network.named_modules())
        known.pop("")
        if self.layer is not None and self.layer not in known:
            raise ExperimentError(
                f"explainer {self.name}: the network has no layer '{self.layer}'"
                f"{nearest(self.layer, known)}"
            )

    def relevance(self, network: nn.Module, x: Tensor, y: Tensor, rng: Generator) -> Tensor:
        if x.dim() != 4:
            raise self._refusal("explains images", "for others: occlusion, kernel_shap")
        self.check_network(network)
        found = torch.zeros_like(x)
        with evaluation(network), differentiable_rnn(network, x):
            for rows in batches(x):
                cam = self._cam(network, x[rows], y[rows])
                pixels = functional.interpolate(cam[:, None], x.shape[2:], mode="bilinear")
                found[rows] = pixels / x.shape[1]
        return found

    def _cam(self, network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """(B, h, w) the map in the layer's own resolution."""
        with torch.enable_grad(), _listened(network, self.layer) as called:
            logits = network(x.detach().clone().requires_grad_())
        output = logits.gather(1, y.to(logits.device).long()[:, None]).sum()
        maps = {name: found for name, out in called.items() if (found := _features(out, x))}
        if not maps:
            raise self._unfit(called, x)
        outputs = [found.output for found in maps.values()]
        gradients: list[Tensor | None] = [None] * len(outputs)
        if output.requires_grad:
            gradients = list(torch.autograd.grad(output, outputs, allow_unused=True))
        reached = [
            (features, gradient)
            for features, gradient in zip(maps.values(), gradients, strict=True)
            if gradient is not None and not _passed_by(features, gradient)
        ]
        if not reached:
            raise self._unread(next(reversed(maps)))
        features, gradient = reached[-1]
        A, slope = features.map_of(features.output.detach()), features.map_of(gradient)
        return (slope.mean(dim=(2, 3), keepdim=True) * A).sum(dim=1).relu()

    def _unfit(self, called: Mapping[str, Any], x: Tensor) -> ExperimentError:
        if self.layer is None:
            why = "the network has no convolution with a map, nor tokens of an image's patches"
            return self._refusal(why, _OTHERS)
        if self.layer not in called:
            return self._refusal(f"layer '{self.layer}' is not called", "leave out `layer`")
        shape = getattr(called[self.layer], "shape", None)
        what = "no tensor" if shape is None else "×".join(map(str, shape[1:])) or "a number"
        why = (
            f"layer '{self.layer}' returns {what} for each image, which is no map of its "
            f"{x.shape[2]}×{x.shape[3]} pixels"
        )
        return self._refusal(why, "take a convolution, or a block of tokens")

    def _unread(self, last: str) -> ExperimentError:
        why = f"the output does not depend on the places of layer '{self.layer or last}'"
        return self._refusal(why, "take a layer before it, or leave out `layer`")

    def _refusal(self, why: str, instead: str) -> ExperimentError:
        return ExperimentError(f"explainer {self.name}: {why}; {instead}")


@contextmanager
def _listened(network: nn.Module, layer: str | None) -> Iterator[dict[str, Any]]:
    """Context that keeps what a layer returns; by default what convolutions and blocks do."""
    called: dict[str, Any] = {}

    def keep(name: str, found: Any) -> Any:
        several = type(found) in (tuple, list) and found
        first = found[0] if several else found
        called.pop(name, None)  # in the order of the last calls
        called[name] = first
        if not isinstance(first, Tensor):
            return None
        copied = first.clone()  # which may be changed in place
        return type(found)((copied, *found[1:])) if several else copied

    handles = [
        module.register_forward_hook(lambda _, __, found, name=name: keep(name, found))
        for name, module in network.named_modules()
        if name and (name == layer if layer is not None else _may_be_asked(module))
    ]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def _may_be_asked(module: nn.Module) -> bool:
    """Whether a module is a convolution, or one that says itself how its parts are called."""
    if next(module.children(), None) is None:
        return isinstance(module, nn.Conv2d)
    return not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


def _features(output: Any, x: Tensor) -> _Features | None:
    """What a layer returns as a map of the images x (B, C, H, W); None if it is none."""
    if not isinstance(output, Tensor) or len(output) != len(x) or not output.requires_grad:
        return None
    H, W = x.shape[2:]
    if output.dim() == 3:
        grid = patch_grid(output.shape[1], H, W)
        found = grid and _Features(output, "tokens", *grid)
        return found if found and output.shape[1] - found.special > 1 else None
    if output.dim() != 4:
        return None
    (h, w), last = output.shape[2:], output.shape[1:3]
    kind = "channels first"
    if h * W != w * H and last[0] * W == last[1] * H:  # only so does it have the image's shape
        kind, (h, w) = "channels last", last
    return _Features(output, kind, 0, h) if h * w > 1 else None


def _passed_by(features: _Features, gradient: Tensor) -> bool:
    """Whether the output depends on special tokens alone."""
    return bool(features.special and gradient.any() and not features.map_of(gradient).any())
