"""Federated histogram trees: clients send sums of gradients, the server splits.

The trees are XGBoost's (Chen and Guestrin, XGBoost: A Scalable Tree Boosting System, KDD 2016, Eq.
5 to 7) with its histogram algorithm, whose sums over examples are also sums over clients, as in
SecureBoost (Cheng et al., IEEE Intelligent Systems 2021, Algorithms 1 and 2) and FedTree (Li et
al., MLSys 2023), here for examples that are divided among clients, each with all features.

Here sums are exact, so the trees are those of all examples in one place on the same bins, to the
bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.data import ClientSplits, Dataset
from fedsim.errors import ExperimentError, FedsimWarning, NobodyAnswers
from fedsim.federation import Client, Federation, NotCounted, Update, client_function
from fedsim.federation.cohort import Cohort
from fedsim.methods.learns import Learns
from fedsim.methods.method import methods
from fedsim.methods.shared.trees import (
    TreeMethod,
    TreeState,
    arrays_of,
    base_of,
    check_bounds,
    own_gradients,
    own_totals,
    rows,
    targets,
    tree_model,
    units_of,
)
from fedsim.models.arrays import Arrays
from fedsim.models.bins import Array, Ints, count_keys, encode, even_cuts, find_cuts
from fedsim.models.boosted_trees import appended, histograms, leaf_of, places, to_step
from fedsim.objectives import Classification, Regression
from fedsim.training import Train


@dataclass(frozen=True)
class HistState(TreeState):
    """The global ensemble, and what clients have agreed on.

    Attributes:
        cuts: of the bins, see `fedsim.models.bins.find_cuts`; empty before they are agreed on.
        units: of gradients and hessians, which are multiples of 2^-26 of them.
    """

    cuts: Arrays
    units: tuple[float, float] = (1.0, 1.0)


@methods.register
class HistTrees(TreeMethod[HistState]):
    """Boosted trees from sums of clients' histograms, the same as from pooled data, to the bit.

    Before the first round, its cohort agrees on bins: in eight exchanges clients send how
    many of their values lie in intervals that the server refines, which gives quantiles; and then
    how many examples they have of each class, or the sum of their targets, for the score with
    which sums begin. This is setup traffic.

    In each round one tree is grown (for more than two classes, one for each). Its levels are
    exchanges: the server sends the unfinished tree, and clients the sums G = Σ g_i and H = Σ h_i
    of their examples' gradients and hessians by node, feature and bin (16 bytes for both), of the
    smaller child of each node alone; the other's are the difference. The server finds the splits.
    If all clients leave a round (`devices.deadline`), its tree has the levels that are done.

    A round begins with the ensemble and the cuts, which are counted as sent to each client of the
    cohort. Everything that clients send is a sum, so masks change nothing. Gradients are rounded
    to 2^-26 of their size (the largest target, or class weight), so that sums are exact; up to
    2^25 examples.

    Noise (`privacy`) needs `range`, because noisy counts give no bins. `privacy.clip` has to be of
    the size of a client's histograms, in the order of n·√(F/bins) for n examples. `trees` in
    `rounds` is how many there are.

    Args:
        range: bounds of all features and of a regression's target, known without looking at the
            data. Bins are then of equal width, trees begin with the score 0, and nothing is agreed
            on.
    """

    name: str = "hist_trees"
    learns: ClassVar[Learns] = Learns(
        models="tree ensemble", objectives=(Classification, Regression), task_sequences="no"
    )
    trains_clients: ClassVar[bool] = False
    range: tuple[float, float] | None = None

    def check(self, train: Train) -> None:
        super().check(train)
        if self.range is not None and not np.float32(self.range[0]) < np.float32(self.range[1]):
            raise ExperimentError(
                f"method.range={list(self.range)}: the first number must be below the second"
            )

    def check_hidden(self, hidden: Mapping[str, str]) -> None:
        if "weights" in hidden and self.range is None:
            raise ExperimentError(
                f"method.name={self.name} agrees on bins by counting clients' values, and "
                f"{hidden['weights']} makes counts too noisy for that; set method.range, bounds "
                "of all features ([0, 1] with data.scale=minmax)"
            )

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        super().check_data(dataset, splits, network)
        if self.range is not None:
            check_bounds(*self.range, dataset, splits)

    def init(self, fed: Federation) -> HistState:
        trees = tree_model(fed.server).empty(fed.server.num_classes)
        return HistState(fed.initial_weights(), trees, {})

    def round(self, fed: Federation, state: HistState, t: int) -> HistState:
        cohort, model = fed.sample(t), tree_model(fed.server)
        known: dict[str, Any] = {}

        def ask(tree: Arrays, nodes: Ints) -> tuple[Array, frozenset[int]] | None:
            sent = known or {"ensemble": state.trees, "cuts": state.cuts}
            tree = {name: array.copy() for name, array in tree.items()}
            try:
                mean = fed.mean(
                    *(self.histograms, cohort), units=state.units, tree=tree, nodes=nodes, **sent
                )
            except NobodyAnswers:
                if not known:
                    raise
                return None
            if not known:  # by all that take part from now on
                known.update({name: NotCounted(arrays) for name, arrays in sent.items()})
            summed = to_step(mean.histograms.astype(np.float64) * mean.count)
            of_node = summed.reshape(len(nodes), 2, -1)
            return of_node * np.array(state.units)[:, None], mean.clients

        try:
            if not state.cuts:
                state = self.agree(fed, state, cohort)
            tree = model.grow(ask, state.cuts, len(state.trees["base"]))
        except NobodyAnswers as nobody:  # what is agreed on is kept
            again = "" if state.cuts else ", and bins have to be agreed on again"
            warnings.warn(f"{nobody}: no tree is grown{again}", FedsimWarning, stacklevel=2)
            return state
        return replace(state, trees=appended(state.trees, tree))

    @client_function("histograms")
    def histograms(
        self,
        client: Client,
        ensemble: Mapping[str, Tensor],
        cuts: Mapping[str, Tensor],
        units: tuple[float, float],
        tree: Mapping[str, Tensor],
        nodes: Tensor,
    ) -> Update:
        """(client) G and H of some nodes of the unfinished tree, by feature and bin."""
        agreed = arrays_of(cuts)
        codes = client.once("codes", lambda: encode(rows(client), agreed), agreed["edges"])
        g, h = own_gradients(client, arrays_of(ensemble), units)
        place = places(leaf_of(arrays_of(tree), codes.T), nodes.cpu().numpy())
        client.visit(int((place >= 0).any(axis=0).sum()))
        client.report(steps=1)  # a tree, of which this is a level
        found = histograms(place, len(nodes), codes, agreed, g, h) / np.array(units)[:, None]
        return Update(histograms=torch.from_numpy(found.reshape(-1)))

    # -- what clients agree on -----------------------------------------------------------------

    def agree(self, fed: Federation, state: HistState, cohort: Cohort) -> HistState:
        """The bins, the units of gradients, and the score with which sums begin."""
        model, F = tree_model(fed.server), int(np.prod(fed.server.shape))
        classes, objective = fed.server.num_classes, fed.server.objective
        if self.range is not None:
            units = units_of(objective, classes, max(-self.range[0], self.range[1]))
            return replace(state, cuts=even_cuts(*self.range, F, model.bins), units=units)

        def count(feature: Ints, first: Ints, shift: int) -> Array:
            mean = fed.mean(self.counts, cohort, feature=feature, first=first, shift=shift)
            counts: Array = np.rint(mean.counts.astype(np.float64) * mean.count)
            return counts.reshape(-1, 16)

        with fed.setup_traffic():
            # A regression's target is counted like a feature: its bounds give the units.
            cuts = find_cuts(count, F if classes else F + 1, model.bins)
            units = units_of(objective, classes, max(-cuts["low"][-1], cuts["high"][-1]))
            mean = fed.mean(self.totals, cohort, unit=units[0])
        totals = to_step(mean.totals.astype(np.float64) * mean.count)
        if not classes:
            totals[0] *= units[0]
            last = int(cuts["starts"][-2])
            cuts = {
                "edges": cuts["edges"][: last - F],
                **{name: cuts[name][:-1] for name in ("starts", "low", "high")},
            }
        base = base_of(totals, objective, classes)
        return replace(state, trees=model.empty(classes, base), cuts=cuts, units=units)

    @client_function("counts")
    def counts(self, client: Client, feature: Tensor, first: Tensor, shift: int) -> Update:
        """(client) How many of its values lie in the sixteenths of intervals."""
        x = rows(client)
        if not client.num_classes:
            x = np.column_stack([x, targets(client).astype(np.float32)])
        found = count_keys(x, feature.cpu().numpy(), first.cpu().numpy(), shift)
        return Update(counts=torch.from_numpy(found.reshape(-1)))

    @client_function("totals")
    def totals(self, client: Client, unit: float) -> Update:
        """(client) What the score with which sums begin is made of."""
        return Update(totals=torch.from_numpy(own_totals(client, unit)))
