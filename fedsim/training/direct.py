"""Steps of plain SGD that keep no gradient in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from fedsim.training.flat import FlatModel

LARGE = 2**14  # entries of a weight whose gradient a small cache does not hold


@dataclass(frozen=True)
class _Layer:
    """A linear layer.

    Attributes:
        weight: its parameter.
        W, b: the numbers of its parameters, outside of autograd; b may be None.
    """

    weight: nn.Parameter
    W: Tensor
    b: Tensor | None


@dataclass(frozen=True, eq=False)
class _Call:
    """One forward pass of a linear layer: z = a·Wᵀ + b.

    Attributes:
        a: (..., in) what went in, with the version it had then.
        z: where the gradient for (..., out) arrives.
    """

    layer: _Layer
    a: Tensor
    version: int
    z: GradientEdge


class DirectSgd:
    """w ← w − η·(∇loss + λ·w), each layer by itself.

    The gradient of a large linear layer is ∂loss/∂W = δᵀa, with δ = ∂loss/∂z, (B, out), and the
    inputs a, (B, in). For the few examples of a local step W ← W − η·δᵀa is one matrix product
    added to W, where the gradient would be written, and read again, at the size of W. Autograd is
    asked for δ, and for the gradients of all other parameters.

    That is the whole gradient if the layer's parameters reach the loss through its outputs alone.
    If not (a penalty on weights, layers that share them), the step is made with the gradients of
    all parameters. The graph of each step tells.

    Args:
        model: is trained in place.
        lr: η.
        weight_decay: λ.
    """

    def __init__(self, model: FlatModel, lr: float, weight_decay: float) -> None:
        self._model, self._lr, self._decay = model, lr, weight_decay
        self._w = model.vector[: model.num_parameters]
        self._calls: list[_Call] = []
        leaves = {id(leaf): leaf for leaf in model.leaves}
        self._layers: dict[nn.Module, _Layer] = {}
        for module in model.module.modules():
            if type(module) is not nn.Linear or module.weight.numel() < LARGE:
                continue
            weight, bias = leaves.get(id(module.weight)), module.bias
            if weight is None:
                continue
            if bias is not None and id(bias) not in leaves:
                continue
            b = None if bias is None else bias.detach()
            self._layers[module] = _Layer(weight, weight.detach(), b)
        own = [p for m in self._layers for p in (m.weight, m.bias) if isinstance(p, nn.Parameter)]
        self._others = [leaf for leaf in model.leaves if all(leaf is not p for p in own)]
        self._values = {leaf: leaf.detach() for leaf in model.leaves}
        # Autograd drops these nodes unless someone holds them.
        self._ends = {get_gradient_edge(p).node for p in own}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Steps are made within: the calls of linear layers are noted."""
        # First of all hooks, so that it sees what the layer itself returns.
        handles = [m.register_forward_hook(self._note, prepend=True) for m in self._layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def step(self, loss: Tensor) -> None:
        """Make a step from a scalar loss, of forward passes since the step before."""
        calls, self._calls = self._calls, []
        alone = not (self._layers and self._reached_otherwise(loss, calls))
        wanted: list[Any] = [call.z for call in calls] if alone else []
        others = self._others if alone else self._model.leaves
        gradients = torch.autograd.grad(loss, wanted + others, allow_unused=True)
        with torch.no_grad():
            if self._decay:
                self._w.mul_(1 - self._lr * self._decay)
            for call, delta in zip(calls if alone else (), gradients, strict=False):
                if delta is not None:
                    self._update(call, delta)
            pairs = zip(others, gradients[len(wanted) :], strict=True)
            used = [(self._values[p], g) for p, g in pairs if g is not None]
            if used:
                parameters, steps = zip(*used, strict=True)
                torch._foreach_add_(parameters, steps, alpha=-self._lr)

    def _note(self, module: nn.Module, inputs: tuple[Tensor, ...], z: Tensor) -> None:
        layer = self._layers[module]
        # Another weight may stand in for the layer's own; and in evaluation there is no graph.
        if z.requires_grad and module.weight is layer.weight and len(inputs) == 1:
            (a,) = inputs
            self._calls.append(_Call(layer, a, a._version, get_gradient_edge(z)))

    def _reached_otherwise(self, loss: Tensor, calls: list[_Call]) -> bool:
        """Whether linear layers' parameters reach the loss other than through these outputs."""
        if any(call.a._version != call.version for call in calls):
            return True  # inputs that were changed in place; autograd will say so
        seen: set[Node] = {call.z.node for call in calls}
        waiting = [loss.grad_fn, *(call.a.grad_fn for call in calls)]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            if node in self._ends:
                return True
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
        return False

    def _update(self, call: _Call, delta: Tensor) -> None:
        layer = call.layer
        delta, a = delta.reshape(-1, delta.shape[-1]), call.a.reshape(-1, call.a.shape[-1])
        layer.W.addmm_(delta.t(), a, alpha=-self._lr)
        if layer.b is not None:
            layer.b.add_(delta.sum(dim=0), alpha=-self._lr)
