"""Objects that experiments are made of, where other processes can import them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim import Dataset
from fedsim.data import Partition
from fedsim.methods.fedavg import FedAvg


class Plain(FedAvg):
    """FedAvg under a name that it has not said."""

    strength: float = 0.5


class Halves(Partition):
    """Two clients."""

    def split(self, data: Dataset, rng: np.random.Generator) -> list[NDArray[np.int64]]:
        return np.array_split(np.arange(len(data.y)), 2)


class Net(nn.Module):
    def __init__(self, shape: tuple[int, ...], outputs: int, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(int(np.prod(shape)), width),
            nn.ReLU(),
            nn.Linear(width, outputs),
        )

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


class Bare(nn.Module):
    """Takes neither shape nor outputs."""

    def __init__(self) -> None:
        super().__init__()


def net(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return Net(shape, outputs)


def data(samples: int = 60) -> Dataset:
    """Points left and right of a line."""
    x = np.random.default_rng(0).normal(size=(samples, 5))
    return Dataset.of(x, (x[:, 0] > 0).astype(int), half=x[:, 1] > 0)


def inner() -> Callable[..., nn.Module]:
    def within(shape: tuple[int, ...], outputs: int) -> nn.Module:
        return Net(shape, outputs)

    return within
