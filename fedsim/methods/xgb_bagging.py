"""XGBoost by bagging, as Flower has it: every client adds trees of its own in each round.

Flower's strategy FedXgbBagging (flwr.serverapp.strategy, and its examples `xgboost-quickstart` and
`xgboost-comprehensive`): the ensemble is sent to the cohort, each client boosts it for some rounds
on its own data and sends the new trees, and the server appends all of them. The trees are those of
XGBoost, Chen and Guestrin (KDD 2016), Eq. 5 to 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pydantic import Field
from torch import Tensor

from fedsim.errors import RunError
from fedsim.federation import Client, Federation, client_function
from fedsim.methods.method import methods
from fedsim.methods.shared.trees import (
    TreeMethod,
    TreeState,
    arrays_of,
    gradients,
    own_scores,
    rows,
    targets,
    tree_model,
)
from fedsim.models.arrays import Arrays
from fedsim.models.bins import count_keys, encode, find_cuts
from fedsim.models.boosted_trees import (
    STEP,
    TREES,
    appended,
    raw_scores,
    step_of,
)


@methods.register
class XgbBagging(TreeMethod[TreeState]):
    """Each client of the cohort boosts the ensemble on its own data; all new trees are appended.

    Each tree's values are divided by the number of clients that have sent trees, as they correct
    the same errors (Flower's `scaled_lr`); without this, many clients overshoot. A client's bins
    are quantiles of its own values. Sums begin with the score 0. `trees` in `rounds` is how many
    there are.

    Args:
        local_rounds: rounds of boosting by a client; Flower's example takes 1.
    """

    name: str = "xgb_bagging"
    local_rounds: int = Field(1, ge=1)

    def init(self, fed: Federation) -> TreeState:
        trees = tree_model(fed.server).empty(fed.server.num_classes)
        return TreeState(fed.initial_weights(), trees)

    def round(self, fed: Federation, state: TreeState, t: int) -> TreeState:
        sent = fed.gather(self.boost, fed.sample(t), trees=state.trees)
        if not sent:
            raise RunError(f"round {t}: every client of the cohort was skipped")
        trees = appended(state.trees, *sent.values(), scale=1 / len(sent))
        return replace(state, trees=trees)

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
        y = targets(client)
        known = client.num_classes or not len(y)
        of = gradients(client, STEP if known else step_of(float(y.min()), float(y.max())))
        begun, f = len(ensemble["feature"]), own_scores(client, ensemble)
        for _ in range(self.local_rounds):
            ensemble = appended(ensemble, model.boost(f, x, codes, cuts, of))
            f = raw_scores(ensemble, x, f, len(ensemble["feature"]) - 1)
            client.visit(len(x))
        client.trained = ensemble
        client.report(steps=self.local_rounds)
        return {name: ensemble[name][begun:] for name in TREES}
