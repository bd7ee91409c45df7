"""Methods whose clients share images once, and their interface for explanations and audits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.explain.explainer import SharedItems
from fedsim.federation import Client, Federation, Vector, client_function
from fedsim.methods.method import Method, State

S = TypeVar("S", bound=State)


class PoolMethod(Method[S]):
    """A method whose clients share items once; from then on all clients train with the pool.

    Attributes:
        pooled: the fields of the state that hold the pool, and the names of what clients share.
    """

    pooled: ClassVar[tuple[str, ...]]

    @abstractmethod
    def share(self, client: Client, **arguments: Any) -> Mapping[str, Any]:
        """(client) Its items and their labels, by name."""

    @client_function("receive")
    def receive(self, client: Client, **pool: Tensor) -> None:
        """(client) Takes the pool. The simulation passes it again in each round."""

    def share_all(
        self, fed: Federation, state: S, **arguments: Any
    ) -> tuple[dict[str, NDArray[Any]], dict[int, Any]]:
        """Every client's items, pooled in the order of clients and sent to every client.

        Returns:
            The pool by name, and what each client shared.
        """
        everyone = np.arange(fed.num_clients)
        with fed.setup_traffic():
            sent = fed.gather(self.share, everyone, **arguments)
            pool = {
                name: np.concatenate([getattr(state, name), *(own[name] for own in sent.values())])
                for name in self.pooled
            }
            fed.each(self.receive, everyone, **pool)
        return pool, sent

    def has_shared(self, state: Any) -> bool:
        """Whether the pool is not empty; see `SharesImages`."""
        return len(state.labels) > 0


def label_type(num_classes: int) -> np.dtype[Any]:
    """The type of labels that are sent: a byte for up to 256 classes."""
    return np.min_scalar_type(num_classes - 1)


def noise_like(x: Tensor, rng: np.random.Generator) -> Tensor:
    """N(0, 1) in the shape of images."""
    return torch.from_numpy(rng.standard_normal(x.shape, dtype=np.float32)).to(x.device)


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


@runtime_checkable
class ShowsShared(Protocol):
    """A method that can show after a run what its clients shared."""

    def shared_items(self, fed: Federation, state: Any, clients: Sequence[int]) -> SharedItems:
        """Recompute what these clients shared.

        Rows of explanations.parquet (`client`, `class`, `images`) say how much each client shared.

        Raises:
            BadInput: nothing was shared.
        """


@runtime_checkable
class SharesImages(Protocol):
    """A method whose clients share images derived from theirs, which an audit tries to invert."""

    def has_shared(self, state: Any) -> bool:
        """Whether the run has shared any."""

    def shared_pairs(
        self, fed: Federation, state: Any, client: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A client's images and what it shared of them, (n, C, H, W) in pixels; (n,) labels."""

    def obscured(
        self, fed: Federation, state: Any, x: Tensor, y: Tensor, rng: np.random.Generator
    ) -> Tensor:
        """(n, C, H, W) what clients would share, in pixels, of network inputs x with labels y."""
