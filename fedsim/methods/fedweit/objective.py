"""The terms of Eq. 5 (Yoon et al. 2021), and when the learning rate falls.

W are the weights of a task's own dense layers (`Rest.dense`): W_f and W_c in FedSeIT, and in
FedWeIT with `dense_layer`; otherwise none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedsim.models.decomposed import Layout


def sparsity(A: Tensor, W: Sequence[Tensor]) -> Tensor:
    """Σ_i ‖A_i‖₁ + ‖W‖₁, of all A (n, P)."""
    return A.abs().sum() + sum(w.abs().sum() for w in W)


def decay(B: Tensor, A: Tensor, m: Tensor, W: Sequence[Tensor]) -> Tensor:
    """‖m_t‖² + ‖A_t‖² + ‖W‖², t the last task; plus ‖B‖² if it is the first.

    Args:
        B: (P,).
        A: (n, P).
        m: (n, rows).
    """
    others = [A[-1], *W] + ([B] if len(A) == 1 else [])
    return sum((v.square().sum() for v in others), start=m[-1].square().sum())


def drift(layout: Layout, B: Tensor, A: Tensor, gates: Tensor, before: Tensor) -> Tensor:
    """Σ_i ‖B ⊙ σ(m_i) + A_i − θ_i‖², over past tasks.

    Args:
        B: (P,).
        A: (n-1, P).
        gates: (n-1, rows) σ(m_i).
        before: (n-1, P) θ_i when the current task began.
    """
    return (layout.masked(B, gates) + A - before).square().sum()


@dataclass
class Plateau:
    """Detects that a loss has not improved for `patience` epochs in a row.

    Unlike PyTorch's `ReduceLROnPlateau`, any smaller loss counts as improvement, and counting
    restarts after `patience` epochs, not after one more.
    """

    patience: int
    least: float = math.inf
    waited: int = 0

    def reached(self, loss: float) -> bool:
        """Add the loss of an epoch."""
        self.waited = 0 if loss < self.least else self.waited + 1
        self.least = min(self.least, loss)
        if self.waited < self.patience:
            return False
        self.waited = 0
        return True
