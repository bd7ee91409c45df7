"""A user's model that needs torchvision."""

from __future__ import annotations

import torchvision
from torch import nn

from fedsim.models import Classifier


def resized(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A linear model of smaller images."""
    smaller = nn.Sequential(torchvision.transforms.Resize(4), nn.Flatten())
    return Classifier(smaller, nn.Linear(shape[0] * 16, classes))
