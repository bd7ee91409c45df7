"""FedSA-LoRA: A is shared, B stays with each client.

Guo, Zeng, Wang, Fan, Wang and Qu, Selective Aggregation for Low-Rank Adaptation in Federated
Learning, ICLR 2025 (arXiv 2410.01463).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedsim.methods.method import methods
from fedsim.methods.shared.personal import SharedPart
from fedsim.training import FlatModel
from fedsim.training.adapters import pairs


@methods.register
class FedSALoRA(SharedPart):
    """FedAvg of A and the head; each client keeps its own B (Guo et al. 2025).

    A is what clients learn in common, B what is their own: a client's model is the shared A with
    its B. There is no global model: scores on the central test set are means over the clients'
    models.
    """

    name: str = "fedsa_lora"
    adapts = "both"

    def sent_part(self, model: FlatModel) -> NDArray[np.bool_]:
        shared = np.ones(model.size, np.bool_)
        for layer in pairs(model):
            shared[layer.b] = False
        return shared
