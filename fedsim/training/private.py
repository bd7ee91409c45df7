"""DP-SGD: local training with differential privacy of each example.

Abadi et al., Deep Learning with Differential Privacy, CCS 2016, Algorithm 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedsim.errors import ExperimentError
from fedsim.training.flat import FlatModel, WithLoss, named

if TYPE_CHECKING:
    from fedsim.training.local import TrainingJob


class PerExample:
    """The gradient of each example of a batch, clipped to a norm and summed.

    Args:
        model: the network, whose outputs must not depend on other examples of the batch.
        clip: C, the largest L2 norm of an example's gradient.
    """

    def __init__(self, model: FlatModel, clip: float) -> None:
        self._model, self._clip, self._bundle = model, clip, WithLoss(model.module)
        names = list(model.shapes)[: len(model.leaves)]
        self._shapes = {name: model.shapes[name] for name in names}

    def clipped_sum(self, job: TrainingJob, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(P,) Σ_i g_i·min(1, C/‖g_i‖) over a batch, and its losses (B,)."""

        def of_one(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
            leaves = {f"network.{n}": v for n, v in named(self._shapes, w).items()}
            arguments = (job.hooks.loss, x[None], y[None], job.context)
            found: Tensor = functional_call(self._bundle, leaves, arguments)
            return found.sum()

        w = self._model.vector[: self._model.num_parameters]
        each = vmap(grad_and_value(of_one), in_dims=(None, 0, 0), randomness="different")
        g, losses = each(w.detach(), x, y)
        scale = (self._clip / g.norm(dim=1).clamp(min=self._clip)).detach()
        return scale @ g.detach(), losses.detach()


def check_examples_apart(network: nn.Module) -> None:
    """Reject a network that has no per-example gradients.

    Raises:
        ExperimentError: it has batch norm.
    """
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules()):
        raise ExperimentError(
            "privacy.level=example: batch norm mixes examples, so there are no per-example "
            "gradients; use a model without it"
        )


def sampling_rate(n: int, batch_size: int) -> float:
    """q, the probability that each of n examples is in a batch."""
    return min(1.0, batch_size / n)


def steps_of(job: TrainingJob, batch_size: int) -> int:
    """The number of steps of a job, the same as without privacy."""
    steps = job.epochs * math.ceil(len(job.y) / batch_size)
    return steps if job.most_steps is None else min(steps, job.most_steps)


def draw_batch(job: TrainingJob, batch_size: int) -> Tensor:
    """The rows of a batch, drawn independently (Poisson sampling)."""
    n = len(job.y)
    rows = np.flatnonzero(job.rng.random(n) < sampling_rate(n, batch_size))
    return torch.from_numpy(rows).to(job.y.device)


def noise(job: TrainingJob, size: int, device: torch.device) -> Tensor:
    """(size,) standard normal."""
    return torch.from_numpy(job.rng.standard_normal(size, dtype=np.float32)).to(device)
