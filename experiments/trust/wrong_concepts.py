"""Shapes of which some clients know the wrong concepts, for concepts.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedsim import Dataset
from fedsim.data import ClientSplits
from fedsim.data.sources.generated import Shapes

MARK = "wrong"  # the column of what was done


class WrongConcepts(Shapes):
    """The last clients' examples have 1 − c for each concept c; their images and labels are right.

    Args:
        wrong: number of these clients.
    """

    name: str = "wrong_concepts:WrongConcepts"
    wrong: int = 0

    def for_clients(
        self, dataset: Dataset, splits: ClientSplits, seed: int
    ) -> tuple[Dataset, ClientSplits]:
        if MARK in dataset.columns:
            return dataset, splits
        mark = np.zeros(len(dataset.y), bool)
        for k in range(len(splits) - self.wrong, len(splits)):
            mark[splits.train[k]] = mark[splits.test[k]] = True
        columns = {
            c: np.where(mark, 1 - dataset.columns[c], dataset.columns[c]) for c in dataset.concepts
        }
        return replace(dataset, columns={**dataset.columns, **columns, MARK: mark}), splits
