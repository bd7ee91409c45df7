"""Dropout under `vmap`: the same masks for a client alone and in a stack; one for each example."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Draws:
    """The sources of masks under `vmap`, over a stack's clients or the examples of a batch."""

    generators: Sequence[torch.Generator | None]  # of each client; None for torch's global one
    counts: Sequence[int]  # of each one's rows in the batch that are not padding


_draws: Draws | None = None  # of the current stack in this process


@contextmanager
def drawing(draws: Draws) -> Iterator[None]:
    """Context in which dropout under `vmap` draws the masks of each from its own generator."""
    global _draws
    _draws = draws
    try:
        yield
    finally:
        _draws = None


class _Mask(torch.autograd.Function):
    """A mask for `x`, broadcastable, whose entries are 1 with probability `keep`."""

    @staticmethod
    def forward(x: Tensor, keep: float, whole_channels: bool) -> Tensor:
        return _empty(x, whole_channels).bernoulli_(keep)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, keep: float, whole_channels: bool
    ) -> tuple[Tensor, int]:
        if _draws is None or in_dims[0] is None:
            raise RuntimeError("dropout on a tensor without a client dimension")
        mask = _empty(x.movedim(in_dims[0], 0)[0], whole_channels)
        masks = mask.new_zeros(info.batch_size, *mask.shape)
        for row, generator, count in zip(masks, _draws.generators, _draws.counts, strict=False):
            row[:count] = torch.empty_like(mask[:count]).bernoulli_(keep, generator=generator)
        return masks, 0


def _empty(x: Tensor, whole_channels: bool) -> Tensor:
    shape = x.shape[:2] + (1,) * (x.dim() - 2) if whole_channels else x.shape
    return torch.empty(shape, dtype=x.dtype, device=x.device)


class Dropout(nn.Module):
    """`nn.Dropout`, or `nn.Dropout2d` with `whole_channels`, with the same masks on a CPU."""

    def __init__(self, p: float, whole_channels: bool) -> None:
        super().__init__()
        self.p, self.whole_channels = p, whole_channels

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return x * 0
        mask: Tensor = _Mask.apply(x.detach(), 1 - self.p, self.whole_channels)  # type: ignore[no-untyped-call]
        return x * (mask / (1 - self.p))


def replace_dropout(network: nn.Module) -> None:
    """Replace PyTorch's dropout layers within a network."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout or type(child) is nn.Dropout2d:  # not subclasses
                setattr(module, name, Dropout(child.p, type(child) is nn.Dropout2d))
