"""Images as the network takes them, normalised, and as pixels; `Federation.pixels` says how."""

from __future__ import annotations

from torch import Tensor


def to_pixels(x: Tensor, pixels: Tensor) -> Tensor:
    """Images with pixels in [0, 1], from the network's inputs."""
    return (x - pixels[0]) / (pixels[1] - pixels[0])


def to_network(x: Tensor, pixels: Tensor) -> Tensor:
    """The network's inputs, from images with pixels in [0, 1] or parts of them."""
    return x * (pixels[1] - pixels[0]) + pixels[0]
