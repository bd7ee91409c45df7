"""Networks with random weights, for the question whether an explanation depends on the weights.

Source: Adebayo et al. (NeurIPS 2018).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedsim.explain.scores.relevance import Scores, rank_correlation
from fedsim.support.rng import keyed_torch_rng

ALIKE = 0.8  # above this agreement, maps are said not to depend on the weights
DRAWS = 3  # of all random weights, whose agreements are averaged


def layers(network: nn.Module) -> list[str]:
    """The modules with parameters of their own, from the top: the last defined comes first."""
    modules = list(network.named_modules())[::-1]
    return [name for name, one in modules if any(True for _ in one.parameters(recurse=False))]


def randomised(
    network: nn.Module, seed: int, draw: int, round: int = -1, client: int = -1
) -> Iterator[tuple[str, nn.Module]]:
    """A copy of a network in which one layer after the other, from the top, gets random weights.

    A layer draws them as when it was made (its `reset_parameters`). Weights that it does not draw,
    such as those of positions, are put in random order. The name of the layer comes with the copy,
    which is in evaluation mode; after the last layer, all weights are random.

    Args:
        seed, draw, round, client: name the stream of each layer.
    """
    changed = copy.deepcopy(network).eval().requires_grad_(False)
    for name in layers(changed):
        module = changed.get_submodule(name)
        parameters = list(module.parameters(recurse=False))
        before = [one.clone() for one in parameters]
        purpose = f"explain/randomisation/{draw}/{name}"
        with keyed_torch_rng(seed, purpose, round, client, parameters[0].device):
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
            for one, old in zip(parameters, before, strict=True):
                if torch.equal(one, old):
                    order = torch.randperm(one.numel()).to(one.device)
                    one.copy_(one.flatten()[order].view_as(one))
        yield name, changed


def all_random(
    network: nn.Module, seed: int, draw: int, round: int = -1, client: int = -1
) -> nn.Module:
    """A copy of a network with random weights alone; see `randomised`."""
    *_, (_, found) = randomised(network, seed, draw, round, client)
    return found


def agreement(
    a: NDArray[np.float64], b: NDArray[np.float64], squares: int | None = None
) -> Scores:
    """(n,) how alike two maps (n, P) are, whatever their sign: |ρ|, of Spearman's ρ.

    In [0, 1]; of two random maps about √(2/(π(P−1))). NaN for fewer than three parts, which have
    too few orders to tell.

    Args:
        squares: how many squares of pixels have a relevance of their own, which is P then.
    """
    if (squares or a.shape[1]) < 3:
        return np.full(len(a), np.nan)
    return np.abs(rank_correlation(a, b))


def random_agreement(parts: NDArray[np.int64]) -> Scores:
    """(n,) the agreement of maps of P parts each with random ones: about √(2/(π(P−1))) on average.

    NaN for fewer than three parts.
    """
    return np.sqrt(2 / (math.pi * np.where(parts < 3, np.nan, parts - 1)))
