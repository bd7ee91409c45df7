"""A model of your own: it starts as a network with one hidden layer."""

from __future__ import annotations

import math

from torch import nn


def network(shape: tuple[int, ...], outputs: int, hidden: int = 64) -> nn.Module:
    """A network with one hidden layer.

    Args:
        shape: of one input; images are (channels, height, width).
        outputs: how many numbers to return: a logit for each class, or 1 for a regression.
        hidden: its width. Arguments of your own are keys of the `model` section.
    """
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )
