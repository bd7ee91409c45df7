"""What a model is asked about: rows of a test set, files, a text."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.data import Dataset, files
from fedsim.data.dataset import feature_names
from fedsim.data.sources import read_table, table_features
from fedsim.data.text import UNKNOWN, encode, tokenise
from fedsim.errors import DataError


@dataclass(frozen=True)
class Inputs:
    """Inputs of a data set, or like those of it.

    Args:
        x: (n, ...) as in the data set.
        names: what each is called.
        labels: the true class of each, or its target in its own units; None where that is not
            known.
        words: of documents, each as far as the model reads it; else empty.
        marks: of documents, which of these words the label is about; empty where that is not
            known.
    """

    x: NDArray[Any]
    names: tuple[str, ...]
    labels: tuple[str | None, ...]
    words: tuple[tuple[str, ...], ...] = ()
    marks: tuple[tuple[bool, ...], ...] = ()

    @classmethod
    def of_rows(cls, data: Dataset, rows: Sequence[int]) -> Inputs:
        """Rows of the central test set.

        Raises:
            DataError: there is no such row.
        """
        for row in rows:
            if not 0 <= row < len(data.test_y):
                raise DataError(
                    f"there is no row {row} in the test set; it has {len(data.test_y)}, counted "
                    "from 0"
                )
        x, truth = data.test_x[list(rows)], data.test_y[list(rows)]
        words: tuple[tuple[str, ...], ...] = ()
        marks: tuple[tuple[bool, ...], ...] = ()
        if data.words:
            words = tuple(tuple(data.words[token] for token in row if token) for row in x.tolist())
            marks = ((),) * len(words)
            if "signal" in data.truth:
                own = data.truth["signal"][list(rows)].tolist()
                marks = tuple(tuple(m[: len(w)]) for m, w in zip(own, words, strict=True))
        if data.classes:
            labels = tuple(data.classes[y] for y in truth)
        else:
            labels = tuple(f"{y:.6g}" for y in data.target_scaling.undo(truth))
        return cls(x, tuple(f"row {row}" for row in rows), labels, words, marks)

    @classmethod
    def of_texts(cls, data: Dataset, texts: Sequence[str], names: Sequence[str]) -> Inputs:
        """Documents of one's own; words that the data have not are unknown to the model.

        Raises:
            DataError: the data are no documents.
        """
        if not data.words:
            raise DataError("the data are no documents; texts mean nothing to the model")
        tokens = [text.split() if data.spaced else tokenise(text) for text in texts]
        ids = encode(tokens, data.words, data.shape[0])
        # As long as the data's documents: networks may read padding, too.
        x = np.pad(ids, ((0, 0), (0, data.shape[0] - ids.shape[1])))
        words = tuple(tuple(own[: data.shape[0]]) for own in tokens)
        unknown = (None,) * len(words)
        return cls(x, tuple(names), unknown, words, ((),) * len(words))

    @property
    def unknown(self) -> tuple[str, ...]:
        """The words of documents that the data have not."""
        found = [
            word
            for words, ids in zip(self.words, self.x, strict=False)  # no words of other inputs
            for word, i in zip(words, ids, strict=False)
            if i == UNKNOWN
        ]
        return tuple(dict.fromkeys(found))

    @classmethod
    def of_file(cls, data: Dataset, path: Path) -> Inputs:
        """From a file: documents as .txt, rows of a table as .csv, others as .npy, images as .png.

        All are as in the source's own files, and what the source does to these is done to them:
        numbers of a table before `scale`, digits from 0 to 16, images of any size if the source
        resizes them. Only EMNIST's, which lie on their side in its files, are expected upright.

        A .txt has a document a line; a .csv the names of the features in its first line; a .npy
        an input or several, (n, ...); a .png an image.

        Raises:
            DataError: it cannot be read, or holds something else.
        """
        if data.words:
            _expect(path, ".txt", "documents are .txt, one a line")
            lines = files.read_lines(path, "utf-8-sig")
            names = [f"line {k}" for k in range(1, len(lines) + 1)]
            found = cls.of_texts(data, lines, names)
        elif path.suffix == ".csv" and len(data.shape) == 1:
            found = cls.of_arrays(_rows(path, data), "row")
        elif path.suffix == ".png" and _has_pictures(data):
            found = cls.of_arrays(files.read_image(path, data.shape, data.resized)[None], "image")
        else:
            _expect(path, ".npy", _ways(data))
            found = cls.of_arrays(_array(path, data), "input")
        if not len(found.x):
            raise DataError(f"{path}: there is nothing in it")
        if not np.isfinite(found.x).all():
            raise DataError(f"{path}: holds missing or infinite numbers")
        return found

    @classmethod
    def of_arrays(cls, x: NDArray[Any], name: str) -> Inputs:
        """Inputs (n, ...) as the data set has them, which are called by name and number."""
        names = tuple(f"{name} {k}" for k in range(len(x)))
        return cls(x, names, (None,) * len(x))


def _has_pictures(data: Dataset) -> bool:
    return len(data.shape) == 3 and data.shape[0] in (1, 3) and data.x.dtype == np.uint8


def _ways(data: Dataset) -> str:
    """How inputs that are no documents can be given."""
    if len(data.shape) == 1:
        return "rows of a table are .csv or .npy"
    if _has_pictures(data):
        return "images are .png or .npy"
    return "inputs of these data are .npy"


def _expect(path: Path, ending: str, ways: str) -> None:
    if path.suffix != ending:
        raise DataError(f"{path}: {ways}")


def _rows(path: Path, data: Dataset) -> NDArray[Any]:
    table = read_table(path)
    names = feature_names(data.shape[0], data.features)
    missing = [name for name in names if name not in table]
    if missing:
        raise DataError(
            f"{path}: has no column '{missing[0]}'; its first line must name the features: "
            + ", ".join(names)
        )
    if data.x.dtype != np.uint8:
        found: NDArray[Any] = data.scaling(table_features(path, table, names, data.x.dtype))
        return found
    rows = table_features(path, table, names, np.float64)
    if not np.isin(rows, np.arange(256)).all():
        raise DataError(f"{path}: the data are whole numbers from 0 to 255, and not all of it is")
    return rows.astype(np.uint8)


def _array(path: Path, data: Dataset) -> NDArray[Any]:
    with files.reading(path):
        x: NDArray[Any] = np.lib.format.read_array(
            io.BytesIO(files.read_bytes(path)), allow_pickle=False
        )
    if x.shape == data.shape:
        x = x[None]
    if x.shape[1:] != data.shape:
        raise DataError(
            f"{path}: holds an array of shape {x.shape}; one input of the data is {data.shape}, n "
            f"of them (n, {', '.join(map(str, data.shape))})"
        )
    if (x.dtype == np.uint8) != (data.x.dtype == np.uint8) or x.dtype.kind not in "buif":
        raise DataError(f"{path}: holds {x.dtype}; the data are {data.x.dtype}")
    return x if x.dtype == np.uint8 else data.scaling(x.astype(data.x.dtype))
