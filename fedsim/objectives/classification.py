"""Choosing one of several classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.data import Dataset
from fedsim.errors import ExperimentError
from fedsim.objectives.objective import Batch, Metric, Objective, Totals, objectives


class TwoParts(Protocol):
    """A network of a representation and a head, such as `fedsim.models.Classifier`."""

    @property
    def features(self) -> nn.Module: ...

    @property
    def head(self) -> nn.Module: ...


class Forward(NamedTuple):
    """Losses (B,), representations (B, D) and logits (B, C) of a batch."""

    losses: Tensor
    features: Tensor
    logits: Tensor


@objectives.register
class Classification(Objective):
    """Cross-entropy and accuracy of logits, one for each class.

    Columns: `loss` (mean cross-entropy) and `accuracy`.
    """

    name: str = "classification"

    def check(self, data: Dataset) -> None:
        if not data.classes:
            raise ExperimentError(
                f"objective.name={self.name} needs classes, and the target here is a number"
            )
        if len(data.classes) < 2:
            raise ExperimentError(
                f"objective.name={self.name} needs two classes or more, and all examples are of "
                f"'{data.classes[0]}'"
            )

    def num_outputs(self, data: Dataset) -> int:
        return len(data.classes)

    def metrics(self, data: Dataset) -> tuple[Metric, ...]:
        return (
            Metric("accuracy", "accuracy", primary=True, sliced=True),
            Metric("loss", "loss", best="min"),
        )

    def loss(
        self, network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]
    ) -> Tensor:
        return self.losses(network(x), y)

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """(B,) of logits (B, C); a classification with another loss overrides this alone."""
        return cross_entropy(logits, y, reduction="none")

    def forward(self, network: TwoParts, x: Tensor, y: Tensor) -> Forward:
        """The loss of each example, with what it is made from, in one pass."""
        features = network.features(x)
        logits = network.head(features)
        return Forward(self.losses(logits, y), features, logits)

    def totals(self, outputs: Tensor, batch: Batch) -> Totals:
        y = batch.y
        if batch.labels is not None:
            known = torch.tensor(batch.labels, device=y.device)
            outputs, y = outputs[:, known], torch.searchsorted(known, y)
        return {
            "n": len(y),
            "loss": float(cross_entropy(outputs, y, reduction="sum")),
            "right": int((outputs.argmax(dim=1) == y).sum()),
        }

    def scores(self, totals: Totals) -> dict[str, float]:
        n = totals["n"]
        return {"loss": totals["loss"] / n, "accuracy": totals["right"] / n}
