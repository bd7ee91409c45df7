"""Random streams keyed by what they are for, never by process or order.

A stream is named by (seed, purpose, round, client). Two processes that ask for the same stream
draw the same numbers; streams with different names are independent. There is no global generator,
so nothing that the cluster does (which actor, which order, which retry) can change a draw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray


def stream_key(seed: int, purpose: str, round: int = -1, client: int = -1) -> bytes:
    """16 bytes that name a stream."""
    name = f"fedsim/{seed}/{purpose}/{round}/{client}".encode()
    return hashlib.blake2b(name, digest_size=16).digest()


class _Key(ISeedSequence):
    """Philox's key as its seed: `Philox(key=...)` also asks the system for a random seed."""

    def __init__(self, key: bytes) -> None:
        self.key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[np.uint64]:
        """The key, which is two words of 64 bits."""
        return np.frombuffer(self.key, "<u8")


def _generator(key: bytes) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(_Key(key)))  # type: ignore[arg-type]


def keyed_rng(seed: int, purpose: str, round: int = -1, client: int = -1) -> np.random.Generator:
    """A NumPy generator for one purpose; -1 stands for "no round" and "no client"."""
    return _generator(stream_key(seed, purpose, round, client))


def input_rngs(rng: np.random.Generator, x: torch.Tensor) -> list[np.random.Generator]:
    """A stream for each input of x (n, ...), keyed by its content and a draw from `rng`.

    Thus what is drawn for an input does not depend on its place, nor on other inputs.
    """
    base = rng.bytes(16)
    keys = (hashlib.blake2b(row.tobytes(), key=base, digest_size=16) for row in x.cpu().numpy())
    return [_generator(key.digest()) for key in keys]


def draw_clients(rng: np.random.Generator, count: int, share: float) -> NDArray[np.int64]:
    """A share of `count` clients, in ascending order; one at least, unless it is 0."""
    size = max(round(share * count), int(share > 0))
    return np.sort(rng.permutation(count)[:size])


def torch_seed(seed: int, purpose: str, round: int = -1, client: int = -1) -> int:
    """A 63-bit seed for a torch generator of one purpose."""
    return int.from_bytes(stream_key(seed, purpose, round, client)[:8], "little") >> 1


@contextmanager
def keyed_torch_rng(
    seed: int, purpose: str, round: int = -1, client: int = -1, device: torch.device | None = None
) -> Iterator[None]:
    """Run a block with torch's own generator at a keyed point, and put it back afterwards.

    For what draws from that generator and takes no other: weight initialisation, dropout, and
    whatever a client function does.
    """
    # Not torch.manual_seed and fork_rng: they look after every kind of device there might be, and
    # note down the call stack for each that is not there.
    key = torch_seed(seed, purpose, round, client)
    cuda = device if device is not None and device.type == "cuda" else None
    before = torch.get_rng_state()
    cuda_before = None if cuda is None else torch.cuda.get_rng_state(cuda)
    try:
        torch.default_generator.manual_seed(key)
        if cuda is not None:
            with torch.cuda.device(cuda):
                torch.cuda.manual_seed(key)
        yield
    finally:
        torch.set_rng_state(before)
        if cuda is not None and cuda_before is not None:
            torch.cuda.set_rng_state(cuda_before, cuda)


@contextmanager
def global_generators(
    rng: np.random.Generator, device: torch.device | None = None
) -> Iterator[None]:
    """Run a block with torch's and NumPy's own generators at points drawn from `rng`.

    For libraries that draw from them. They are put back afterwards.
    """
    before = np.random.get_state()
    np.random.seed(int(rng.integers(2**32)))
    try:
        with keyed_torch_rng(int(rng.integers(2**63)), "libraries", device=device):
            yield
    finally:
        np.random.set_state(before)


def generator_state(device: torch.device) -> torch.Tensor:
    """The state of torch's own generator on a device."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def set_generator_state(state: torch.Tensor, device: torch.device) -> None:
    """Put torch's own generator on a device to where it was."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
