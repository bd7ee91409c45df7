"""ROAD: pixels are removed so that the gap does not show, and so does not decide by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from fedsim.errors import ExperimentError
from fedsim.explain.scores.faithfulness import Predict, Streams, of_most, present
from fedsim.explain.scores.relevance import Scores

# Neighbours of a pixel, (rows, columns) away, and their weights.
_NEIGHBOURS = {
    **{(i, j): 1 / 12 for i in (-1, 1) for j in (-1, 1)},
    **{(0, 1): 1 / 6, (0, -1): 1 / 6, (1, 0): 1 / 6, (-1, 0): 1 / 6},
}


def road(
    predict: Predict,
    x: Tensor,
    relevance: NDArray[Any],
    shares: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    noise: float | NDArray[Any] = 0.01,
    rng: Streams | None = None,
) -> Scores:
    """(n,) the value as the most relevant pixels are imputed from others: the mean over shares.

    In the unit of the value; less is better. Other than `deletion_curve`, it leaves no black
    pixels, whose shape tells the class as well.

    Args:
        predict: the value; the paper's is 1 if the decision stays, else 0.
        x: (n, C, H, W) as the network takes them.
        relevance: (n, H·W).
        shares: how many of the pixels are imputed, each below 1; their number is rounded up.
        noise: standard deviation of the noise on imputed pixels, in the unit of x; or (n,).
        rng: draws the noise, and the orders of equal pixels; by default seed 0.

    Raises:
        ExperimentError: x are no images.

    Source: Rong et al. (ICML 2022), removing the most relevant first.
    """
    if x.dim() != 4:
        raise ExperimentError("road: imputes pixels from those beside them, so it needs images")
    rng = np.random.default_rng(0) if rng is None else rng
    wide = x.shape[1:]
    drawn = (
        rng.standard_normal(x.shape)
        if isinstance(rng, Generator)
        else np.stack([own.standard_normal(wide) for own in rng])
    )
    drawn *= np.reshape(noise, (-1, 1, 1, 1))  # the same in all steps
    images = x.detach().cpu().double().numpy()

    def changed(most: NDArray[np.bool_]) -> Tensor:
        gone = most.reshape(len(x), *wide[1:])
        filled = [imputed(image, where) for image, where in zip(images, gone, strict=True)]
        return torch.from_numpy(np.where(gone[:, None], filled + drawn, images)).to(x)

    every = present(x)
    return of_most(predict, x, relevance, every, every, shares, changed, rng).mean(axis=1)


def imputed(image: NDArray[np.float64], gone: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(C, H, W) an image whose missing pixels are weighted means of those around them.

    A linear system for all of them at once; neighbours to the side weigh twice as much as those
    across a corner, and those outside the image nothing.

    Args:
        gone: (H, W) the missing pixels, not all.
    """
    from scipy.sparse import csc_array, diags_array  # slow to import
    from scipy.sparse.linalg import spsolve

    rows, columns = np.nonzero(gone)
    if not len(rows):
        return image
    number = np.full(gone.shape, -1)
    number[rows, columns] = np.arange(len(rows))
    weights, entries = np.zeros(len(rows)), []
    known = np.zeros((len(rows), len(image)))
    for (i, j), weight in _NEIGHBOURS.items():
        r, c = rows + i, columns + j
        inside = (r >= 0) & (r < gone.shape[0]) & (c >= 0) & (c < gone.shape[1])
        at, r, c = np.flatnonzero(inside), r[inside], c[inside]
        weights[at] += weight
        missing = gone[r, c]
        known[at[~missing]] += weight * image[:, r[~missing], c[~missing]].T
        entries.append(
            (at[missing], number[r[missing], c[missing]], np.full(missing.sum(), weight))
        )
    at, of, shares = map(np.concatenate, zip(*entries, strict=True))
    system = csc_array((-shares, (at, of)), (len(rows), len(rows))) + diags_array(
        weights, format="csc"
    )
    found = image.copy()
    found[:, rows, columns] = spsolve(system, known).reshape(len(rows), -1).T
    return found
