"""Forgetting by fine-tuning: the naive control."""

from __future__ import annotations

from pydantic import Field

from fedsim.analysis.unlearning.forgetting import Forgetting, Unlearning, unlearning
from fedsim.federation import Vector


@unlearning.register
class FineTune(Unlearning):
    """The others go on alone, w ← w^T after further rounds of the run's own method.

    Nothing makes the model forget but that it is no longer reminded (catastrophic forgetting).

    Args:
        rounds: how many; with 0 the model stays as it is.
    """

    name: str = "fine_tune"
    rounds: int = Field(5, ge=0, le=1_000_000)

    @property
    def further_rounds(self) -> int:
        return self.rounds

    def forget(self, task: Forgetting) -> Vector:
        return task.recover(task.weights, self.rounds)
