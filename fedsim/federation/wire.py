"""The size of messages: bytes as the paper's system would send them.

Arrays count by their type: 4 bytes per float32, 1 per uint8 (images, labels of up to 256 classes),
one bit per boolean. Single numbers (a round, a sample count) are not counted. An argument that a
real system would not send is wrapped in `NotCounted`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

# Columns of records with what a protocol, such as that of secure aggregation, adds to others.
PROTOCOL = {
    name: f"protocol_{name}"
    for name in (
        f"{kind}_{way}" for kind in ("bytes", "one_off", "total_bytes") for way in ("up", "down")
    )
}
PROTOCOL_COLUMNS = frozenset({*PROTOCOL.values(), "protocol_rounds", "protocol_dropped"})

WAYS: tuple[Literal["down", "up"], ...] = ("down", "up")

_PART = 1 << 14  # entries that are compared at a time


@dataclass(frozen=True)
class NotCounted:
    """Wraps an argument that the simulation passes on but a real system would not send.

    Args:
        value: the argument.
    """

    value: Any


@dataclass(frozen=True)
class PerClient:
    """An argument of which each client gets its own part, or None if it has none.

    Args:
        parts: by client.
    """

    parts: Mapping[int, Any]


def nbytes(message: Any) -> int:
    """Bytes of a message: an array, a tensor, or nested dicts, lists and tuples of them."""
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


def sent_to_all(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that all clients receive, by name."""
    return {
        name: a.value if isinstance(a, NotCounted) else a
        for name, a in arguments.items()
        if not isinstance(a, PerClient)
    }


def each_leaf(tree: Any, change: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """Apply a function to each leaf of nested dicts, lists and tuples, which are copied."""
    if isinstance(tree, Mapping):
        return {key: each_leaf(value, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(each_leaf(value, change) for value in tree)
    return change(tree)


def to_arrays(tree: Any) -> Any:
    """Copy nested tensors to NumPy arrays in main memory.

    A copy, because a tensor may be a view of weights that change later.
    """
    return each_leaf(as_arrays(tree), lambda a: a.copy() if isinstance(a, np.ndarray) else a)


def as_arrays(tree: Any) -> Any:
    """Nested tensors as NumPy arrays, which share memory with tensors in main memory."""
    return each_leaf(
        tree, lambda t: t.detach().cpu().numpy() if isinstance(t, torch.Tensor) else t
    )


def same(a: Any, b: Any) -> bool:
    """Whether nested arrays and scalars are the same, to the bit."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and _same_bytes(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    # repr tells 0.0 from -0.0.
    return a is b or (type(a) is type(b) and repr(a) == repr(b))


def _same_bytes(a: NDArray[Any], b: NDArray[Any]) -> bool:
    if a.dtype.kind not in "biufc":
        return a.tobytes() == b.tobytes()
    # As integers, because NaN is not equal to itself.
    integer = f"i{min(a.dtype.itemsize, 8)}"
    a, b = a.reshape(-1).view(integer), b.reshape(-1).view(integer)
    parts = (slice(start, start + _PART) for start in range(0, len(a), _PART))
    return all(np.array_equal(a[part], b[part]) for part in parts)


def to_tensors(tree: Any, device: torch.device) -> Any:
    """Copy nested arrays and tensors, which may be shared, to tensors on a device."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().to(device, copy=True)
        return torch.tensor(leaf, device=device) if isinstance(leaf, np.ndarray) else leaf

    return each_leaf(tree, copied)


def freeze(tree: Any) -> None:
    """Make arrays read-only: a state must not change after it was sent to clients."""
    if isinstance(tree, np.ndarray):
        tree.flags.writeable = False
    elif isinstance(tree, NotCounted):
        freeze(tree.value)
    elif isinstance(tree, PerClient):
        freeze(tree.parts)
    elif isinstance(tree, Mapping):
        for part in tree.values():
            freeze(part)
    elif isinstance(tree, list | tuple):
        for part in tree:
            freeze(part)
