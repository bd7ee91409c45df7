"""Code of a user's own that writes into what it is given, or would like to."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from own_relevances import Slopes
from torch import Tensor, nn

from fedsim import Dataset
from fedsim.data import Partition
from fedsim.objectives import Batch
from fedsim.objectives.classification import Classification

Array = NDArray[Any]


def right(outputs: Array, targets: Array) -> float:
    return float((outputs.argmax(axis=1) == targets).mean())


def writes_outputs(outputs: Array, targets: Array) -> float:
    outputs[np.arange(len(targets)), targets] = np.inf
    return 0.0


def writes_targets(outputs: Array, targets: Array) -> float:
    targets[:] = outputs.argmax(axis=1)
    return 0.0


def sorts(outputs: Array, targets: Array) -> float:
    targets.sort()
    return 0.0


def through_torch(outputs: Array, targets: Array) -> float:
    torch.from_numpy(outputs).zero_()
    torch.from_numpy(targets).zero_()
    return 0.0


class WritesTotals(Classification):
    name: str = "own_spoilers:WritesTotals"

    def scores(self, totals: Any) -> dict[str, float]:
        for value in totals.values():
            if isinstance(value, np.ndarray):
                value[:] = 0
        return super().scores(totals)


class WritesBatch(Classification):
    name: str = "own_spoilers:WritesBatch"

    def totals(self, outputs: Tensor, batch: Batch) -> Any:
        batch.y.copy_(outputs.argmax(dim=1))
        return super().totals(outputs, batch)


class WritesInputs(Slopes):
    """An explainer after which nothing could be explained."""

    name: str = "own_spoilers:WritesInputs"

    def relevances(self, model: Any, data: Any, x: Tensor, y: Tensor, rng: Any) -> Any:
        found = super().relevances(model, data, x, y, rng)
        x.zero_()
        y.zero_()
        return found


class WritesData(Slopes):
    name: str = "own_spoilers:WritesData"

    def relevances(self, model: Any, data: Any, x: Tensor, y: Tensor, rng: Any) -> Any:
        dataset = data.dataset
        for array in (dataset.vectors, dataset.known, *dataset.truth.values()):
            assert not array.flags.writeable
        dataset.test_x[:] = 0
        return super().relevances(model, data, x, y, rng)

    def explain(self, model: Any, data: Any, inputs: Any, rng: Any) -> Any:
        inputs.x[:] = 0


class WritesLabels(Partition):
    kind: str = "own_spoilers:WritesLabels"

    def split(self, data: Dataset, rng: np.random.Generator) -> list[Array]:
        data.y[:] = 0
        return np.array_split(np.arange(len(data.y)), 2)


class InPlace(nn.Module):
    """A network whose first layer writes into its inputs."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        size = int(np.prod(shape))
        self.layers = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(size, outputs))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found
