"""DP-SGD: local training with differential privacy of each example.

Abadi et al., Deep Learning with Differential Privacy, CCS 2016, Algorithm 1.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedsim.errors import ExperimentError
from fedsim.objectives.objective import Context
from fedsim.support.rng import generator_state, set_generator_state
from fedsim.training.dropout import Draws, drawing
from fedsim.training.flat import FlatModel, WithLoss, has_batch_norm, lacks_memory, named
from fedsim.training.job import DrawnBatch, Loss, TrainingJob


class PerExample:
    """The gradient of each example of a batch, clipped to the L2 norm C and summed.

    The outputs of the network must not depend on other examples of the batch.
    """

    def __init__(self, model: FlatModel, clip: float) -> None:
        self._model, self._clip, self._bundle = model, clip, WithLoss(model.module)
        names = list(model.shapes)[: len(model.leaves)]
        self._shapes = {name: model.shapes[name] for name in names}
        self._together = True  # all examples of a batch under one vmap

    def clipped_sum(self, loss: Loss, batch: DrawnBatch) -> tuple[Tensor, Tensor]:
        """(P,) Σ_i g_i·min(1, C/‖g_i‖) over a batch, and its losses (B,)."""
        device = self._model.device
        if self._together:
            before = generator_state(device)
            try:
                return self._clipped(*self._at_once(loss, batch))
            except Exception as error:
                if lacks_memory(error):
                    raise
                set_generator_state(before, device)
                self._together = False  # the network, or the loss, does not run under vmap
        sums, found = [], []
        for one in batch.split([1] * len(batch.y)):
            losses = loss(self._model.module, one.x, one.y, one.context)
            g, losses = self._clipped(self._model.gradient(losses.sum())[None], losses)
            sums.append(g)
            found.append(losses)
        return torch.stack(sums).sum(dim=0), torch.cat(found)

    def _clipped(self, g: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
        """(P,) the clipped sum of gradients (B, P), and the losses (B,)."""
        scale = (self._clip / g.norm(dim=1).clamp(min=self._clip)).detach()
        return scale @ g.detach(), losses.detach()

    def _at_once(self, loss: Loss, batch: DrawnBatch) -> tuple[Tensor, Tensor]:
        """(B, P) each example's gradient, and (B,) its loss."""

        def of_one(leaves: dict[str, Tensor], x: Tensor, y: Tensor, rows: Context) -> Tensor:
            own = {name: row[None] for name, row in rows.items()}
            arguments = (loss, x[None], y[None], {**batch.whole, **own})
            found: Tensor = functional_call(self._bundle, leaves, arguments)
            return found.sum()

        w = self._model.vector[: self._model.num_parameters].detach()
        # By layer: the gradient of a slice of w would be a vector of zeros as long as w.
        leaves = {f"network.{name}": view for name, view in named(self._shapes, w).items()}
        each = vmap(grad_and_value(of_one), in_dims=(None, 0, 0, 0), randomness="different")
        B = len(batch.y)
        with drawing(Draws([None] * B, [1] * B)):  # dropout draws a mask for each example
            found, losses = each(leaves, batch.x, batch.y, batch.rows)
        return torch.cat([found[name].reshape(B, -1) for name in leaves], dim=1), losses


def check_examples_apart(network: nn.Module) -> None:
    """Reject a network that has no per-example gradients.

    Raises:
        ExperimentError: it has batch norm.
    """
    if has_batch_norm(network):
        raise ExperimentError(
            "privacy.level=example: batch norm mixes examples, so there are no per-example "
            "gradients; use a model without it"
        )


def sampling_rate(n: int, batch_size: int) -> float:
    """q, the probability that each of n examples is in a batch."""
    return min(1.0, batch_size / n)


def draw_batch(job: TrainingJob, batch_size: int) -> Tensor:
    """The rows of a batch, drawn independently (Poisson sampling)."""
    n = len(job.y)
    rows = np.flatnonzero(job.rng.random(n) < sampling_rate(n, batch_size))
    return torch.from_numpy(rows).to(job.y.device)


def noise(job: TrainingJob, size: int, device: torch.device) -> Tensor:
    """(size,) standard normal."""
    return torch.from_numpy(job.rng.standard_normal(size, dtype=np.float32)).to(device)
