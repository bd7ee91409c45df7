"""Activations that are computed again in the backward pass, instead of being kept for it.

Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174), by
`torch.utils.checkpoint`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a network: of a list or sequence, those with layers of one class.

    They are the outermost, and in no other's part. Single layers are no blocks, nor are layers
    with adapters.
    """
    children = [child for child in network.children() if not hasattr(child, "lora_A")]
    found: list[nn.Module] = []
    if isinstance(network, nn.ModuleList | nn.Sequential):
        inner = [child for child in children if next(child.children(), None) is not None]
        kinds = Counter(map(type, inner))
        found = [child for child in inner if kinds[type(child)] > 1]
    for child in children:
        if not any(child is block for block in found):
            found += blocks_of(child)
    return list(dict.fromkeys(found))


@contextmanager
def recomputed(network: nn.Module) -> Iterator[None]:
    """Context in which training keeps only the inputs of the network's blocks.

    Gradients, random draws and batch norm's statistics are those without it, to the bit.
    """
    blocks = blocks_of(network)
    for block in blocks:
        vars(block)["forward"] = partial(_forward, block, block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del vars(block)["forward"]


def _forward(block: nn.Module, forward: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    if not (torch.is_grad_enabled() and block.training):
        return forward(*inputs, **more)

    tensors: dict[str, Tensor] = {f"block.{name}": p for name, p in block.named_parameters()}

    def contexts() -> tuple[Any, Any]:
        return nullcontext(), _uncounted(block)

    def run(*inputs: Any, **more: Any) -> Any:
        now = block.parameters()
        if all(p is known for p, known in zip(now, tensors.values(), strict=True)):
            return forward(*inputs, **more)
        # The loss had put others in their place, and the gradient is taken after that.
        return functional_call(_Block(block, forward), tensors, inputs, more)

    return checkpoint(run, *inputs, use_reentrant=False, context_fn=contexts, **more)


class _Block(nn.Module):
    """A block with its own forward pass."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.block, self.run = block, forward

    def forward(self, *inputs: Any, **more: Any) -> Any:
        return self.run(*inputs, **more)


@contextmanager
def _uncounted(block: nn.Module) -> Iterator[None]:
    """Context in which batch norm's running statistics stay as they are."""
    norms = [m for m in block.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    before = [(m.momentum, m.num_batches_tracked) for m in norms]
    for norm in norms:
        norm.momentum = 0.0
        counted = norm.num_batches_tracked
        norm.num_batches_tracked = None if counted is None else counted.clone()
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
