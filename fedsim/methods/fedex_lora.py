"""FedEx-LoRA: the mean of adapters, and the rest of the mean of their products.

Singhal, Ponkshe and Vepakomma, FedEx-LoRA: Exact Aggregation for Federated and Efficient
Fine-Tuning of Foundation Models, ACL 2025 (arXiv 2410.09432).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedsim.federation import Federation, Mean
from fedsim.methods.method import methods
from fedsim.methods.shared.adapters import ExactAdapters, shares


@methods.register
class FedExLoRA(ExactAdapters):
    """Adapters are averaged, and the frozen weights take what that loses (Singhal et al. 2025).

    Ā = Σ_k p_k·A_k, B̄ = Σ_k p_k·B_k and W₀ ← W₀ + (α/r)·(Σ_k p_k·B_k·A_k − B̄·Ā), so that
    W₀ + (α/r)·B̄·Ā is the mean of the clients' weights. The sum beside W₀ is sent whole; the paper
    sends it as factors, which are smaller while the ranks of all clients together are low.
    """

    name: str = "fedex_lora"

    def merge(self, fed: Federation, weights: NDArray[np.float32], mean: Mean) -> None:
        for layer, clients in shares(fed, mean):
            a = np.sum([p * A for p, A, _ in clients], axis=0)
            b = np.sum([p * B for p, _, B in clients], axis=0)
            weights[layer.a], weights[layer.b] = a.ravel(), b.ravel()
            # What float32 makes of the means is not lost either.
            A, B = layer.factors(weights)
            residual = np.sum([p * (B_k @ A_k) for p, A_k, B_k in clients], axis=0) - B @ A
            weights[layer.added] += (layer.scale * residual).ravel().astype(np.float32)
