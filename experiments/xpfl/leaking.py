"""XPFL with a fault of its released code: clients use labels that they do not have."""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from fedsim.data import ClientSplits, Dataset
from fedsim.errors import ExperimentError
from fedsim.federation import Client, Examples
from fedsim.methods.xpfl import XPFL


class Leaking(XPFL):
    """XPFL whose clients draw anew in each round which of their examples are labelled.

    A client draws |D^L| of all its examples as labelled, and, separately, |D^U| for its teacher,
    so that over time it learns from nearly all its labels. (The released code counts in batches:
    ⌊γ·B⌋ + 1 of B are labelled.)
    """

    name: str = "leaking:Leaking"

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        super().check_data(dataset, splits, network)
        if not len(splits.unlabelled.values):
            raise ExperimentError(
                f"method.name={self.name}: no client has unlabelled data whose labels could leak; "
                "set partition.labelled_fraction below 1"
            )

    def examples(self, client: Client) -> tuple[Examples, Tensor]:
        splits, rng = client.splits, client.rng("leak")
        held = np.concatenate([splits.train[client.id], splits.unlabelled[client.id]])
        labelled = rng.permutation(held)[: client.num_samples]
        hidden = rng.permutation(held)[client.num_samples :]
        # Clients offer no labels of their unlabelled examples.
        return client.context.examples(labelled), client.context.examples(hidden).x
