"""FedRep: a shared representation, learnt in turns with each client's own head.

Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021,
Algorithm 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from fedsim.data import ClientSplits, Dataset
from fedsim.federation import Client
from fedsim.methods.method import methods
from fedsim.methods.shared.classifiers import needs_trained_features
from fedsim.methods.shared.personal import SharedPart, entries_of
from fedsim.training import FlatModel


@methods.register
class FedRep(SharedPart):
    """Each client trains its head h_k on the shared φ, then φ under h_k (Collins et al. 2021).

    Only φ is sent, and φ ← Σ_k φ_k / |S|, with equal weights as in Algorithm 1 (the authors' code
    weights by samples). φ is trained for `train.local_epochs` (or `local_steps`), and the recorded
    loss and steps are those of φ. There is no global model: scores on the central test set are
    means over the clients' models.

    Args:
        head_epochs: passes over the data with which the head is trained first; τ steps in the
            paper, 10 epochs in its experiments.
    """

    name: str = "fedrep"
    head_epochs: int = Field(10, ge=1)

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        needs_trained_features(self.name, network)

    def sent_part(self, model: FlatModel) -> NDArray[np.bool_]:
        return ~entries_of(model, ["head"])

    def train(self, client: Client, weights: Tensor) -> Tensor:
        head, features = client.model.part("head"), client.model.part("features")
        weights = client.train(weights, part=head, epochs=self.head_epochs, on_record=False)
        return client.train(weights, part=features)

    def weight(self, client: Client) -> float:
        return 1.0
