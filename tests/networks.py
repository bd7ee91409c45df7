"""Networks that experiments of the tests name."""

from __future__ import annotations

from torch import nn

from fedsim.models import Classifier


def regularised(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Dropout of both kinds and group norm, on images of 8 pixels a side."""
    features = nn.Sequential(
        nn.Conv2d(shape[0], 8, 3),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Dropout2d(0.2),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
    )
    return Classifier(features, nn.Linear(72, classes))
