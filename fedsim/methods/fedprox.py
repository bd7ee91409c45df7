"""FedProx: FedAvg with a proximal term that keeps clients close to the global model.

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, Eq. 2.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from fedsim.data import ClientSplits
from fedsim.federation import Client, Update, client_function
from fedsim.methods.fedavg import FedAvg
from fedsim.methods.method import methods


@methods.register
class FedProx(FedAvg):
    """FedAvg whose clients minimise F_k(w) + (μ/2)·‖w − w_global‖² (Li et al. 2020).

    Args:
        mu: μ, strength of the proximal term. The paper tunes it in {0.001, 0.01, 0.1, 1}; there
            is no official default.
    """

    name: str = "fedprox"
    mu: float = Field(0.01, ge=0)

    def pull(self, splits: ClientSplits) -> tuple[str, float]:
        return "mu", self.mu

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor) -> Update:
        w_global = client.parameters(weights)
        trained = client.train(weights, linear=-self.mu * w_global, quadratic=self.mu)
        return Update(weights=trained, weight=client.num_samples)
