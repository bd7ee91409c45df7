"""FFA-LoRA: A is frozen as it is drawn, so the mean of adapters is the mean of products.

Sun, Li, Li and Ding, Improving LoRA in Privacy-Preserving Federated Learning, ICLR 2024 (arXiv
2403.12313).
"""

from __future__ import annotations

from fedsim.methods.fedavg import FedAvg
from fedsim.methods.method import methods


@methods.register
class FFALoRA(FedAvg):
    """FedAvg of B and the head; A stays as it is drawn, the same for all (Sun et al. 2024).

    As Σ_k p_k·(B_k·A) = (Σ_k p_k·B_k)·A, averaging loses nothing, and noise on B is not multiplied
    by noise on A. Half as much is sent.
    """

    name: str = "ffa_lora"
    adapts = "b"
