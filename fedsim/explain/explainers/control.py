"""Controls: attributions that know nothing of the network."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor, nn

from fedsim.explain.explainer import ExplainedData, ExplainedModel, explainers
from fedsim.explain.explainers.attribution import Attribution, attributions


@explainers.register
@attributions.register
class Random(Attribution):
    """A random control that ignores the network: R ~ U[−1, 1) for each entry or word.

    As it should, it fails the check that maps depend on the weights (`fedsim explain --check`).
    """

    name: str = "random"
    draws: ClassVar[bool] = True

    def relevance(self, network: nn.Module, x: Tensor, y: Tensor, rng: Generator) -> Tensor:
        draws = 2 * torch.from_numpy(rng.random(tuple(x.shape), dtype=np.float32)) - 1
        found = draws.to(x.device)
        return found if x.is_floating_point() else found.masked_fill(x == 0, 0)

    def relevance_in(
        self, model: ExplainedModel, data: ExplainedData, x: Tensor, y: Tensor, rng: Generator
    ) -> Tensor:
        found = self.relevance(model.as_network(), x, y, rng)
        if data.dataset.parts is not None:  # a feature of many entries is no more likely to count
            found[:, np.flatnonzero(np.diff(data.dataset.parts, prepend=-1) == 0)] = 0
        return found
