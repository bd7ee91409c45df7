"""Attributions from gradients: as they are, times the input, smoothed, integrated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from numpy.random import Generator
from pydantic import Field
from torch import Tensor, nn

from fedsim.explain.explainer import explainers
from fedsim.explain.explainers.attribution import (
    BATCH,
    FromBaseline,
    OfGradients,
    attributions,
)
from fedsim.explain.scores.faithfulness import PartOf


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
        return self.by_batch(network, x, y, lambda gradient, some: gradient(some))


@explainers.register
@attributions.register
class GradientXInput(FromBaseline, OfGradients):
    """Gradient times input: R = (x − x') ⊙ ∂f_y(x)/∂x, with a baseline x', usually zero.

    For a piecewise linear network without biases, the relevances from zero sum to the logit.
    Documents are explained at their words' vectors, over whose entries relevances are summed.

    Args:
        baseline: x'; see `integrated_gradients`.
        target: the output that is explained; see `gradient`.

    Source: Shrikumar et al. (2016), "Not Just a Black Box".
    """

    name: str = "gradient_x_input"
    documents: ClassVar[bool] = True

    def compared(
        self, network: nn.Module, x: Tensor, y: Tensor, baseline: Tensor | None, part_of: PartOf
    ) -> Tensor:
        def explain(gradient: Callable[[Tensor], Tensor], some: Tensor) -> Tensor:
            return (some if baseline is None else some - baseline) * gradient(some)

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

    def _smooth(self, rng: Generator, gradient: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        rows = x.flatten(1)
        spread = (rows.amax(1) - rows.amin(1)).view(-1, *[1] * (x.dim() - 1))
        # an example's samples are drawn together, so that the draws do not depend on the batch
        draws = rng.standard_normal((len(x), self.samples, *x.shape[1:]), dtype=np.float32)
        total, together = torch.zeros_like(x), max(1, BATCH // len(x))  # samples at a time
        for i in range(0, self.samples, together):
            some = torch.from_numpy(draws[:, i : i + together]).to(x).transpose(0, 1)
            noisy = x + self.noise * spread * some
            total += gradient(noisy.flatten(0, 1)).view_as(noisy).sum(0)
        return total / self.samples


@explainers.register
@attributions.register
class IntegratedGradients(FromBaseline, OfGradients):
    """Integrated gradients, R = (x − x') ⊙ 1/m Σ_{k=1..m} ∂f_y(x' + k/m·(x − x'))/∂x.

    The baseline x' is usually zero as the network takes it: the mean pixel if the data are
    normalised, otherwise black, or the minimum of a scaled feature. With many steps the relevances
    sum to f_y(x) − f_y(x'). Documents are explained at their words' vectors, over whose entries
    relevances are summed.

    Args:
        baseline: x': `zero`; the `mean` or the `median` of the training inputs, entry by entry;
            the mean of the `clients`' means; or a row of the central test set, `{reference: 12}`.
        steps: m, number of steps; FedXDS uses 20.
        target: the output that is explained; see `gradient`.

    Source: Sundararajan et al. (ICML 2017), the sum of their section 5.
    """

    name: str = "integrated_gradients"
    documents: ClassVar[bool] = True
    steps: int = Field(20, ge=1)

    def compared(
        self, network: nn.Module, x: Tensor, y: Tensor, baseline: Tensor | None, part_of: PartOf
    ) -> Tensor:
        def explain(gradient: Callable[[Tensor], Tensor], some: Tensor) -> Tensor:
            change, total = some if baseline is None else some - baseline, torch.zeros_like(some)
            for k in range(1, self.steps + 1):
                step = k / self.steps * change
                total += gradient(step if baseline is None else baseline + step)
            return change * total / self.steps

        return self.by_batch(network, x, y, explain)
