"""Mini-batches, gradients and losses of a client, for methods that need more than `train`."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.federation import Client, Examples
from fedsim.objectives.objective import EVALUATION_BATCH


def batches_of(client: Client) -> list[Examples]:
    """(client) The mini-batches of its local training in this round, as `Client.train` makes them.

    Raises:
        ValueError: no step can be made.
    """
    settings, n = client.settings, client.num_samples
    size = settings.batch_size
    # A last batch of one example is left out where batch norm needs two.
    end = n - 1 if client.model.has_batch_norm and n % size == 1 else n
    rng, found = client.rng("batches"), list[Examples]()
    for _ in range(settings.most_epochs):
        order = torch.from_numpy(rng.permutation(n))[:end].to(client.device)
        found += [
            Examples(client.data.x[rows], client.data.y[rows]) for rows in torch.split(order, size)
        ]
        if settings.local_steps is not None and len(found) >= settings.local_steps:
            break
    if end == 0:
        raise ValueError("too few training examples to make a step with")
    return found[: settings.local_steps]


def gradient(client: Client, weights: Tensor, data: Examples) -> tuple[Tensor, float]:
    """(client) (P,) the gradient of the mean loss over examples, in training mode; the mean loss.

    It leaves in `client.model` the weights, with batch norm's statistics after these examples.

    Args:
        weights: (size,).
    """
    model = client.model
    model.load(weights)
    model.train()
    g, total = torch.zeros(model.num_parameters, device=client.device), 0.0
    parts = (torch.split(part, EVALUATION_BATCH) for part in (data.x, data.y))
    for x, y in zip(*parts, strict=True):
        losses = client.objective.loss(model.module, model.arranged(x), y, {})
        loss = losses.sum() / len(data)
        g += model.gradient(loss)
        total += float(loss.detach())
    return g, total


@torch.no_grad()
def mean_loss(client: Client, weights: Tensor) -> float:
    """(client) F_k(w): the mean loss of a model on its training examples, in evaluation mode.

    Args:
        weights: (size,).
    """
    client.model.load(weights)
    network, data = client.model.module.eval(), client.data
    parts = (torch.split(part, EVALUATION_BATCH) for part in (data.x, data.y))
    losses = [client.objective.loss(network, x, y, {}) for x, y in zip(*parts, strict=True)]
    return float(torch.cat(losses).double().mean())
