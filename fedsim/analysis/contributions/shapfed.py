"""ShapFed: Shapley values by class, of the direction in which a coalition moves the output layer.

Tastan, Fares, Aremu, Horváth, Nandakumar, Redefining contributions: Shapley-driven federated
learning, IJCAI 2024 (class-specific Shapley values).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedsim.analysis.contributions.cosine import cos
from fedsim.analysis.contributions.games import Coalition, shapley
from fedsim.analysis.contributions.updates import Columns, RoundUpdates, Score, Wide
from fedsim.errors import BadInput


def shapfed(rounds: Iterator[RoundUpdates], worth: Score, rng: np.random.Generator) -> Columns:
    """The mean over classes c and rounds of the Shapley values of the game

        v_t^c(S) = cos(Σ_S n_k Δ_k^c, Σ_N n_k Δ_k^c),  v_t^c(∅) = 0,

    where Δ_k^c are the output layer's weights for class c, and N is the cohort; `value/<class>`
    are those of a class. Not in units of a score; `worth` and `rng` are not used.
    """
    found: Columns = {}
    count = 0
    for round in rounds:
        count += 1
        if not round.by_class:
            raise BadInput("how=shapfed: the network's last layer has no output for each class")
        round.insist_on_few("shapfed", "cosine")
        for name, at in round.by_class.items():
            own = {k: round.samples[k] * change[at] for k, change in round.changes.items()}
            whole = sum(own.values(), np.zeros(len(at)))

            def value(some: Coalition, own: dict[int, Wide] = own, whole: Wide = whole) -> float:
                return cos(sum((own[k] for k in some), np.zeros(len(whole))), whole)

            for k, part in shapley(round.cohort, value).items():
                columns = found.setdefault(k, {})
                columns[f"value/{name}"] = columns.get(f"value/{name}", 0.0) + part
    return {
        k: {"value": sum(own.values()) / len(own) / count}
        | {name: total / count for name, total in own.items()}
        for k, own in found.items()
    }
