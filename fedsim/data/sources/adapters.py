"""Data sets of PyTorch and of Hugging Face, read into a `Dataset`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedsim.config.registry import Config, nearest
from fedsim.data.dataset import Dataset, TestFraction, check_trainable, of_parts
from fedsim.data.sources.pictures import as_shown
from fedsim.errors import DataError

IMAGES = ("image", "img")  # the usual names of a column of images
LABEL = "label"  # the usual name of a column of labels
TRAIN, TESTS = "train", ("test", "validation", "valid", "val")  # of the parts of a `DatasetDict`

Part = tuple[Any, Any]  # an input and a label


class Reading(Config):
    """How the data set of another library is read.

    Args:
        x: the column of inputs, for a Hugging Face data set, or several columns of numbers, the
            features of a table; by default `image` or `img`.
        y: the column of labels, for a Hugging Face data set; by default `label`.
        test_fraction: share of the examples in the test set if the data set has none.
    """

    x: Annotated[str | tuple[str, ...], Field(min_length=1)] | None = None
    y: str | None = Field(None, min_length=1)
    test_fraction: TestFraction = 0.2


def read(found: Any, where: str, how: Reading) -> Dataset | None:
    """A data set of PyTorch or of Hugging Face, a pair (train, test), or a `DatasetDict`.

    Every item is read once, so that random transforms are drawn once. Images of Pillow become
    uint8 (channels, height, width), grey or RGB, as viewers show them (`as_shown`), those of
    32-bit numbers float32; tensors and arrays keep their shape.

    Returns:
        None if it is something else.

    Raises:
        DataError: an item is not an input and a label, or items differ in shape.
    """
    parts = _parts(found, where)
    if not parts:
        return None
    if not _is_hugging_face(parts[0]):
        for key in ("x", "y"):
            if getattr(how, key) is not None:
                raise DataError(f"data.{key}: names a column, and items of {where} have none")
    names = ("", " (test)")[: len(parts)]
    examples = [_read(part, where + name, how) for part, name in zip(parts, names, strict=True)]
    classes = _classes(examples, where)
    train, *test = ((part.x, part.y) for part in examples)
    columns = examples[0].columns
    made = of_parts(train, test[0] if test else None, classes, how.test_fraction, where, columns)
    features = examples[0].features
    if features:
        made = replace(made, features=features, target=how.y or LABEL)
    check_trainable(made, where)
    return made


def _is_hugging_face(found: Any) -> bool:
    return isinstance(getattr(found, "features", None), Mapping) and hasattr(found, "with_format")


def _parts(found: Any, where: str) -> tuple[Any, ...]:
    """The training part, and the test part if there is one; nothing for something else."""
    from torch.utils.data import Dataset as TorchDataset

    if isinstance(found, Mapping) and found and all(map(_is_hugging_face, found.values())):
        if TRAIN not in found:
            raise DataError(f"{where}: has no '{TRAIN}' but {', '.join(map(str, found))}")
        tests = [found[name] for name in TESTS if name in found]
        parts: tuple[Any, ...] = (found[TRAIN], *tests[:1])
    else:
        parts = tuple(found) if isinstance(found, tuple | list) and len(found) == 2 else (found,)
    if not all(_is_hugging_face(part) or isinstance(part, TorchDataset) for part in parts):
        return ()
    for part in parts:
        if not hasattr(part, "__len__") or not hasattr(part, "__getitem__"):
            raise DataError(
                f"{where}: {type(part).__name__} has no length or no items by index; return a "
                f"map-style data set"
            )
        if len(part) == 0:
            raise DataError(f"{where}: {type(part).__name__} has no item")
    return parts


class _Examples(NamedTuple):
    """Of one part: labels are class indices with names or without, texts, or numbers."""

    x: NDArray[Any]
    y: NDArray[Any]
    names: tuple[str, ...]
    columns: dict[str, NDArray[np.generic]]
    features: tuple[str, ...] = ()


def _read(part: Any, where: str, how: Reading) -> _Examples:
    if _is_hugging_face(part):
        return _read_hugging_face(part, where, how)
    x, y = _stacked((_pair(part[i], where, i) for i in range(len(part))), len(part), where)
    return _Examples(x, y, _class_names(part), {})


def _pair(item: Any, where: str, i: int) -> Part:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise DataError(f"{where}: item {i} is a {type(item).__name__}, expected a pair (x, y)")
    return item[0], item[1]


def _class_names(part: Any) -> tuple[str, ...]:
    """As torchvision's data sets have them in `classes`, also below a `Subset`."""
    while not hasattr(part, "classes") and hasattr(part, "dataset"):
        part = part.dataset
    names = getattr(part, "classes", ())
    return tuple(map(str, names)) if isinstance(names, Sequence) else ()


def _read_hugging_face(part: Any, where: str, how: Reading) -> _Examples:
    known = list(part.features)
    x_key = how.x or next((name for name in IMAGES if name in known), "")
    if not x_key:
        raise DataError(
            f"{where}: set data.x to the column of inputs; there are {', '.join(known)}"
        )
    features = () if isinstance(x_key, str) else x_key
    y_key = how.y or LABEL
    for key, name in (*(("x", name) for name in features or (x_key,)), ("y", y_key)):
        if name not in known:
            raise DataError(
                f"{where}: has no column '{name}' for data.{key}{nearest(name, known)}"
            )
    if getattr(part, "format", {}).get("type") != "custom":  # a transform of the user's own
        part = part.with_format(None)
    used = {*features, x_key, y_key}
    columns: dict[str, list[Any]] = {name: [] for name in known if name not in used}

    def pairs() -> Iterator[Part]:
        for i in range(len(part)):
            row = part[i]
            for name, values in columns.items():
                values.append(row.get(name))
            yield (
                _numbers(row, features, f"{where}: item {i}") if features else row[x_key],
                row[y_key],
            )

    x, y = _stacked(pairs(), len(part), where)
    names = tuple(map(str, getattr(part.features[y_key], "names", None) or ()))
    return _Examples(x, y, names, _plain_columns(columns), features)


def _numbers(row: Mapping[str, Any], features: Sequence[str], what: str) -> list[float]:
    for name in features:
        if not isinstance(row[name], numbers.Real):
            raise DataError(f"{what} has {row[name]!r:.60} in column '{name}', expected a number")
    return [float(row[name]) for name in features]


def _plain_columns(columns: Mapping[str, list[Any]]) -> dict[str, NDArray[np.generic]]:
    """The columns in which every value is a number, or every value a text."""
    found: dict[str, NDArray[np.generic]] = {}
    for name, values in columns.items():
        for kind in (str, numbers.Real):
            if all(isinstance(value, kind) for value in values):
                found[name] = np.array(values)
    return found


def _stacked(pairs: Iterator[Part], count: int, where: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """(count, ...) inputs, uint8 or float32, and (count,) labels."""
    x = np.empty(0)
    labels = []
    for i, (given, label) in enumerate(pairs):
        array = _array(given, f"{where}: x of item {i}")
        if i == 0:
            x = np.empty((count, *array.shape), array.dtype)
        if array.shape != x.shape[1:] or array.dtype != x.dtype:
            raise DataError(
                f"{where}: x of item {i} is {array.dtype} of shape {array.shape}, of item 0 "
                f"{x.dtype} of {x.shape[1:]}; give them the same shape, in a transform say"
            )
        x[i] = array
        labels.append(_label(label, f"{where}: y of item {i}"))
    kinds = {type(label) for label in labels}
    if str in kinds and len(kinds) > 1:
        raise DataError(f"{where}: some labels are text and some numbers")
    return x, np.array(labels, None if str in kinds or float not in kinds else np.float64)


def _array(given: Any, what: str) -> NDArray[Any]:
    """A tensor, an array, a list of numbers, or an image of Pillow."""
    if hasattr(given, "getbands"):  # of Pillow's images alone
        try:  # numbers of 32 bits are taken as they are
            pixels = np.asarray(given if given.mode in ("I", "F") else as_shown(given))
        except ValueError as error:
            raise DataError(f"{what}: {error}") from error
        given = pixels[np.newaxis] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    elif hasattr(given, "detach"):
        given = given.detach().cpu().numpy()
    if isinstance(given, str):
        raise DataError(f"{what} is text; write it to a file and read it with data.name=text")
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise DataError(f"{what} is not an array: {error}") from error
    if array.ndim == 0 or array.dtype.kind not in "biuf":
        raise DataError(
            f"{what} is a {type(given).__name__}, expected a tensor, an array or an image"
        )
    return array if array.dtype == np.uint8 else array.astype(np.float32)


def _label(given: Any, what: str) -> int | float | str:
    single = hasattr(given, "item") and math.prod(given.shape) == 1
    plain = given.item() if single else given
    if isinstance(plain, str):
        return plain
    if isinstance(plain, numbers.Integral):
        return int(plain)
    if isinstance(plain, numbers.Real):
        return float(plain)
    raise DataError(f"{what} is a {type(given).__name__}, expected a number or a text")


def _classes(examples: Sequence[_Examples], where: str) -> tuple[str, ...] | None:
    """The names of the classes, none for a regression; None if they are the labels that occur."""
    kinds = {part.y.dtype.kind for part in examples}
    if len(kinds) > 1:
        raise DataError(f"{where}: the labels of train and test are of different types")
    if "f" in kinds:
        return ()
    if "U" in kinds:
        return None
    both = np.concatenate([part.y for part in examples])
    low, high, names = int(both.min()), int(both.max()), examples[0].names
    if low < 0 or (names and high >= len(names)):
        known = f" with {len(names)} classes" if names else ""
        raise DataError(
            f"{where}: labels are class indices from 0 on, and range from {low} to {high}{known}"
        )
    return names or None
