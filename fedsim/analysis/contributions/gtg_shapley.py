"""GTG-Shapley: guided sampling of orders with truncation within and between rounds.

Liu, Chen, Yu, Liu, Cui, GTG-Shapley: efficient and accurate participant contribution evaluation in
federated learning, ACM Transactions on Intelligent Systems and Technology 2022, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from fedsim.analysis.contributions.games import Coalition
from fedsim.analysis.contributions.updates import Columns, RoundUpdates, Score

BETWEEN = 0.005  # ε_b: rounds that change the score less are left out
WITHIN = 0.001  # ε_i: an order ends once the score is this close to that of the whole cohort
SWEEPS = 5  # in each of which every client is first in an order once
SETTLED = 0.05  # relative change of the values between sweeps at which sampling ends


def gtg_shapley(rounds: Iterator[RoundUpdates], worth: Score, rng: np.random.Generator) -> Columns:
    """Σ_t of mean marginal contributions to v(w_t + Σ_S n_k Δ_k / Σ_S n_k) over sampled orders."""
    found: dict[int, float] = {}
    for round in rounds:

        @cache
        def value(own: Coalition, round: RoundUpdates = round) -> float:
            return worth(round.model(own))

        cohort, whole = round.cohort, frozenset(round.cohort)
        if abs(value(whole) - value(frozenset())) <= BETWEEN:
            continue
        sums, count, before = dict.fromkeys(cohort, 0.0), 0, np.zeros(len(cohort))
        for _ in range(SWEEPS):
            for leader in cohort:
                rest = rng.permutation([k for k in cohort if k != leader]).tolist()
                own, at = frozenset[int](), value(frozenset())
                for k in [leader, *rest]:
                    if abs(value(whole) - at) <= WITHIN:
                        break
                    own |= {k}
                    sums[k] += value(own) - at
                    at = value(own)
                count += 1
            now = np.array([sums[k] / count for k in cohort])
            if np.abs(now - before).sum() <= SETTLED * np.abs(now).sum():
                break
            before = now
        for k in cohort:
            found[k] = found.get(k, 0.0) + sums[k] / count
    return {k: {"value": value} for k, value in found.items()}
