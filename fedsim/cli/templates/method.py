"""A federated method of your own: it starts as FedAvg with a server learning rate."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field
from torch import Tensor

from fedsim import Client, Federation, Method, State, Update


class Template(Method[State]):
    """FedAvg whose server goes a share of the way: w ← w + η_g·(mean of w_k − w).

    Args:
        server_lr: η_g; 1 is FedAvg.
    """

    name: str = "template:Template"
    server_lr: float = Field(1.0, gt=0)

    def init(self, fed: Federation) -> State:
        """What the server holds before the first round; extend State to keep more."""
        return State(weights=fed.initial_weights())

    def round(self, fed: Federation, state: State, t: int) -> State:
        """One round of communication, t = 1, 2, ...: a new state, the old one is not changed."""
        cohort = fed.sample(t)
        mean = fed.mean(self.local_update, cohort, weights=state.weights)
        step = mean.weights - state.weights
        return replace(state, weights=state.weights + self.server_lr * step)

    def local_update(self, client: Client, weights: Tensor) -> Update:
        """What each client of the cohort does, where it lives."""
        trained = client.train(weights)
        return Update(weights=trained, weight=client.num_samples)
