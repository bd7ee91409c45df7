"""FedBABU: only the body is federated; the head keeps its initial weights.

Oh, Kim and Yun, FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR
2022, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from fedsim.data import ClientSplits, Dataset
from fedsim.federation import Client, Federation, NotCounted, Update, client_function
from fedsim.methods.fedavg_ft import fine_tuned
from fedsim.methods.method import Method, State, methods
from fedsim.methods.shared.classifiers import needs_trained_features
from fedsim.training import FlatModel


@methods.register
class FedBABU(Method[State]):
    """FedAvg of everything but the head, which is neither trained nor sent (Oh et al. 2022).

    The head (the last layer) keeps its random weights, the same for all clients. Bodies are
    averaged with equal weights, as in the authors' code. Fine-tuning then gives each client a
    model of its own, which `evaluate.clients` evaluates.

    Args:
        fine_tune: the part of the model that a client fine-tunes on its own data before its test.
        fine_tune_epochs: passes over the data for fine-tuning (the authors use 5).
    """

    name: str = "fedbabu"
    fine_tune: Literal["nothing", "head", "all"] = "nothing"
    fine_tune_epochs: int = Field(5, ge=1)

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        needs_trained_features(self.name, network)

    def sent_part(self, model: FlatModel) -> NDArray[np.bool_]:
        body = np.ones(model.size, dtype=np.bool_)
        body[model.part("head")] = False
        return body

    def init(self, fed: Federation) -> State:
        return State(weights=fed.initial_weights())

    def round(self, fed: Federation, state: State, t: int) -> State:
        head = fed.server.model.part("head")
        body = np.delete(state.weights, head)
        mean = fed.mean(
            self.local_update,
            fed.sample(t),
            body=body,
            head=NotCounted(state.weights[head].copy()),
        )
        weights = np.insert(mean.body, head.start, state.weights[head])
        return replace(state, weights=weights)

    @client_function("local_update")
    def local_update(self, client: Client, body: Tensor, head: Tensor) -> Update:
        """(client) The body, trained with the fixed head."""
        part = client.model.part("head")
        weights = torch.cat([body[: part.start], head, body[part.start :]])
        trained = client.train(weights, part=client.model.part("features"))
        return Update(body=torch.cat([trained[: part.start], trained[part.stop :]]))

    def own_model(self, client: Client, weights: Tensor) -> Tensor:
        """(client) The global model, fine-tuned on the client's data."""
        if self.fine_tune == "nothing":
            return weights
        return fine_tuned(client, weights, self.fine_tune, self.fine_tune_epochs)

    @property
    def keeps_models(self) -> bool:
        return self.fine_tune != "nothing"
