"""LG-FedAvg: local representations, a global model on top of them.

Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global
Representations, 2020, Algorithm 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import nn

from fedsim.data import ClientSplits, Dataset
from fedsim.methods.method import methods
from fedsim.methods.shared.personal import SharedPart, check_modules, entries_of
from fedsim.training import FlatModel


@methods.register
class LGFedAvg(SharedPart):
    """FedAvg of the top layers θ^g; each client keeps the layers θ_k^l below (Liang et al. 2020).

    A client trains both together, and sends θ^g alone: θ^g ← Σ_k n_k·θ_k^g / Σ_k n_k; the authors'
    code weights clients equally. There is no global model: scores on the central test set are
    means over the clients' models, where the paper lets them vote. In the authors' experiments,
    all begin with weights that FedAvg has trained; here, as in Algorithm 1, with the run's initial
    weights.

    Args:
        shared: names of the modules that are shared; by default the head. The authors share two
            or three layers.
    """

    name: str = "lg_fedavg"
    shared: tuple[str, ...] = Field(("head",), min_length=1)

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        check_modules("shared", self.shared, network)

    def sent_part(self, model: FlatModel) -> NDArray[np.bool_]:
        return entries_of(model, self.shared)
