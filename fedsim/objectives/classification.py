"""Classification."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from pydantic import NonNegativeFloat
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from fedsim.data import Dataset
from fedsim.errors import ExperimentError
from fedsim.objectives.objective import (
    Batch,
    Context,
    Metric,
    Objective,
    OutputGradient,
    Totals,
    objectives,
)

log_softmax_backward = torch.ops.aten._log_softmax_backward_data.default  # its backward pass


class Forward(NamedTuple):
    """Losses (B,), representations (B, D) and logits (B, C) of a batch."""

    losses: Tensor
    features: Tensor
    logits: Tensor


@objectives.register
class Classification(Objective):
    """Classification: cross-entropy and accuracy of logits, one logit per class.

    Columns: `loss` (mean cross-entropy) and `accuracy`.

    Args:
        class_weights: factor of the training loss of each class, in the data's order; or
            `balanced`, inversely proportional to the class's share of all training examples, and
            1 on average. Scores are not weighted.
    """

    name: str = "classification"
    class_weights: Literal["balanced"] | tuple[NonNegativeFloat, ...] | None = None

    def check(self, data: Dataset) -> None:
        if not data.classes:
            raise ExperimentError(
                f"objective.name={self.name} needs classes, and the target here is a number"
            )
        if len(data.classes) < 2:
            raise ExperimentError(
                f"objective.name={self.name} needs two or more classes, and there is only "
                f"'{data.classes[0]}'"
            )
        given = self.class_weights
        if isinstance(given, tuple) and len(given) != len(data.classes):
            raise ExperimentError(
                f"objective.class_weights: {len(given)} weights for {len(data.classes)} classes: "
                f"{', '.join(data.classes)}"
            )

    def fitted(self, data: Dataset) -> Self:
        if self.class_weights != "balanced":
            return self
        counts = np.bincount(data.y, minlength=len(data.classes))
        weights = len(data.y) / ((counts > 0).sum() * np.maximum(counts, 1))
        return self.model_copy(update={"class_weights": tuple(weights.tolist())})

    def num_outputs(self, data: Dataset) -> int:
        return len(data.classes)

    def metrics(self, data: Dataset) -> tuple[Metric, ...]:
        return (
            Metric("accuracy", "accuracy", primary=True, sliced=True),
            Metric("loss", "loss", best="min"),
        )

    def loss(self, network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
        return self.weighted(self.losses(network(x), y), y)

    def weighted(self, losses: Tensor, y: Tensor) -> Tensor:
        """Losses (B,) times the weights of their classes (`class_weights`)."""
        if self.class_weights is None:
            return losses
        assert self.class_weights != "balanced", "see `fitted`"
        return losses * losses.new_tensor(self.class_weights)[y]

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """(B,) losses of logits (B, C); override this to classify with another loss."""
        return cross_entropy(logits, y, reduction="none")

    def output_gradient(self) -> OutputGradient | None:
        own = type(self)
        as_here = own.loss is Classification.loss and own.losses is Classification.losses
        return _cross_entropy if as_here and self.class_weights is None else None

    def forward(self, network: Any, x: Tensor, y: Tensor) -> Forward:
        """The losses, with the representations of `network.features` and the head's logits."""
        features = network.features(x)
        logits = network.head(features)
        return Forward(self.weighted(self.losses(logits, y), y), features, logits)

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


def _cross_entropy(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """-log p_y of each example, and the gradient of their mean at the logits: (p - onehot(y))/B.

    Equal to autograd's to the bit.
    """
    log_p, y = torch.log_softmax(logits, dim=1), y.long()
    losses = nll_loss(log_p, y, reduction="none")
    at_log_p = torch.zeros_like(log_p).scatter_(1, y.unsqueeze(1), -1 / len(y))
    return losses, log_softmax_backward(at_log_p, log_p, 1, log_p.dtype)
