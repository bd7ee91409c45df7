"""Draws a subset of examples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def take_stratified(
    share: Indices, labels: NDArray[np.int64], fraction: float, rng: np.random.Generator
) -> tuple[Indices, Indices]:
    """Draw round(fraction·n) of `share`, each class in proportion (largest remainders).

    Returns:
        (taken, rest), both sorted.
    """
    share = np.sort(share)
    present, inverse, counts = np.unique(labels[share], return_inverse=True, return_counts=True)
    exact = fraction * counts
    quota = np.floor(exact + 1e-9).astype(np.int64)
    missing = round(fraction * len(share)) - int(quota.sum())
    quota[np.argsort(quota - exact, kind="stable")[:missing]] += 1
    chosen = np.zeros(len(share), dtype=bool)
    for c in range(len(present)):
        chosen[rng.permutation(np.flatnonzero(inverse == c))[: quota[c]]] = True
    return share[chosen], share[~chosen]
