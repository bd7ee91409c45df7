"""Real data where there is any, and writers of the official formats where there is none."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

FOLDERS = {
    "MNIST": "mnist",
    "Fashion-MNIST": "fashion_mnist",
    "CIFAR-10": "cifar10",
    "Mortgage": "mortgage",
    "OpenFL-XAI": "openfl_xai",
}


@pytest.fixture(scope="session")
def real_data() -> Callable[[str], Path]:
    """The data root that holds the data set of that name, or a skip that names it.

    Taken when the session starts, before any test changes the environment.
    """
    root = Path(os.environ.get("FEDSIM_DATA", "/nowhere"))

    def find(name: str) -> Path:
        if not (root / FOLDERS[name]).is_dir():
            pytest.skip(f"{name} is not in FEDSIM_DATA")
        return root

    return find


class Writers:
    """Files of the official formats, compressed as their names ask for."""

    def raw(self, path: Path, content: bytes) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        compress = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
        path.write_bytes(compress(content))
        return path

    def idx(self, path: Path, array: NDArray[np.uint8]) -> Path:
        header = struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape)
        return self.raw(path, header + array.tobytes())

    def idx_pair(self, folder: Path, stem: str, x: NDArray[np.uint8], y: NDArray[Any]) -> None:
        self.idx(folder / f"{stem}-images-idx3-ubyte.gz", x)
        self.idx(folder / f"{stem}-labels-idx1-ubyte.gz", y.astype(np.uint8))

    def cifar_binary(self, path: Path, x: NDArray[np.uint8], *labels: NDArray[Any]) -> Path:
        records = [np.stack(labels, axis=1), x.reshape(len(x), -1)]
        return self.raw(path, np.concatenate(records, axis=1).astype(np.uint8).tobytes())

    def cifar_python(self, path: Path, batch: Mapping[str, Any]) -> Path:
        """As Python 2 and NumPy 1 wrote it, which Python 3 no longer does: opcode by opcode."""
        items = b"".join(_python2(key) + _python2(value) for key, value in batch.items())
        return self.raw(path, b"\x80\x02}(" + items + b"u.")

    def leaf(self, path: Path, users: Mapping[str, tuple[Any, Any]]) -> Path:
        document = {
            "users": list(users),
            "num_samples": [len(y) for _, y in users.values()],
            "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
        }
        return self.raw(path, json.dumps(document).encode())

    def npy(self, path: Path, array: NDArray[Any]) -> Path:
        stream = io.BytesIO()
        np.save(stream, array)
        return self.raw(path, stream.getvalue())


def _python2(value: str | bytes | Sequence[Any] | NDArray[np.uint8]) -> bytes:
    if isinstance(value, str):
        value = value.encode("latin1")
    if isinstance(value, bytes):
        short = len(value) < 256
        return struct.pack("<cB" if short else "<ci", b"U" if short else b"T", len(value)) + value
    if isinstance(value, int):
        return struct.pack("<ci", b"J", value)
    if isinstance(value, np.ndarray):
        dtype = (
            b"cnumpy\ndtype\n" + _python2("u1") + b"K\x00K\x01\x87R"
            b"(K\x03" + _python2("|") + b"NNN" + _python2(-1) * 2 + b"K\x00tb"
        )
        shape = b"(" + b"".join(_python2(n) for n in value.shape) + b"t"
        return (
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
            b"(K\x01" + shape + dtype + b"\x89" + _python2(value.tobytes()) + b"tb"
        )
    return b"](" + b"".join(_python2(item) for item in value) + b"e"


@pytest.fixture(scope="session")
def write() -> Writers:
    return Writers()
