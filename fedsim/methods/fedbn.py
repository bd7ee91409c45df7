"""FedBN: batch norm stays with the clients.

Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021,
Algorithm 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.data import ClientSplits, Dataset
from fedsim.errors import ExperimentError
from fedsim.federation import Client
from fedsim.methods.method import methods
from fedsim.methods.shared.personal import SharedPart, entries_of
from fedsim.training import FlatModel, has_batch_norm


@methods.register
class FedBN(SharedPart):
    """FedAvg of everything but batch norm, which each client keeps (Li et al. 2021).

    The parameters (γ, β) and the statistics (μ, σ²) of batch norm are a client's own; all other
    weights are averaged, with equal weights. There is no global model: scores on the central test
    set are means over the clients' models.
    """

    name: str = "fedbn"

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        if not has_batch_norm(network):
            raise ExperimentError(
                "method.name=fedbn keeps batch norm with the clients, and the model has none; "
                "models with batch norm: resnet8"
            )

    def sent_part(self, model: FlatModel) -> NDArray[np.bool_]:
        modules = model.module.named_modules()
        return ~entries_of(model, (n for n, m in modules if isinstance(m, _BatchNorm)))

    def weight(self, client: Client) -> float:
        return 1.0
