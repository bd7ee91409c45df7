"""An explainer of your own: it starts as gradient times input."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.explain import ExplainedData, ExplainedModel
from fedsim.explain.explainers.attribution import OfDecision


class Template(OfDecision):
    """Gradient times input, scaled: R = scale·x ⊙ ∂f_y(x)/∂x.

    Args:
        scale: of all relevances.
    """

    name: str = "template:Template"
    scale: float = 1.0

    def relevances(
        self,
        model: ExplainedModel,
        data: ExplainedData,
        x: Tensor,
        y: Tensor,
        rng: np.random.Generator,
    ) -> NDArray[np.float32]:
        """A number for each part of inputs x (n, ...), of what it is worth to the class y (n,)."""
        x = x.clone().requires_grad_()
        logits = model.as_network()(x).gather(1, y[:, None])
        (gradient,) = torch.autograd.grad(logits.sum(), x)
        relevance = self.scale * x.detach() * gradient
        if relevance.ndim == 4:  # images (n, channels, height, width): a number for each pixel
            relevance = relevance.sum(dim=1)
        return relevance.cpu().numpy()
