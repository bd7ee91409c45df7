"""A network whose weights are one flat vector."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from fedsim.models import Classifier
from fedsim.objectives.objective import EVALUATION_BATCH
from fedsim.support.rng import generator_state, set_generator_state
from fedsim.training.dropout import replace_dropout

LOWEST = -1e9  # a finite logit of probability 0


def named(shapes: Mapping[str, tuple[int, ...]], vector: Tensor) -> dict[str, Tensor]:
    """Views of vectors (..., size) by layer name; layers beyond their end are left out."""
    views, start = {}, 0
    for name, shape in shapes.items():
        if start >= vector.shape[-1]:
            break
        end = start + math.prod(shape)
        views[name] = vector[..., start:end].view((*vector.shape[:-1], *shape))
        start = end
    return views


@torch.no_grad()
def representation(network: nn.Module, weights: Tensor, x: Tensor) -> Tensor:
    """(B, D) output of a network's `features` for x (B, ...) with other weights, in evaluation.

    The network is a classifier wrapped by a `FlatModel`, or a copy of it.
    """
    views = named(network.flat_shapes, weights)  # type: ignore[arg-type]
    inner = {n.removeprefix("features."): v for n, v in views.items() if n.startswith("features.")}
    features = network.get_submodule("features")
    was_training = features.training
    features.eval()
    batches = torch.split(x, EVALUATION_BATCH)
    parts = [functional_call(features, inner, (batch,)) for batch in batches]
    features.train(was_training)
    return torch.cat(parts)


def _array(tensor: Tensor) -> NDArray[Any]:
    """A copy as an array, which has no bfloat16."""
    tensor = tensor.detach()
    wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return np.array(wide.cpu().numpy(), order="C")


def _overruns(convolution: nn.Conv2d) -> bool:
    """Whether torch's backward pass may write beyond its buffer if channels are last.

    With oneDNN on processors without AVX-512, strided 1×1 convolutions of fewer than eight input
    channels corrupt the heap (torch 2.13).
    """
    strided = convolution.stride != (1, 1)
    return convolution.kernel_size == (1, 1) and strided and convolution.in_channels < 8


class WithLoss(nn.Module):
    """A network and its loss in one module, for `functional_call`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, loss: Any, x: Tensor, y: Tensor, context: Any) -> Tensor:
        return loss(self.network, x, y, context)


class _Among:
    """Lowers the logits of excluded classes. Copies of a network share it."""

    def __init__(self) -> None:
        self.labels: Tensor | None = None

    def __call__(self, module: nn.Module, inputs: object, logits: Tensor) -> Tensor:
        if self.labels is None:
            return logits
        lowered = torch.full_like(logits, LOWEST)
        return lowered.index_copy(-1, self.labels, logits.index_select(-1, self.labels))

    def __deepcopy__(self, memo: object) -> _Among:
        return self


def lacks_memory(error: BaseException) -> bool:
    """Whether an error means out of memory, which must not change what is computed."""
    words = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        word in words for word in ("out of memory", "can't allocate", "alloc_failed")
    )


def has_batch_norm(network: nn.Module) -> bool:
    """Whether a network has batch norm, which mixes the examples of a batch and takes two."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules())


class FlatModel:
    """A module whose trainable parameters and float buffers are views of one vector.

    The vector holds the P trainable parameters first and then the buffers that belong to the
    weights (batch norm's running mean and variance). Loading a client's weights is one copy, an
    optimiser step one operation, and every method writes plain vector arithmetic. Frozen
    parameters, integer buffers and buffers that the module does not save are never sent, and the
    same for all weights: a module must not keep anything of a client in them.

    Args:
        module: moved to `device`; its parameters and buffers are replaced by views, and its
            dropout layers by `fedsim.training.dropout.Dropout`.

    Attributes:
        vector: (size,) float32, parameters and buffers.
        leaves: the parameters, in the vector's order.
        gradients: views of the vector that `gradient` returns, one for each of them.
        num_parameters: P.
        size: P plus the number of buffer entries.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        replace_dropout(module)
        self.module = module.to(device)
        self.device = device
        parameters = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        saved = self.module.state_dict()
        kept = [(n, b) for n, b in self.module.named_buffers() if n in saved]
        buffers = [(n, b) for n, b in kept if b.is_floating_point()]
        self.num_parameters = sum(p.numel() for _, p in parameters)
        self.size = self.num_parameters + sum(b.numel() for _, b in buffers)
        self.shapes = {n: tuple(t.shape) for n, t in itertools.chain(parameters, buffers)}
        self.module.flat_shapes = self.shapes  # type: ignore[assignment]
        tensors = [t.detach().reshape(-1).float() for _, t in parameters + buffers]
        self.vector = torch.cat(tensors) if tensors else torch.empty(0, device=device)
        self._gradient = torch.zeros(self.num_parameters, device=device)
        views = self.named(self.vector)
        self.leaves = [parameter for _, parameter in parameters]
        gradients = self.named(self._gradient)
        self.gradients = [gradients[name] for name, _ in parameters]
        for name, parameter in parameters:
            parameter.data = views[name]
        replaced = {id(buffer): views[name] for name, buffer in buffers}
        for owner in self.module.modules():  # several may share one buffer
            shared = {n: replaced[id(b)] for n, b in owner._buffers.items() if id(b) in replaced}
            owner._buffers.update(shared)
        # Batch norm's count of batches, masks, positions; and their initial values.
        self._integers = [(b, b.clone()) for _, b in kept if not b.is_floating_point()]
        self._modules = list(self.module.modules())
        self._among: _Among | None = None
        self._takes_channels_last: bool | None = None  # not tried yet
        self.has_batch_norm = has_batch_norm(self.module)

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a vector of `size` (or, without the buffers, of P) entries, by layer name."""
        return named(self.shapes, vector)

    def named_arrays(self, vector: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        """The network's state dict with the weights of a vector, as arrays.

        First the layers of the vector, in its order; then the rest: frozen parameters, integer
        buffers, further names of shared layers. Below adapters, frozen parameters are left out.
        """
        before = self.vector.clone()
        self.load(torch.tensor(vector))
        found = {n: t for n, t in self.module.state_dict().items() if isinstance(t, Tensor)}
        for name in getattr(self.module, "backbone", ()):
            del found[name]
        arrays = {name: _array(found[name]) for name in {**self.shapes, **found}}
        self.vector.copy_(before)
        return arrays

    def part(self, name: str) -> slice:
        """Where the parameters of a submodule (`head`, `features.0`) lie in the vector.

        Raises:
            ValueError: it has none, or they are not contiguous.
        """
        parts, start = [], 0
        for layer, shape in itertools.islice(self.shapes.items(), len(self.leaves)):
            length = math.prod(shape)
            if layer == name or layer.startswith(name + "."):
                parts.append((start, start + length))
            start += length
        if not parts or any(a[1] != b[0] for a, b in itertools.pairwise(parts)):
            raise ValueError(f"the network has no '{name}' with contiguous parameters")
        return slice(parts[0][0], parts[-1][1])

    def gradient(self, loss: Tensor) -> Tensor:
        """(P,) the gradient of a scalar loss. It is overwritten by the next call."""
        return self.gradient_and(loss, [])[0]

    def gradient_and(
        self, loss: Tensor, others: Sequence[Tensor], retain_graph: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """As `gradient`, and the gradients at further tensors."""
        parts = torch.autograd.grad(
            loss, [*self.leaves, *others], retain_graph=retain_graph, materialize_grads=True
        )
        own = [part.reshape(-1) for part in parts[: len(self.leaves)]]
        return torch.cat(own, out=self._gradient), list(parts[len(self.leaves) :])

    def load(self, weights: Tensor) -> None:
        """Take (size,) weights. Integer buffers (batch counts) get their initial values."""
        self.vector.copy_(weights)
        for buffer, initial in self._integers:
            buffer.copy_(initial)

    def arranged(self, x: Tensor) -> Tensor:
        """Inputs (n, ...) in the memory layout in which training is fastest.

        On a CPU, this is channels last for images and convolutions, whose pooling then takes a
        third of the time. Inputs stay unchanged for networks that do not support it, for example
        because of `x.view(len(x), -1)`, for those with a strided 1×1 convolution of few channels,
        and on other devices.
        """
        if x.dim() != 4 or self.device.type != "cpu" or len(x) == 0:
            return x
        if self._takes_channels_last is None:
            self._takes_channels_last = self._try_channels_last(x[:2])
        return x.to(memory_format=torch.channels_last) if self._takes_channels_last else x

    @torch.no_grad()
    def _try_channels_last(self, x: Tensor) -> bool:
        convolutions = [m for m in self.module.modules() if isinstance(m, nn.Conv2d)]
        if not convolutions or any(_overruns(convolution) for convolution in convolutions):
            return False
        was_training, drawn = self.module.training, generator_state(self.device)
        self.module.eval()
        try:
            self.module(x.to(memory_format=torch.channels_last))
        except RuntimeError:  # any other error will show in training
            return False
        finally:
            self.module.train(was_training)
            set_generator_state(drawn, self.device)
        return True

    def train(self) -> None:
        """Put all modules into training mode."""
        if [module for module in self._modules if not module.training]:
            self.module.train()

    def restrict_classes(self, labels: Sequence[int] | None) -> None:
        """Restrict the network's predictions to these classes; None for all.

        The logits of other classes are so low that they get no probability and no gradient: the
        rows of the last layer for these classes are the head of their task.
        """
        if self._among is None:
            if labels is None:
                return
            self._among = _Among()
            last = self.module.head if isinstance(self.module, Classifier) else self.module
            last.register_forward_hook(self._among)
        self._among.labels = None if labels is None else torch.tensor(labels, device=self.device)

    def weights(self) -> NDArray[np.float32]:
        """A copy of the vector, (size,) float32 in main memory."""
        return self.vector.detach().cpu().numpy().copy()
