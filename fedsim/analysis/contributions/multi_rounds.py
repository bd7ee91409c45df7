"""Shapley values of each round's reconstructed models, added up over the rounds.

Song, Tong, Wei, Profit allocation for federated learning, IEEE Big Data 2019 (MR); the sum over
rounds is the federated Shapley value of Wang et al., A principled approach to data valuation for
federated learning, 2020.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedsim.analysis.contributions.games import Coalition, shapley
from fedsim.analysis.contributions.updates import Columns, RoundUpdates, Score


def multi_rounds(
    rounds: Iterator[RoundUpdates], worth: Score, rng: np.random.Generator
) -> Columns:
    """φ_k = Σ_t φ_k^t, where φ^t is of the game v_t(S) = v(w_t + Σ_S n_k Δ_k / Σ_S n_k).

    The game of round t is that of its cohort, with v_t(∅) = v(w_t); the values of all clients sum
    to v(w_T) − v(w_0) up to rounding.
    """
    found: dict[int, float] = {}
    for round in rounds:
        round.insist_on_few("multi_rounds", "gtg_shapley")

        def value(own: Coalition, round: RoundUpdates = round) -> float:
            return worth(round.model(own))

        for k, own in shapley(round.cohort, value).items():
            found[k] = found.get(k, 0.0) + own
    return {k: {"value": value} for k, value in found.items()}
