"""FedPer: shared base layers, personal layers on top.

Arivazhagan et al., Federated Learning with Personalization Layers, 2019, Algorithms 1 and 2.
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
class FedPer(SharedPart):
    """FedAvg of the base layers W_B; each client keeps personal layers W_Pk (Arivazhagan 2019).

    A client trains both together, and sends W_B alone: W_B ← Σ_k n_k·W_Bk / Σ_k n_k. Batch norm's
    parameters and statistics belong to the layers that they are in. There is no global model:
    scores on the central test set are means over the clients' models.

    Args:
        personal: names of the modules that are personal; by default the head (K_P = 1). The
            authors also try several blocks before it.
    """

    name: str = "fedper"
    personal: tuple[str, ...] = Field(("head",), min_length=1)

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        check_modules("personal", self.personal, network)

    def sent_part(self, model: FlatModel) -> NDArray[np.bool_]:
        return ~entries_of(model, self.personal)
