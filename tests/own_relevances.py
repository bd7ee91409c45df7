"""Explainers of a user's own that give relevances: one that works, and ways to fail."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.explain import ExplainedData, ExplainedModel, Explanation
from fedsim.explain.explainer import FeatureExplainer
from fedsim.explain.inputs import Inputs


class Slopes(FeatureExplainer):
    """The gradient of the logit decided upon, as one writes it without thinking of modes."""

    name: str = "own_relevances:Slopes"

    def explain(
        self, model: ExplainedModel, data: ExplainedData, inputs: Inputs, rng: np.random.Generator
    ) -> Explanation:
        raise NotImplementedError

    def relevances(
        self, model: ExplainedModel, data: ExplainedData, x: Tensor, y: Tensor, rng: Any
    ) -> Any:
        assert model.network is not None
        z = x.clone().requires_grad_()
        logits = model.network(z).gather(1, y[:, None])
        return torch.autograd.grad(logits.sum(), z)[0].numpy()


class OfPixels(Slopes):
    """The same of images, summed over channels."""

    name: str = "own_relevances:OfPixels"

    def relevances(self, *about: Any) -> Any:
        return super().relevances(*about).sum(axis=1)


class Raises(Slopes):
    """Fails for clients' models, as long as a file is there."""

    name: str = "own_relevances:Raises"
    file: Path = Path("/nowhere")

    def relevances(self, model: ExplainedModel, *about: Any) -> Any:
        if model.client is not None and self.file.exists():
            raise ZeroDivisionError("too little\nof everything")
        return super().relevances(model, *about)


class OneForEach(Slopes):
    """A single number for each input."""

    name: str = "own_relevances:OneForEach"

    def relevances(self, *about: Any) -> Any:
        return super().relevances(*about).sum(axis=1, keepdims=True)


class Refuses(Slopes):
    """Its check fails."""

    name: str = "own_relevances:Refuses"

    def check(self, model: ExplainedModel, data: ExplainedData) -> None:
        raise KeyError("no such thing")
