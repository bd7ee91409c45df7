"""FLoRA-NA: a mean of A and one of B whose product is near the mean of the products.

Nguyen, Nguyen, Jeong, Dung and Pham, Communication-Efficient and Accurate Approach for Aggregation
in Federated Low-Rank Adaptation, 2025 (arXiv 2509.26399).
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedsim.federation import Federation
from fedsim.methods.fedavg import FedAvg
from fedsim.methods.learns import Learns
from fedsim.methods.method import State, methods
from fedsim.training.adapters import pairs

Array = NDArray[np.float64]

SWEEPS = 200  # at most
SMALLEST = 1e-12  # share of the largest eigenvalue
ROUNDING = 1e-14  # share of the squared norm


@methods.register
class FLoRANA(FedAvg):
    """FedAvg with Â = Σ_k q_k·A_k and B̂ = Σ_k p_k·B_k, chosen for their product (Nguyen 2025).

    For each layer min_{p,q} ‖Σ_k w_k·B_k·A_k − B̂·Â‖_F, w_k = n_k/n; p and q are any numbers. What
    travels is as large as with averages. The head is averaged.

    The paper takes steps along the gradient. Here p and q are solved for in turn, which are linear
    least squares in the matrices of clients' inner products; no product of the size of the layer
    is formed. They start from the averages, p = q = w, and from the client with the largest
    w_k·‖B_k·A_k‖, and never end above the averages. Of p/c and c·q, which have one product, those
    with ‖p‖ = ‖q‖ are taken, and w·(p + q) ≥ 0.

    Recorded: `surrogate_gap`, ‖Σ_k w_k·B_k·A_k − B̂·Â‖ / ‖Σ_k w_k·B_k·A_k‖ over all layers, beside
    `adapter_gap`, which is that of the averages.
    """

    name: str = "flora_na"
    learns: ClassVar[Learns] = Learns(asks=("messages", "sizes"), averages=False)
    adapts = "both"

    def round(self, fed: Federation, state: State, t: int) -> State:
        sent = fed.gather(self.local_update, fed.sample(t), weights=state.weights)
        models = {k: update["weights"] for k, update in sent.items()}
        weights = fed.server.average(models)
        n = fed.server.num_samples[[*models]].astype(np.float64)
        gaps, norms = [], []
        for pair in pairs(fed.server.model):
            A, B = map(np.stack, zip(*map(pair.factors, models.values()), strict=True))
            p, q, gap, norm = surrogates(A, B, n / n.sum())
            weights[pair.a] = np.tensordot(q, A, 1).ravel()
            weights[pair.b] = np.tensordot(p, B, 1).ravel()
            gaps.append(gap)
            norms.append(norm)
        fed.log(surrogate_gap=math.hypot(*gaps) / (math.hypot(*norms) or 1.0))
        return State(weights=weights)


def surrogates(A: Array, B: Array, w: Array) -> tuple[Array, Array, float, float]:
    """p and q (n,) for the least ‖Σ_k w_k·B_k·A_k − (Σ_k p_k·B_k)·(Σ_k q_k·A_k)‖ that is found.

    Args:
        A: (n, r, in).
        B: (n, out, r).
        w: (n,) shares.

    Returns:
        p, q, that norm, and ‖Σ_k w_k·B_k·A_k‖.
    """
    of_A = np.einsum("iax,jbx->iajb", A, A, optimize=True)  # A_i·A_jᵀ
    of_B = np.einsum("xia,xjb->iajb", *2 * [B.swapaxes(0, 1)], optimize=True)  # B_iᵀ·B_j
    sizes = np.einsum("iaib,iaib->i", of_B, of_A)  # ‖B_i·A_i‖²
    square = float(np.einsum("i,iajb,iajb,j->", w, of_B, of_A, w, optimize=True))

    def gap(p: Array, q: Array) -> float:
        H, c = _equations(of_B, of_A, w, q)
        return square - 2 * float(c @ p) + float(p @ H @ p)

    best, least = (w, w), gap(w, w)
    for q in (w, np.eye(len(w))[np.argmax(w**2 * sizes)]):
        before = np.inf
        for _ in range(SWEEPS):
            p = _least_squares(*_equations(of_B, of_A, w, q))
            q = _least_squares(*_equations(of_A, of_B, w, p))
            after = gap(p, q)
            if before - after <= ROUNDING * square:
                break
            before = after
        if after < least - ROUNDING * square:
            best, least = (p, q), after
    p, q = best
    alike = np.sqrt(np.linalg.norm(q) / np.linalg.norm(p)) * (-1 if w @ (p + q) < 0 else 1)
    return p * alike, q / alike, math.sqrt(max(least, 0)), math.sqrt(square)


def _equations(varied: Array, fixed: Array, w: Array, q: Array) -> tuple[Array, Array]:
    """H (n, n) and c (n,) of the squared gap pᵀ·H·p − 2·c·p + const, for fixed q.

    Args:
        varied, fixed: inner products (n, r, n, r) of the factors that p and q combine.
    """
    with_each = np.tensordot(q, fixed, 1)  # (r, n, r): Â·A_kᵀ
    with_itself = np.tensordot(with_each, q, (1, 0))
    H = np.einsum("iajb,ab->ij", varied, with_itself)
    return H, np.einsum("iakb,akb,k->i", varied, with_each, w, optimize=True)


def _least_squares(H: Array, c: Array) -> Array:
    """The shortest solution; directions in which clients hardly differ are left out."""
    return np.linalg.pinv(H, SMALLEST, hermitian=True) @ c
