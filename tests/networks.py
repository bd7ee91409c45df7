"""Networks that experiments of the tests name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedsim.models import Classifier
from fedsim.models.model import SelfTaught


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


class _LinearLoss(SelfTaught):
    def losses(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.features(x)
        return -self.head(z).gather(1, y[:, None])[:, 0], z


def linear_loss(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A loss that is linear in the weights, so that gradients do not depend on them."""
    return _LinearLoss(nn.Flatten(), nn.Linear(int(torch.Size(shape).numel()), classes))
