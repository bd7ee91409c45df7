"""How far the mean of clients' adapters is from what their products mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedsim.federation import Condition, Update
from fedsim.federation.condition import Round, Sent
from fedsim.training.adapters import pairs

Array = NDArray[np.float64]
Factors = tuple[NDArray[np.float32], NDArray[np.float32]]


class AdapterRecords(Condition):
    """Records ‖mean(B·A) − mean(B)·mean(A)‖, the error of averaging adapters, of each round.

    Means are weighted as those of the updates. The table `adapters` has it for each layer, as
    `gap` beside ‖mean(B·A)‖ as `norm`; the column `adapter_gap` is the ratio over all layers.
    Nothing of it is sent, and what methods do about the gap does not change it.
    """

    name: str = "adapters"
    order: ClassVar[int] = 99  # what clients have trained, before others change it
    patient: ClassVar[bool] = True

    @property
    def columns(self) -> tuple[str, ...]:
        return ("adapter_gap",)

    def sent(self, client: Any, sent: Sent) -> Sent:
        """(client) Note the factors of its layers, if its update has all of them."""
        if isinstance(sent.message, Update):
            weights = client.trained
            if weights is not None and all(p.a is not None for p in pairs(client.model)):
                vector = weights.cpu().numpy()
                own = {  # as they were trained
                    p.layer: tuple(m.astype(np.float32) for m in p.factors(vector))
                    for p in pairs(client.model)
                }
                client.notes[self.name] = sent.message.weight, own
        return sent

    def close(self, round: Round, ledger: dict[str, Any]) -> Mapping[str, float]:
        notes, of_clients = dict(round.notes.get(self.name, ())), round.runner.rows
        found = [notes[k] for k in sorted(notes) if "lost" not in of_clients[k]]
        total = math.fsum(weight for weight, _ in found)
        if not total:
            return {}
        shares = np.array([weight / total for weight, _ in found])
        rows = []
        for layer in found[0][1]:
            gap, norm = gap_of_means(shares, [own[layer] for _, own in found])
            rows.append({"layer": layer, "gap": gap, "norm": norm})
        round.runner.record("adapters", rows)
        gap, norm = (math.hypot(*(row[name] for row in rows)) for name in ("gap", "norm"))
        return {"adapter_gap": gap / norm if norm else 0.0}


def gap_of_means(shares: Array, factors: Sequence[Factors]) -> tuple[float, float]:
    """‖Σ p·B·A − (Σ p·B)·(Σ p·A)‖_F and ‖Σ p·B·A‖_F, at the cost of the ranks, not of the layer.

    Args:
        shares: (K,) p, which sum to 1.
        factors: A (r, in) and B (out, r) of each client.
    """
    A, B = (np.stack(each).astype(np.float64) for each in zip(*factors, strict=True))
    p = shares[:, None, None]
    with np.errstate(invalid="ignore"):  # of a client that has diverged
        # Σ p·(B − B̄)·(A − Ā) is the same difference, without its cancellation.
        gap = _norm(p * (B - (p * B).sum(0)), A - (p * A).sum(0))
        return gap, _norm(p * B, A)


def _norm(B: Array, A: Array) -> float:
    """‖Σ B·A‖_F of (K, out, r) and (K, r, in)."""
    left, right = _thin(np.hstack([*B])), _thin(np.vstack([*A]).T)  # (out, K·r), (in, K·r)
    return float(np.linalg.norm(left @ right.T))


def _thin(m: Array) -> Array:
    """R of m = Q·R where that is smaller, as Q changes no norm."""
    return m if len(m) <= m.shape[1] else np.asarray(np.linalg.qr(m, mode="r"))
