"""SCAFFOLD: control variates correct the client drift of local steps.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020,
Algorithm 1 with option II.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import Field
from torch import Tensor

from fedsim.errors import ExperimentError
from fedsim.federation import Client, Federation, Update, Vector, client_function
from fedsim.methods.method import Method, State, methods
from fedsim.training import Optimizer, Train


@dataclass(frozen=True)
class ScaffoldState(State):
    """The server's control variate c, (P,), besides the weights x."""

    control: Vector


@methods.register
class Scaffold(Method[ScaffoldState]):
    """Local SGD corrected by control variates: y ← y − η·(g − c_k + c) (Karimireddy et al. 2020).

    The corrections apply to trainable parameters; batch norm's statistics are averaged. The local
    optimiser is plain SGD, as in the paper, or SGD with momentum: the new c_k divides y − x by the
    effective number of steps (`steps_worth`), which is τ without momentum.

    Args:
        server_lr: η_g, server learning rate.
    """

    name: str = "scaffold"
    server_lr: float = Field(1.0, gt=0)

    def check(self, train: Train) -> None:
        if train.optimizer.name != "sgd":
            raise ExperimentError(
                "method.name=scaffold needs train.optimizer.name=sgd: its control variates are "
                f"averages of SGD steps, which {train.optimizer.name}'s are not"
            )

    def init(self, fed: Federation) -> ScaffoldState:
        control = np.zeros(fed.server.model.num_parameters, dtype=np.float32)
        return ScaffoldState(weights=fed.initial_weights(), control=control)

    def round(self, fed: Federation, state: ScaffoldState, t: int) -> ScaffoldState:
        P = fed.server.model.num_parameters
        mean = fed.mean(
            self.local_update, fed.sample(t), weights=state.weights, control=state.control
        )
        weights = state.weights + mean.delta
        weights[:P] = state.weights[:P] + self.server_lr * mean.delta[:P]
        control = state.control + (mean.count / fed.num_clients) * mean.delta_control
        return ScaffoldState(weights=weights, control=control)

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor, control: Tensor) -> Update:
        """(client) Δy = y − x and Δc = c_k⁺ − c_k; keeps c_k⁺."""
        own = client.state.get("control")
        correction = control if own is None else control - own
        y = client.train(weights, linear=correction)
        worth = steps_worth(client.steps, client.settings.optimizer)
        delta = y - weights
        gradient = client.parameters(delta) / (-client.lr * worth)
        client.state["control"] = gradient - correction
        return Update(delta=delta, delta_control=gradient.sub_(control))


def steps_worth(steps: int, optimizer: Optimizer) -> float:
    """How many plain SGD steps τ local steps amount to: w_0 − w_τ = η·worth·g for a constant g.

    From v_0 = 0, the velocity after step t is v_t = m·v_{t−1} + g = g·(1 − m^t)/(1 − m).

    - Without momentum each step is η·g, and worth = τ.
    - With momentum m it is η·v_t, and worth = Σ_t v_t/g = (τ − m·(1 − m^τ)/(1 − m))/(1 − m).
    - In Nesterov's form it is η·(g + m·v_t), and worth = Σ_t (1 + m·v_t/g)
      = (τ − m²·(1 − m^τ)/(1 − m))/(1 − m).

    If gradients change, (w_0 − w_τ)/(η·worth) is a weighted average, in which earlier ones have
    larger weights because they stay in the velocity. η does not change within a round.
    """
    m, velocity, worth = optimizer.momentum, 0.0, 0.0
    for _ in range(steps):  # closed forms suffer cancellation for m close to 1
        velocity = m * velocity + 1
        worth += 1 + m * velocity if optimizer.nesterov else velocity
    return worth
