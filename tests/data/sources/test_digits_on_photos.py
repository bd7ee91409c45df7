"""The planted data of FedXDS's positive control."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from snippets import ROOT
from torch import nn

from fedsim.data import Dataset
from fedsim.errors import DataError


@pytest.fixture
def photos(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "experiments" / "fedxds")
    return importlib.import_module("photos")


@pytest.fixture
def digits(photos: Any) -> Callable[..., Dataset]:
    def made(**fields: Any) -> Dataset:
        try:
            data: Dataset = photos.digits_on_photos(**fields)
        except DataError as error:
            pytest.skip(str(error))
        return data

    return made


def test_a_digit_lies_somewhere_on_a_photograph(digits: Callable[..., Dataset]) -> None:
    data = digits(samples=60, test_samples=50)
    assert data.x.shape == (60, 3, 32, 32)
    assert data.test_x.shape == (50, 3, 32, 32)
    strokes = data.truth["signal"]
    places = set()
    for image, own in zip(data.test_x, strokes, strict=True):
        rows, columns = np.nonzero(own)
        assert 0 < np.ptp(rows) < 16
        assert np.ptp(columns) < 16
        places.add((rows.min(), columns.min()))
        assert image[:, own].min() > 127
    assert len(places) > 25
    again = digits(samples=60, test_samples=50)
    assert np.array_equal(again.x, data.x)


@pytest.mark.night
def test_the_oracle_keeps_the_strokes(photos: Any, digits: Callable[..., Dataset]) -> None:
    data = digits(samples=10, test_samples=40)
    x = torch.from_numpy(data.test_x).float()
    found = photos.Brightness().relevance(nn.Identity(), x, torch.zeros(40), None).sum(1)
    kept = found >= found.flatten(1).kthvalue(int(0.8 * 1024), dim=1).values[:, None, None]
    strokes = torch.from_numpy(data.truth["signal"])
    assert (kept & strokes).sum() > 0.97 * strokes.sum()


@pytest.mark.night
def test_photographs_follow_the_digit_in_training_alone(digits: Callable[..., Dataset]) -> None:
    """Their mean colour tells: with all of them spurious, a class has the same photographs."""
    alike = digits(samples=400, test_samples=400, spurious=1.0)
    random = digits(samples=400, test_samples=400, spurious=0.0)

    def spread_of_classes(x: Any, y: Any) -> float:
        means = [x[y == c].mean(axis=(0, 2, 3)) for c in range(10)]
        return float(np.std(means, axis=0).mean())

    assert spread_of_classes(alike.x, alike.y) > 1.5 * spread_of_classes(random.x, random.y)
    np.testing.assert_array_equal(alike.test_x, random.test_x)
