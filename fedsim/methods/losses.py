"""Shared code of methods that compare the losses of clients at the global model."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.federation import Client
from fedsim.objectives.objective import EVALUATION_BATCH


@torch.no_grad()
def mean_loss(client: Client, weights: Tensor) -> float:
    """(client) F_k(w): the mean loss on its training examples, in evaluation mode."""
    client.model.load(weights)
    network, data = client.model.module.eval(), client.data
    parts = (torch.split(part, EVALUATION_BATCH) for part in (data.x, data.y))
    losses = [client.objective.loss(network, x, y, {}) for x, y in zip(*parts, strict=True)]
    return float(torch.cat(losses).double().mean())
