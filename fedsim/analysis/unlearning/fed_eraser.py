"""FedEraser: the others' stored updates again, in directions that they calibrate.

Liu et al., FedEraser: Enabling Efficient Client-Level Data Removal from Federated Learning Models,
IWQoS 2021, Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from pydantic import Field
from torch import Tensor

from fedsim.analysis.unlearning.forgetting import Forgetting, Unlearning, unlearning
from fedsim.federation import (
    Asked,
    Client,
    Federation,
    PerClient,
    Update,
    Vector,
    client_function,
)
from fedsim.methods import State


@dataclass(frozen=True)
class Retained(State):
    """M̃, and what the server has stored of the others' updates.

    Attributes:
        models: the others' models after the first retained round.
        steps: by retained round t and client k, ‖U_k^t‖.
    """

    models: Mapping[int, Vector]
    steps: Mapping[int, Mapping[int, float]]


@unlearning.register
class FedEraser(Unlearning):
    """M̃ ← M̃ + Σ_k n_k·‖U_k^t‖·Û_k^t/‖Û_k^t‖ / Σ_k n_k over the retained rounds (eqs. 2 to 4).

    The sum is over the others of round t's cohort. U_k^t = w_k^t − w^t is the update that client k
    sent in the run, from which its length is kept; Û_k^t the one that it makes now from M̃, by
    `epochs` of local training, from which the direction is taken. In the first retained round the
    U_k^t themselves are added, as M̃ is then the model that they were made from.

    Retained are the first round in which one of the clients took part, before which there is
    nothing to forget, and every Δt-th one after it. The server would have to store all updates of
    these rounds; here they are computed again by replay, and counted. A client scales its own
    update before it sends it, where in the paper the server does, so that the run's own mean,
    codecs and adversaries apply to it. Calibration is plain local training, and the mean is
    FedAvg's, whatever the run's method adds to the loss or makes of the mean.

    Args:
        every: Δt.
        epochs: E_cali, passes of calibration; by default half of `train.local_epochs`, rounded up
            (the paper's r = 0.5), or `train.local_steps`.
    """

    name: str = "fed_eraser"
    asks: ClassVar[tuple[Asked, ...]] = ("messages", "sizes")
    trains_alike: ClassVar[bool] = True
    every: int = Field(2, ge=1, le=1_000_000)
    epochs: int | None = Field(None, ge=1, le=1_000_000)

    def forget(self, task: Forgetting) -> Vector:
        start, models = task.weights, dict[int, Vector]()
        steps: dict[int, dict[int, float]] = {}
        P = task.again.fed.server.model.num_parameters
        for t, w, trained in task.history(task.first):
            if not steps:
                start, models = w, trained
            if (t - task.first) % self.every == 0:
                task.store(t)
                steps[t] = {k: float(np.linalg.norm((own - w)[:P])) for k, own in trained.items()}
        return task.play(self, Retained(start, models, steps), steps).weights

    def round(self, fed: Federation, state: Retained, t: int) -> Retained:
        if not (steps := state.steps[t]):  # none of the others took part
            return state
        if t == min(state.steps):
            return replace(state, weights=fed.server.average(state.models))
        own = PerClient(steps)
        mean = fed.mean(self.calibrate, list(steps), weights=state.weights, step=own)
        return replace(state, weights=mean.weights)

    @client_function("unlearning/calibrate")
    def calibrate(self, client: Client, weights: Tensor, step: float) -> Update:
        """(client) M̃ + ‖U‖·Û/‖Û‖; running statistics of batch norm stay as trained."""
        settings, P = client.settings, client.model.num_parameters
        epochs = self.epochs
        if epochs is None and settings.local_steps is None:
            epochs = math.ceil(settings.local_epochs / 2)
        trained = client.train(weights, epochs=epochs)
        change = (trained - weights)[:P]
        length = change.norm()
        calibrated = trained.clone()
        if length > 0:
            calibrated[:P] = weights[:P] + float(step) / length * change
        return Update(weights=calibrated, weight=client.num_samples)
