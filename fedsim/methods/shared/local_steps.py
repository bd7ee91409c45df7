"""Mini-batches, gradients and losses of a client, for methods that need more than `train`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, islice

import torch
from torch import Tensor

from fedsim.federation import Client, Examples
from fedsim.objectives.objective import EVALUATION_BATCH
from fedsim.training import epoch_order, in_precision, part_sizes, usable


def batches_of(client: Client) -> Iterator[Examples]:
    """(client) The mini-batches of its local training in this round, those of `Client.train`."""
    settings, data, n = client.settings, client.data, client.num_samples
    size = settings.batch_size
    end = usable(client.model, n, size)
    if end == 0:
        raise ValueError("too few training examples to make a step with")
    rng = client.rng("batches")

    def batches() -> Iterator[Examples]:
        for _ in range(settings.most_epochs):
            order = torch.from_numpy(epoch_order(data.y, rng, settings)[:end]).to(client.device)
            for rows in torch.split(order, size):
                yield data.at(rows)

    return islice(batches(), settings.local_steps)


def gradient(client: Client, weights: Tensor, data: Examples) -> tuple[Tensor, float]:
    """(client) (P,) the gradient of the mean loss over examples, in training mode; the mean loss.

    It leaves in `client.model` the weights (size,), with batch norm's statistics after these
    examples. They are taken in parts, as `train.accumulate` says, and of 500 at most.
    """
    model, settings = client.model, client.settings
    model.load(weights)
    model.train()
    g, total = torch.zeros(model.num_parameters, device=client.device), 0.0
    sizes = part_sizes(model, len(data), settings.accumulate, EVALUATION_BATCH)
    for end, size in zip(accumulate(sizes), sizes, strict=True):
        part = data.at(slice(end - size, end))
        with in_precision(settings, client.device):
            x = model.arranged(part.x)
            losses = client.objective.loss(model.module, x, part.y, part.facts)
        loss = losses.sum() / len(data)
        g += model.gradient(loss)
        total += float(loss.detach())
    client.visit(len(data))
    return g, total


@torch.no_grad()
def mean_loss(client: Client, weights: Tensor) -> float:
    """(client) F_k(w), w (size,): the mean loss on its training examples, in evaluation mode."""
    client.model.load(weights)
    losses = client.data.losses(client.objective, client.model.module.eval())
    return float(losses.double().mean())
