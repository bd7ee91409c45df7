"""Means of one round by themselves, which tests of conditions compare."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments import federation, small_experiment
from fedsim import Experiment
from fedsim.federation import Mean


def one_mean(made: Experiment, cohort: Any) -> Mean:
    """The mean of one round's local training, from the initial weights."""
    fed = federation(made)
    fed.runner.begin(1)
    arguments: dict[str, Any] = {"weights": fed.initial_weights()}
    if made.method.name == "scaffold":
        arguments["control"] = np.zeros(fed.server.model.num_parameters, np.float32)
    return fed.mean(made.method.local_update, cohort, **arguments)  # type: ignore[attr-defined]


@cache
def changes(rate: float = 0.1) -> NDArray[np.float64]:
    """What each client of the small experiment changes in a round, under no condition."""
    plain = small_experiment(train={"optimizer": {"lr": rate}})
    start = federation(plain).initial_weights().astype(np.float64)
    return np.array([one_mean(plain, [k]).weights - start for k in range(10)])
