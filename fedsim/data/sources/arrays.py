"""Arrays in NumPy's files."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

import numpy as np

from fedsim.data.dataset import Dataset, TestFraction, of_arrays
from fedsim.data.source import Source, datasets
from fedsim.data.sources import files
from fedsim.data.stored import AnyArray, MappedArray
from fedsim.errors import DataError


@datasets.register
class Npz(Source):
    """Your own arrays in a NumPy `.npz` file, or in a folder of `.npy` files.

    Args:
        path: file with `x` (N, ...) and `y` (N,), or `x_train`, `y_train`, `x_test`, `y_test`;
            further arrays (N,) are columns of the training examples. Inputs are uint8 (images,
            which are divided by 255) or numbers that are read as float32. Or a folder with a
            file for each of these arrays (`x.npy`, `y.npy`).
        test_fraction: share of the examples in the test set if the file has none.
        in_place: memory-map the file, which must not be compressed, and read rows whenever they
            are needed, for inputs that do not fit into memory.
    """

    name: str = "npz"
    path: Path
    test_fraction: TestFraction = 0.2
    in_place: bool = False

    def load(self) -> Dataset:
        """x as in the file, uint8 or else float32; the classes are the labels that occur."""
        path = self.path
        with files.reading(path):
            arrays = _load_arrays(path, {"x", "x_train", "x_test"} if self.in_place else set())
        return of_arrays(str(path), arrays, self.test_fraction)


def _load_arrays(path: Path, in_place: Set[str]) -> dict[str, AnyArray]:
    """The arrays of an archive or folder by name; those of `in_place` stay in their files."""
    if path.is_dir():
        found = {file.stem: file for file in files.match_all(path, "*.npy")}
        return {
            key: MappedArray(file) if key in in_place else np.load(file, allow_pickle=False)
            for key, file in found.items()
        }
    archive = np.load(path, allow_pickle=False)
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise DataError(f"{path}: is not an .npz archive of named arrays")
    with archive:
        return {
            key: MappedArray(path, key) if key in in_place else archive[key]
            for key in archive.files
        }
