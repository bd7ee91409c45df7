"""Weak and strong augmentation against torch's padding and torchvision's transforms."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from fedsim.data.augment import strong, weak

Augment = Callable[[Tensor, np.random.Generator], Tensor]
BOTH: Sequence[Augment] = (weak, strong)
NAMES = ("brightness", "contrast", "turn", "shear_x", "shear_y", "cutout")


def images(*shape: int) -> Tensor:
    """As normalised images are: of any sign, each channel with a range of its own."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal(shape) * rng.uniform(0.5, 3, (1, shape[1], 1, 1)) + 1
    return torch.tensor(x, dtype=torch.float32)


def stream(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


class Chosen:
    """In a generator's place: no shift, no mirror, and one operation by a given amount.

    Args:
        operation: one of `NAMES`; an image's other one gets the amount 0.
        amount: in [-1, 1].
        centre: of what is cut out, (row, column), in units of half a side.
    """

    def __init__(
        self, operation: str, amount: float, centre: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        self.operation, self.amount, self.centre = NAMES.index(operation), amount, centre

    def integers(self, low: int, high: int, size: Any, endpoint: bool) -> NDArray[np.int64]:
        return np.zeros(size, dtype=np.int64)

    def random(self, size: Any) -> NDArray[np.float64]:
        return np.ones(size)

    def permuted(self, chosen: NDArray[np.bool_], axis: int) -> NDArray[np.bool_]:
        assert axis == 1
        assert (chosen.sum(axis=1) == 2).all()
        found = np.zeros_like(chosen)
        found[:, [self.operation, self.operation - 1]] = True
        return found

    def uniform(self, low: float, high: float, size: tuple[int, int]) -> NDArray[np.float64]:
        if size[1] == 2:
            return np.tile(self.centre, (size[0], 1))
        amounts = np.zeros(size)
        amounts[:, self.operation] = self.amount
        return amounts


def only(x: Tensor, operation: str, amount: float, **centre: Any) -> Tensor:
    return strong(x, Chosen(operation, amount, **centre))  # type: ignore[arg-type]


@pytest.mark.parametrize("augment", BOTH)
@pytest.mark.parametrize("shape", [(12, 1, 8, 8), (12, 3, 32, 32), (12, 3, 16, 24)])
def test_both(augment: Augment, shape: tuple[int, ...]) -> None:
    x = images(*shape)
    given, before = x.clone(), torch.get_rng_state()
    first, again, other = (augment(x, stream(seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)  # nothing is drawn from torch's generator
    assert first.shape == x.shape
    assert first.dtype == x.dtype
    assert first.is_contiguous()
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first, other)
    torch.testing.assert_close(x, given, rtol=0, atol=0)
    # No colour leaves its range, and an image of one colour stays as it is.
    assert (first <= x.amax((2, 3), keepdim=True)).all()
    assert (first >= x.amin((2, 3), keepdim=True)).all()
    assert torch.isfinite(first).all()
    plain = torch.full(shape, -1.5)
    torch.testing.assert_close(augment(plain, stream()), plain, rtol=0, atol=1e-6)
    # Each image has a draw of its own.
    many = x[:1].expand(40, -1, -1, -1)
    assert len({image.numpy().tobytes() for image in augment(many, stream())}) > 5


class TestWeak:
    def shifts(self, image: Tensor, most: int) -> dict[bytes, int]:
        """All shifted images, by what they hold, from torch's own reflection padding."""
        padded = pad(image[None], (most, most, most, most), mode="reflect")[0]
        height, width = image.shape[1:]
        found = {}
        for dy in range(2 * most + 1):
            for dx in range(2 * most + 1):
                cut = padded[:, dy : dy + height, dx : dx + width].contiguous()
                found[cut.numpy().tobytes()] = len(found)
        return found

    @pytest.mark.parametrize(("side", "most"), [(8, 1), (28, 3), (32, 4)])
    def test_grey_images_are_shifted_and_never_mirrored(self, side: int, most: int) -> None:
        image = images(1, 1, side, side)
        known = self.shifts(image[0], most)
        y = weak(image.expand(2000, -1, -1, -1), stream())
        seen = np.bincount([known[shifted.numpy().tobytes()] for shifted in y])
        assert len(seen) == len(known) == (2 * most + 1) ** 2
        expected = 2000 / len(known)
        assert (np.abs(seen - expected) < 5 * np.sqrt(expected)).all()

    def test_colour_images_are_mirrored_half_of_the_time(self) -> None:
        image = images(1, 3, 8, 8)
        plain = self.shifts(image[0], 1)
        mirrored = self.shifts(image[0].flip(-1), 1)
        y = [one.numpy().tobytes() for one in weak(image.expand(2000, -1, -1, -1), stream())]
        assert all(one in plain or one in mirrored for one in y)
        assert np.mean([one in mirrored for one in y]) == pytest.approx(0.5, abs=0.05)
        assert len(set(y)) == 18

    def test_images_too_small_to_shift(self) -> None:
        x = images(10, 1, 6, 5)
        torch.testing.assert_close(weak(x, stream()), x, rtol=0, atol=0)

    def test_no_image(self) -> None:
        assert weak(images(1, 1, 8, 8)[:0], stream()).shape == (0, 1, 8, 8)


class TestStrong:
    @pytest.mark.parametrize("name", NAMES)
    def test_an_amount_of_nothing_changes_nothing(self, name: str) -> None:
        x = images(5, 3, 16, 12)
        torch.testing.assert_close(only(x, name, 0.0), x, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("amount", [-1.0, -0.4, 0.7])
    def test_brightness_and_contrast(self, amount: float) -> None:
        """As torchvision has them, for images in [0, 1] that reach both ends."""
        functional = importlib.import_module("torchvision.transforms.v2.functional")
        x = images(5, 1, 16, 16)
        low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
        x = (x - low) / (high - low)
        factor = 1 + 0.9 * amount
        expected = functional.adjust_brightness(x, factor)
        torch.testing.assert_close(only(x, "brightness", amount), expected, rtol=0, atol=1e-5)
        expected = torch.stack([functional.adjust_contrast(image, factor) for image in x])
        torch.testing.assert_close(only(x, "contrast", amount), expected, rtol=0, atol=1e-5)

    def test_normalisation_does_not_matter(self) -> None:
        x = images(5, 3, 16, 16)
        for name in NAMES:
            moved = only(3 * x - 7, name, 0.8)
            torch.testing.assert_close(moved, 3 * only(x, name, 0.8) - 7, rtol=0, atol=1e-4)

    @pytest.mark.parametrize("shape", [(3, 1, 28, 28), (3, 3, 20, 28)])
    @pytest.mark.parametrize("amount", [-1.0, 0.6])
    def test_turns_and_shears_are_torchvisions(
        self, shape: tuple[int, ...], amount: float
    ) -> None:
        functional = importlib.import_module("torchvision.transforms.v2.functional")
        x = images(*shape)
        inside = slice(8, -8)  # where nothing is moved in

        def affine(angle: float, shear: Sequence[float]) -> Tensor:
            bilinear = functional.InterpolationMode.BILINEAR
            moved: Tensor = functional.affine(x, angle, [0, 0], 1.0, list(shear), bilinear)
            return moved[..., inside, inside]

        turned = only(x, "turn", amount)[..., inside, inside]
        torch.testing.assert_close(turned, affine(-30 * amount, (0, 0)), rtol=0, atol=1e-4)
        angle = float(np.degrees(np.arctan(0.3 * amount)))
        sheared = only(x, "shear_x", amount)[..., inside, inside]
        torch.testing.assert_close(sheared, affine(0, (angle, 0)), rtol=0, atol=1e-4)

    def test_the_second_shear_is_the_first_of_the_transposed_image(self) -> None:
        x = images(4, 1, 20, 12)
        expected = only(x.transpose(2, 3), "shear_x", 0.7).transpose(2, 3)
        torch.testing.assert_close(only(x, "shear_y", 0.7), expected, rtol=0, atol=1e-5)

    def test_cutout(self) -> None:
        x = images(4, 3, 16, 16)
        y = only(x, "cutout", -0.5, centre=(0.5, -0.5))
        expected = x.clone()  # a square of a quarter of the side, round row 12 and column 4
        expected[..., 10:14, 2:6] = x.mean((2, 3), keepdim=True)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-5)

    def test_each_image_gets_two_operations(self) -> None:
        """Two of six leave the geometry alone in 3 of 15 cases: then no new colour is mixed."""
        x = (images(1, 1, 16, 16) > 1).float().expand(3000, -1, -1, -1)
        y = (strong(x, stream()) * 1e4).round()
        colours = np.array([len(image.unique()) for image in y])
        assert np.mean(colours <= 3) == pytest.approx(3 / 15, abs=0.04)
        # Both brightness and contrast, or one of them and a cut: 1 and 2 of these 3.
        cut = np.mean(colours[colours <= 3] == 3)
        assert 0.5 < cut < 0.7
