"""Regression."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.data import Dataset
from fedsim.data.encoding import UNSCALED
from fedsim.errors import ExperimentError
from fedsim.objectives.objective import (
    Batch,
    Context,
    HeldOut,
    Metric,
    Objective,
    Totals,
    objectives,
)


@objectives.register
class Regression(Objective):
    """Regression: squared error of a single output.

    Errors are those of the target as it is trained on, scaled if `data.scale` says so.

    Columns: `loss` (mean squared error), `rmse`, `mae` and `r2` = 1 - Σ(y - ŷ)² / Σ(y - ȳ)², NaN
    if all targets are the same.
    """

    name: str = "regression"

    def check(self, data: Dataset) -> None:
        if data.classes:
            raise ExperimentError(
                f"objective.name={self.name} needs a numeric target, and the data has "
                f"{len(data.classes)} classes"
            )

    def num_outputs(self, data: Dataset) -> int:
        return 1

    def metrics(self, data: Dataset) -> tuple[Metric, ...]:
        scaled = ", of the scaled target" * (data.target_scaling is not UNSCALED)
        return (
            Metric("r2", "R²", primary=True, sliced=True),
            Metric("loss", "loss", best="min"),
            Metric("rmse", f"error, root mean square (RMSE{scaled})", best="min"),
            Metric("mae", f"error, mean absolute (MAE{scaled})", best="min"),
        )

    def loss(self, network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
        return torch.square(network(x).squeeze(-1) - y)

    def totals(self, outputs: Tensor, batch: Batch) -> Totals:
        y = batch.y
        errors = (outputs.squeeze(-1) - y.float()).double()
        return {
            "squared": float(errors.square().sum()),
            "absolute": float(errors.abs().sum()),
            "y": y.cpu().numpy(),
        }

    def scores_of(
        self,
        predictions: NDArray[np.float64],
        y: NDArray[np.float64],
        held_out: HeldOut | None = None,
    ) -> dict[str, float]:
        """The scores of (n,) predictions of targets, in full precision.

        Args:
            held_out: the same of the validation set, if there is one.
        """
        errors = predictions - y
        squared, absolute = float(np.square(errors).sum()), float(np.abs(errors).sum())
        found = self.scores({"squared": squared, "absolute": absolute, "y": y})
        for further in self.further:
            found |= further.columns(predictions, y, held_out)
        return found

    def scores(self, totals: Totals) -> dict[str, float]:
        y, n = totals["y"], len(totals["y"])
        mse = totals["squared"] / n
        spread = float(np.square(y - np.mean(y, dtype=np.float64)).sum(dtype=np.float64))
        return {
            "loss": mse,
            "rmse": math.sqrt(mse),
            "mae": totals["absolute"] / n,
            "r2": 1 - totals["squared"] / spread if np.ptp(y) and spread else math.nan,
        }
