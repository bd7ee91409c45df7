"""FedAvgM: FedAvg with momentum on the server.

Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019, section 4.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import Field

from fedsim.federation import Federation, Vector
from fedsim.methods.fedopt import ServerOptimizer
from fedsim.methods.method import State, methods


@dataclass(frozen=True)
class FedAvgMState(State):
    """The server's momentum v, (P,), besides the weights."""

    velocity: Vector


@methods.register
class FedAvgM(ServerOptimizer[FedAvgMState]):
    """FedAvg with server momentum: v ← β·v + (w − mean), w ← w − η_s·v (Hsu et al. 2019).

    Momentum applies to the trainable parameters; batch norm's statistics are averaged. As in the
    paper, it is not Nesterov momentum.

    Args:
        server_lr: η_s, server learning rate.
        beta: β, server momentum.
    """

    name: str = "fedavgm"
    beta: float = Field(0.9, ge=0, lt=1)

    def init(self, fed: Federation) -> FedAvgMState:
        velocity = np.zeros(fed.server.model.num_parameters, dtype=np.float32)
        return FedAvgMState(weights=fed.initial_weights(), velocity=velocity)

    def round(self, fed: Federation, state: FedAvgMState, t: int) -> FedAvgMState:
        P = fed.server.model.num_parameters
        mean = fed.mean(self.local_update, fed.sample(t), weights=state.weights)
        velocity = self.beta * state.velocity + (state.weights - mean.weights)[:P]
        weights = mean.weights.copy()
        weights[:P] = state.weights[:P] - self.eta(fed, t) * velocity
        return FedAvgMState(weights=weights, velocity=velocity)
