"""The convolutional autoencoder of XPFL (arXiv 2410.08634) and its code, for comparison."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d

from fedsim.errors import ExperimentError

SMALLEST = 16  # pixels a side, reduced to one by two convolutions and poolings


class ConvolutionalAutoencoder(nn.Module):
    """The autoencoder that XPFL compares with: the student's encoder, mirrored by a decoder.

    Two 5×5 convolutions to 32 channels, each with ReLU and 2×2 max pooling, and no padding; then
    twice unpooling, to the positions of the maxima, and a transposed 5×5 convolution. 52,897
    parameters for one channel, 56,099 for three.

    As in the released code, the last layer is tanh, which ends at ±1, whereas normalised pixels go
    further (on MNIST to 2.8). Its range is therefore mapped to that of the pixels: low + (high −
    low)·(1 + tanh)/2.

    Args:
        shape: (C, H, W) of an image, of 16 pixels a side or more.
        low, high: the range of normalised pixels: numbers, or (C, 1, 1) if channels were
            normalised differently. Pixels in [0, 1] normalised by mean and standard deviation lie
            in [−mean/std, (1 − mean)/std].

    Raises:
        ExperimentError: the inputs are not images of this size, or the range is empty.
    """

    low: Tensor
    high: Tensor

    def __init__(self, shape: tuple[int, ...], low: float | Tensor, high: float | Tensor) -> None:
        super().__init__()
        if len(shape) != 3 or min(shape[1:]) < SMALLEST:
            raise ExperimentError(
                f"shape={shape}: must be (C, H, W) of images of {SMALLEST} pixels a side or "
                "more, the minimum for two 5×5 convolutions and poolings"
            )
        # Not saved, so that they are no part of the weights.
        dtype = torch.get_default_dtype()
        self.register_buffer("low", torch.as_tensor(low, dtype=dtype), persistent=False)
        self.register_buffer("high", torch.as_tensor(high, dtype=dtype), persistent=False)
        if not bool((self.low < self.high).all()):
            raise ExperimentError(f"low={low}, high={high}: low must be less than high")
        C = shape[0]
        self.conv1 = nn.Conv2d(C, 32, 5)
        self.conv2 = nn.Conv2d(32, 32, 5)
        self.back2 = nn.ConvTranspose2d(32, 32, 5)
        self.back1 = nn.ConvTranspose2d(32, C, 5)

    def reconstruct(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, C, H, W)."""
        first = self.conv1(x).relu()
        h, places1 = max_pool2d(first, 2, return_indices=True)
        second = self.conv2(h).relu()
        h, places2 = max_pool2d(second, 2, return_indices=True)
        h = self.back2(_unpool(h, places2, second)).relu()
        h = self.back1(_unpool(h, places1, first)).tanh()
        pixels: Tensor = self.low + (self.high - self.low) * (1 + h) / 2
        return pixels

    def loss(self, x: Tensor) -> Tensor:
        """(B,) mean absolute error of the pixels of images (B, C, H, W)."""
        return (self.reconstruct(x) - x).abs().mean(dim=(1, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """`reconstruct`."""
        return self.reconstruct(x)


def _unpool(h: Tensor, places: Tensor, before: Tensor) -> Tensor:
    """A tensor of `before`'s shape, with h at the positions of the maxima and 0 elsewhere.

    torch's own unpooling is not allowed with deterministic algorithms, because positions might
    occur twice; without overlapping pools, they do not.
    """
    flat = torch.zeros_like(before).flatten(2)
    return flat.scatter(2, places.flatten(2), h.flatten(2)).view_as(before)
