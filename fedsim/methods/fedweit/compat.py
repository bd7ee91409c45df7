"""Options to follow the released code of FedSeIT instead of its paper."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedsim.config.registry import Config
from fedsim.federation import Examples
from fedsim.models.decomposed import Rest
from fedsim.models.text import Reader

BATCH = 64  # documents per batch in the released code's evaluation


class Compat(Config):
    """Options to follow the released code of FedSeIT instead of its paper.

    Args:
        frozen: masks are trained only by their decay and the drift term, not by the task's loss;
            heads are not trained. In FedSeIT, only the projection of the first width is trained,
            and the features of others' convolutions do not reach the network (for this alone, use
            `top_k: 0`).
        eval: a task is tested on at most as many documents as the current task has for validation,
            rounded up to batches of 64, from a test set sorted by class: often on a single class.
    """

    frozen: bool = False
    eval: bool = False


def trained(rest: Rest, frozen: bool) -> list[nn.Parameter]:
    """The parameters that are trained; the others keep their initial values."""
    return [p for n, p in rest.named_parameters() if not (frozen and n.startswith(rest.untrained))]


def digest(rest: Rest, reader: Reader, x: Tensor, frozen: bool) -> Tensor:
    """`Rest.digest`, or zeros if others' convolutions are not used."""
    digested = rest.digest(reader, x)
    return torch.zeros_like(digested) if frozen and not rest.uses_others else digested


def first_of_classes(test: Examples, order: Sequence[int], validation: int) -> Examples:
    """The test examples under `Compat.eval`, by the order of classes and a number to validate."""
    by_class = torch.cat([(test.y == label).nonzero().flatten() for label in order])
    rows = by_class[: BATCH * max(1, math.ceil(validation / BATCH))]
    return Examples(test.x[rows], test.y[rows])
