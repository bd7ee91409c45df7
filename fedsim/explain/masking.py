"""Masks that keep the part of an image that an attribution finds relevant."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_relevant(heatmaps: Tensor, removed: float) -> Tensor:
    """(B, H, W) which pixels to keep: True for the most relevant of each image.

    The threshold is the k-th smallest relevance of N = H·W pixels, k = ⌊N·removed/100⌋, and is
    itself kept: N - k + 1 pixels stay (all for k = 0), and more in case of ties. As in FedXDS's
    released code.

    Args:
        heatmaps: (B, H, W) signed relevances.
        removed: s, the percentage of pixels to remove, 0 ≤ s < 100.
    """
    flat = heatmaps.flatten(1)
    k = int(flat.shape[1] * removed / 100)
    if k == 0:
        return torch.ones_like(heatmaps, dtype=torch.bool)
    # Not `kthvalue`, which deterministic runs refuse on a GPU.
    threshold = flat.sort(dim=1).values[:, k - 1, None]
    return (flat >= threshold).view_as(heatmaps)


def scaled(heatmaps: Tensor) -> Tensor:
    """(B, H, W) each heatmap scaled to [0, 1]; 0 if it is constant."""
    flat = heatmaps.flatten(1)
    low, high = flat.amin(dim=1, keepdim=True), flat.amax(dim=1, keepdim=True)
    span = torch.where(high > low, high - low, torch.inf)
    return ((flat - low) / span).view_as(heatmaps)
