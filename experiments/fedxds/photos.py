"""Planted data for a positive control: small digits anywhere on photographs.

What decides the class covers at most a quarter of an image and stands in another place each time,
so a map of what matters keeps the digit, and a random map keeps a fifth of its strokes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from fedsim.data import Dataset, datasets
from fedsim.explain.explainers.attribution import Attribution
from fedsim.support.rng import keyed_rng

SIDE, DIGIT = 32, 16  # pixels
DARK = 0.6  # brightness of photographs; strokes of digits are white


def digits_on_photos(
    samples: int = 3000, test_samples: int = 2000, spurious: float = 0.9, seed: int = 0
) -> Dataset:
    """MNIST's digits, at a random place of CIFAR-10's photographs.

    Args:
        samples: number of training examples.
        test_samples: number of test examples.
        spurious: probability that a training example's photograph is of the digit's class (0 on
            airplanes, 1 on automobiles, ...); otherwise, and in the test set, of a random one.
        seed: seed of places and photographs.

    Returns:
        x is uint8 (samples, 3, 32, 32). `truth` marks the `signal`: pixels of strokes.
    """
    digits, photos = (datasets.parse({"name": name}).load() for name in ("mnist", "cifar10"))
    shares = {"train": (samples, spurious), "test": (test_samples, 0.0)}
    parts = {}
    for part, (count, share) in shares.items():
        rng = keyed_rng(seed, f"digits on photos {part}")
        of = ("x", "y") if part == "train" else ("test_x", "test_y")
        (x, y), (behind, kind) = ([getattr(d, n) for n in of] for d in (digits, photos))
        rows = rng.choice(len(y), count, replace=False)
        wanted = np.where(rng.random(count) < share, y[rows], rng.integers(10, size=count))
        order = [np.flatnonzero(kind == c) for c in range(10)]
        photo = np.array([rng.choice(order[c]) for c in wanted])
        parts[part] = (*paste(np.asarray(x)[rows], np.asarray(behind)[photo], rng), y[rows])
    (x, _, y), (test_x, strokes, test_y) = parts["train"], parts["test"]
    pixels = x.transpose(1, 0, 2, 3).reshape(3, -1) / 255
    return Dataset(
        *(x, y, test_x, test_y, digits.classes),
        mean=tuple(pixels.mean(axis=1).tolist()),
        std=tuple(pixels.std(axis=1).tolist()),
        truth={"signal": strokes},
    )


def paste(
    digits: NDArray[Any], photos: NDArray[Any], rng: np.random.Generator
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """(n, 3, 32, 32) digits of half their size on darkened photographs, and where strokes are."""
    n = len(digits)
    strokes = np.zeros((n, SIDE, SIDE), np.uint8)
    down, right = rng.integers(SIDE - DIGIT, size=(2, n), endpoint=True)
    for own, digit, i, j in zip(strokes, digits[:, 0], down, right, strict=True):
        own[i : i + DIGIT, j : j + DIGIT] = Image.fromarray(digit).resize((DIGIT, DIGIT))
    pasted = np.maximum((DARK * photos).astype(np.uint8), strokes[:, None])
    return pasted, strokes > 127


class Brightness(Attribution):
    """An oracle for these images: strokes are brighter than any photograph."""

    name: str = f"{__name__}:Brightness"

    def relevance(
        self, network: nn.Module, x: Tensor, y: Tensor, rng: np.random.Generator
    ) -> Tensor:
        # The darkest channel: a photograph's pixel can be bright in one, strokes are in all.
        return x.amin(1, keepdim=True).expand_as(x) / x.shape[1]
