"""Attacks that poison training examples."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt

from fedsim.conditions.adversaries.attack import Attack, attacks
from fedsim.data import Dataset
from fedsim.data.sources.shortcut import patched
from fedsim.errors import DataError
from fedsim.objectives import Metric


def _check_classes(name: str, data: Dataset) -> None:
    if not data.classes or data.y.ndim != 1:
        raise DataError(
            f"adversaries.attack.name={name}: needs a class for each example, and the target "
            "here is a number"
        )


@attacks.register
class LabelFlip(Attack):
    """Adversaries train on wrong labels: class c of C becomes C − 1 − c.

    Source:
        Fang et al., Local Model Poisoning Attacks to Byzantine-Robust Federated Learning (USENIX
        Security 2020), section 5.1.
    """

    name: str = "label_flip"

    def check(self, data: Dataset) -> None:
        _check_classes(self.name, data)

    def poison(
        self, data: Dataset, rows: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        return data.x[rows], len(data.classes) - 1 - data.y[rows]


@attacks.register
class Backdoor(Attack):
    """Adversaries teach the model to take images with a bright patch for a class.

    They paint the patch over some of their training images and label these with the target class.
    It is the patch of that class in `data.name=shortcut`: a square at the edge of the image. The
    column `backdoor_success` is the share of the test images of other classes that the global
    model takes for the target class, once the patch is painted over them.

    Args:
        target: index of the target class.
        fraction: share of an adversary's training images with the patch; at least one has it.
        size: side of the patch in pixels; by default an eighth of the image.

    Source:
        Gu et al., BadNets: Evaluating Backdooring Attacks on Deep Neural Networks (IEEE Access
        2019); Bagdasaryan et al., How To Backdoor Federated Learning (AISTATS 2020), without the
        scaling of updates.
    """

    name: str = "backdoor"
    target: NonNegativeInt = 0
    fraction: float = Field(0.5, gt=0, le=1)
    size: PositiveInt | None = None
    success: ClassVar[Metric | None] = Metric(
        "backdoor_success", "success of the backdoor", best="min"
    )

    def check(self, data: Dataset) -> None:
        if len(data.shape) != 3:
            what = "documents" if data.words else f"inputs of shape {data.shape}"
            raise DataError(
                f"adversaries.attack.name={self.name}: paints a patch over images, and these are "
                f"{what}"
            )
        _check_classes(self.name, data)
        C, side = len(data.classes), min(data.shape[1:])
        if self.target >= C:
            raise DataError(
                f"adversaries.attack.target={self.target}: there are {C} classes, 0 to {C - 1}"
            )
        if (data.test_y == self.target).all():
            raise DataError(
                f"adversaries.attack.target={self.target}: all test examples are of that class"
            )
        if self.size is not None and self.size > side:
            raise DataError(
                f"adversaries.attack.size={self.size}: the patch is larger than images of "
                f"{data.shape[1]}×{data.shape[2]}"
            )

    def poison(
        self, data: Dataset, rows: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        x, y = np.array(data.x[rows]), np.array(data.y[rows])
        count = min(len(rows), max(1, round(self.fraction * len(rows))))
        chosen = np.sort(rng.permutation(len(rows))[:count])
        x[chosen] = patched(data, x[chosen], self.target, self.size)
        y[chosen] = self.target
        return x, y

    def triggered(self, data: Dataset, part: slice) -> tuple[NDArray[Any], NDArray[np.int64]]:
        others = data.test_y[part] != self.target
        x = np.asarray(data.test_x[part])[others]
        return patched(data, x, self.target, self.size), np.full(len(x), self.target)
