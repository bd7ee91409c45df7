"""Built-in networks."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from fedsim.models.model import Model, classifier, image_shape, models, representation_size

Width = Annotated[int, Field(ge=1)]


@models.register
class Mlp(Model):
    """Fully connected layers with ReLU between them.

    Args:
        hidden: width of each layer except the last.
        projection: size of MOON's projection head, between the features and the last layer.
    """

    name: str = "mlp"
    hidden: tuple[Width, ...] = (200, 200)
    projection: Width | None = None

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        sizes = (math.prod(shape), *self.hidden)
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return classifier(nn.Sequential(*layers), sizes[-1], outputs, self.projection)


@models.register
class Cnn(Model):
    """Two 5×5 convolutions, each with ReLU and 2×2 max pooling, and a linear layer.

    18,378 parameters for 28×28 grey images and ten classes.

    Args:
        channels: output channels of the two convolutions.
        padding: `auto` is no padding, as is usual for images of 28 pixels and more, and 2 (same
            size) below 16 pixels, where nothing would be left after two unpadded convolutions.
        projection: size of MOON's projection head, between the features and the last layer.
    """

    name: str = "cnn"
    channels: tuple[Width, Width] = (16, 32)
    projection: Width | None = None
    padding: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        inputs, height, width = image_shape(self.name, shape, smallest=4)
        first, second = self.channels
        padding = self.padding
        if padding == "auto":
            padding = 2 if min(height, width) < 16 else 0
        image_shape(self.name, shape, smallest=4 if padding >= 2 else 16 - 6 * padding)
        features = nn.Sequential(
            nn.Conv2d(inputs, first, 5, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 5, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        return classifier(features, representation_size(features, shape), outputs, self.projection)


@models.register
class XpflStudent(Cnn):
    """The CNN of XPFL's clients: `cnn` with 32 channels twice (31,594 parameters on MNIST)."""

    niche: ClassVar[bool] = True
    name: str = "xpfl_student"
    channels: tuple[Width, Width] = (32, 32)


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with batch norm and a skip connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out)) + self.shortcut(x)
        return self.relu(out)


@models.register
class ResNet8(Model):
    """Four residual blocks with w, 2w, 4w and 8w channels (FedXDS, FedAUX).

    4,903,242 parameters for colour images, ten classes and w = 64.

    Args:
        width: w, channels of the first convolution and block.
        projection: size of MOON's projection head, between the features and the last layer.
    """

    name: str = "resnet8"
    width: int = Field(64, ge=1)
    projection: Width | None = None

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        inputs, _, _ = image_shape(self.name, shape, smallest=8)
        w = self.width
        features = nn.Sequential(
            nn.Conv2d(inputs, w, 3, padding=1, bias=False),
            nn.BatchNorm2d(w),
            nn.ReLU(),
            ResidualBlock(w, w, stride=1),
            ResidualBlock(w, 2 * w, stride=2),
            ResidualBlock(2 * w, 4 * w, stride=2),
            ResidualBlock(4 * w, 8 * w, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        return classifier(features, 8 * w, outputs, self.projection)
