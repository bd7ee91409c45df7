"""FedAvg with local fine-tuning.

Wang et al., Federated Evaluation of On-device Personalization, 2019.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from fedsim.data import ClientSplits, Dataset
from fedsim.federation import Client
from fedsim.methods.fedavg import FedAvg
from fedsim.methods.method import methods
from fedsim.methods.shared.classifiers import needs_classifier


@methods.register
class FedAvgFT(FedAvg):
    """FedAvg whose clients fine-tune the global model on their own data (Wang et al. 2019).

    The federation is FedAvg's. For its own test (`evaluate.clients`), each client trains the
    global model further, with the experiment's optimiser; the result, its personal model, is used
    for nothing else. The global model is evaluated on the central test set as it is.

    Args:
        fine_tune: the part of the model that is fine-tuned.
        fine_tune_epochs: passes over the client's data for it.
    """

    name: str = "fedavg_ft"
    fine_tune: Literal["head", "all"] = "all"
    fine_tune_epochs: int = Field(1, ge=1)

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        if self.fine_tune == "head":
            needs_classifier(self.name, network)

    def own_model(self, client: Client, weights: Tensor) -> Tensor:
        """(client) The global model, fine-tuned on the client's data."""
        return fine_tuned(client, weights, self.fine_tune, self.fine_tune_epochs)


def fine_tuned(client: Client, weights: Tensor, part: str, epochs: int) -> Tensor:
    """(client) A model, its `head` or `all`, trained further on the client's data, off record."""
    where = client.model.part("head") if part == "head" else None
    return client.train(weights, part=where, epochs=epochs, on_record=False)
