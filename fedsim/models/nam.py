"""Neural additive models: a small network for each feature, and the sum of what they say.

Agarwal et al., Neural Additive Models: Interpretable Machine Learning with Neural Nets (NeurIPS
2021); in federations FedNAMs (Nanda, Balija and Sahoo, 2025).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from fedsim.data import DataSpec
from fedsim.errors import ExperimentError
from fedsim.models.model import Classifier, Model, models

Width = Annotated[int, Field(ge=1)]
Units = Literal["relu", "exu"]
Chance = Annotated[float, Field(ge=0, lt=1)]


class FirstLayer(nn.Module):
    """Rows (B, W) to the first hidden units (B, F, H) of each feature, from its own entries.

    ReLU units are max(0, Σ_w x_w·a_w + b). ExU units, min(1, max(0, Σ_w (x_w − b_w)·exp(a_w))),
    can be steep, so that shape functions can jump.

    Args:
        parts: (W,) the feature of each entry.
    """

    member: Tensor

    def __init__(self, parts: NDArray[np.int64], units: Units, hidden: int) -> None:
        super().__init__()
        W, F = len(parts), int(parts.max()) + 1
        self.units, self.one_each = units, F == W
        member = torch.from_numpy(parts) == torch.arange(F)[:, None]
        self.register_buffer("member", member.float(), persistent=False)
        if units == "exu":  # as the paper's code
            self.weight = nn.Parameter(torch.randn(W, hidden) * 0.5 + 4)
            self.bias = nn.Parameter(torch.randn(W, hidden) * 0.5)
            return
        inputs = member.sum(dim=1)  # of each feature's network
        self.weight = nn.Parameter(_uniform(inputs[parts], W, hidden))
        self.bias = nn.Parameter(_uniform(inputs, F, hidden))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(2)
        if self.units == "exu":
            return self._by_feature((x - self.bias) * self.weight.exp()).clamp(0, 1)
        return (self._by_feature(x * self.weight) + self.bias).relu()

    def _by_feature(self, h: Tensor) -> Tensor:
        """(B, W, H) to the sums (B, F, H) over the entries of each feature."""
        return h if self.one_each else self.member @ h


class HiddenLayer(nn.Module):
    """A linear layer and ReLU for each feature: (B, F, D) to (B, F, H)."""

    def __init__(self, features: int, inputs: int, hidden: int) -> None:
        super().__init__()
        inputs_of_each = torch.full((features,), inputs)
        self.weight = nn.Parameter(_uniform(inputs_of_each, features, inputs, hidden))
        self.bias = nn.Parameter(_uniform(inputs_of_each, features, hidden))

    def forward(self, h: Tensor) -> Tensor:
        return (torch.einsum("bfd,fdh->bfh", h, self.weight) + self.bias).relu()


def _uniform(inputs: Tensor, *shape: int) -> Tensor:
    """Initial weights, as of `nn.Linear` with so many inputs along the first axis."""
    bound = inputs.float().rsqrt().view(-1, *[1] * (len(shape) - 1))
    return (2 * torch.rand(shape) - 1) * bound


class FeatureNetworks(nn.Module):
    """Rows (B, W) to (B, F·H): the last hidden units of each feature's network.

    Args:
        parts: (W,) the feature of each entry.
        section: widths and dropout.

    Attributes:
        size: H.
    """

    def __init__(self, parts: NDArray[np.int64], section: Nam) -> None:
        super().__init__()
        F, self.size = int(parts.max()) + 1, section.hidden[-1]
        layers: list[nn.Module] = [FirstLayer(parts, section.units, section.hidden[0])]
        for before, after in pairwise(section.hidden):
            layers += [nn.Dropout(section.dropout), HiddenLayer(F, before, after)]
        self.layers = nn.Sequential(*layers, nn.Dropout(section.dropout))
        self.whole = nn.Dropout2d(section.feature_dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers(x)
        return self.whole(h.unsqueeze(3)).flatten(1)


class AdditiveClassifier(Classifier):
    """Σ_f w_f·h_f(x_f) + b: a classifier whose head adds what the features' networks say."""

    features: FeatureNetworks

    def contributions(self, x: Tensor) -> Tensor:
        """(B, F, C) in 64 bits: what each feature adds to each output; with the bias, they sum to
        the outputs.
        """
        H = self.features.size
        h, weight = (t.double().view(len(t), -1, H) for t in (self.features(x), self.head.weight))
        return torch.einsum("bfh,cfh->bfc", h, weight)


@models.register
class Nam(Model):
    """A neural additive model of tables: a network for each feature, whose outputs are added.

    The function that a feature's network has learnt can be drawn: `shape_functions`, its usual
    explainer. The entries of a feature of categories belong to one network. The networks' last
    layers together are the head, so methods with personal heads share the hidden layers.

    Args:
        hidden: width of each hidden layer of a feature's network. The paper has 64, 64, 32, or
            1024 ExU units alone.
        units: of the first layer: `relu`, or `exu`, exp-centred units, for functions with jumps,
            of inputs in about [−1, 1].
        dropout: dropout of hidden units, in training.
        feature_dropout: dropout of whole features, in training.
    """

    name: str = "nam"
    explainer: ClassVar[str] = "shape_functions"
    hidden: Annotated[tuple[Width, ...], Field(min_length=1)] = (64, 64, 32)
    units: Units = "relu"
    dropout: Chance = 0.0
    feature_dropout: Chance = 0.0

    def build_for(self, data: DataSpec, outputs: int) -> nn.Module:
        if data.embeddings is not None or data.parts is None:
            return super().build_for(data, outputs)
        return self._of_parts(data.parts, outputs)

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        if len(shape) != 1:
            raise ExperimentError(
                f"model.name={self.name} takes rows of a table or vectors, (features,); the "
                f"data's inputs have shape {shape}. Models for any shape: mlp"
            )
        return self._of_parts(np.arange(shape[0]), outputs)

    def _of_parts(self, parts: NDArray[np.int64], outputs: int) -> nn.Module:
        features = FeatureNetworks(parts, self)
        head = nn.Linear((int(parts.max()) + 1) * features.size, outputs)
        return AdditiveClassifier(features, head)
