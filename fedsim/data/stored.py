"""Inputs that stay in files and are read on demand, for data larger than memory."""

from __future__ import annotations

import math
import mmap
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from cachetools import LRUCache, cached
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedsim.data.sources import files, pictures
from fedsim.errors import DataError

CACHE_BYTES = 1 << 28  # decoded data cached by each process
CHUNK_BYTES = 1 << 24  # read at a time in a pass over all inputs
LOCAL_HEADER = 30  # bytes before a zip member's name and extra field


class StoredArray(ABC):
    """(N, ...) inputs in files.

    Indexing with a slice or with (n,) indices reads these rows into memory; `select` chooses
    rows and reads nothing. Pickled, it is paths and row numbers: every process reads the files
    itself, so they must have the same path on all nodes of a cluster.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)

    @abstractmethod
    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """(n, ...) rows, in any order, as a new array.

        Raises:
            DataError: they cannot be read, or are invalid.
        """

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all inputs in memory."""
        return int(math.prod(self.shape)) * int(self.dtype.itemsize)

    def __getitem__(self, rows: slice | int | NDArray[Any] | Sequence[int]) -> NDArray[Any]:
        if isinstance(rows, slice):
            return self.read(np.arange(*rows.indices(len(self))))
        chosen = np.asarray(rows)
        if chosen.dtype == np.bool_:
            chosen = np.flatnonzero(chosen)
        chosen = chosen.astype(np.int64)
        if ((chosen < -len(self)) | (chosen >= len(self))).any():
            raise IndexError(f"there are {len(self)} rows")
        found = self.read(np.where(chosen < 0, chosen + len(self), chosen).reshape(-1))
        return found if chosen.ndim else found[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """All inputs in memory."""
        return np.asarray(self[:], dtype=dtype)

    def chunks(self, rows: NDArray[np.int64] | None = None) -> Iterator[NDArray[Any]]:
        """Rows in the given order, some at a time; by default all."""
        rows = np.arange(len(self)) if rows is None else rows
        count = max(1, CHUNK_BYTES * len(self) // self.nbytes)
        for start in range(0, len(rows), count):
            yield self.read(rows[start : start + count])

    def contents(self, rows: NDArray[np.int64] | None = None) -> Iterator[Any]:
        """Buffers that identify the content of rows; by default those of `chunks`."""
        return self.chunks(rows)


AnyArray: TypeAlias = NDArray[Any] | StoredArray


def select(x: AnyArray, rows: NDArray[np.integer[Any]]) -> AnyArray:
    """(n, ...) rows of inputs; inputs stored in files stay there."""
    return _Selected(x, rows.astype(np.int64)) if isinstance(x, StoredArray) else x[rows]


def as_float32(x: NDArray[Any], what: str, rows: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
    """Numbers (n, ...) as finite float32; errors name them as `what` and the row, of `rows`."""
    with np.errstate(over="ignore"):  # overflow is refused below
        values = x.astype(np.float32)
    finite = np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
    if not finite.all():
        raise DataError(f"{what} is not finite in float32 in example {rows[finite.argmin()]}")
    return values


def bounds(x: AnyArray) -> tuple[float, float]:
    """The minimum and the maximum of inputs."""
    parts = x.chunks() if isinstance(x, StoredArray) else [x]
    low, high = zip(*((part.min(), part.max()) for part in parts), strict=True)
    return min(low), max(high)


class _Selected(StoredArray):
    """Some rows of other inputs."""

    of: StoredArray
    rows: NDArray[np.int64]

    def __init__(self, of: StoredArray, rows: NDArray[np.int64]) -> None:
        super().__init__((len(rows), *of.shape[1:]), of.dtype)
        if isinstance(of, _Selected):
            rows, of = of.rows[rows], of.of
        self.of, self.rows = of, rows

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        return self.of.read(self.rows[rows])

    def contents(self, rows: NDArray[np.int64] | None = None) -> Iterator[Any]:
        return self.of.contents(self.rows if rows is None else self.rows[rows])


class MappedArray(StoredArray):
    """An array that is mapped into memory, of a `.npy` file or an `.npz` that is not compressed.

    Bytes (images) keep their type, other numbers are read as float32.
    """

    def __init__(self, path: Path, member: str = "") -> None:
        self.path, self.name = path.absolute(), f"{path}: '{member}'" if member else str(path)
        with files.reading(path):
            self._offset, shape, fortran, self._stored = _header(path, member)
        if fortran:
            raise DataError(f"{self.name} is in Fortran order, which cannot be read in place")
        if len(shape) < 2 or 0 in shape or self._stored.kind not in "biuf":
            raise DataError(
                f"{self.name} is {self._stored} of shape {shape}, expected numbers of shape "
                "(N, ...)"
            )
        super().__init__(shape, np.uint8 if self._stored == np.uint8 else np.float32)
        _mapped.cache_clear()  # the file may have changed since an earlier run
        self._map()  # to reject a file that is too short here

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        memory, array = self._map()
        self._ask_for(memory, rows)
        found = array[rows]
        return found if self.dtype == np.uint8 else as_float32(found, self.name, rows)

    def _map(self) -> tuple[mmap.mmap, NDArray[Any]]:
        return _mapped(self.path, self._offset, self._stored, self.shape)

    def _ask_for(self, memory: mmap.mmap, rows: NDArray[np.int64]) -> None:
        """Let the system read all pages of rows at once, not one after another."""
        if not len(rows):
            return
        size = math.prod(self.shape[1:]) * self._stored.itemsize
        start = self._offset + np.unique(rows) * size
        first, last = start // mmap.PAGESIZE, (start + size - 1) // mmap.PAGESIZE
        gaps = np.flatnonzero(first[1:] > last[:-1] + 1)
        begins, ends = first[np.r_[0, gaps + 1]], last[np.r_[gaps, len(last) - 1]] + 1
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            length = min(end * mmap.PAGESIZE, len(memory)) - begin * mmap.PAGESIZE
            memory.madvise(mmap.MADV_WILLNEED, begin * mmap.PAGESIZE, length)


@lru_cache(maxsize=16)
def _mapped(
    path: Path, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> tuple[mmap.mmap, NDArray[Any]]:
    with files.reading(path), path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        memory.madvise(mmap.MADV_RANDOM)  # neighbouring rows belong to other clients
        array = np.frombuffer(memory, dtype, math.prod(shape), offset).reshape(shape)
    return memory, array


def _header(path: Path, member: str) -> tuple[int, tuple[int, ...], bool, np.dtype[Any]]:
    """An array's offset in its file, shape, whether it is in Fortran order, and dtype."""
    with path.open("rb") as file:
        if not member:
            return _npy_header(file)
        with zipfile.ZipFile(file) as archive:
            info = archive.getinfo(f"{member}.npy")
            if info.compress_type != zipfile.ZIP_STORED:
                raise DataError(
                    f"{path}: '{member}' is compressed and cannot be read in place; use "
                    "numpy.savez, which does not compress"
                )
            file.seek(info.header_offset)
            local = file.read(LOCAL_HEADER)
            name, extra = (int.from_bytes(local[i : i + 2], "little") for i in (26, 28))
            file.seek(info.header_offset + LOCAL_HEADER + name + extra)
            return _npy_header(file)


def _npy_header(file: Any) -> tuple[int, tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(file)
    return file.tell(), shape, fortran, dtype


class ImageFiles(StoredArray):
    """Image files, decoded on demand to (channels, height, width); the latest are cached."""

    def __init__(self, paths: Sequence[Path], shape: tuple[int, int, int]) -> None:
        super().__init__((len(paths), *shape), np.uint8)
        self.paths = [path.absolute() for path in paths]
        _decoded.cache_clear()  # the files may have changed since an earlier run

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        found = np.empty((len(rows), *self.shape[1:]), np.uint8)
        for pixels, row in zip(found, rows, strict=True):
            pixels[:] = _decoded(self.paths[row], self.shape[1:])
        return found

    def contents(self, rows: NDArray[np.int64] | None = None) -> Iterator[Any]:
        """The undecoded files, which is much faster."""
        for path in self.paths if rows is None else [self.paths[row] for row in rows]:
            with files.reading(path):
                yield path.read_bytes()


def latest() -> LRUCache[Any, Any]:
    """A cache of each process for the latest arrays: `CACHE_BYTES`, or one larger array."""
    return LRUCache(CACHE_BYTES, getsizeof=lambda array: min(array.nbytes, CACHE_BYTES))


@cached(latest())
def _decoded(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(pictures.read_picture(path, shape))
