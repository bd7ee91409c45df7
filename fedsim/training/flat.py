"""A network whose weights are one flat vector."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class FlatModel:
    """A module whose trainable parameters and float buffers are views of one vector.

    The vector holds the P trainable parameters first and then the buffers that belong to the
    weights (batch norm's running mean and variance). Loading a client's weights is one copy, an
    optimiser step one operation, and every method writes plain vector arithmetic. Frozen
    parameters and buffers that the module does not save stay in place and are never sent: a
    module must not keep anything of a client in them.

    Args:
        module: moved to `device`; its parameters and buffers are replaced by views.

    Attributes:
        vector: (size,) float32, parameters and buffers.
        gradient: (P,) float32, where backward passes accumulate.
        num_parameters: P.
        size: P plus the number of buffer entries.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module = module.to(device)
        self.device = device
        parameters = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        saved = self.module.state_dict()
        buffers = [
            (n, b) for n, b in self.module.named_buffers() if n in saved and b.is_floating_point()
        ]
        self.num_parameters = sum(p.numel() for _, p in parameters)
        self.size = self.num_parameters + sum(b.numel() for _, b in buffers)
        self.shapes = {n: tuple(t.shape) for n, t in itertools.chain(parameters, buffers)}
        tensors = [t.detach().reshape(-1).float() for _, t in parameters + buffers]
        self.vector = torch.cat(tensors) if tensors else torch.empty(0, device=device)
        self.gradient = torch.zeros(self.num_parameters, device=device)
        views = self.named(self.vector)
        gradients = self.named(self.gradient)
        for name, parameter in parameters:
            parameter.data = views[name]
            parameter.grad = gradients[name]
        for name, _ in buffers:
            owner, _, attribute = name.rpartition(".")
            self.module.get_submodule(owner)._buffers[attribute] = views[name]
        self._counters = [b for n, b in self.module.named_buffers() if not b.is_floating_point()]
        self.has_batch_norm = any(
            isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.module.modules()
        )

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a vector of `size` (or, without the buffers, of P) entries, by layer name."""
        views, start = {}, 0
        for name, shape in self.shapes.items():
            if start >= len(vector):
                break
            length = int(np.prod(shape))
            views[name] = vector[start : start + length].view(shape)
            start += length
        return views

    def load(self, weights: Tensor) -> None:
        """Take (size,) weights. Integer buffers (batch counts) start again at zero."""
        self.vector.copy_(weights)
        for counter in self._counters:
            counter.zero_()

    def weights(self) -> NDArray[np.float32]:
        """A copy of the vector as it travels: (size,) float32 in main memory."""
        return self.vector.detach().cpu().numpy().copy()
