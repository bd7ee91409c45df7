"""Attributions from gradients: as they are, times the input, smoothed, integrated."""

from __future__ import annotations

import warnings
from functools import cache, partial
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from torch import Tensor, nn

from fedsim.config.registry import located
from fedsim.errors import FedsimWarning
from fedsim.explain.baselines import Background
from fedsim.explain.calls import by_words
from fedsim.explain.explainer import ExplainedData, ExplainedModel, explainers
from fedsim.explain.explainers.attribution import (
    BATCH,
    FromBaseline,
    OfGradients,
    Output,
    attributions,
    batches,
    evaluation,
)
from fedsim.explain.scores.faithfulness import PartOf
from fedsim.explain.scores.relevance import completeness_gap

# Steps of integrated gradients, and how far they may be from their sum.
FEWEST, MOST = 8, 512
TOLERANCE = 0.01


@explainers.register
@attributions.register
class Gradient(OfGradients):
    """Gradient of the logit: R = ∂f_y(x)/∂x.

    Args:
        target: the output that is explained: the logit f_y of the example's class (`class`), f_y
            less the mean logit (`centred`), or ½ Σ_c f_c² (`outputs`), as in FedXDS's released
            code.

    Source: Simonyan et al. (ICLR 2014 workshop), without the absolute value.
    """

    name: str = "gradient"

    def relevance(self, network: nn.Module, x: Tensor, y: Tensor, rng: Generator) -> Tensor:
        return self.by_batch(network, x, y, lambda f, some: f.gradient(some))


@explainers.register
@attributions.register
class GradientXInput(FromBaseline, OfGradients):
    """Gradient times input: R = (x − x') ⊙ ∂f_y(x)/∂x, with a baseline x', usually zero.

    For a piecewise linear network without biases, the relevances from zero sum to the logit. Of a
    background, x' is the mean, since R is linear in it. Documents are explained at their words'
    vectors, over whose entries relevances are summed.

    Args:
        baseline: x'; see `integrated_gradients`.
        target: the output that is explained; see `gradient`.

    Source: Shrikumar et al. (2016), "Not Just a Black Box".
    """

    name: str = "gradient_x_input"
    documents: ClassVar[bool] = True

    def compared(
        self,
        network: nn.Module,
        x: Tensor,
        y: Tensor,
        background: Background | None,
        part_of: PartOf,
    ) -> Tensor:
        def explain(f: Output, some: Tensor) -> Tensor:
            change = some
            if background is not None:
                own = background.of(f.rows)
                change = some - own.mean(own.rows)
            return change * f.gradient(some)

        return self.by_batch(network, x, y, explain)


@explainers.register
@attributions.register
class SmoothGrad(OfGradients):
    """SmoothGrad, the mean gradient near an input: R = 1/n Σ_i ∂f_y(x + ε_i)/∂x, ε_i ~ N(0, σ²).

    σ = noise·(max x − min x), separately for each example. All n samples are noisy, as in the
    paper; Zennit leaves the last one clean. FedXDS's code for SmoothGrad does not run, so it
    cannot be followed.

    Args:
        noise: σ as a share of the example's range.
        samples: n, number of noisy samples.
        target: the output that is explained; see `gradient`.

    Source: Smilkov et al. (2017).
    """

    name: str = "smoothgrad"
    draws: ClassVar[bool] = True
    noise: float = Field(0.1, ge=0)
    samples: int = Field(20, ge=1)

    def relevance(self, network: nn.Module, x: Tensor, y: Tensor, rng: Generator) -> Tensor:
        return self.by_batch(network, x, y, partial(self._smooth, rng))

    def _smooth(self, rng: Generator, f: Output, x: Tensor) -> Tensor:
        rows = x.flatten(1)
        spread = (rows.amax(1) - rows.amin(1)).view(-1, *[1] * (x.dim() - 1))
        # an example's samples are drawn together, so that the draws do not depend on the batch
        draws = rng.standard_normal((len(x), self.samples, *x.shape[1:]), dtype=np.float32)
        total, together = torch.zeros_like(x), max(1, BATCH // len(x))  # samples at a time
        for i in range(0, self.samples, together):
            some = torch.from_numpy(draws[:, i : i + together]).to(x).transpose(0, 1)
            noisy = x + self.noise * spread * some
            total += f.gradient(noisy.flatten(0, 1)).view_as(noisy).sum(0)
        return total / self.samples


@explainers.register
@attributions.register
class IntegratedGradients(FromBaseline, OfGradients):
    """Integrated gradients, R = (x − x') ⊙ ∫ ∂f_y(x' + α·(x − x'))/∂x dα over α in [0, 1].

    The integral is a weighted sum of gradients at n points. With the right ones the relevances sum
    to f_y(x) − f_y(x'). By default, n is doubled from 8, for each input by itself, until the sum
    is as close to it as `tolerance` says, or n is 512; the score `completeness_gap` is the error
    that remains, and a `tolerance` that is given and not reached warns.

    The baseline x' is usually zero as the network takes it: the mean pixel if the data are
    normalised, otherwise black, or the minimum of a scaled feature. Of a background, R is the mean
    over its rows (expected gradients), which sums to f_y(x) less the mean of f_y(x'). Documents
    are explained at their words' vectors, over whose entries relevances are summed.

    Args:
        baseline: x': `zero`; the `mean` or the `median` of the training inputs, entry by entry;
            the image after a `blur`; `noise` in the range of the training inputs; a row of the
            central test set, `{reference: 12}`; training examples, `{train: 8}`; or centres that
            clients send, `{clients: 8}`. See `fedsim.explain.baselines`.
        rule: `gauss_legendre`, or `right` sums at α = 1/n, …, 1, the sum of the paper's section 5.
        steps: n, a fixed number. FedXDS uses 20 right sums.
        tolerance: the largest error of the sum, relative to the change of f_y; by default 0.01.
        target: the output that is explained; see `gradient`.

    Sources: Sundararajan et al. (ICML 2017); of a background, Erion et al. (Nature Machine
    Intelligence 2021), with the whole path of each row.
    """

    name: str = "integrated_gradients"
    documents: ClassVar[bool] = True
    complete: ClassVar[bool] = True
    rule: Literal["gauss_legendre", "right"] = "gauss_legendre"
    steps: int | None = Field(None, ge=1)
    tolerance: float | None = Field(None, gt=0, lt=1)

    @model_validator(mode="after")
    def _either(self) -> IntegratedGradients:
        if self.steps is not None and self.tolerance is not None:
            problem = PydanticCustomError(
                "unfit", "decides on the number of steps; leave out steps"
            )
            raise located(type(self).__name__, "tolerance", problem, self.tolerance)
        return self

    def compared(
        self,
        network: nn.Module,
        x: Tensor,
        y: Tensor,
        background: Background | None,
        part_of: PartOf,
    ) -> Tensor:
        def starts(f: Output, some: Tensor) -> Background:
            return Background.zero(some) if background is None else background.of(f.rows)

        def fixed(f: Output, some: Tensor) -> Tensor:
            return self._sum(f, some, starts(f, some), self.steps or FEWEST, 1)

        def to_tolerance(f: Output, some: Tensor) -> Tensor:
            return self._to_tolerance(f, some, starts(f, some))

        # One input at a time: another number of steps for its neighbour does not change its bits.
        size, explain = (1, to_tolerance) if self.steps is None else (None, fixed)
        return self.by_batch(network, x, y, explain, size)

    def endpoints(
        self, model: ExplainedModel, data: ExplainedData, x: Tensor, y: Tensor
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        if x.is_floating_point():
            return super().endpoints(model, data, x, y)
        ends, starts, network = [], [], model.as_network()
        with torch.no_grad(), evaluation(network):
            for rows in batches(x):
                vectors, of = by_words(f"explainer {self.name}", network, x[rows])
                f = Output(self, network, of, y[rows], rows)
                ends.append(f(vectors))
                starts.append(f(torch.zeros_like(vectors)))
        return np.concatenate(ends), np.concatenate(starts)

    def _sum(self, f: Output, x: Tensor, starts: Background, n: int, together: int) -> Tensor:
        """The relevances by n points, of which some are computed together."""
        points, weights, divisor = _points(self.rule, n)
        shape = -1, *[1] * x.dim()
        at, by = (torch.from_numpy(values).to(x).view(shape) for values in (points, weights))
        found = torch.zeros_like(x)
        for weight, start in starts.each():
            change, total = x - start, torch.zeros_like(x)
            for i in range(0, n, together):
                along = start + at[i : i + together] * change
                gradients = f.gradient(along.flatten(0, 1)).view_as(along)
                total += (by[i : i + together] * gradients).sum(0)
            found += weight * (change * total / divisor)
        return found / len(starts.rows)

    def _to_tolerance(self, f: Output, x: Tensor, starts: Background) -> Tensor:
        """The relevances of one input."""
        tolerance, values = self.tolerance or TOLERANCE, f(torch.cat([x, *starts.rows]))
        ends, n = (values[:1], (starts.weights * values[1:]).mean(keepdims=True)), FEWEST
        while True:
            found = self._sum(f, x, starts, n, BATCH)
            (gap,) = completeness_gap(found.double().sum().cpu().numpy()[None], *ends)
            if not gap > tolerance:  # it may be NaN
                return found
            if n >= MOST:
                break
            n *= 2
        if self.tolerance is not None:
            warnings.warn(
                f"{self.name}: with {n} steps, relevances of some inputs are further than "
                f"tolerance={tolerance:g} from their sum; see completeness_gap",
                FedsimWarning,
                stacklevel=2,
            )
        return found


@cache
def _points(rule: str, n: int) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """(n,) points in [0, 1], their weights (n,), and the sum of these."""
    if rule == "right":
        return np.arange(1, n + 1) / n, np.ones(n), float(n)
    points, weights = np.polynomial.legendre.leggauss(n)
    return (points + 1) / 2, weights / 2, 1.0
