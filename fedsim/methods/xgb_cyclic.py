"""Cyclic XGBoost, as Flower has it: one client after another continues the ensemble.

Flower's strategy FedXgbCyclic (flwr.serverapp.strategy, and its example `xgboost-comprehensive`):
in each round one client gets the ensemble and boosts it on its own data. The trees are those of
XGBoost, Chen and Guestrin (KDD 2016), Eq. 5 to 7.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from fedsim.errors import RunError
from fedsim.federation import Federation
from fedsim.federation.cohort import Cohort
from fedsim.methods.method import methods
from fedsim.methods.shared.trees import TreeState
from fedsim.methods.xgb_bagging import XgbBagging
from fedsim.models.boosted_trees import appended
from fedsim.support.rng import keyed_rng


@methods.register
class XgbCyclic(XgbBagging):
    """In each round one client boosts the ensemble on its own data; clients take turns.

    Turns are in the order of the clients' numbers, as in Flower, or in random orders. Of a cohort
    that lacks the client whose turn it is, the next in the order takes it; a client that drops
    out in its turn loses it. Sums begin with the mean target, or the log-odds, of the first.
    `trees` in `rounds` is how many there are.

    Args:
        local_rounds: rounds of boosting by a client; Flower's example takes 1.
        order: `numbered`; or `shuffled`, a new random order each time all have had their turn.
    """

    name: str = "xgb_cyclic"
    order: Literal["numbered", "shuffled"] = "numbered"

    def round(self, fed: Federation, state: TreeState, t: int) -> TreeState:
        chosen = self.turn(fed.sample(t), t, fed.num_clients, fed.server.seed)
        state = self.begun(fed, state, [chosen])
        sent = fed.gather(self.boost, [chosen], trees=state.trees)
        if not sent and fed.server.loses_clients:
            return state
        if not sent:
            raise RunError(f"round {t}: client {chosen}, whose turn it is, was skipped")
        return replace(state, trees=appended(state.trees, sent[chosen]))

    def turn(self, cohort: Cohort, t: int, K: int, seed: int) -> int:
        """The client of the cohort whose turn it is in round t = 1, 2, … of K clients."""
        cycle, place = divmod(t - 1, K)
        order = np.arange(K)
        if self.order == "shuffled":
            order = keyed_rng(seed, "turns", cycle).permutation(K)
        order = np.roll(order, -place)
        return int(order[np.isin(order, cohort)][0])
