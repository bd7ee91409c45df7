"""Federated histogram trees: clients send sums of gradients, the server splits.

The trees are XGBoost's (Chen and Guestrin, XGBoost: A Scalable Tree Boosting System, KDD 2016, Eq.
5 to 7) with its histogram algorithm, whose sums over examples are also sums over clients, as in
SecureBoost (Cheng et al., IEEE Intelligent Systems 2021, Algorithms 1 and 2) and FedTree (Li et
al., MLSys 2023), here for examples that are divided among clients, each with all features.

Here sums are exact, so the trees are those of all examples in one place on the same bins, to the
bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedsim.errors import ExperimentError
from fedsim.federation import Client, Federation, NotCounted, Update, client_function
from fedsim.federation.cohort import Cohort
from fedsim.methods.learns import Learns
from fedsim.methods.method import methods
from fedsim.methods.shared.trees import (
    TreeMethod,
    TreeState,
    arrays_of,
    own_gradients,
    rows,
    targets,
    tree_model,
)
from fedsim.models.arrays import Arrays
from fedsim.models.bins import Array, Ints, count_keys, encode, even_cuts, find_cuts
from fedsim.models.boosted_trees import (
    STEP,
    appended,
    histograms,
    step_of,
    to_step,
)
from fedsim.objectives import Classification, Regression
from fedsim.training import Train


@dataclass(frozen=True)
class HistState(TreeState):
    """The global ensemble, and what clients have agreed on.

    Attributes:
        cuts: of the bins, see `fedsim.models.bins.find_cuts`; empty before the first
            round.
        step: gradients are multiples of it.
    """

    cuts: Arrays
    step: float = STEP


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

    A round begins with the ensemble and the cuts, which are counted as sent to each client of the
    cohort. Everything that clients send is a sum, so masks change nothing. Gradients are rounded
    to multiples of 2^-26 (of a regression: times the size of its targets), so that sums are
    exact; up to 2^25 examples.

    Noise (`privacy`) needs `range`, because counts that are clipped to a norm and made noisy give
    no bins. `privacy.clip` has to be of the size of a client's histograms, in the order of
    n·√(F/bins) for n examples. `trees` in `rounds` is how many there are.

    Args:
        range: bounds of all features, known without looking at the data. Bins are then of equal
            width, trees begin with the score 0, and nothing is agreed on.
    """

    name: str = "hist_trees"
    learns: ClassVar[Learns] = Learns(
        models="tree ensemble", objectives=(Classification, Regression), task_sequences="no"
    )
    trains_clients: ClassVar[bool] = False
    range: tuple[float, float] | None = None

    def check(self, train: Train) -> None:
        if self.range is not None and not np.diff(np.array(self.range, np.float32)) > 0:
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

    def init(self, fed: Federation) -> HistState:
        trees = tree_model(fed.server).empty(fed.server.num_classes)
        return HistState(fed.initial_weights(), trees, {})

    def round(self, fed: Federation, state: HistState, t: int) -> HistState:
        cohort, model = fed.sample(t), tree_model(fed.server)
        if not state.cuts:
            state = self.agree(fed, state, cohort)
        C, B = len(state.trees["base"]), int(state.cuts["starts"][-1])
        ensemble, cuts = state.trees, state.cuts
        begun = False

        def ask(tree: Arrays, nodes: Ints) -> tuple[Array, frozenset[int]]:
            nonlocal begun
            known = (lambda arrays: NotCounted(arrays)) if begun else (lambda arrays: arrays)
            begun = True
            mean = fed.mean(
                self.histograms,
                cohort,
                ensemble=known(ensemble),
                cuts=known(cuts),
                step=state.step,
                tree={name: tree[name].copy() for name in ("feature", "threshold")},
                nodes=nodes,
            )
            summed = mean.histograms.astype(np.float64) * mean.count
            G, H = np.moveaxis(summed.reshape(len(nodes), 2, B), 1, 0)
            return np.stack([to_step(G, state.step), to_step(H, STEP)], axis=1), mean.clients

        tree = model.grow(ask, state.cuts, C)
        return replace(state, trees=appended(state.trees, tree))

    @client_function("histograms")
    def histograms(
        self,
        client: Client,
        ensemble: Mapping[str, Tensor],
        cuts: Mapping[str, Tensor],
        step: float,
        tree: Mapping[str, Tensor],
        nodes: Tensor,
    ) -> Update:
        """(client) G and H of some nodes of the unfinished tree, by feature and bin."""
        agreed, x = arrays_of(cuts), rows(client)
        codes = client.once("codes", lambda: encode(x, agreed), agreed["edges"])
        g, h = own_gradients(client, arrays_of(ensemble), step)
        client.visit(len(x))
        client.report(steps=1)  # a tree, of which this is a level
        found = histograms(arrays_of(tree), nodes.cpu().numpy(), x, codes, agreed, g, h)
        return Update(histograms=torch.from_numpy(found.reshape(-1)))

    # -- what clients agree on -----------------------------------------------------------------

    def agree(self, fed: Federation, state: HistState, cohort: Cohort) -> HistState:
        """The bins, the step of gradients, and the score with which sums begin."""
        model, F = tree_model(fed.server), int(np.prod(fed.server.shape))
        classes = fed.server.num_classes
        if self.range is not None:
            return replace(state, cuts=even_cuts(*self.range, F, model.bins))

        def count(feature: Ints, first: Ints, shift: int) -> Array:
            mean = fed.mean(self.counts, cohort, feature=feature, first=first, shift=shift)
            counts: Array = np.rint(mean.counts.astype(np.float64) * mean.count)
            return counts.reshape(-1, 16)

        with fed.setup_traffic():
            # A regression's target is counted like a feature: its bounds give the step.
            cuts = find_cuts(count, F if classes else F + 1, model.bins)
            step = STEP if classes else step_of(cuts["low"][-1], cuts["high"][-1])
            mean = fed.mean(self.totals, cohort, step=step)
        totals = mean.totals.astype(np.float64) * mean.count
        n = np.rint(totals)
        if not classes:
            base = to_step(totals[:1], step) / max(n[1], 1)
            last = int(cuts["starts"][-2])
            cuts = {
                "edges": cuts["edges"][: last - F],
                **{name: cuts[name][:-1] for name in ("starts", "low", "high")},
            }
        else:
            # As if there were an example more of each class.
            p = (n + 1) / (n + 1).sum()
            base = np.log(p[1:] / p[0]) if classes == 2 else np.log(p)
        return replace(state, trees=model.empty(classes, base), cuts=cuts, step=float(step))

    @client_function("counts")
    def counts(self, client: Client, feature: Tensor, first: Tensor, shift: int) -> Update:
        """(client) How many of its values lie in the sixteenths of intervals."""
        x = rows(client)
        if not client.num_classes:
            x = np.column_stack([x, targets(client).astype(np.float32)])
        found = count_keys(x, feature.cpu().numpy(), first.cpu().numpy(), shift)
        return Update(counts=torch.from_numpy(found.reshape(-1)))

    @client_function("totals")
    def totals(self, client: Client, step: float) -> Update:
        """(client) Its number of examples of each class; or the sum of its targets, and n."""
        if client.num_classes:
            found = np.bincount(targets(client), minlength=client.num_classes).astype(np.float64)
        else:
            y = to_step(targets(client), step)
            found = np.array([y.sum(), len(y)])
        return Update(totals=torch.from_numpy(found))
