"""Occlusion: the drop of an output without a part of the input."""

from __future__ import annotations

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.explain.baselines import Background
from fedsim.explain.explainer import explainers
from fedsim.explain.explainers.attribution import (
    FromBaseline,
    attributions,
    batches,
    evaluation,
)
from fedsim.explain.groups import check_size, count_squares, group_parts
from fedsim.explain.scores.faithfulness import PartOf, without


@explainers.register
@attributions.register
class Occlusion(FromBaseline):
    """Occlusion, the drop of the logit without a part of x: R = f_y(x) − f_y(x without it).

    For images, one square at a time is set to the baseline, usually zero (the mean pixel if the
    data are normalised), and the drop is spread evenly over its pixels and channels; for vectors,
    one entry at a time, or all entries of a feature; for documents, one word at a time is left
    out. Works with any network, differentiable or not.

    Args:
        baseline: what takes the part's place, see `integrated_gradients`; the drop is the mean
            over a background.
        size: side of the squares, in pixels; squares at the right and lower edges may be smaller.

    Sources: Zeiler and Fergus (ECCV 2014); of words, Li et al. (2016), "Understanding Neural
    Networks through Representation Erasure".
    """

    name: str = "occlusion"
    size: int = Field(4, ge=1)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        check_size(f"explainer {self.name}: size", shape, self.size)

    def squares(self, shape: tuple[int, ...]) -> int | None:
        return count_squares(shape, self.size)

    @torch.no_grad()
    def compared(
        self,
        network: nn.Module,
        x: Tensor,
        y: Tensor,
        background: Background | None,
        part_of: PartOf,
    ) -> Tensor:
        # Each word, entry of a vector, or feature is one part.
        if part_of is None or part_of.ndim == 1:
            part_of = group_parts(tuple(x.shape[1:]), self.size, part_of).index[None]
        part_of = np.broadcast_to(part_of.reshape(len(part_of), -1), (len(x), part_of[0].size))
        found = torch.zeros(part_of.shape, device=x.device)  # of all channels alike
        channels = x.shape[1] if x.dim() == 4 else 1

        def outputs(some: Tensor, classes: Tensor) -> Tensor:
            return network(some).gather(1, classes)[:, 0]

        with evaluation(network):
            for rows in batches(x):
                some, labels = x[rows], y[rows].to(x.device).long()[:, None]
                whole, own = outputs(some, labels), part_of[rows]
                instead: list[tuple[float, Tensor | None]] = [(1.0, None)]
                if background is not None:
                    instead = [*background.of(rows).each()]
                for g in range(own.max(initial=-1) + 1):
                    removed = own == g
                    lost = torch.zeros_like(whole)
                    for weight, one in instead:
                        changed = without(some, removed, instead=one)
                        lost += weight * ((whole - outputs(changed, labels)) / len(instead))
                    gone = torch.from_numpy(removed).to(x.device)
                    each = (lost / (gone.sum(1).clamp(min=1) * channels))[:, None].to(found)
                    found[rows] = torch.where(gone, each, found[rows])
        if x.dim() == 4:
            return found.view(len(x), 1, *x.shape[2:]).repeat(1, channels, 1, 1)
        found = found.view(x.shape)
        return found if x.is_floating_point() else found.masked_fill(x == 0, 0)
