"""Training examples that lie on a card, once for each process that computes there."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.data import Dataset
from fedsim.data.stored import AnyArray

SHARE = 0.5  # of the free memory that examples may take; networks and steps need the rest
CHUNK = 4096  # examples that are sent to the card at a time


class OnCard:
    """The training examples of a data set as they came (bytes stay bytes), on a card.

    Args:
        device: the card.
    """

    def __init__(self, dataset: Dataset, device: torch.device) -> None:
        self._device = device
        self._x, self._y = (_sent(array, device) for array in (dataset.x, dataset.y))

    def rows(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """(n, ...) inputs and (n, ...) labels or targets, as new tensors."""
        chosen = torch.from_numpy(np.array(indices)).to(self._device)
        return self._x[chosen], self._y[chosen]


def keep_on_card(dataset: Dataset, device: torch.device) -> tuple[OnCard | None, str | None]:
    """The data set on the device if that is a card with room for it.

    Returns:
        The data set there, if it is; and a line for the user if there is no room.
    """
    if device.type != "cuda":
        return None, None
    size, (free, _) = dataset.x.nbytes + dataset.y.nbytes, torch.cuda.mem_get_info(device)
    if size > SHARE * free:
        return None, (
            f"the training data ({size / 1e9:.1f} GB) take more than half of the memory that is "
            f"free on the card ({free / 1e9:.1f} GB): they are sent to it client by client"
        )
    return OnCard(dataset, device), None


def _sent(array: AnyArray, device: torch.device) -> Tensor:
    """An array on a device, sent in parts, so that no copy of all of it is made on the way."""
    kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
    found = torch.empty(array.shape, dtype=kind, device=device)
    for start in range(0, len(array), CHUNK):
        found[start : start + CHUNK].copy_(torch.tensor(array[start : start + CHUNK]))
    return found
