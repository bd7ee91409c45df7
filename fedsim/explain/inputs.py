"""Inputs to explain: rows of a test set, files, texts."""

from __future__ import annotations

import hashlib
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.data import Dataset, tokens
from fedsim.data.dataset import frozen
from fedsim.data.encoding import Feature
from fedsim.data.sources import files, pictures
from fedsim.data.sources.columns import as_entries
from fedsim.data.sources.table_files import is_table, read_table
from fedsim.data.stored import StoredArray, bounds
from fedsim.data.text import UNKNOWN, encode, tokenise
from fedsim.errors import DataError

MOST_ROWS = 8  # listed in a file name
MOST_LETTERS = 40  # of a text or file name, likewise
MOST_SIZES = 5  # listed of pictures in a folder
MOST_WORDS = 20  # listed as unknown


@dataclass(frozen=True)
class Inputs:
    """Inputs of a data set, or of the same kind.

    Args:
        x: (n, ...) inputs as in the data set.
        names: the name of each input.
        labels: the true class of each, or its target in its own units; None if unknown.
        rows: their rows of the central test set; empty if they are none of it.
        blank: (n, F) which features of a table had blank cells, and were filled; empty for none.
        words: for documents, the words that the model reads; otherwise empty.
        marks: for documents, which of these words determine the label; empty if unknown.
        suffix: suffix of file names, so that pictures of different inputs can be in one folder:
            `-row-3`.
        notes: remarks on how the inputs were read, one line each.
    """

    x: NDArray[Any]
    names: tuple[str, ...]
    labels: tuple[str | None, ...]
    words: tuple[tuple[str, ...], ...] = ()
    marks: tuple[tuple[bool, ...], ...] = ()
    suffix: str = ""
    notes: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    blank: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((0, 0), np.bool_))

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", frozen(self.x))  # several explainers get it

    def shown(self, data: Dataset, k: int) -> tuple[str, ...]:
        """(F,) the features of an input of a table, with their values in words."""
        none = np.zeros(len(data.feature_names), np.bool_)
        return data.shown(self.x[k], self.blank[k] if self.blank.size else none)

    def joined(self, data: Dataset, relevance: NDArray[Any]) -> tuple[Inputs, NDArray[Any]]:
        """The inputs, and relevances (n, ...), by word where a tokenizer divides words.

        Relevances of a word's tokens are summed.
        """
        if not data.tokenizer:
            return self, relevance
        part_of = tokens.words_of(data.tokenizer, data.padding, self.x)
        summed, words, marks = np.zeros_like(relevance), [], []
        for k, (row, own) in enumerate(zip(self.x, part_of, strict=True)):
            there = own >= 0
            np.add.at(summed[k], own[there], relevance[k][there])
            of_word = [np.flatnonzero(own == w) for w in range(own.max(initial=-1) + 1)]
            words.append(
                tuple(
                    tokens.read(data.tokenizer, data.padding, row[at]) or data.words[row[at[0]]]
                    for at in of_word
                )
            )
            known = bool(self.marks[k])
            marks.append(tuple(any(self.marks[k][i] for i in at) for at in of_word if known))
        return replace(self, words=tuple(words), marks=tuple(marks)), summed

    @classmethod
    def of_rows(cls, data: Dataset, rows: Sequence[int]) -> Inputs:
        """Take rows of the central test set."""
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
        names, numbers = tuple(f"row {row}" for row in rows), "-".join(map(str, rows))
        if len(rows) > MOST_ROWS:
            told = hashlib.sha256(numbers.encode()).hexdigest()[:6]
            numbers = f"{rows[0]}-and-{len(rows) - 1}-more-{told}"
        suffix = f"-row{'s' * (len(rows) > 1)}-{numbers}" if rows else ""
        none = np.zeros(len(data.test_y), np.bool_)
        cells = [data.test_blanks.get(name, none)[list(rows)] for name in data.features]
        blank = np.array(cells).reshape(len(cells), len(rows)).T
        return cls(x, names, labels, words, marks, suffix, rows=tuple(rows), blank=blank)

    @classmethod
    def of_texts(cls, data: Dataset, texts: Sequence[str], names: Sequence[str]) -> Inputs:
        """Use your own documents; words that do not occur in the data are unknown to the model."""
        if not data.words:
            raise DataError("the data are not documents, so the model cannot read texts")
        if data.tokenizer:
            ids = tokens.encode(data.tokenizer, data.padding, texts)[:, : data.shape[0]]
            words = tuple(tuple(data.words[i] for i in row if i) for row in ids.tolist())
            notes: tuple[str, ...] = ()
        else:
            # As the data set's own documents are parted: into characters, at spaces, into words.
            part = list if " " in data.words else str.split if data.spaced else tokenise
            parted: list[list[str]] = [part(text) for text in texts]
            ids = encode(parted, data.words, data.shape[0])
            words = tuple(tuple(own[: data.shape[0]]) for own in parted)
            notes = _unknown_words(words, ids)
        # Padded to the data's length, because networks may read padding.
        x = np.pad(ids, ((0, 0), (0, data.shape[0] - ids.shape[1])))
        labels, marks = (None,) * len(words), ((),) * len(words)
        suffix = f"-text{_as_suffix(texts[0])}" if len(texts) == 1 else "-texts"
        return cls(x, tuple(names), labels, words, marks, suffix, notes)

    @classmethod
    def of_file(cls, data: Dataset, path: Path) -> Inputs:
        """Read a file, or a folder of pictures.

        Documents are .txt files with one document per line; rows of a table are files of tables
        with the features' names; arrays (n, ...) of one or several inputs are .npy
        files. All are given as in the source's own files and processed in the same way: numbers of
        a table before `scale`, digits from 0 to 16.

        Pictures can have any format of `PICTURES` (`fedsim.data.sources.pictures`), any colours
        and size: they are read as viewers show them, as in training, and converted to those of
        the data, with black as the minimum and white as the maximum pixel value of the training
        images; `notes` says so. (EMNIST's files hold images on their side; pictures are upright.)

        Raises:
            DataError: it cannot be read, or does not fit the data.
        """
        if not path.exists():
            raise DataError(f"{path}: there is no such file")
        if data.words:
            _expect(path, ".txt", "documents must be .txt files, one document per line")
            lines = files.read_lines(path, "utf-8-sig")
            names = [f"line {k}" for k in range(1, len(lines) + 1)]
            found = cls.of_texts(data, lines, names)
        elif is_table(path) and len(data.shape) == 1:
            rows, blank, remarks = _rows(path, data)
            found = replace(cls.of_arrays(rows, "row"), notes=remarks, blank=blank)
        elif _has_pictures(data) and (pictures.is_picture(path) or path.is_dir()):
            found = cls._of_pictures(data, path)
        else:
            _expect(path, ".npy", _ways(data))
            found = cls.of_arrays(_array(path, data), "input")
        if not len(found.x):
            raise DataError(f"{path}: is empty")
        if not np.isfinite(found.x).all():
            raise DataError(f"{path}: contains missing or infinite values")
        words, folder = path.name if path.is_dir() else path.stem, path.parent
        if folder.name and len([*folder.parent.glob(f"*/{escape(path.name)}")]) > 1:
            words = f"{folder.name} {words}"  # `a/00.jpg` beside `b/00.jpg`
        return replace(found, suffix=_as_suffix(words))

    @classmethod
    def _of_pictures(cls, data: Dataset, path: Path) -> Inputs:
        """A picture, or all in a folder in the order of their names."""
        paths, notes = [path], []
        if path.is_dir():
            within = sorted(path.iterdir())
            if hidden := [each.name for each in within if not files.is_visible(each.name)]:
                notes.append(f"{path.name}: {files.ignored(hidden)}")
            visible = [each for each in within if files.is_visible(each.name)]
            paths = [each for each in visible if pictures.is_picture(each)]
            if not paths:
                raise DataError(f"{path}: contains no pictures ({', '.join(pictures.PICTURES)})")
        changes, x = Counter[str](), np.empty((len(paths), *data.shape), np.uint8)
        for row, each in zip(x, paths, strict=True):
            picture, mode = pictures.open_picture(each)
            row[:] = pictures.pixels(picture, data.shape)
            changes[_change(picture.size, mode, data)] += 1
        if data.x.dtype != np.uint8:
            low, high = bounds(data.x)
            x = (low + (high - low) * (x / np.float64(255))).astype(data.x.dtype)
        for change, count in changes.most_common(MOST_SIZES):
            if change:
                several = f"{count} picture{'s' * (count > 1)} of " if path.is_dir() else ""
                notes.append(f"{path.name}: {several}{change}")
        if len(changes) > MOST_SIZES:
            notes.append(f"{path.name}: … and pictures of {len(changes) - MOST_SIZES} more sizes")
        names = tuple(each.name for each in paths)
        return cls(x, names, (None,) * len(x), notes=tuple(notes))

    @classmethod
    def of_arrays(cls, x: NDArray[Any], name: str) -> Inputs:
        """Inputs (n, ...) in the data set's form, named by `name` and their number."""
        names = tuple(f"{name} {k}" for k in range(len(x)))
        return cls(x, names, (None,) * len(x))


def _has_pictures(data: Dataset) -> bool:
    return len(data.shape) == 3 and data.shape[0] in (1, 3)


def _change(size: tuple[int, int], mode: str, data: Dataset) -> str:
    """How a picture is converted: "640×480 RGB, resized to 8×8 gray"; empty if it is not."""
    C, H, W = data.shape
    wanted = "RGB" if C == 3 else "gray"
    own = {"L": "gray", "LA": "gray with transparency", "P": "palette"}.get(mode, mode)
    if size != (W, H):
        return f"{size[0]}×{size[1]} {own}, resized to {W}×{H} {wanted}"
    return "" if own == wanted else f"{W}×{H} {own}, converted to {wanted}"


def _as_suffix(words: str) -> str:
    """Words as part of a file name: letters and digits, separated by hyphens."""
    found = "-".join(re.findall(r"\w+", words))[:MOST_LETTERS].rstrip("-")
    return f"-{found}" if found else ""


def _unknown_words(documents: Sequence[Sequence[str]], ids: NDArray[Any]) -> tuple[str, ...]:
    pairs = [pair for own in zip(documents, ids, strict=True) for pair in zip(*own, strict=False)]
    unknown = [*dict.fromkeys(word for word, i in pairs if i == UNKNOWN)]
    if not unknown:
        return ()
    rest = f" … and {len(unknown) - MOST_WORDS} more" if len(unknown) > MOST_WORDS else ""
    return (f"words that do not occur in the run's data: {' '.join(unknown[:MOST_WORDS])}{rest}",)


def _ways(data: Dataset) -> str:
    if len(data.shape) == 1:
        return "rows of a table must be .csv, .tsv, .parquet or .npy files"
    if _has_pictures(data):
        ends = ", ".join(pictures.PICTURES)
        return f"images must be {ends} or .npy files, or a folder of pictures"
    return "inputs of these data must be .npy files"


def _expect(path: Path, ending: str, ways: str) -> None:
    if path.suffix.lower() != ending:
        raise DataError(f"{path}: {ways}")


def _rows(path: Path, data: Dataset) -> tuple[NDArray[Any], NDArray[np.bool_], tuple[str, ...]]:
    """(n, W) the rows of a file, (n, F) which of their features are blank, and remarks."""
    words = frozenset(word for feature in data.encoding for word in feature.blanks)
    table = read_table(path, blanks=words)
    names = data.feature_names
    if missing := [name for name in names if name not in table]:
        raise DataError(
            f"{path}: has no column '{missing[0]}'; its first line must name the features: "
            + ", ".join(names)
        )
    features = data.encoding or tuple(map(Feature, names))
    if data.x.dtype != np.uint8:
        blanks = data.scaling.fill is not None
        found, remarks = as_entries(path, table, features, data.x.dtype, blanks, "")
        x = data.scaling(found)
        return x, data.blank_cells(found), (*remarks, *_far_away(path, x, features, data))
    rows, _ = as_entries(path, table, features, np.float64, False, "")
    if not np.isin(rows, np.arange(256)).all():
        raise DataError(f"{path}: the data are whole numbers from 0 to 255, and these are not")
    return rows.astype(np.uint8), np.zeros((0, 0), np.bool_), ()


def _far_away(
    path: Path, x: NDArray[Any], features: Sequence[Feature], data: Dataset
) -> Iterator[str]:
    """Remarks on numbers that are farther from those of training than these are apart."""
    if isinstance(data.x, StoredArray):
        return
    low, high = data.x.min(axis=0), data.x.max(axis=0)
    far = (x < low - (high - low)) | (x > high + (high - low))
    start = 0
    for feature in features:
        if feature.kind in ("number", "date") and (rows := np.flatnonzero(far[:, start])).size:
            ends = (data.scaling.undo(end)[start:] for end in (low, high, x[rows[0]]))
            least, most, value = map(feature.shown, ends)
            yield f"{path}: {feature.name} = {value} is far from training's {least} to {most}"
        start += len(feature.entries)


def _array(path: Path, data: Dataset) -> NDArray[Any]:
    with files.reading(path):
        x: NDArray[Any] = np.lib.format.read_array(
            io.BytesIO(files.read_bytes(path)), allow_pickle=False
        )
    if x.shape == data.shape:
        x = x[None]
    if x.shape[1:] != data.shape:
        raise DataError(
            f"{path}: contains an array of shape {x.shape}; one input of the data is "
            f"{data.shape}, n of them (n, {', '.join(map(str, data.shape))})"
        )
    if (x.dtype == np.uint8) != (data.x.dtype == np.uint8) or x.dtype.kind not in "buif":
        raise DataError(f"{path}: contains {x.dtype}; the data are {data.x.dtype}")
    return x if x.dtype == np.uint8 else data.scaling(x.astype(data.x.dtype))
