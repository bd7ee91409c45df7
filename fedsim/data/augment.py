"""Weak and strong augmentation of images for semi-supervised methods.

Both take network inputs, (B, C, H, W), normalised or not, and draw from a given generator for each
image separately. torchvision's transforms draw from torch's global generator, once per batch, and
expect colours in [0, 1]. Here colours stay within the range of their channel in the image, and
shifted images are padded by reflection.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

# Maximum strengths of the operations, from the usual ranges of RandAugment (Cubuk et al.,
# RandAugment: Practical Automated Data Augmentation with a Reduced Search Space, 2020).
BRIGHTNESS = CONTRAST = 0.9  # a factor of 1 ± this
TURN = np.pi / 6
SHEAR = 0.3
CUTOUT = 0.5  # side of the square cut out, as a share of the image's

OPERATIONS = 6
PER_IMAGE = 2  # operations


def weak(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Images shifted by up to an eighth of each side and, with three channels, randomly mirrored.

    Grey images are never mirrored, because many show digits and letters.
    """
    B, C, H, W = x.shape
    rows, columns = _shifted(H, B, rng), _shifted(W, B, rng)
    if C == 3:
        mirrored = rng.random((B, 1)) < 0.5
        columns = np.where(mirrored, columns[:, ::-1], columns)
    image = torch.arange(B, device=x.device).view(B, 1, 1, 1)
    channel = torch.arange(C, device=x.device).view(1, C, 1, 1)
    row = torch.from_numpy(rows).to(x.device).view(B, 1, H, 1)
    column = torch.from_numpy(columns).to(x.device).view(B, 1, 1, W)
    return x[image, channel, row, column]


def strong(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Weak augmentation, then two of six operations: RandAugment in a fixed order.

    Brightness, contrast, rotation, shear along either axis, and a square filled with the image's
    mean. Strengths are uniform, in either direction.
    """
    x = weak(x, rng)
    B = len(x)
    chosen = rng.permuted(np.tile(np.arange(OPERATIONS) < PER_IMAGE, (B, 1)), axis=1)
    amounts = rng.uniform(-1, 1, (B, OPERATIONS)) * chosen  # 0 is the identity
    centres = rng.uniform(-1, 1, (B, 2))
    brightness, contrast, turn, shear_x, shear_y, cutout = torch.from_numpy(amounts.T).to(x)
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)

    x = (low + _each(1 + BRIGHTNESS * brightness) * (x - low)).clamp(low, high)
    mean = x.mean((2, 3), keepdim=True)
    x = (mean + _each(1 + CONTRAST * contrast) * (x - mean)).clamp(low, high)

    grid = _grid(TURN * turn, SHEAR * shear_x, SHEAR * shear_y, x)
    x = grid_sample(x, grid, padding_mode="reflection", align_corners=False)

    cut = _square(torch.from_numpy(centres.T).to(x), CUTOUT * cutout.abs(), x)
    return torch.where(cut, x.mean((2, 3), keepdim=True), x).clamp(low, high)


def _shifted(side: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """(count, side) the source pixel of each position along a side."""
    most, last = side // 8, side - 1
    by = rng.integers(-most, most, size=(count, 1), endpoint=True)
    return last - np.abs(last - np.abs(np.arange(side) + by))


def _each(factor: Tensor) -> Tensor:
    """(B,) as (B, 1, 1, 1)."""
    return factor[:, None, None, None]


def _grid(turn: Tensor, shear_x: Tensor, shear_y: Tensor, x: Tensor) -> Tensor:
    """(B, H, W, 2) the source of each pixel for a rotation and shears about the centre."""
    H, W = x.shape[2:]
    cos, sin, zero = turn.cos(), turn.sin(), torch.zeros_like(turn)
    # The rotation times ((1, shear_x), (shear_y, 1)) in pixels, then in units of half a side.
    to_x = cos - sin * shear_y, (cos * shear_x - sin) * (H / W), zero
    to_y = (sin + cos * shear_y) * (W / H), sin * shear_x + cos, zero
    matrix = torch.stack([*to_x, *to_y], dim=1).view(-1, 2, 3)
    return affine_grid(matrix, list(x.shape), align_corners=False)


def _square(centre: Tensor, half: Tensor, x: Tensor) -> Tensor:
    """(B, 1, H, W) which pixels lie in a square, in units of half a side."""
    H, W = x.shape[2:]
    down = (2 * torch.arange(H).to(x) + 1)[:, None] / H - 1
    right = (2 * torch.arange(W).to(x) + 1) / W - 1
    far = torch.maximum((down - _each(centre[0])).abs(), (right - _each(centre[1])).abs())
    return far < _each(half)
