"""Steps of plain SGD that are made layer by layer, without a gradient of the whole network."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fedsim.models import Classifier
from fedsim.rng import generator_state, set_generator_state
from fedsim.training.flat import FlatModel

threshold_backward = torch.ops.aten.threshold_backward.default  # ReLU's, as autograd has it


class _Layer(Protocol):
    """A layer, and what its latest forward pass left for the backward pass."""

    def forward(self, a: Tensor) -> Tensor:
        """Outputs of inputs, outside of autograd."""

    def backward(self, delta: Tensor, lr: float, shrink: float) -> Tensor | None:
        """Make the step w ← shrink·w − lr·∂loss/∂w.

        Args:
            delta: ∂loss/∂z, in the shape of the outputs z.

        Returns:
            ∂loss/∂a, before the step, in the shape of the inputs; None if there is nothing to
            train below.
        """


class _Linear:
    """z = a·Wᵀ + b.

    ∂loss/∂W = δᵀa, a product of (out, B) and (B, in). For the few examples of a batch it is added
    to W as it is computed, where a gradient would be written, and read again, at the size of W.
    """

    def __init__(self, module: nn.Linear, first: bool) -> None:
        self.W, self.first = module.weight.detach(), first
        self.b = None if module.bias is None else module.bias.detach()

    def forward(self, a: Tensor) -> Tensor:
        self.a = a
        return linear(a, self.W, self.b)

    def backward(self, delta: Tensor, lr: float, shrink: float) -> Tensor | None:
        below = None if self.first else delta @ self.W
        delta, a = delta.reshape(-1, delta.shape[-1]), self.a.reshape(-1, self.a.shape[-1])
        self.W.addmm_(delta.t(), a, beta=shrink, alpha=-lr)
        if self.b is not None:
            if shrink != 1:
                self.b.mul_(shrink)
            self.b.add_(delta.sum(dim=0), alpha=-lr)
        return below


class _ReLU:
    def forward(self, a: Tensor) -> Tensor:
        self.z = torch.relu(a)
        return self.z

    def backward(self, delta: Tensor, lr: float, shrink: float) -> Tensor | None:
        below: Tensor = threshold_backward(delta, self.z, 0)
        return below


class _Flatten:
    def __init__(self, module: nn.Flatten) -> None:
        self.module = module

    def forward(self, a: Tensor) -> Tensor:
        self.shape = a.shape
        return a.flatten(self.module.start_dim, self.module.end_dim)

    def backward(self, delta: Tensor, lr: float, shrink: float) -> Tensor | None:
        return delta.reshape(self.shape)


class _Autograd:
    """Layers of any kind, one after another."""

    def __init__(self, modules: Sequence[nn.Module], first: bool) -> None:
        self.modules, self.first = modules, first
        self.leaves = [p for m in modules for p in m.parameters() if p.requires_grad]
        self.values = [leaf.detach() for leaf in self.leaves]

    def forward(self, a: Tensor) -> Tensor:
        with torch.enable_grad():
            if not self.first:
                self.a = a.detach().requires_grad_()
                a = self.a.clone()  # which a layer may change in place
            for module in self.modules:
                a = module(a)
        self.z = a
        return a.detach()

    def backward(self, delta: Tensor, lr: float, shrink: float) -> Tensor | None:
        wanted = self.leaves if self.first else [self.a, *self.leaves]
        if not self.z.requires_grad:
            return None
        found = torch.autograd.grad(self.z, wanted, delta, allow_unused=True)
        below, gradients = (None, found) if self.first else (found[0], found[1:])
        if shrink != 1 and self.values:
            torch._foreach_mul_(self.values, shrink)
        used = [(w, g) for w, g in zip(self.values, gradients, strict=True) if g is not None]
        if used:
            torch._foreach_add_([w for w, _ in used], [g for _, g in used], alpha=-lr)
        return below


class LayerwiseSgd:
    """w ← w − η·(∇loss + c + λ·w), each layer as soon as its gradient is known.

    For networks whose layers follow one after another and end in a linear one. Linear layers and
    the ReLU between them are written out; autograd is asked for all others, and for the gradient
    of the loss at the outputs. The loss must see nothing of the network but its outputs.

    Args:
        model: is trained in place.
        lr: η.
        weight_decay: λ.
    """

    def __init__(self, model: FlatModel, lr: float, weight_decay: float) -> None:
        self._network, self._lr, self._shrink = model.module, lr, 1 - lr * weight_decay
        self._w = model.vector[: model.num_parameters]
        self._buffers = model.vector[model.num_parameters :]
        self._leaves = {id(leaf) for leaf in model.leaves}
        self._places = [
            (module._parameters, name, leaf)
            for module in model.module.modules()
            for name, leaf in module._parameters.items()
            if id(leaf) in self._leaves
        ]
        self._layers = _layers_of(model)
        inner = itertools.islice(model.module.modules(), 1, None)
        self._unhooked = [module for module in inner if not _is_hooked(module)]

    @torch.no_grad()
    def step(
        self, loss: Callable[[], Tensor], correction: Callable[[], Tensor] | None = None
    ) -> Tensor | None:
        """Make a step.

        Args:
            loss: runs the network and returns the loss of each example, (B,).
            correction: returns what is added to the gradient, (P,).

        Returns:
            The losses, before the step; None, and no trace, if layer by layer it would be wrong.
        """
        if self._layers is None:
            return None
        layers, forward, found = self._layers, self._network.forward, []
        drawn, statistics = generator_state(self._w.device), self._buffers.clone()

        def by_layers(x: Tensor) -> Tensor:
            if not torch.is_grad_enabled() or x.requires_grad or self._is_changed():
                return forward(x)  # type: ignore[no-any-return]
            with torch.no_grad():
                for layer in layers:
                    x = layer.forward(x)
            found.append(x.requires_grad_())
            return x

        vars(self._network)["forward"] = by_layers
        try:
            with torch.enable_grad():
                losses = loss()
        finally:
            del vars(self._network)["forward"]
        if len(found) != 1 or not self._sees_only(found[0], losses):
            set_generator_state(drawn, self._w.device)
            self._buffers.copy_(statistics)
            return None
        c = None if correction is None else correction()
        delta: Tensor | None
        (delta,) = torch.autograd.grad(losses, found, torch.full_like(losses, 1 / len(losses)))
        for layer in reversed(layers):
            if delta is None:
                break
            delta = layer.backward(delta, self._lr, self._shrink)
        if c is not None:
            self._w.add_(c, alpha=-self._lr)
        return losses.detach()

    def _is_changed(self) -> bool:
        """Whether the loss runs the network with other parameters, or has hooked its layers."""
        moved = any(parameters.get(name) is not leaf for parameters, name, leaf in self._places)
        return moved or any(map(_is_hooked, self._unhooked))

    def _sees_only(self, outputs: Tensor, losses: Tensor) -> bool:
        """Whether losses come from the outputs, and parameters reach them no other way."""
        seen, waiting, reached = set(), [losses.grad_fn], False
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)  # of a leaf
            if id(variable) in self._leaves:
                return False
            reached = reached or variable is outputs
            waiting += [following for following, _ in node.next_functions]
        return reached


def _layers_of(model: FlatModel) -> list[_Layer] | None:
    """The network as layers, one after another; None if it is not made that way."""
    trained = {id(leaf) for leaf in model.leaves}
    modules = list(_in_order(model.module))
    leaves = [id(p) for module in modules for p in module.parameters() if p.requires_grad]
    if sorted(leaves) != sorted(trained):
        return None  # layers share some, or there are some outside of them
    layers: list[_Layer] = []
    others: list[nn.Module] = []  # in a row, for autograd
    first = True  # whether there is nothing to train yet

    def close() -> None:
        nonlocal first
        if others:
            row = _Autograd(list(others), first)
            layers.append(row)
            first = first and not row.leaves
            others.clear()

    for module in modules:
        if _is_hooked(module):
            others.append(module)
        elif type(module) is nn.Linear and all(id(p) in trained for p in module.parameters()):
            close()
            layers.append(_Linear(module, first))
            first = False
        elif type(module) is nn.ReLU and not others:
            layers.append(_ReLU())
        elif type(module) is nn.Flatten and not others:
            layers.append(_Flatten(module))
        else:
            others.append(module)
    return layers if layers and not others else None


def _in_order(module: nn.Module) -> Iterator[nn.Module]:
    """Modules of which each takes what the one before it returns, as far as that is known."""
    if type(module) in (nn.Sequential, Classifier) and not _is_hooked(module):
        for child in module._modules.values():  # `children` names none twice
            assert child is not None
            yield from _in_order(child)
    else:
        yield module


def _is_hooked(module: nn.Module) -> bool:
    """Whether running the module is more than its class says."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
    )
