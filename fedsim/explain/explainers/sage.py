"""SAGE: how much each feature reduces a model's loss, as Shapley values."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from fedsim.errors import ExperimentError
from fedsim.explain.baselines import Background, Baseline, Compared, TrainingRows
from fedsim.explain.explainer import ExplainedData, ExplainedModel, explainers
from fedsim.explain.explainers.attribution import OfDecision
from fedsim.explain.groups import check_size, count_squares, group_parts
from fedsim.training import logits


@explainers.register
class Sage(Compared, OfDecision):
    """SAGE: how much each feature reduces the loss, as Shapley values of the loss.

    With v(S) = ln (1/n Σ_b w_b·p_y(x_S, b_rest)), minus the cross-entropy of the mean prediction
    when the features outside S are those of n background rows b (of weights w_b, which are 1
    unless the rows are centres), feature i gets the mean over orders of v(before i, i) −
    v(before i), which is positive if it lowers the loss. Orders are drawn separately for each
    input. The sum over features is the loss with all features absent minus the loss of the
    unchanged input, whatever the number of orders.

    The background is the same for all rounds of a run. y is the explained class:
    with `explain.target: label` it is the true class, and the mean over inputs is the SAGE value
    of each feature. With `decision`, the values explain how certain the model is rather than how
    accurate.

    For images a feature is a square of pixels, with its value spread evenly over them; for other
    inputs it is an entry, of tables a feature. Only for classification and floating-point inputs.
    It takes about permutations · background · features evaluations of the network for each input.

    Args:
        permutations: number of orders drawn for each input.
        baseline: the background, of which features outside S are; by default 16 examples of the
            client's own for its model, of all clients' for the global one. See
            `fedsim.explain.baselines.Compared`.
        size: side of the squares, in pixels; squares at the right and lower edges may be smaller.

    Source: Covert, Lundberg, Lee, "Understanding Global Feature Contributions With Additive
    Importance Measures" (NeurIPS 2020), Eq. 3 and Algorithm 1. There the background is redrawn at
    each step; here the same rows are used throughout.
    """

    name: str = "sage"
    draws: ClassVar[bool] = True
    complete: ClassVar[bool] = True
    baseline: Baseline = TrainingRows(train=16)
    permutations: int = Field(8, ge=1)
    size: int = Field(4, ge=1)

    def check(self, model: ExplainedModel, data: ExplainedData) -> None:
        if data.dataset.words:
            raise ExperimentError(
                f"explainer {self.name}: needs floating-point inputs; for documents: occlusion"
            )
        if not data.dataset.classes:
            raise ExperimentError(
                f"explainer {self.name}: explains the loss of a class, and the target here is "
                "a number"
            )
        check_size(f"explainer {self.name}: size", data.dataset.shape, self.size)
        super().check(model, data)

    def squares(self, shape: tuple[int, ...]) -> int | None:
        return count_squares(shape, self.size)

    @torch.no_grad()
    def relevances(
        self, model: ExplainedModel, data: ExplainedData, x: Tensor, y: Tensor, rng: Generator
    ) -> NDArray[np.float32]:
        parts = data.dataset.parts
        features = group_parts(tuple(x.shape[1:]), self.size, parts)
        feature_of, G = features.index, len(features)
        drawn = [[rng.permutation(G) for _ in range(len(x))] for _ in range(self.permutations)]
        found = shapley_of_loss(
            model.as_network(),
            x,
            y,
            self.background(model, data, x) or Background.zero(x),
            torch.from_numpy(feature_of).to(x.device),
            np.array(drawn),
        )
        if parts is not None:
            return found.astype(np.float32)
        pixels = np.bincount(feature_of.ravel())
        return (found / pixels)[:, feature_of].astype(np.float32)

    @torch.no_grad()
    def endpoints(
        self, model: ExplainedModel, data: ExplainedData, x: Tensor, y: Tensor
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """v with all features, and with none."""
        network, absent = model.as_network(), self.background(model, data, x)
        absent = absent or Background.zero(x)
        nothing = absent.rows.transpose(0, 1).expand(len(x), -1, *x.shape[1:])
        return (
            log_mean_chance(network, x[None, :, None], y, np.ones(1))[0],
            log_mean_chance(network, nothing[None], y, absent.weights)[0],
        )


def shapley_of_loss(
    network: nn.Module,
    x: Tensor,
    y: Tensor,
    background: Background,
    feature_of: Tensor,
    orders: NDArray[np.int64],
) -> NDArray[np.float64]:
    """(m, G) by how much each of G features reduces the cross-entropy, mean over orders.

    Args:
        network: inputs (B, ...) to logits (B, classes).
        x: (m, ...) inputs.
        y: (m,) the classes of the loss.
        background: inputs that replace absent features.
        feature_of: the feature of each entry, in the shape of an input without channels.
        orders: (P, m, G) orders in which features are added to each input.
    """
    P, m, G = orders.shape

    def value(there: NDArray[np.bool_]) -> NDArray[np.float64]:
        """(k, m) the log of the mean probability with features (k, m, G) present."""
        mask = torch.from_numpy(there).to(x.device)[:, :, feature_of]
        mask = mask[:, :, None, None] if x.dim() == 4 else mask[:, :, None]
        mixed = torch.where(mask, x[:, None], background.rows.transpose(0, 1))
        return log_mean_chance(network, mixed, y, background.weights)

    found, there = np.zeros((P, m, G)), np.zeros((P, m, G), dtype=bool)
    before, everything = value(there[:1]), value(~there[:1])
    for k in range(G):
        added = orders[:, :, k : k + 1]
        np.put_along_axis(there, added, True, axis=2)
        after = everything if k == G - 1 else value(there)
        gain = np.broadcast_to(after - before, (P, m))
        np.put_along_axis(found, added, gain[:, :, None], axis=2)
        before = after
    return found.mean(axis=0)


def log_mean_chance(
    network: nn.Module, mixed: Tensor, y: Tensor, weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(k, m) the log of the mean probability of classes (m,) over n inputs (k, m, n, ...).

    Args:
        weights: (n,), 1 on average.
    """
    k, m, n = mixed.shape[:3]
    chances = torch.from_numpy(logits(network, mixed.flatten(0, 2))).double().log_softmax(dim=1)
    of_class = y.cpu().repeat_interleave(n).repeat(k)
    own = chances[torch.arange(len(chances)), of_class].view(k, m, n)
    return ((own + torch.from_numpy(weights).log()).logsumexp(dim=2) - np.log(n)).numpy()
