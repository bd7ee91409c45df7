"""Training examples kept in a GPU's memory, one copy per worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.data import Dataset
from fedsim.data.stored import StoredArray

SHARE = 0.5  # of a worker's share of the memory; networks and training need the rest
CHUNK_BYTES = 1 << 26  # copied at a time


class OnCard:
    """The training examples of a data set on a GPU, in their original types.

    Args:
        device: the GPU.
    """

    def __init__(self, dataset: Dataset, device: torch.device) -> None:
        self._device = device
        self._x, self._y = (_sent(np.asarray(a), device) for a in (dataset.x, dataset.y))

    def rows(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """(n, ...) inputs and (n, ...) labels or targets, as new tensors."""
        chosen = torch.from_numpy(np.array(indices)).to(self._device)
        return self._x[chosen], self._y[chosen]


def keep_on_card(
    dataset: Dataset, device: torch.device, part: float
) -> tuple[OnCard | None, str | None]:
    """The data set on the device if that is a GPU with enough memory.

    Inputs that stay in files are still read when needed.

    Args:
        part: the worker's share of the GPU, 0 to 1; with 0 nothing is kept.

    Returns:
        The data set on the GPU, if it fits; and a notice to the user if it does not.
    """
    if device.type != "cuda" or not part or isinstance(dataset.x, StoredArray):
        return None, None
    size, (free, total) = dataset.x.nbytes + dataset.y.nbytes, torch.cuda.mem_get_info(device)
    room = min(free, SHARE * part * total)
    if size <= room:
        try:
            return OnCard(dataset, device), None
        except torch.OutOfMemoryError:  # other processes took it
            room = 0
    return None, (
        f"the training data ({size / 1e9:.1f} GB) do not fit the GPU's free memory "
        f"({room / 1e9:.1f} GB): each client's data are copied when it trains"
    )


def _sent(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on a device, copied in parts to avoid a second full copy."""
    kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
    found = torch.empty(array.shape, dtype=kind, device=device)
    count = max(1, CHUNK_BYTES * len(array) // max(1, array.nbytes))
    for start in range(0, len(array), count):
        found[start : start + count].copy_(torch.tensor(array[start : start + count]))
    return found
