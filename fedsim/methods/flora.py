"""FLoRA: clients' adapters are stacked, which sums their products.

Wang, Shen, He, Sun, Wang, Lyu and Li, FLoRA: Federated Fine-Tuning Large Language Models with
Heterogeneous Low-Rank Adaptations, NeurIPS 2024 (arXiv 2409.05976).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedsim.federation import Federation, Mean
from fedsim.methods.method import methods
from fedsim.methods.shared.adapters import ExactAdapters, shares


@methods.register
class FLoRA(ExactAdapters):
    """The frozen weights take the mean of the clients' products; adapters begin anew (Wang 2024).

    W₀ ← W₀ + (α/r)·Σ_k p_k·B_k·A_k, the product of all B_k beside each other and all p_k·A_k below
    each other. Then A is drawn anew and B is zero, in every round. The sum beside W₀ is sent
    whole, where the paper sends the stack.
    """

    name: str = "flora"

    def merge(self, fed: Federation, weights: NDArray[np.float32], mean: Mean) -> None:
        rng = fed.rng("adapters")
        for layer, clients in shares(fed, mean):
            product = np.sum([p * (B @ A) for p, A, B in clients], axis=0)
            weights[layer.added] += (layer.scale * product).ravel().astype(np.float32)
            _, r, within = layer.shape
            bound = within**-0.5  # torch's default of a linear layer
            weights[layer.a] = rng.uniform(-bound, bound, r * within)
            weights[layer.b] = 0
