"""q-FedAvg: clients with higher losses count for more, so that losses become more alike.

Li et al., Fair Resource Allocation in Federated Learning, ICLR 2020, Algorithm 2.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedsim.errors import ExperimentError
from fedsim.federation import Client, Update, client_function
from fedsim.methods.fedavg import FedAvg
from fedsim.methods.learns import Learns
from fedsim.methods.method import methods
from fedsim.methods.shared.local_steps import mean_loss
from fedsim.training import Train

TINY = 1e-10  # added to a loss, which may be 0


@methods.register
class QFedAvg(FedAvg):
    """FedAvg for the objective Σ_k p_k·F_k^{q+1}/(q + 1) (q-FFL, Li et al. 2020).

    w ← w − Σ_k n_k·Δ_k / Σ_k n_k·h_k, with Δ_k = F_k^q·L·(w − w_k) and
    h_k = q·F_k^{q−1}·‖L·(w − w_k)‖² + L·F_k^q, where F_k is the mean loss of the global model w on
    the client's training examples, before training, and L = 1/η with the learning rate of the
    round. The paper draws clients in proportion to n_k, the number of their samples; here they
    are drawn uniformly and their terms weighted by n_k. Batch norm's statistics are averaged with
    the weights n_k·h_k. With q = 0 the method is FedAvg.

    Args:
        q: strength of fairness. The paper tunes it in {0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 15}.
    """

    name: str = "qfedavg"
    private_by_example: ClassVar[bool] = False
    learns: ClassVar[Learns] = Learns(asks=("weights",))
    q: float = Field(0.1, ge=0)

    def check(self, train: Train) -> None:
        if train.optimizer.name != "sgd":
            raise ExperimentError(
                "method.name=qfedavg needs train.optimizer.name=sgd: it estimates gradients from "
                f"changes divided by the learning rate, which is no estimate with "
                f"{train.optimizer.name}"
            )

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor) -> Update:
        """(client) w − Δ_k/h_k, with the weight n_k·h_k/L, of which the mean is the step."""
        trained = client.train(weights)
        loss, L = mean_loss(client, weights) + TINY, 1 / client.lr
        start, end = client.parameters(weights), client.parameters(trained)
        square = float((end - start).double().square().sum())
        shrink = 1 / (1 + self.q * L * square / loss)  # Δ_k/h_k = shrink·(w − w_k)
        found = trained.clone()
        client.parameters(found).copy_(torch.lerp(start, end, shrink))
        return Update(weights=found, weight=client.num_samples * loss**self.q / shrink)
