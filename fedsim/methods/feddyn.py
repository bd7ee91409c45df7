"""FedDyn: a dynamic regulariser that tracks each client's gradient.

Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedsim.data import ClientSplits
from fedsim.errors import ExperimentError
from fedsim.federation import Client, Federation, Update, Vector, client_function
from fedsim.methods.method import Method, State, methods


@dataclass(frozen=True)
class FedDynState(State):
    """The server's state; `weights`, which are evaluated, are the mean of the cohort's models.

    Attributes:
        server: (size,) the model that is sent to clients.
        h: (P,) mean of h_k over all K clients.
    """

    server: Vector
    h: Vector


@methods.register
class FedDyn(Method[FedDynState]):
    """Clients minimise F_k(w) + α_k·⟨w, h_k − w_server⟩ + (α_k/2)·‖w‖² (Acar et al. 2021).

    Each client keeps h_k ← h_k + (w_k − w_server), and the server sends mean_S(w_k) + mean_K(h_k):
    an unweighted mean of the cohort's models plus a mean over all clients. In the paper's
    notation, ∇L_k(θ_k) = −α·h_k. The regulariser applies to trainable parameters; batch norm's
    statistics are averaged. The authors clip gradients to a norm of 10 (`train.clip_norm`).

    Args:
        alpha: α, strength of the regulariser (the authors use 0.01).
        scale: `samples`: α_k = α·n̄/n_k with n̄ the mean number of samples, as in the authors'
            code; `none`: α_k = α, as in the paper.
    """

    name: str = "feddyn"
    alpha: float = Field(0.01, gt=0)
    scale: Literal["samples", "none"] = "samples"

    def pull(self, splits: ClientSplits) -> tuple[str, float]:
        n = splits.train.lengths
        most = n.mean() / n[n > 0].min() if self.scale == "samples" else 1.0
        return "alpha", self.alpha * float(most)

    def check_hidden(self, hidden: Mapping[str, str]) -> None:
        if "sizes" in hidden and self.scale == "samples":
            raise ExperimentError(
                f"{hidden['sizes']}: hides clients' numbers of samples, with which "
                "method.name=feddyn scales α; set method.scale=none"
            )

    def init(self, fed: Federation) -> FedDynState:
        weights = fed.initial_weights()
        h = np.zeros(fed.server.model.num_parameters, dtype=np.float32)
        return FedDynState(weights=weights, server=weights, h=h)

    def round(self, fed: Federation, state: FedDynState, t: int) -> FedDynState:
        P = fed.server.model.num_parameters
        mean_samples = float(fed.server.num_samples.mean()) if self.scale == "samples" else None
        mean = fed.mean(
            self.local_update, fed.sample(t), weights=state.server, mean_samples=mean_samples
        )
        moved = mean.weights[:P] - state.server[:P]
        h = state.h + np.float32(mean.count / fed.num_clients) * moved
        server = mean.weights.copy()
        server[:P] += h
        return FedDynState(weights=mean.weights, server=server, h=h)

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor, mean_samples: float | None) -> Update:
        """(client) w_k, from w_server; keeps h_k."""
        start = client.parameters(weights)
        h = client.state.get("h")
        if h is None:
            h = torch.zeros_like(start)
        alpha = self.alpha
        if mean_samples is not None:
            alpha *= mean_samples / client.num_samples
        trained = client.train(weights, linear=(h - start).mul_(alpha), quadratic=alpha)
        client.state["h"] = (h + client.parameters(trained)).sub_(start)
        return Update(weights=trained)
