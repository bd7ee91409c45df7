"""Attacks that forge updates."""

from __future__ import annotations

from statistics import NormalDist
from typing import ClassVar

import numpy as np
from pydantic import Field

from fedsim.conditions.adversaries.attack import Attack, Changes, Mask, attacks


@attacks.register
class SignFlip(Attack):
    """Adversaries send the opposite of what they have trained: −scale·Δ.

    Args:
        scale: factor of the change.

    Source:
        Li et al., RSA: Byzantine-Robust Stochastic Aggregation Methods for Distributed Learning
        from Heterogeneous Datasets (AAAI 2019).
    """

    name: str = "sign_flip"
    scale: float = Field(1.0, gt=0)

    def forge(self, changes: Changes, adversary: Mask, rng: np.random.Generator) -> Changes:
        return -self.scale * changes[adversary]


@attacks.register
class Gaussian(Attack):
    """Adversaries send noise: every entry of their change is drawn from N(0, std²).

    Args:
        std: standard deviation.

    Source:
        Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent
        (NeurIPS 2017), section 5.
    """

    name: str = "gaussian"
    std: float = Field(1.0, gt=0)

    def forge(self, changes: Changes, adversary: Mask, rng: np.random.Generator) -> Changes:
        return self.std * rng.standard_normal((int(adversary.sum()), changes.shape[1]))


@attacks.register
class ALittleIsEnough(Attack):
    """A little is enough (ALIE): adversaries hide within the spread of honest changes.

    All adversaries of a cohort send μ − z·σ, with the mean and the standard deviation of each
    coordinate of what they have trained themselves. By default, z is the largest for which s
    honest clients are expected to lie farther out, so that together they are a majority: with m
    adversaries among n clients, s = ⌊n/2 + 1⌋ − m (at least 1), and z (at least 0) is the quantile
    of the standard normal distribution at (n − m − s)/(n − m).

    Args:
        z: standard deviations; by default as above, which is 0 in small cohorts with few
            adversaries.

    Source:
        Baruch, Baruch and Goldberg, A Little Is Enough: Circumventing Defenses For Distributed
        Learning (NeurIPS 2019), Algorithm 3.
    """

    name: str = "alie"
    least: ClassVar[int] = 2
    z: float | None = Field(None, ge=0)

    def forge(self, changes: Changes, adversary: Mask, rng: np.random.Generator) -> Changes:
        own = changes[adversary]
        z = largest_z(len(changes), len(own)) if self.z is None else self.z
        forged = own.mean(axis=0) - z * own.std(axis=0)
        return np.repeat(forged[None], len(own), axis=0)


def largest_z(n: int, m: int) -> float:
    """z of ALIE for m adversaries among n clients."""
    supporters = max(n // 2 + 1 - m, 1)
    share = (n - m - supporters) / max(n - m, 1)
    return NormalDist().inv_cdf(share) if share > 0.5 else 0.0
