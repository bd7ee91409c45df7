"""SGD steps made layer by layer, without a gradient of the whole network."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fedsim.models import Classifier
from fedsim.objectives.objective import OutputGradient
from fedsim.support.gradients import vector_jacobian
from fedsim.training.flat import FlatModel

# Views of the flat gradient, by parameter.
Gradients = Mapping[nn.Parameter, Tensor]

threshold_backward = torch.ops.aten.threshold_backward.default  # ReLU's backward pass


class _Layer(ABC):
    """A layer of the network, run outside of autograd."""

    values: Sequence[Tensor] = ()  # its trainable parameters
    gradients: Sequence[Tensor] = ()  # views of the flat gradient, one for each parameter

    @abstractmethod
    def forward(self, a: Tensor) -> tuple[Tensor, Any]:
        """Outputs z of inputs a, and what `backward` needs."""

    @abstractmethod
    def backward(
        self, kept: Any, delta: Tensor, to: Sequence[Tensor], beta: float, alpha: float
    ) -> Tensor | None:
        """Add the gradient of each parameter p: to ← beta·to + alpha·∂loss/∂p.

        Args:
            kept: what `forward` returned for it.
            delta: ∂loss/∂z, in the shape of z.
            to: `values` or `gradients`.

        Returns:
            ∂loss/∂a, in the shape of a; None if no earlier layer is trained.
        """


class _Linear(_Layer):
    """z = a·Wᵀ + b.

    ∂loss/∂W = δᵀa, a product of (out, B) and (B, in). It is added to W as it is computed, which
    saves writing and reading a gradient of the size of W.
    """

    def __init__(self, module: nn.Linear, gradients: Gradients, first: bool) -> None:
        self.first = first
        parameters = list(module.parameters())
        self.values = [p.detach() for p in parameters]
        self.gradients = [gradients[p] for p in parameters]
        self.W, self.W_t = self.values[0], self.values[0].t()
        self.b = self.values[1] if len(parameters) == 2 else None

    def forward(self, a: Tensor) -> tuple[Tensor, Any]:
        if self.b is not None and a.dim() == 2:  # what `linear` ends up with
            return torch.addmm(self.b, a, self.W_t), a
        return linear(a, self.W, self.b), a

    def backward(
        self, kept: Any, delta: Tensor, to: Sequence[Tensor], beta: float, alpha: float
    ) -> Tensor | None:
        below, a = None if self.first else delta @ self.W, kept
        if delta.dim() != 2:
            delta, a = delta.reshape(-1, delta.shape[-1]), a.reshape(-1, a.shape[-1])
        to[0].addmm_(delta.t(), a, beta=beta, alpha=alpha)
        if self.b is not None:
            if beta != 1:
                to[1].mul_(beta)
            to[1].add_(delta.sum(dim=0), alpha=alpha)
        return below


class _ReLU(_Layer):
    def forward(self, a: Tensor) -> tuple[Tensor, Any]:
        z = torch.relu(a)
        return z, z

    def backward(
        self, kept: Any, delta: Tensor, to: Sequence[Tensor], beta: float, alpha: float
    ) -> Tensor | None:
        return threshold_backward(delta, kept, 0)


class _Flatten(_Layer):
    def __init__(self, module: nn.Flatten) -> None:
        self.module = module

    def forward(self, a: Tensor) -> tuple[Tensor, Any]:
        return a.flatten(self.module.start_dim, self.module.end_dim), a.shape

    def backward(
        self, kept: Any, delta: Tensor, to: Sequence[Tensor], beta: float, alpha: float
    ) -> Tensor | None:
        return delta.reshape(kept)


@dataclass
class _Graph:
    """A pass through layers, recorded by autograd."""

    inputs: list[Tensor]  # a leaf if an earlier layer is trained; otherwise empty
    z: Tensor  # outputs
    further: Tensor | None = None  # gradient at the inputs along paths other than through z


class _Autograd(_Layer):
    """Layers of any kind, one after another."""

    def __init__(self, modules: Sequence[nn.Module], gradients: Gradients, first: bool) -> None:
        self.modules, self.first = modules, first
        self.leaves = [p for m in modules for p in m.parameters() if p.requires_grad]
        self.values = [leaf.detach() for leaf in self.leaves]
        self.gradients = [gradients[leaf] for leaf in self.leaves]

    def forward(self, a: Tensor) -> tuple[Tensor, Any]:
        inputs = [] if self.first else [a.detach().requires_grad_()]
        with torch.enable_grad():
            z = a if self.first else inputs[0].clone()  # a layer may change its input in place
            for module in self.modules:
                z = module(z)
        return z.detach(), _Graph(inputs, z)

    def backward(
        self, kept: Any, delta: Tensor, to: Sequence[Tensor], beta: float, alpha: float
    ) -> Tensor | None:
        inputs, z = kept.inputs, kept.z
        if not z.requires_grad:
            return None
        of = inputs + self.leaves
        parts = vector_jacobian(z, of, delta, allow_unused=True)
        found = [torch.zeros_like(x) if g is None else g for x, g in zip(of, parts, strict=True)]
        if to:
            if beta != 1:
                torch._foreach_mul_(list(to), beta)
            torch._foreach_add_(list(to), found[len(inputs) :], alpha=alpha)
        if not inputs:
            return None
        below: Tensor = found[0]
        return below if kept.further is None else below + kept.further


@dataclass(frozen=True)
class _Pass:
    """A pass through the network."""

    outputs: Tensor  # as a leaf of autograd
    kept: list[Any]  # what each layer's `forward` returned for `backward`


class LayerwiseSgd:
    """w ← w − η·(∇loss + v + λ·w), each layer as soon as its gradient is computed, in place.

    For sequential networks that end in a linear layer. Linear layers and the ReLU between them
    have explicit backward passes; autograd computes those of all other layers, and the gradient of
    the loss at the outputs. The loss may use only the outputs of the network.
    """

    def __init__(self, model: FlatModel) -> None:
        self._model = proxy(model)  # those who keep it by its model keep no model alive
        self._w = model.vector[: model.num_parameters]
        self._places = [
            (module._parameters, name, leaf)
            for module in model.module.modules()
            for name, leaf in module._parameters.items()
            if leaf is not None and leaf.requires_grad
        ]
        self._layers = _layers_of(model)
        inner = itertools.islice(model.module.modules(), 1, None)
        hooks = [of_one for module in inner for of_one in _hooks(module)]
        self._no_hooks = [of_one for of_one in hooks if not of_one]
        self._hooks = [(of_one, len(of_one)) for of_one in hooks if of_one]

    def step(
        self,
        loss: Callable[[], Tensor],
        lr: float,
        decay: float = 0.0,
        linear: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Make a step with learning rate η, if it can be made layer by layer.

        The loss runs the network, and returns (B,) those of the examples; it is called once. Decay
        is λ, and linear v (P,).

        Returns:
            The losses; and None if the step was made, else (P,) the gradient of the mean loss.
        """
        losses, passes = self._run(loss)
        if len(passes) != 1 or not _sees_only(passes[0].outputs, losses):
            return losses, self._gradient(losses, passes)
        with torch.no_grad():
            mean = torch.full_like(losses, 1 / losses.numel())
            (delta,) = vector_jacobian(losses, [passes[0].outputs], mean)
            self._descend(passes[0].kept, delta, lr, decay, linear)
        return losses, None

    def runs_as_built(self) -> bool:
        """Whether the forward pass is one through the layers in order; see `step_to`."""
        known = self._layers is not None and not _is_hooked(self._model.module)
        return known and not self._is_changed()

    def step_to(
        self,
        x: Tensor,
        y: Tensor,
        output_gradient: OutputGradient,
        lr: float,
        decay: float = 0.0,
        linear: Tensor | None = None,
    ) -> Tensor:
        """Make a step for a loss whose gradient at the outputs is known, without autograd.

        Only for a network that `runs_as_built`; see `step`. Returns the losses, (B,).
        """
        assert self._layers is not None
        with torch.no_grad():
            outputs, kept = self._forward(x)
            losses, delta = output_gradient(outputs, y)
            self._descend(kept, delta, lr, decay, linear)
        return losses

    def _forward(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        """Outputs of the network, and what each layer keeps for the backward pass."""
        kept = []
        for layer in self._layers or ():
            x, own = layer.forward(x)
            kept.append(own)
        return x, kept

    def _run(self, loss: Callable[[], Tensor]) -> tuple[Tensor, list[_Pass]]:
        """The losses, and the passes through the network made layer by layer."""
        if self._layers is None:
            return loss(), []
        network, passes = self._model.module, list[_Pass]()
        forward = network.forward

        def by_layers(x: Tensor) -> Tensor:
            if not torch.is_grad_enabled() or x.requires_grad or self._is_changed():
                return forward(x)
            with torch.no_grad():
                outputs, kept = self._forward(x)
            passes.append(_Pass(outputs.requires_grad_(), kept))
            return outputs.clone()  # the loss may change them in place

        vars(network)["forward"] = by_layers
        try:
            return loss(), passes
        finally:
            del vars(network)["forward"]

    def _gradient(self, losses: Tensor, passes: list[_Pass]) -> Tensor:
        """(P,) the gradient through the layers and all other paths from parameters to losses."""
        graphs = [k for p in passes for k in p.kept if isinstance(k, _Graph) and k.inputs]
        cuts = [*(p.outputs for p in passes), *(graph.inputs[0] for graph in graphs)]
        g, found = self._model.gradient_and(losses.mean(), cuts, retain_graph=bool(passes))
        for graph, further in zip(graphs, found[len(passes) :], strict=True):
            graph.further = further
        with torch.no_grad():
            for one, delta in zip(passes, found, strict=False):
                self._backward(one.kept, delta, "gradients", 1.0, 1.0)
        return g

    def _descend(
        self, kept: list[Any], delta: Tensor, lr: float, decay: float, linear: Tensor | None
    ) -> None:
        """Update the weights from a pass and the gradient at its outputs."""
        self._backward(kept, delta, "values", 1 - lr * decay, -lr)
        if linear is not None:
            self._w.add_(linear, alpha=-lr)

    def _backward(
        self, kept: list[Any], delta: Tensor | None, to: str, beta: float, alpha: float
    ) -> None:
        assert self._layers is not None
        for layer, own in zip(reversed(self._layers), reversed(kept), strict=True):
            if delta is None:
                break
            delta = layer.backward(own, delta, getattr(layer, to), beta, alpha)

    def _is_changed(self) -> bool:
        """Whether the loss uses other or frozen parameters, or hooks the layers."""
        moved = any(
            parameters.get(name) is not leaf or not leaf.requires_grad
            for parameters, name, leaf in self._places
        )
        hooked = any(self._no_hooks) or any(len(hooks) != count for hooks, count in self._hooks)
        return moved or hooked


def _sees_only(outputs: Tensor, losses: Tensor) -> bool:
    """Whether losses depend on the outputs only, according to autograd."""
    seen, waiting, reached = set(), [losses.grad_fn], False
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is outputs:
            reached = True
        elif leaf is not None:
            return False
        waiting += [following for following, _ in node.next_functions]
    return reached


def _layers_of(model: FlatModel) -> list[_Layer] | None:
    """The network as a sequence of layers; None if it is not sequential."""
    trained = {id(leaf) for leaf in model.leaves}
    gradients = dict(zip(model.leaves, model.gradients, strict=True))
    modules = _pooled_first(_in_order(model.module))
    leaves = [id(p) for module in modules for p in module.parameters() if p.requires_grad]
    if sorted(leaves) != sorted(trained):
        return None  # shared parameters, or some outside of layers
    layers: list[_Layer] = []
    others: list[nn.Module] = []  # consecutive layers, for autograd
    first = True  # whether no earlier layer is trained

    def close() -> None:
        nonlocal first
        if others:
            row = _Autograd(list(others), gradients, first)
            layers.append(row)
            first = first and not row.leaves
            others.clear()

    for module in modules:
        if _is_hooked(module):
            others.append(module)
        elif type(module) is nn.Linear and all(id(p) in trained for p in module.parameters()):
            close()
            layers.append(_Linear(module, gradients, first))
            first = False
        elif type(module) is nn.ReLU and not others:
            layers.append(_ReLU())
        elif type(module) is nn.Flatten and not others:
            layers.append(_Flatten(module))
        else:
            others.append(module)
    return layers if layers and not others else None


def _in_order(module: nn.Module) -> Iterator[nn.Module]:
    """Modules in the order of the forward pass, if known."""
    if type(module) in (nn.Sequential, Classifier) and not _is_hooked(module):
        for child in module._modules.values():  # `children` skips repeated ones
            assert child is not None
            yield from _in_order(child)
    else:
        yield module


def _pooled_first(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The same with ReLU after max pooling, where fewer numbers are left.

    Both orders give equal outputs and gradients: the largest number of a window is the same, and
    where none is above 0, no gradient passes.
    """
    found = list[nn.Module]()
    for module in modules:
        before = found[-1] if found else module
        fits = type(before) is nn.ReLU and type(module) is nn.MaxPool2d
        fits = fits and not (module.return_indices or _is_hooked(module) or _is_hooked(before))
        found.insert(len(found) - fits, module)
    return found


def _is_hooked(module: nn.Module) -> bool:
    """Whether the module has hooks or an overridden forward."""
    return any(_hooks(module)) or "forward" in vars(module)


def _hooks(module: nn.Module) -> Sequence[Mapping[int, Any]]:
    """The hooks of a module, of each kind."""
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
