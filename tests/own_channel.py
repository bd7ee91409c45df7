"""A condition from outside the package: a channel that loses a share of each vector's entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field

from fedsim.federation import Client, Condition, Round, Sent, Update


class Lossy(Condition):
    """Each entry of what a client changed is lost with a given chance: it arrives as no change.

    Args:
        share: chance of each entry to be lost.
    """

    name: str = "own_channel:Lossy"
    columns: ClassVar[tuple[str, ...]] = ("entries_lost",)
    client_columns: ClassVar[tuple[str, ...]] = ("entries_lost",)
    share: float = Field(0.1, ge=0, lt=1)

    def sent(self, client: Client, sent: Sent) -> Sent:
        if not isinstance(sent.message, Update):
            return sent
        arrived, lost = {}, 0
        for name, vector in sent.message.vectors.items():
            base = sent.received.get(name, torch.zeros_like(vector))
            drawn = client.rng(f"channel/{name}").random(tuple(vector.shape))
            gone = torch.from_numpy(drawn < self.share).to(vector.device)
            arrived[name] = torch.where(gone, base, vector)
            lost += int(gone.sum())
        client.row["entries_lost"] = lost
        return replace(sent, message=sent.message.with_vectors(arrived))

    def close(self, round: Round, ledger: dict[str, Any]) -> Mapping[str, float]:
        return {
            "entries_lost": sum(row.get("entries_lost", 0) for row in round.runner.rows.values())
        }
