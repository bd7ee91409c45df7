"""FedAvg: train locally, average.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
AISTATS 2017, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedsim.federation import Client, Federation, Update, client_function
from fedsim.methods.method import Method, State, methods


@methods.register
class FedAvg(Method[State]):
    """Federated averaging: w ← Σ_k n_k·w_k / Σ_k n_k (McMahan et al. 2017)."""

    name: str = "fedavg"

    def init(self, fed: Federation) -> State:
        return State(weights=fed.initial_weights())

    def round(self, fed: Federation, state: State, t: int) -> State:
        cohort = fed.sample(t)
        mean = fed.mean(self.local_update, cohort, weights=state.weights)
        return replace(state, weights=mean.weights)

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor) -> Update:
        """(client) w_k: local epochs of the local optimiser, from the global model."""
        trained = client.train(weights)
        return Update(weights=trained, weight=client.num_samples)
