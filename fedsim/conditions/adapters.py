"""How far the mean of clients' adapters is from what their products mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedsim.federation import Condition, Update
from fedsim.federation.condition import Round, Sent
from fedsim.training.adapters import pairs

Factors = tuple[NDArray[np.float64], NDArray[np.float64]]


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
                own = {p.layer: p.factors(weights.cpu().numpy()) for p in pairs(client.model)}
                client.notes[self.name] = sent.message.weight, own
        return sent

    def close(self, round: Round, ledger: dict[str, Any]) -> Mapping[str, float]:
        notes, of_clients = dict(round.notes.get(self.name, ())), round.runner.rows
        found = [notes[k] for k in sorted(notes) if "lost" not in of_clients[k]]
        total = math.fsum(weight for weight, _ in found)
        if not total:
            return {}
        rows = []
        for layer in found[0][1]:
            shares = [(weight / total, *own[layer]) for weight, own in found]
            product = sum(p * (b @ a) for p, a, b in shares)
            gap = product - sum(p * b for p, _, b in shares) @ sum(p * a for p, a, _ in shares)
            norms = {n: float(np.linalg.norm(v)) for n, v in (("gap", gap), ("norm", product))}
            rows.append({"layer": layer, **norms})
        round.runner.record("adapters", rows)
        gap, norm = (math.hypot(*(row[name] for row in rows)) for name in ("gap", "norm"))
        return {"adapter_gap": gap / norm if norm else 0.0}
