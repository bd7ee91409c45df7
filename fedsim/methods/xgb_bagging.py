"""XGBoost by bagging, as Flower has it: every client adds trees of its own in each round.

Flower's strategy FedXgbBagging (flwr.serverapp.strategy, and its examples `xgboost-quickstart` and
`xgboost-comprehensive`): the ensemble is sent to the cohort, each client boosts it for some rounds
on its own data and sends the new trees, and the server appends all of them. The trees are those of
XGBoost, Chen and Guestrin (KDD 2016), Eq. 5 to 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedsim.errors import RunError
from fedsim.federation import Client, Federation, client_function
from fedsim.federation.cohort import Cohort
from fedsim.methods.method import methods
from fedsim.methods.shared.trees import (
    TreeMethod,
    TreeState,
    arrays_of,
    base_of,
    gradients,
    own_scores,
    own_totals,
    rows,
    targets,
    tree_model,
    units_of,
)
from fedsim.models.arrays import Arrays
from fedsim.models.bins import count_keys, encode, find_cuts
from fedsim.models.boosted_trees import TREES, appended, raw_scores


@methods.register
class XgbBagging(TreeMethod[TreeState]):
    """Each client of the cohort boosts the ensemble on its own data; all new trees are appended.

    Each tree's values are divided by the number of clients that have sent trees, as they correct
    the same errors; without this, many clients overshoot. (Flower's `scaled_lr` divides η before
    trees are grown, by the number of all clients.) A client's bins are quantiles of its own
    values. Sums begin with the mean target, or the log-odds, of the first round's cohort, which
    sends its own (setup traffic). `trees` in `rounds` is how many there are.

    Args:
        local_rounds: rounds of boosting by a client; Flower's example takes 1.
    """

    name: str = "xgb_bagging"
    local_rounds: int = Field(1, ge=1)

    def init(self, fed: Federation) -> TreeState:
        trees = tree_model(fed.server).empty(fed.server.num_classes)
        return TreeState(fed.initial_weights(), trees)

    def round(self, fed: Federation, state: TreeState, t: int) -> TreeState:
        cohort = fed.sample(t)
        state = self.begun(fed, state, cohort)
        sent = fed.gather(self.boost, cohort, trees=state.trees)
        if not sent:
            raise RunError(f"round {t}: every client of the cohort was skipped")
        trees = appended(state.trees, *sent.values(), scale=1 / len(sent))
        return replace(state, trees=trees)

    def begun(
        self, fed: Federation, state: TreeState, cohort: Sequence[int] | Cohort
    ) -> TreeState:
        """Before the first trees, the score with which sums begin."""
        if len(state.trees["feature"]):
            return state
        with fed.setup_traffic():
            totals = [*fed.gather(self.totals, cohort).values()]
        if not totals:  # as below
            return state
        found = base_of(np.sum(totals, axis=0), fed.server.objective, fed.server.num_classes)
        return replace(state, trees={**state.trees, "base": found})

    @client_function("totals")
    def totals(self, client: Client) -> NDArray[Any]:
        """(client) What the score with which sums begin is made of."""
        return own_totals(client)

    @client_function("boost")
    def boost(self, client: Client, trees: Mapping[str, Tensor]) -> Arrays:
        """(client) New trees, grown on its own examples."""
        ensemble, model, x = arrays_of(trees), tree_model(client), rows(client)
        cuts = client.once(
            "cuts",
            lambda: find_cuts(
                lambda *intervals: count_keys(x, *intervals), x.shape[1], model.bins
            ),
        )
        codes = client.once("codes", lambda: encode(x, cuts))
        size = float(np.abs(targets(client)).max(initial=0))
        units = units_of(client.objective, client.num_classes, size)
        of = gradients(client, units)
        begun, f = len(ensemble["feature"]), own_scores(client, ensemble)
        for _ in range(self.local_rounds):
            ensemble = appended(ensemble, model.boost(*of(f), codes, cuts))
            f = raw_scores(ensemble, x, f, len(ensemble["feature"]) - 1)
            client.visit(len(x))
        client.trained = ensemble
        client.report(steps=self.local_rounds)
        return {name: ensemble[name][begun:] for name in TREES}
