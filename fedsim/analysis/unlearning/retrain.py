"""Retraining: the federation that the clients never joined, to which others are compared."""

from __future__ import annotations

from typing import ClassVar

from fedsim.analysis.replay import replay
from fedsim.analysis.unlearning.forgetting import Forgetting, Unlearning, unlearning
from fedsim.federation import Vector
from fedsim.launch.without import without


@unlearning.register
class Retrain(Unlearning):
    """The weights of `fedsim.without`: what unlearning is meant to come close to.

    It begins with the first round in which one of the clients took part, whose beginning a real
    server would have to have kept; the rounds from there on are its cost.
    """

    name: str = "retrain"
    continues: ClassVar[bool] = False

    def forget(self, task: Forgetting) -> Vector:
        retrained = without(task.run, task.clients, progress=False)
        rows = retrained.rounds[retrained.rounds["round"] >= task.first]
        task.cost.rounds += len(rows)
        task.cost.bytes_up += int(rows["bytes_up"].sum())
        task.cost.bytes_down += int(rows["bytes_down"].sum())
        task.cost.seconds += float(rows["seconds"].sum())
        weights: Vector = replay(retrained).state.weights
        return weights
