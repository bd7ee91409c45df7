"""Conversion between normalised images, as the network takes them, and pixels."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from fedsim.federation import Federation, Vector


def pixel_range(fed: Federation) -> Vector:
    """(2, C, 1, 1) normalised values of pixels 0 and 1."""
    edges = np.zeros((2, fed.server.shape[0], 1, 1), dtype=np.float32)
    edges[1] = 1
    return np.array(fed.server.prepare(edges, np.zeros(2, dtype=np.int64)).x.cpu())


def to_pixels(x: Tensor, pixels: Tensor) -> Tensor:
    """Images with pixels in [0, 1], from the network's inputs."""
    return (x - pixels[0]) / (pixels[1] - pixels[0])


def to_network(x: Tensor, pixels: Tensor) -> Tensor:
    """The network's inputs, from images with pixels in [0, 1] or parts of them."""
    return x * (pixels[1] - pixels[0]) + pixels[0]
