"""What messages cost: bytes as the paper's system would send them.

Arrays count by their type: 4 bytes a float32 entry, 1 a byte (images, labels of up to 256 classes
kept as uint8), one bit a boolean. Numbers that ride along (a round, a sample count) are not
counted, and neither is an argument that a real system would not send: wrap it in `NotCounted`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_PART = 1 << 14  # entries that are compared at a time


@dataclass(frozen=True)
class NotCounted:
    """An argument that the simulation passes along and a real system would not send."""

    value: Any


@dataclass(frozen=True)
class PerClient:
    """An argument of which each client is sent its own part, or None if there is none for it.

    Args:
        parts: by client.
    """

    parts: Mapping[int, Any]


def nbytes(message: Any) -> int:
    """Bytes of a message: an array, a tensor, or a nest of dicts, lists and tuples of them."""
    if isinstance(message, np.ndarray):
        return -(-message.size // 8) if message.dtype == np.bool_ else message.nbytes
    if isinstance(message, torch.Tensor):
        bits = message.dtype == torch.bool
        return -(-message.numel() // 8) if bits else message.numel() * message.element_size()
    if isinstance(message, Mapping):
        return sum(nbytes(part) for part in message.values())
    if isinstance(message, list | tuple):
        return sum(nbytes(part) for part in message)
    return 0


def to_arrays(tree: Any) -> Any:
    """A nest of tensors as a nest of NumPy arrays in main memory, as it travels."""
    if isinstance(tree, np.ndarray):
        return tree.copy()
    if isinstance(tree, torch.Tensor):
        # A copy, because a tensor may be a view of weights that train on.
        return tree.detach().cpu().numpy().copy()
    if isinstance(tree, Mapping):
        return {key: to_arrays(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(to_arrays(value) for value in tree)
    return tree


def as_arrays(tree: Any) -> Any:
    """A nest of tensors in main memory as a nest of the arrays behind them."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().numpy()
    if isinstance(tree, Mapping):
        return {key: as_arrays(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(as_arrays(value) for value in tree)
    return tree


def same(a: Any, b: Any) -> bool:
    """Whether two nests of arrays and scalars are the same, to the bit."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and _same_bytes(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    # Words tell 0.0 from -0.0.
    return a is b or (type(a) is type(b) and repr(a) == repr(b))


def _same_bytes(a: NDArray[Any], b: NDArray[Any]) -> bool:
    if a.dtype.kind not in "biufc":
        return a.tobytes() == b.tobytes()
    # As integers, for not-a-number is not equal to itself. What has changed has usually changed
    # everywhere, so that the first part tells.
    integer = f"i{min(a.dtype.itemsize, 8)}"
    a, b = a.reshape(-1).view(integer), b.reshape(-1).view(integer)
    if not np.array_equal(a[:64], b[:64]):
        return False
    parts = (slice(start, start + _PART) for start in range(0, len(a), _PART))
    return all(np.array_equal(a[part], b[part]) for part in parts)


def to_tensors(tree: Any, device: torch.device) -> Any:
    """A nest of arrays and tensors as tensors on a device, copied: they may be shared."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().to(device, copy=True)
    if isinstance(tree, np.ndarray):
        return torch.tensor(tree, device=device)
    if isinstance(tree, Mapping):
        return {key: to_tensors(value, device) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(to_tensors(value, device) for value in tree)
    return tree
