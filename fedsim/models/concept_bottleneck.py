"""Concept bottleneck models, which decide by named concepts that they predict.

Koh et al., Concept Bottleneck Models (ICML 2020).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field, SerializeAsAny, field_validator
from torch import Tensor, nn

from fedsim.config.registry import unfit
from fedsim.data import Dataset, DataSpec
from fedsim.data.concepts import Concept
from fedsim.errors import ExperimentError
from fedsim.models.model import Classifier, Model, models
from fedsim.models.networks import Mlp
from fedsim.objectives import ConceptRegression, Concepts, Objective

Learning = Literal["joint", "sequential", "independent"]


class ConceptPredictor(nn.Module):
    """Inputs to concepts (B, J): probabilities of binary ones, and numbers in their own scale.

    Args:
        network: inputs to (B, J) logits and numbers.
        concepts: (J,).
    """

    binary: Tensor

    def __init__(self, network: nn.Module, concepts: tuple[Concept, ...]) -> None:
        super().__init__()
        self.network, self.concepts = network, concepts
        self.register_buffer("binary", torch.tensor([c.binary for c in concepts]), False)

    def raw(self, x: Tensor) -> Tensor:
        """(B, J) logits and numbers."""
        found: Tensor = self.network(x)
        return found

    def values(self, raw: Tensor) -> Tensor:
        """(B, J) concepts from logits and numbers."""
        return torch.where(self.binary, raw.sigmoid(), raw)

    def forward(self, x: Tensor) -> Tensor:
        return self.values(self.raw(x))


class ConceptClassifier(Classifier):
    """Σ_j w_j·c_j(x) + b: a classifier whose representation is the predicted concepts."""

    features: ConceptPredictor

    def __init__(self, features: ConceptPredictor, head: nn.Linear, section: Bottleneck) -> None:
        super().__init__(features, head)
        self.weight, self.learning = section.weight, section.learning

    def contributions(self, concepts: Tensor) -> Tensor:
        """(B, J, C) in 64 bits: what concepts (B, J) add to each output; with the bias, they sum
        to the outputs.
        """
        return concepts.double()[:, :, None] * self.head.weight.double().T


@models.register
class Bottleneck(Model):
    """A concept bottleneck: a network predicts named concepts, and a linear layer decides by them.

    It learns from data with concepts, with the loss L(y, f(c)) + λ·Σ_j ℓ_j(c_j), c = g(x), of
    objective `concepts`; see there. The linear layer f is the head, so methods with personal heads
    share the network g of the concepts.

    Args:
        network: g, any network for the data, as a `model` section.
        weight: λ.
        learning: `joint`; `sequential`, in which g does not learn from the label; or
            `independent`, in which f moreover learns from the true concepts, where they are known.
            g and f learn at the same time in all of them; in the paper's other two, f learns
            after g.

    Source: Koh et al. (ICML 2020), Section 3; binary concepts enter f as probabilities.
    """

    name: str = "concept_bottleneck"
    inputs: ClassVar[str] = "either"
    explainer: ClassVar[str] = "concepts"
    network: Annotated[SerializeAsAny[Model], BeforeValidator(models.parse)] = Mlp()
    weight: float = Field(1.0, ge=0)
    learning: Learning = "joint"

    @field_validator("network")
    @classmethod
    def _plain(cls, network: Model) -> Model:
        plain = type(network).objective is Model.objective
        if network.kind != cls.kind or not network.builds_network or not plain:
            raise unfit(f"{network.name} is no plain network, such as mlp or cnn")
        return network

    def objective(self, data: Dataset) -> Objective:
        return Concepts() if data.classes else ConceptRegression()

    def files(self) -> tuple[Path, ...]:
        return self.network.files()

    def takes(self, data: Dataset) -> Dataset:
        return self.network.takes(data)

    def build_for(self, data: DataSpec, outputs: int) -> nn.Module:
        if not data.concepts:
            raise ExperimentError(
                f"model.name={self.name} needs concepts, and the data have none; name columns of "
                "a table in data.concepts, or take data.name=shapes"
            )
        network = self.network.build_for(data, len(data.concepts))
        head = nn.Linear(len(data.concepts), outputs)
        return ConceptClassifier(ConceptPredictor(network, data.concepts), head, self)
