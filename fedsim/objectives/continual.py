"""Continual learning metrics, from a run's table of tasks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Continual:
    """Means over clients and their tasks 1 ... T; a_{t,r} is the accuracy on task t in round r.

    Args:
        tta: task-averaged test accuracy, a_{t,R} in the last round R.
        forgetting: max_r a_{t,r} − a_{t,R} for tasks t < T, over rounds r since t began.
        backward: backward transfer, a_{t,R} minus the accuracy at the end of task t, for tasks t <
            T.
        forward: forward transfer, accuracy before task t begins minus that of guessing, t > 1; NaN
            if a task cannot be evaluated before it begins because it has no head yet.
        first_round: accuracy after a task's first evaluated round.
    """

    tta: float
    forgetting: float
    backward: float
    forward: float
    first_round: float


def continual(tasks: pd.DataFrame) -> Continual:
    """Compute the continual learning metrics of a run from its `tasks`.

    Raises:
        ValueError: the table is empty, because the partition has no sequence of tasks.
    """
    if tasks.empty:
        raise ValueError("the run has no recorded tasks; its partition has no sequence of tasks")
    last = tasks["round"].max()
    found: dict[str, list[float]] = {name: [] for name in Continual.__dataclass_fields__}
    for _, own in tasks.groupby("client"):
        under_way = own[own["seen"]].groupby("round")["task"].max()
        T = int(under_way.max()) + 1
        for t in range(T):
            by_round = own[own["task"] == t].set_index("round")
            learnt = by_round[by_round["seen"]]["accuracy"]
            if learnt.empty:
                continue
            final = float(learnt[last]) if last in learnt.index else math.nan
            found["tta"].append(final)
            found["first_round"].append(float(learnt.iloc[0]))
            if len(before := by_round[~by_round["seen"]]):
                now = before.iloc[-1]
                found["forward"].append(float(now["accuracy"]) - 1 / float(now["classes"]))
            if t < T - 1:
                during = learnt[under_way.reindex(learnt.index) == t]
                found["forgetting"].append(float(learnt.max()) - final)
                if len(during):
                    found["backward"].append(final - float(during.iloc[-1]))
    means = {n: float(np.mean(v)) if v else math.nan for n, v in found.items()}
    return Continual(**means)
