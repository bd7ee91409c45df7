"""The variational autoencoder of FedFed."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn


class Autoencoder(nn.Module):
    """A convolutional variational autoencoder of images (C, H, W) with pixels in [0, 1].

    The encoder halves the sides twice, to d = `width` channels; the decoder mirrors it. The latent
    vector, by default as long as the encoder's output, is sampled in training, and is the mean in
    evaluation.
    """

    def __init__(
        self, shape: tuple[int, ...], width: int, latent: int | Literal["auto"] = "auto"
    ) -> None:
        super().__init__()
        channels, H, W = shape
        encoded = (width, H // 4, W // 4)
        length = width * (H // 4) * (W // 4)
        z = length if latent == "auto" else latent
        half = width // 2
        self.encoder = nn.Sequential(
            nn.Conv2d(channels, half, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(half),
            nn.ReLU(),
            nn.Conv2d(half, width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            _Residual(width),
            nn.BatchNorm2d(width),
            _Residual(width),
            nn.Flatten(),
        )
        self.mean, self.log_variance = nn.Linear(length, z), nn.Linear(length, z)
        self.decoder = nn.Sequential(
            nn.Linear(z, length),
            nn.Unflatten(1, encoded),
            _Residual(width),
            nn.BatchNorm2d(width),
            _Residual(width),
            nn.BatchNorm2d(width),
            _doubling(width, half, (H // 2, W // 2)),
            nn.BatchNorm2d(half),
            nn.LeakyReLU(),
            nn.Tanh(),
            _doubling(half, channels, (H, W)),
            nn.BatchNorm2d(channels),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """G(x) (B, C, H, W), and mean and log-variance of the latent vector, (B, z) each."""
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        z = mean
        if self.training:
            z = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        return self.decoder(z), mean, log_variance


class _Residual(nn.Module):
    """A 3×3 and a 1×1 convolution with a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.LeakyReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convolutions(x)


def _doubling(inputs: int, outputs: int, size: tuple[int, int]) -> nn.Module:
    """A transposed convolution to a size from its half, rounded down."""
    odd = (size[0] % 2, size[1] % 2)
    return nn.ConvTranspose2d(
        inputs, outputs, 4, stride=2, padding=1, output_padding=odd, bias=False
    )
