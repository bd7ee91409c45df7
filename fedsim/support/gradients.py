"""Gradients by autograd's engine, without what `torch.autograd.grad` does before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def vector_jacobian(
    z: Tensor, inputs: Sequence[Tensor], v: Tensor, allow_unused: bool = False
) -> tuple[Tensor, ...]:
    """vᵀ·∂z/∂input for each input, as `torch.autograd.grad(z, inputs, v)`.

    Which compares shapes first: that takes as long as a small layer, and imports sympy the first
    time, for half a second of each process. Here they are not compared.

    Args:
        z, v: of the same shape.
        allow_unused: whether None stands for an input that z does not depend on.

    Raises:
        RuntimeError: z does not depend on an input, unless that is allowed.
    """
    if not inputs:  # of none, the engine would add the gradients of all leaves to them
        return ()
    return torch.autograd.graph._engine_run_backward(
        (z,), (v,), False, False, tuple(inputs), allow_unused, accumulate_grad=False
    )  # neither retain_graph nor create_graph
