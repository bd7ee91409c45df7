"""Ditto: FedAvg, and a personal model of each client that is held near the global one.

Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021,
Algorithm 1.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from fedsim.data import ClientSplits
from fedsim.federation import Client, Update, client_function
from fedsim.methods.method import methods
from fedsim.methods.shared.personal import PersonalBesideGlobal


@methods.register
class Ditto(PersonalBesideGlobal):
    """FedAvg; beside it each client minimises F_k(v_k) + (λ/2)·‖v_k − w‖² (Li et al. 2021).

    The global model w is FedAvg's, with clients weighted by their samples (equally in the authors'
    code), and is evaluated on the central test set. A client of the
    cohort trains its v_k, starting from the v_k of its last round (at first w⁰), for as many
    epochs or steps as w. v_k is never sent; `evaluate.clients` evaluates it.

    Args:
        lam: λ, how near the personal models stay to w; with 0 they are trained alone. The authors
            choose it in {0.05, 0.1, 0.2, 1, 2}.
    """

    name: str = "ditto"
    lam: float = Field(0.1, ge=0)

    def pull(self, splits: ClientSplits) -> tuple[str, float]:
        return "lam", self.lam

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor, initial: Tensor) -> Update:
        """(client) w_k as in FedAvg; trains v_k and keeps it."""
        trained = client.train(weights)
        v, w = client.state.get("weights", initial), client.parameters(weights)
        v = client.train(v, linear=-self.lam * w, quadratic=self.lam, on_record=False)
        self.keep_model(client, v)
        client.trained = trained
        return Update(weights=trained, weight=client.num_samples)
