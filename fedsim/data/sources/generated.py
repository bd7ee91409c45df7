"""Data sets that need no file: scikit-learn's digits, and synthetic ones."""

from __future__ import annotations

import math
import string
from dataclasses import replace
from functools import cache
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveInt

from fedsim.config.pretrained import PACKAGE, folder_of
from fedsim.data.dataset import Dataset, TestFraction, of_parts
from fedsim.data.encoding import Scaling
from fedsim.data.source import Source, check_memory, datasets
from fedsim.support.rng import keyed_rng

SIDE = 16  # pixels, of images of shapes


@datasets.register
class Digits(Source):
    """Handwritten digits, 8×8 grey pixels, 1,797 in all; included in scikit-learn, needs no file.

    Args:
        test_fraction: share of the examples in the test set.
    """

    name: str = "digits"
    test_fraction: TestFraction = 0.2

    def load(self) -> Dataset:
        """x is float32 (N, 1, 8, 8) in [0, 1]: the embedded values 0 to 16, divided by 16."""
        rows = _digits()
        scaling = Scaling(span=16.0)
        x = scaling(rows[:, :-1].reshape(-1, 1, 8, 8)).astype(np.float32)
        y = rows[:, -1].astype(np.int64)
        data = of_parts((x, y), None, tuple(string.digits), self.test_fraction, self.name)
        return replace(data, scaling=scaling)


@cache
def _digits() -> NDArray[np.float64]:
    """(1797, 65) the pixels and the label of each digit, read once."""
    # Not by load_digits, which takes more than a second to import.
    folder = folder_of("data.name", f"{PACKAGE}sklearn/datasets/data")
    rows = np.loadtxt(folder / "digits.csv.gz", delimiter=",")
    rows.flags.writeable = False
    return rows


@datasets.register
class Synthetic(Source):
    """Gaussian clusters, one per class, generated at load time in any size; needs no file.

    An example of class c is m_c + noise·ε, with the centre m_c and ε drawn from the standard
    normal distribution in each dimension. Classes are balanced to within one example.

    Args:
        samples: number of training examples.
        test_samples: number of test examples.
        shape: shape of one example.
        classes: number of classes.
        noise: standard deviation within a class; that of the centres is 1.
        seed: seed of the generated data, independent of the experiment's seed.
    """

    name: str = "synthetic"
    samples: PositiveInt = 1000
    test_samples: PositiveInt = 200
    shape: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (16,)
    classes: int = Field(10, ge=2)
    noise: NonNegativeFloat = 1.0
    seed: int = 0

    def load(self) -> Dataset:
        """x is float32 (samples, *shape)."""
        examples = self.samples + self.test_samples
        # Two arrays of each example's shape at once, and its label.
        check_memory(self, (examples + self.classes) * (8 * math.prod(self.shape) + 16))
        centres = keyed_rng(self.seed, "synthetic centres").standard_normal(
            (self.classes, *self.shape), dtype=np.float32
        )
        x, y = self._draw(centres, self.samples, "synthetic train")
        test_x, test_y = self._draw(centres, self.test_samples, "synthetic test")
        return Dataset(x, y, test_x, test_y, tuple(str(c) for c in range(self.classes)))

    def _draw(
        self, centres: NDArray[np.float32], count: int, purpose: str
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        stream = keyed_rng(self.seed, purpose)
        y = stream.permutation(np.arange(count) % self.classes)
        x = stream.standard_normal((count, *self.shape), dtype=np.float32)
        x *= self.noise
        x += centres[y]
        return x, y


@datasets.register
class Shapes(Source):
    """Images of shapes whose label follows from named concepts, generated at load time.

    Grey images of 16×16 pixels. Half of them have a `square` of 4×4 pixels, half a `ring` around
    4×4, half a `stripe` across the image and half a `frame` at its edge, each independently, the
    first three at random places; the background's `brightness` is uniform in [0, 1]. An example is
    of class `yes` if square + ring − stripe + 2·brightness > 1.25, whatever the frame, which is
    the case of 59 %. Shapes are 0.5 brighter than what is below them, and the background
    0.5·brightness.

    Args:
        samples: number of training examples.
        test_samples: number of test examples.
        noise: standard deviation of each pixel's normal noise.
        seed: seed of the generated data, independent of the experiment's seed.
    """

    name: str = "shapes"
    samples: PositiveInt = 2000
    test_samples: PositiveInt = 500
    noise: NonNegativeFloat = 0.2
    seed: int = 0

    def load(self) -> Dataset:
        """x is float32 (samples, 1, 16, 16)."""
        check_memory(self, (self.samples + self.test_samples) * 3 * 4 * SIDE**2)
        x, columns = self._draw(self.samples, "shapes train")
        test_x, test_columns = self._draw(self.test_samples, "shapes test")
        y, test_y = (
            c["square"] + c["ring"] - c["stripe"] + 2 * c["brightness"] > 1.25
            for c in (columns, test_columns)
        )
        return Dataset(
            *(x, y.astype(np.int64), test_x, test_y.astype(np.int64), ("no", "yes")),
            columns=dict(columns),
            test_columns=dict(test_columns),
            concepts=tuple(columns),
        )

    def _draw(
        self, count: int, purpose: str
    ) -> tuple[NDArray[np.float32], dict[str, NDArray[np.float64]]]:
        stream = keyed_rng(self.seed, purpose)
        there = {s: stream.random(count) < 0.5 for s in ("square", "ring", "stripe", "frame")}
        brightness = stream.random(count)
        x = np.full((count, 1, SIDE, SIDE), 0.5) * brightness[:, None, None, None]
        places = stream.integers(1, SIDE - 6, (count, 5))
        for k, (image, (i, j, a, b, row)) in enumerate(zip(x[:, 0], places, strict=True)):
            if there["square"][k]:
                image[i : i + 4, j : j + 4] += 0.5
            if there["ring"][k]:
                image[a : a + 6, b : b + 6] += 0.5
                image[a + 1 : a + 5, b + 1 : b + 5] -= 0.5
            if there["stripe"][k]:
                image[row + 2] += 0.5
            if there["frame"][k]:
                image += 0.5
                image[1:-1, 1:-1] -= 0.5
        x += self.noise * stream.standard_normal(x.shape)
        columns = {name: own.astype(np.float64) for name, own in there.items()}
        return x.astype(np.float32), columns | {"brightness": brightness}


@datasets.register
class Friedman(Source):
    """Friedman's first regression problem, generated at load time in any size; needs no file.

    Inputs are uniform in [0, 1]; y = 10·sin(π·x1·x2) + 20·(x3 - 0.5)² + 10·x4 + 5·x5 + noise·ε,
    with ε standard normal; further inputs have no effect (Friedman, Multivariate Adaptive
    Regression Splines, Annals of Statistics 1991). The target is divided by 30, so that without
    noise it lies in [0, 1].

    Args:
        samples: number of training examples.
        test_samples: number of test examples.
        features: number of inputs, at least five.
        noise: standard deviation of the noise, on the scale of the formula.
        seed: seed of the generated data, independent of the experiment's seed.
    """

    name: str = "friedman"
    samples: PositiveInt = 1000
    test_samples: PositiveInt = 200
    features: int = Field(10, ge=5)
    noise: NonNegativeFloat = 1.0
    seed: int = 0

    def load(self) -> Dataset:
        """x is float64 (samples, features), y float64 (samples,)."""
        check_memory(self, (self.samples + self.test_samples) * (8 * self.features + 24))
        x, y = self._draw(self.samples, "friedman train")
        test_x, test_y = self._draw(self.test_samples, "friedman test")
        return Dataset(x, y, test_x, test_y, classes=())

    def _draw(self, count: int, purpose: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        stream = keyed_rng(self.seed, purpose)
        x = stream.random((count, self.features))
        y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
        y += 10 * x[:, 3] + 5 * x[:, 4] + self.noise * stream.standard_normal(count)
        return x, y / 30
