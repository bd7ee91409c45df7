"""Masks that keep the part of an image that an attribution finds relevant."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_relevant(heatmaps: Tensor, removed: float) -> Tensor:
    """(B, H, W) which pixels to keep: True for the most relevant of each image.

    Of N = H·W pixels the k = ⌊N·removed/100⌋-th smallest relevance is the threshold, which is kept
    itself: N - k + 1 pixels stay (all for k = 0), and more where several are equal to it. FedXDS's
    released code.

    Args:
        heatmaps: (B, H, W) signed relevances.
        removed: s, the percentage of pixels to remove, 0 ≤ s < 100.
    """
    flat = heatmaps.flatten(1)
    k = int(flat.shape[1] * removed / 100)
    if k == 0:
        return torch.ones_like(heatmaps, dtype=torch.bool)
    threshold = flat.kthvalue(k, dim=1, keepdim=True).values
    return (flat >= threshold).view_as(heatmaps)


def scaled(heatmaps: Tensor) -> Tensor:
    """(B, H, W) each heatmap from its least relevance, 0, to its greatest, 1; 0 if equal."""
    flat = heatmaps.flatten(1)
    low, high = flat.amin(dim=1, keepdim=True), flat.amax(dim=1, keepdim=True)
    span = torch.where(high > low, high - low, torch.inf)
    return ((flat - low) / span).view_as(heatmaps)
