"""Groups of an input's parts, and their importance for a network by a linear surrogate on masks.

Whole groups are masked at random, and a linear model is fitted to the network's outputs, as in
LIME (Ribeiro et al., KDD 2016), but over many examples of a class at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.errors import ExperimentError

Matrix = NDArray[np.float64]

RIDGE = 1e-3  # makes the solution unique
SIDES = 7  # groups along an image's longer side, at most


@dataclass(frozen=True)
class Groups:
    """The parts of an input that are masked together.

    Args:
        index: the group of each pixel or entry, (H, W) for images, otherwise in the shape of an
            input: 0 ≤ index < G.
    """

    index: NDArray[np.int64]

    def __len__(self) -> int:
        """G."""
        return int(self.index.max()) + 1

    def masked(self, x: Tensor, kept: NDArray[np.bool_], instead: Tensor) -> Tensor:
        """Inputs with some groups replaced, all channels of a pixel together.

        Args:
            x: (n, ...) inputs.
            kept: (n, G) which groups stay, or (1, G) for all inputs.
            instead: replacement of the other groups, in the shape of the inputs or of one.
        """
        stays = torch.from_numpy(kept[:, self.index]).to(x.device)
        return torch.where(stays[:, None] if x.dim() == 4 else stays, x, instead)


def group_parts(
    shape: tuple[int, ...], size: int | None = None, part_of: NDArray[np.int64] | None = None
) -> Groups:
    """Groups of inputs of a shape: squares of pixels, row by row, features, or entries.

    >>> group_parts((1, 4, 6), 2).index[::2, ::2].tolist()
    [[0, 1, 2], [3, 4, 5]]

    Args:
        shape: shape of one input; (C, H, W) for images.
        size: side of a square in pixels; squares at the right and lower edges may be smaller. By
            default a seventh of the longer side, rounded up: 4 pixels of 28, 5 of 32.
        part_of: (W,) the feature of each entry, if features take several.
    """
    if part_of is not None:
        return Groups(part_of)
    if len(shape) != 3:
        return Groups(np.arange(math.prod(shape)).reshape(shape))
    _, H, W = shape
    size = size or math.ceil(max(H, W) / SIDES)
    rows, columns = np.arange(H) // size, np.arange(W) // size
    return Groups(rows[:, None] * (columns[-1] + 1) + columns)


def count_squares(shape: tuple[int, ...], size: int | None) -> int | None:
    """How many groups of `group_parts` images of a shape have; None if these are no images."""
    return len(group_parts(shape, size)) if len(shape) == 3 else None


def by_feature(relevance: Tensor, part_of: NDArray[np.int64] | None) -> Tensor:
    """(n, F) the sum over the entries of each feature; unchanged if each takes one."""
    if part_of is None:
        return relevance
    index = torch.from_numpy(part_of).to(relevance.device)
    found = relevance.new_zeros(len(relevance), int(part_of.max()) + 1)
    return found.index_add_(1, index, relevance)


def check_size(what: str, shape: tuple[int, ...], size: int | None) -> None:
    """Reject squares of `group_parts` as large as the image; raises ExperimentError."""
    if len(shape) == 3 and len(group_parts(shape, size)) == 1 < max(shape[1:]):
        _, H, W = shape
        raise ExperimentError(
            f"{what}={size} makes one square of the {H}×{W} pixels, which would all be equally "
            f"relevant; take {max(H, W) - 1} or less"
        )


def fit(kept: NDArray[np.bool_], outputs: Matrix, prior: Matrix, lam: float) -> Matrix:
    """(m, G) surrogates of m outputs, shrunk towards a prior.

    β_c = argmin (1/n)·Σ_i (f_ic − β·z_i)² + λ·‖β − α_c‖² + 10⁻³·‖β‖², with masks z and outputs f
    standardised. Thus ‖β_c‖² is about the share of the output's variance that masks explain, and
    priors of up to unit length have the same scale.

    Args:
        kept: (n, G) masks: which groups were kept.
        outputs: (n, m) the network's outputs. A constant output has the surrogate 0.
        prior: (m, G) α.
        lam: λ ≥ 0.
    """
    z, f = _standardised(kept.astype(np.float64)), _standardised(outputs)
    n, G = z.shape
    system = z.T @ z / n + (lam + RIDGE) * np.eye(G)
    return np.linalg.solve(system, z.T @ f / n + lam * prior.T).T


def explained_variance(kept: NDArray[np.bool_], outputs: Matrix, surrogates: Matrix) -> Matrix:
    """(m,) R² of surrogates (m, G), up to 1; NaN for a constant output."""
    z, f = _standardised(kept.astype(np.float64)), _standardised(outputs)
    missed = np.square(f - z @ surrogates.T).mean(axis=0)
    return np.where(f.any(axis=0), 1 - missed, np.nan)


def largest(rows: Matrix, k: int) -> NDArray[np.int64]:
    """(m, k) indices of the k largest |entries| of each row (m, G), ascending."""
    order = np.argsort(-np.abs(rows), axis=1, kind="stable")
    return np.sort(order[:, :k], axis=1)


def unit(rows: Matrix) -> Matrix:
    """Rows (m, G) scaled to Euclidean length 1, except zeros."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)


def _standardised(columns: Matrix) -> Matrix:
    centred = columns - columns.mean(axis=0)
    # A constant column may differ from its mean by rounding.
    centred = np.where(np.ptp(columns, axis=0) > 0, centred, 0)
    deviation = np.sqrt(np.square(centred).mean(axis=0))
    return centred / np.where(deviation > 0, deviation, 1)
