"""The base class of models that are arrays by name instead of a network's weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.models.model import Model

Arrays = dict[str, NDArray[Any]]  # by name


class ArrayModel(Model, ABC):
    """A model that is arrays by name, which methods of its own `kind` learn without SGD.

    It predicts, is scored and is explained like a network, but has no gradients.
    """

    builds_network: ClassVar[bool] = False

    @abstractmethod
    def outputs(self, arrays: Arrays, x: NDArray[np.float32]) -> NDArray[np.float64]:
        """(n, outputs) what a network would return: a logit for each class, or a number.

        Args:
            arrays: the model.
            x: (n, ...) inputs as networks take them.
        """

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A network without weights, as a placeholder."""
        return self.as_network({})

    def as_network(self, arrays: Arrays) -> nn.Module:
        """Arrays as something that is called like a network."""
        return ArraysNetwork(self, arrays)


class ArraysNetwork(nn.Module):
    """Arrays of a model as a network."""

    def __init__(self, section: ArrayModel, arrays: Arrays) -> None:
        super().__init__()
        self.section, self._arrays = section, arrays

    def forward(self, x: Tensor) -> Tensor:
        found = self.section.outputs(self._arrays, x.detach().cpu().numpy())
        return torch.from_numpy(found).to(x)
