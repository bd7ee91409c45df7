"""Robust aggregation rules from the literature."""

from __future__ import annotations

import math
from abc import ABC
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from fedsim.conditions.aggregators.aggregator import Aggregator, Changes, aggregators

CHUNK = 4096  # entries worked on at a time, so that temporaries stay in the cache
SMALLEST = 1e-6  # ν, below which no distance counts in the geometric median


@aggregators.register
class Median(Aggregator):
    """The median of each coordinate; weights do not count.

    Withstands f < n/2 adversaries.

    Source:
        Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates (ICML
        2018), Definition 1.
    """

    name: str = "median"

    def aggregate(self, changes: Changes, weights: NDArray[np.float64]) -> Changes:
        found: Changes = np.median(changes, axis=0)
        return found


@aggregators.register
class TrimmedMean(Aggregator):
    """The mean of each coordinate without its ⌈β·n⌉ smallest and largest values.

    Weights do not count. Withstands f ≤ ⌈β·n⌉ adversaries. With `trim: 0` it is the mean.

    Args:
        trim: β, share of the values that is left out at either end.

    Source:
        Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates (ICML
        2018), Definition 2.
    """

    name: str = "trimmed_mean"
    trim: float = Field(0.2, ge=0, lt=0.5)
    bound: ClassVar[str] = "f ≤ ⌈trim·n⌉"

    def max_adversaries(self, n: int) -> int:
        return _share_of(self.trim, n)

    def check(self, n: int) -> None:
        cut = self.max_adversaries(n)
        if 2 * cut >= n:
            raise ValueError(
                f"trim={self.trim} leaves out {cut} values at either end, and there are only {n} "
                "clients: ⌈trim·n⌉ must be below n/2"
            )

    def aggregate(self, changes: Changes, weights: NDArray[np.float64]) -> Changes:
        n = len(changes)
        cut = self.max_adversaries(n)
        found: Changes = np.sort(changes, axis=0)[cut : n - cut].mean(axis=0)
        return found


@aggregators.register
class GeometricMedian(Aggregator):
    """The point with the least weighted sum of distances to clients' changes (RFA).

    argmin_v Σ_k p_k·‖v − Δ_k‖ with p_k = weight_k / Σ weight, by the smoothed Weiszfeld algorithm:
    v ← Σ_k β_k·Δ_k / Σ_k β_k with β_k = p_k / max(ν, ‖v − Δ_k‖) and ν = 10⁻⁶. It starts from the
    median of each coordinate, rather than from the mean, which a single adversary can move
    anywhere. Withstands adversaries with less than half of the weight.

    Args:
        iterations: how often v is updated.

    Source:
        Pillutla, Kakade and Harchaoui, Robust Aggregation for Federated Learning (IEEE
        Transactions on Signal Processing 2022), Algorithm 2.
    """

    name: str = "geometric_median"
    weighted: ClassVar[bool] = True
    iterations: PositiveInt = 10

    def aggregate(self, changes: Changes, weights: NDArray[np.float64]) -> Changes:
        found: Changes = np.median(changes, axis=0)
        for _ in range(self.iterations):
            distances = _distances(changes, found)
            factors = weights / np.maximum(SMALLEST, distances)
            found = _sum(changes, factors) / math.fsum(factors)
        return found


class _Krum(Aggregator, ABC):
    """What Krum and Multi-Krum share: the score of each client.

    Args:
        adversaries: share of a cohort that is assumed to be adversarial, at least
            `adversaries.share` if there is such a section; f is this share of n, rounded up.
    """

    name: str
    adversaries: float = Field(0.2, ge=0, lt=0.5)
    bound: ClassVar[str] = "f as assumed by aggregation.adversaries, and n ≥ 2f + 3"

    def max_adversaries(self, n: int) -> int:
        return _share_of(self.adversaries, n)

    def check(self, n: int) -> None:
        f = self.max_adversaries(n)
        if n < 2 * f + 3:
            raise ValueError(
                f"with f = {f} adversaries (aggregation.adversaries={self.adversaries}) it needs "
                f"n ≥ 2f + 3 = {2 * f + 3} clients, and there are {n}"
            )

    def _best_first(self, changes: Changes) -> NDArray[np.intp]:
        """(n,) clients by their sum of squared distances to the n − f − 2 nearest others."""
        n = len(changes)
        products = changes @ changes.T
        squares = np.diagonal(products)
        distances = np.maximum(squares[:, None] + squares - 2 * products, 0)
        np.fill_diagonal(distances, 0)
        last = n - self.max_adversaries(n) - 1
        nearest = np.sort(distances, axis=1)[:, 1:last]  # without itself
        return np.argsort(nearest.sum(axis=1), kind="stable")


@aggregators.register
class Krum(_Krum):
    """The change of the one client that is closest to its neighbours; weights do not count.

    A client's score is the sum of squared distances to the n − f − 2 changes nearest to its own;
    the client with the lowest score wins, and of equal ones the first. Needs n ≥ 2f + 3.

    Source:
        Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent
        (NeurIPS 2017), section 4.
    """

    name: str = "krum"

    def aggregate(self, changes: Changes, weights: NDArray[np.float64]) -> Changes:
        found: Changes = changes[self._best_first(changes)[0]]
        return found


@aggregators.register
class MultiKrum(_Krum):
    """The mean of the m changes with the lowest scores of Krum; weights do not count.

    Args:
        selected: m; by default n − f. With 1 it is Krum.

    Source:
        Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent
        (NeurIPS 2017), section 6.
    """

    name: str = "multi_krum"
    selected: PositiveInt | None = None

    def check(self, n: int) -> None:
        super().check(n)
        f = self.max_adversaries(n)
        if self.selected is not None and self.selected > n - f:
            raise ValueError(
                f"selected={self.selected}: of {n} clients, f = {f} are assumed to be "
                f"adversaries; set at most n − f = {n - f}"
            )

    def aggregate(self, changes: Changes, weights: NDArray[np.float64]) -> Changes:
        m = self.selected or len(changes) - self.max_adversaries(len(changes))
        found: Changes = changes[np.sort(self._best_first(changes)[:m])].mean(axis=0)
        return found


@aggregators.register
class NormClipping(Aggregator):
    """The weighted mean of changes whose L2 norm is clipped: Σ w_k·Δ_k·min(1, S/‖Δ_k‖) / Σ w_k.

    Bounds what any client can do, rather than leaving out those that differ.

    Args:
        clip: S, largest norm; by default the median of the clients' norms, in each round.

    Source:
        Sun et al., Can You Really Backdoor Federated Learning? (2019), section 4.
    """

    name: str = "norm_clipping"
    weighted: ClassVar[bool] = True
    clip: float | None = Field(None, gt=0)

    def aggregate(self, changes: Changes, weights: NDArray[np.float64]) -> Changes:
        norms = np.sqrt(np.square(changes).sum(axis=1))
        clip = np.median(norms) if self.clip is None else self.clip
        scale = clip / np.maximum(norms, clip) if clip > 0 else np.zeros(len(norms))
        return _sum(changes, weights * scale) / math.fsum(weights)


def _share_of(share: float, n: int) -> int:
    """⌈share·n⌉, where 0.1 of 30 is 3."""
    return math.ceil(round(share * n, 9))


def _distances(changes: Changes, point: Changes) -> Changes:
    """(n,) between changes (n, P) and a point (P,)."""
    squares = np.zeros(len(changes))
    for start in range(0, len(point), CHUNK):
        apart = changes[:, start : start + CHUNK] - point[start : start + CHUNK]
        squares += np.einsum("kj,kj->k", apart, apart)
    found: Changes = np.sqrt(squares)
    return found


def _sum(changes: Changes, factors: NDArray[np.float64]) -> Changes:
    """Σ_k factor_k·Δ_k, in the order of clients."""
    total = np.zeros(changes.shape[1])
    for change, factor in zip(changes, factors, strict=True):
        total += factor * change
    return total
