"""What a client finds where its work is carried out: a network, the data, a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.data import Dataset, Holdings
from fedsim.models import Model
from fedsim.streams import torch_stream
from fedsim.training import FlatModel, Train


@dataclass(frozen=True)
class Examples:
    """Inputs (n, ...) float32 and labels (n,) int64, on the client's device."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Setup:
    """What a worker needs to know besides the data. It travels once, when the worker starts."""

    model: Model
    train: Train
    seed: int
    # The object whose methods are the client functions; the Method, which this package never
    # imports.
    functions: Any
    shape: tuple[int, ...]
    classes: int

    def build_model(self) -> nn.Module:
        """The network with the run's initial weights, the same wherever it is built."""
        with torch_stream(self.seed, "init"):
            return self.model.build(self.shape, self.classes)


class Host:
    """A network and the data, in one process on one device; clients take turns on it."""

    def __init__(
        self, setup: Setup, dataset: Dataset, holdings: Holdings, device: torch.device
    ) -> None:
        self.setup, self.holdings, self.device = setup, holdings, device
        self.model = FlatModel(setup.build_model(), device)
        self._dataset = dataset

    def examples(self, indices: NDArray[np.int64]) -> Examples:
        """Training examples by index."""
        return self._prepare(self._dataset.x[indices], self._dataset.y[indices])

    def test_examples(self, part: slice) -> Examples:
        """A part of the central test set."""
        return self._prepare(self._dataset.test_x[part], self._dataset.test_y[part])

    def _prepare(self, x: NDArray[np.generic], y: NDArray[np.int64]) -> Examples:
        inputs = torch.tensor(x, device=self.device)
        if inputs.dtype == torch.uint8:
            inputs = inputs.float() / 255
        if self._dataset.mean:
            per_channel = (-1, *[1] * (inputs.dim() - 2))
            mean = torch.tensor(self._dataset.mean, device=self.device).view(per_channel)
            std = torch.tensor(self._dataset.std, device=self.device).view(per_channel)
            inputs = (inputs - mean) / std
        return Examples(inputs, torch.tensor(y, device=self.device))
