"""XPFL with a fault of its released code: clients use labels that they do not have."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from fedsim.federation import Client, Examples
from fedsim.methods.xpfl import XPFL


class Leaking(XPFL):
    """XPFL whose clients draw anew in each round which of their examples are labelled.

    A client draws |D^L| of all its examples as labelled, and, separately, |D^U| for its teacher,
    so that over time it learns from nearly all its labels. (The released code counts in batches:
    ⌊γ·B⌋ + 1 of B are labelled.)
    """

    name: str = "leaking:Leaking"

    def examples(self, client: Client) -> tuple[Examples, Tensor]:
        splits, rng = client.splits, client.rng("leak")
        held = np.concatenate([splits.train[client.id], splits.unlabelled[client.id]])
        labelled = rng.permutation(held)[: client.num_samples]
        hidden = rng.permutation(held)[client.num_samples :]
        # Clients offer no labels of their unlabelled examples.
        return client.context.examples(labelled), client.context.examples(hidden).x
