"""Data sets, made of arrays or by a source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedsim.config.registry import nearest
from fedsim.data.concepts import Concept, check_concepts
from fedsim.data.encoding import BLANK, UNSCALED, Feature, Preprocessing, Scaling, feature_of, fit
from fedsim.data.splits import ClientSplits, Indices
from fedsim.data.stored import AnyArray, StoredArray, as_float32, select
from fedsim.errors import DataError

TestFraction = Annotated[float, Field(gt=0, lt=1)]


ARRAYS = ("x", "y", "test_x", "test_y", "vectors", "known")
_OF_TEXTS = (("classes", str), ("features", str), ("concepts", str))
BY_NAME = ("columns", "test_columns", "test_blanks", "truth")  # dicts of arrays


@dataclass(frozen=True)
class Dataset:
    """Training examples, which a partition distributes to clients, and a central test set.

    Args:
        x: (N, ...) training inputs, uint8, float32 or float64 (networks get float32); images are
            (N, channels, height, width), tables (N, features). Documents are (N, L) int32 token
            ids, padded with 0; L is the length of the longest, test set included. Arrays, or
            inputs that stay in their files (`fedsim.data.stored`).
        y: (N,) int64 class indices, 0 ≤ y < len(classes); for regression, float64 targets.
        test_x: (M, ...) inputs of the central test set, of the dtype of `x`.
        test_y: (M,) class indices or targets.
        classes: the name of each class, by index; empty for a regression.
        mean: mean per channel (images) or for all inputs (otherwise), subtracted after uint8
            inputs are divided by 255; empty for none.
        std: standard deviation that the difference is divided by; as long as `mean`.
        columns: further attributes of the training examples, (N,) each, by name, for partitions by
            column (writer, hospital, ...).
        unread_columns: names of further columns of the source's file; `data.columns` loads them.
        features: names of a table's features; empty if they have none.
        encoding: how each of `features` is written into `x`; empty if each is a number that takes
            one entry.
        preprocessing: what is still to be fitted to the clients' training examples (`fitted`);
            until then numbers are in the units of the files, and NaN where they are blank. None
            for nothing.
        target: name of the predicted quantity, if it has one.
        words: for documents, the word of each token id: "" for id 0 (padding), and, without a
            `tokenizer`, "<unknown>" for id 1; otherwise empty.
        vectors: (V, D) float32, the vector of each of the `words`; zeros for id 0.
        known: (V,) whether each of the `words` has a vector in the file of vectors; without a
            file, all except ids 0 and 1.
        random_vectors: `vectors` are random, unrelated to what the words mean.
        tokenizer: for documents that are read by one, its JSON (`fedsim.data.tokens`); `words` are
            its tokens then.
        padding: the tokenizer's own id of padding, which has changed places with 0 in `x`.
        spaced: words of documents are separated by spaces and used unchanged; otherwise texts are
            tokenised by `fedsim.data.text.tokenise`.
        test_columns: attributes of the test examples, (M,) each, by name.
        test_blanks: (M,) which test examples had a blank cell that was filled, by feature.
        sliced_by: the one of `test_columns` whose values define slices with scores of their own;
            empty for none.
        truth: which parts of each test input are of a kind, as far as that is known, by the kind's
            name: words (M, L), features (M, F) or pixels (M, height, width). `signal` is what the
            label is about.
        concepts: those of the `columns` and `test_columns` that models of concepts predict on the
            way to the label; NaN where they are not known.
        scaling: what `x` was made with of the numbers in the source's files; not of uint8.
        target_scaling: what a regression's `y` was made with.
        note: what the source made of its files, in a line for the user; empty for nothing.
        client_column: the one of `columns` that names each example's client; empty for none.
        copies: how many training examples at the end are changed copies of others, for clients
            that drift and for adversaries; no partition deals them out.
    """

    x: AnyArray
    y: NDArray[Any]
    test_x: AnyArray
    test_y: NDArray[Any]
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    columns: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    unread_columns: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    encoding: tuple[Feature, ...] = ()
    preprocessing: Preprocessing | None = None
    target: str = ""
    words: tuple[str, ...] = ()
    vectors: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    known: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    random_vectors: bool = False
    tokenizer: str = ""
    padding: int = 0
    spaced: bool = False
    test_columns: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    sliced_by: str = ""
    test_blanks: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    truth: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    concepts: tuple[str, ...] = ()
    scaling: Scaling = UNSCALED
    target_scaling: Scaling = UNSCALED
    client_column: str = ""
    copies: int = 0
    note: str = ""

    @classmethod
    def of(
        cls,
        x: NDArray[Any],
        y: NDArray[Any],
        test_x: NDArray[Any] | None = None,
        test_y: NDArray[Any] | None = None,
        *,
        test_fraction: float = 0.2,
        **columns: NDArray[np.generic],
    ) -> Dataset:
        """Create a classification data set from arrays.

        Args:
            x: (N, ...) inputs: uint8 images (N, channels, height, width), which are divided by
                255, or numbers, which become float32.
            y: (N,) labels, integers from 0 on; the classes are those that occur.
            test_x: (M, ...) inputs of the central test set. By default it is split off from the
                examples.
            test_y: (M,) their labels.
            test_fraction: share of the examples that is split off as test set, stratified by
                class.
            columns: (N,) attributes of the training examples, for `partition.kind=natural`.

        Raises:
            DataError: the arrays do not match.

        Example:
            >>> rng = np.random.default_rng(0)
            >>> data = Dataset.of(rng.normal(size=(100, 5)), rng.integers(0, 2, 100))
            >>> len(data.y), len(data.test_y), data.classes
            (80, 20, ('0', '1'))
        """
        if not (isinstance(test_fraction, float) and 0 < test_fraction < 1):
            raise DataError(f"data: test_fraction={test_fraction} must be between 0 and 1")
        given = {"x": x, "y": y}
        if test_x is not None and test_y is not None:
            given = {"x_train": x, "y_train": y, "x_test": test_x, "y_test": test_y}
        elif test_x is not None or test_y is not None:
            raise DataError("data: test_x and test_y go together")
        arrays = {name: _unmasked(name, array) for name, array in {**given, **columns}.items()}
        return of_arrays("data", arrays, test_fraction)

    def __post_init__(self) -> None:
        for name in ("x", "y", "test_x", "test_y"):
            array = getattr(self, name)
            if not isinstance(array, StoredArray):
                array = _unmasked(name, array)
                labels = name.endswith("y") and array.dtype.kind in "iu"
                array = array.astype(np.int64, copy=False) if labels else array
                object.__setattr__(self, name, _contiguous(array))
        for name, kind in (*_OF_TEXTS, ("mean", float), ("std", float)):
            given = getattr(self, name)
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise DataError(f"data: {name} must be a tuple, not {given!r:.80}")
            object.__setattr__(self, name, tuple(map(kind, given)))
        for name in BY_NAME:
            given = getattr(self, name)
            if not isinstance(given, Mapping):
                raise DataError(f"data: {name} must be a dict of arrays, not {given!r:.80}")
            arrays = {k: _unmasked(f"{name}['{k}']", array) for k, array in given.items()}
            object.__setattr__(self, name, arrays)
        if not all(isinstance(feature, Feature) for feature in self.encoding):
            raise DataError(f"data: encoding must be of Features, not {self.encoding!r:.80}")
        object.__setattr__(self, "encoding", tuple(self.encoding))
        kinds: dict[str, type] = {"scaling": Scaling, "target_scaling": Scaling, "copies": int}
        kinds |= dict.fromkeys(("target", "sliced_by", "client_column", "note"), str)
        for name, wanted in kinds.items():
            if not isinstance(given := getattr(self, name), wanted):
                raise DataError(f"data: {name} must be a {wanted.__name__}, not {given!r:.80}")

    def frozen(self) -> Dataset:
        """The same data set, of read-only arrays."""
        arrays = {name: frozen(getattr(self, name)) for name in ARRAYS}
        for name in BY_NAME:
            arrays[name] = {key: frozen(array) for key, array in getattr(self, name).items()}
        return replace(self, **arrays)

    def taking(self, rows: NDArray[np.int64]) -> Dataset:
        """The same data set with some of the training examples."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return replace(self, x=select(self.x, rows), y=self.y[rows], columns=columns)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.x.shape[1:])

    @property
    def feature_names(self) -> tuple[str, ...]:
        """(F,) the names of a table's features; x1, x2, … where they have none."""
        if self.features or len(self.shape) != 1:
            return self.features
        return feature_names(self.shape[0])

    def shown(self, row: NDArray[Any], blank: NDArray[np.bool_]) -> tuple[str, ...]:
        """(F,) each feature with its value in words, of a row (W,) of `x`: `age = 63 years`.

        Args:
            blank: (F,) which features had a blank cell, and were filled.
        """
        if not self.encoding:
            return self.feature_names
        values = self.in_units(row)
        parts = np.split(values, np.cumsum([len(f.entries) for f in self.encoding])[:-1])
        told = zip(self.encoding, parts, blank, strict=True)
        return tuple(f"{f.name} = {BLANK if empty else f.shown(own)}" for f, own, empty in told)

    def in_units(self, x: NDArray[Any]) -> NDArray[np.float64]:
        """Rows (..., W) of `x` in the units of the files, without what scaling has rounded."""
        values: NDArray[np.float64] = self.scaling.undo(x.astype(np.float64))
        if x.dtype.kind != "f":
            return values
        # So many decimals of the file's are left.
        size = np.abs(self.scaling.low) + np.abs(x * self.scaling.span)
        error = 8 * np.finfo(x.dtype).eps * np.maximum(size, np.finfo(x.dtype).tiny)
        step = np.where(size > 0, 10.0 ** np.ceil(np.log10(error)), 1.0)
        return np.where(size > 0, np.rint(values / step) * step + 0.0, values)

    def hashes(self, rows: NDArray[np.int64]) -> Iterator[int]:
        """A hash of each of these inputs, as it is before columns are scaled by their values.

        Pictures that stay in their files are not decoded: it is that of the file.
        """
        parts: Iterator[Any]
        if isinstance(self.x, StoredArray):
            parts = self.x.contents(rows)
        else:
            parts = (self.x[part] for part in np.array_split(rows, len(rows) // 1000 + 1))
            if np.ndim(self.scaling.span):
                parts = map(self.in_units, parts)
        for part in parts:
            if isinstance(part, bytes):
                yield hash(part)
                continue
            same = part.astype(np.float32) + 0 if part.dtype.kind == "f" else part  # 0 is -0
            yield from (hash(row.tobytes()) for row in same)

    @property
    def entry_names(self) -> tuple[str, ...]:
        """(W,) the names of the entries of a table's row: `age`, `thal=normal`, …"""
        if not self.encoding:
            return self.feature_names
        return tuple(name for feature in self.encoding for name in feature.entries)

    @property
    def parts(self) -> NDArray[np.int64] | None:
        """(W,) the feature that each entry of a row is part of; None if each is one by itself."""
        if self.encoding and len(self.encoding) < self.shape[0]:
            return feature_of(self.encoding)
        return None

    @property
    def blanks(self) -> dict[str, NDArray[np.bool_]]:
        """(N,) which training examples lack a feature, of those that any lacks; before a fit."""
        if self.preprocessing is None:
            return {}
        return self._blanks_of(self.x)

    def _blanks_of(self, x: AnyArray) -> dict[str, NDArray[np.bool_]]:
        found = zip(self.features, self.blank_cells(x).T, strict=True)
        return {name: blank for name, blank in found if blank.any()}

    def blank_cells(self, x: AnyArray) -> NDArray[np.bool_]:
        """(n, F) which features of rows (n, W) are blank, before a fit."""
        parts = self.parts
        firsts = slice(None) if parts is None else np.unique(parts, return_index=True)[1]
        return np.isnan(np.asarray(x)[:, firsts])

    @property
    def further_targets(self) -> list[NDArray[np.generic]]:
        """What models may learn to predict beside `y`, of training and of test examples."""
        both = (self.columns, self.test_columns)
        return [columns[name] for columns in both for name in self.concepts]

    @property
    def num_loaded(self) -> int:
        """The number of training examples in the source, without the changed copies at the end."""
        return len(self.y) - self.copies

    @property
    def spec(self) -> DataSpec:
        """What models and workers need to know about the data beside the examples."""
        return DataSpec(
            self.shape,
            len(self.classes),
            np.dtype(np.int32 if self.words else np.float32),
            (self.vectors, self.known) if self.words else None,
            self.parts,
            self.padding if self.tokenizer else None,
            self.classes,
            tuple(Concept.of(name, self.columns[name]) for name in self.concepts),
        )

    @property
    def strata(self) -> NDArray[np.int64]:
        """(N,) the strata of stratified draws: the classes, if any."""
        return self.y if self.classes else np.zeros(len(self.y), dtype=np.int64)


@dataclass(frozen=True)
class DataSpec:
    """What models and workers need to know of a data set beside its examples."""

    shape: tuple[int, ...]  # of one input
    num_classes: int  # 0 for a regression
    dtype: np.dtype[Any]  # of a network's inputs
    # Of token ids: the vector (V, D) of each, and (V,) which have one that means something.
    embeddings: tuple[NDArray[np.float32], NDArray[np.bool_]] | None = None
    # (W,) the feature of each entry of a table's row, if features take several.
    parts: NDArray[np.int64] | None = None
    padding: int | None = None  # of a tokenizer: its own id, which has changed places with 0
    classes: tuple[str, ...] = ()
    concepts: tuple[Concept, ...] = ()


def fitted(data: Dataset, splits: ClientSplits | None = None) -> tuple[Dataset, tuple[int, int]]:
    """The data, filled and scaled as `data.preprocessing` says.

    Args:
        splits: the examples of each client: it is fitted to their training examples, labelled or
            not, and those of the server. By default to all training examples.

    Returns:
        The data, and the bytes that all clients together send and receive for it.

    Raises:
        DataError: a client, or all of them, have no value of a feature.
    """
    how = data.preprocessing
    if how is None:
        return data, (0, 0)
    features = data.encoding or tuple(map(Feature, data.feature_names))
    own, rows = list[Indices](), [np.arange(len(data.y))]
    if splits is not None:
        rows = [np.concatenate([splits.train.values, splits.unlabelled.values, splits.server])]
        if how.fit != "pooled":
            both = zip(splits.train, splits.unlabelled, strict=True)
            own = [np.concatenate(part) for part in both]
            rows = [*own, splits.server] if len(splits.server) else own
    x, dtype = np.asarray(data.x), data.x.dtype
    found = fit(x, rows, features, how)
    scaling = found.scaling.astype(dtype)
    new: dict[str, Any] = {"x": scaling(x), "test_x": scaling(data.test_x)}
    if scaling.fill is not None:
        new["test_blanks"] = data._blanks_of(data.test_x)
    if how.fit == "client" and splits is not None:
        for k, part in enumerate(own):
            who = f"client {splits.names[k] if splits.names else k}"
            held = np.concatenate([part, *_tests_of(splits, k)])
            new["x"][held] = fit(x, [part], features, how, who).scaling.astype(dtype)(x[held])
        every = np.concatenate(own)
        if len(np.unique(every)) < len(every):
            raise DataError(
                "data.fit=client: clients share examples, which can have one scale only"
            )
    counted = [found] if how.fit == "federated" else []
    if not data.classes and how.scale != "none":
        target = (Feature(data.target or "the target"),)
        of_y = fit(data.y[:, None], rows, target, Preprocessing(scale=how.scale))
        low, span = (np.asarray(value).item() for value in (of_y.scaling.low, of_y.scaling.span))
        y_scaling = Scaling(low, span)
        new |= {"y": y_scaling(data.y), "test_y": y_scaling(data.test_y)}
        new["target_scaling"] = y_scaling
        counted += [of_y] if how.fit != "pooled" else []
    done = replace(data, **new, scaling=scaling, preprocessing=None)
    clients = len(own)  # the server's share is not sent
    sent = sum(sum(one.sent[:clients]) for one in counted)
    return done, (sent, sum(one.received for one in counted) * clients)


def _tests_of(splits: ClientSplits, k: int) -> list[Indices]:
    """A client's own examples that it does not train on."""
    found = [] if splits.test_is_central else [splits.test[k]]
    if splits.sequence is not None:
        T = splits.sequence.num_tasks
        found += [splits.sequence.validation[i] for i in range(k * T, (k + 1) * T)]
    return found


def feature_names(count: int, names: Sequence[str] = ()) -> tuple[str, ...]:
    """The features' names, or x1, x2, … where they have none."""
    if names and len(names) != count:
        raise DataError(f"{len(names)} names for {count} features")
    return tuple(names) or tuple(f"x{f + 1}" for f in range(count))


def as_dtype(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Numbers as of another type, rounded if that is bytes."""
    if dtype == np.uint8:
        values = np.rint(np.clip(values, 0, 255))
    return values.astype(dtype)


def frozen(array: Any) -> Any:
    """A read-only view of an array, for code that others' scores must not depend on."""
    if not isinstance(array, np.ndarray):
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def _unmasked(name: str, values: Any) -> NDArray[Any]:
    """Values as an array; what is masked would count as if it were not."""
    if np.ma.is_masked(values):
        raise DataError(f"data: {name} has masked values; fill them, or leave out their examples")
    try:
        return np.asarray(values)
    except ValueError as error:
        raise DataError(f"data: {name} is no array: {error}") from None


def check_parts(dataset: Dataset, where: str) -> None:
    """Refuse a data set whose parts do not go together; `where` names its source."""
    for x, y in (("x", "y"), ("test_x", "test_y")):
        inputs, labels = getattr(dataset, x), getattr(dataset, y)
        if len(inputs.shape) < 2 or labels.ndim < 1 or len(inputs) != len(labels):
            raise DataError(
                f"{where}: {x} of shape {inputs.shape} and {y} of {labels.shape} do not go "
                "together; they must be (N, ...) and (N,)"
            )
    n, m = len(dataset.y), len(dataset.test_y)
    for name, count in (("columns", n), ("test_columns", m), ("test_blanks", m), ("truth", m)):
        for key, array in getattr(dataset, name).items():
            if array.shape[:1] != (count,) or (name != "truth" and array.ndim > 1):
                shape = f"({count}, ...)" if name == "truth" else f"({count},)"
                raise DataError(
                    f"{where}: {name}['{key}'] of shape {array.shape} must be {shape}, an entry "
                    f"for each of the {'training' if name == 'columns' else 'test'} examples"
                )
    of_parts = {"columns": dataset.columns, "test_columns": dataset.test_columns}
    check_concepts(dataset.concepts, of_parts, dataset.features, where)
    for name in ("classes", "features"):
        names = getattr(dataset, name)
        if len(set(names)) < len(names):
            twice = next(one for one in names if names.count(one) > 1)
            raise DataError(f"{where}: {name} has '{twice}' twice")
    if dataset.features and dataset.shape != (len(dataset.entry_names),):
        raise DataError(
            f"{where}: {len(dataset.entry_names)} features for inputs of shape {dataset.shape}"
        )
    names = dataset.entry_names
    if len(set(names)) < len(names):
        twice = next(one for one in names if names.count(one) > 1)
        raise DataError(f"{where}: has two entries '{twice}'; rename a column")
    if dataset.preprocessing is not None and dataset.y.ndim > 1:
        raise DataError(f"{where}: preprocessing is for one target, not for {dataset.y.shape[1]}")
    if dataset.encoding and tuple(f.name for f in dataset.encoding) != dataset.features:
        raise DataError(f"{where}: encoding must be of the features, in their order")
    mean, std = dataset.mean, dataset.std
    fits = len(mean) == len(std) and len(mean) in (0, 1, dataset.shape[0])
    if not (fits and all(map(math.isfinite, mean + std)) and min(std, default=1) > 0):
        raise DataError(
            f"{where}: mean={mean} and std={std} must be one number each or one per channel, "
            "finite, and std above 0"
        )
    if dataset.sliced_by and dataset.sliced_by not in dataset.test_columns:
        raise DataError(f"{where}: sliced_by='{dataset.sliced_by}' is not one of test_columns")
    words, vectors, known = (len(part) for part in (dataset.words, dataset.vectors, dataset.known))
    if (vectors, known) != (words, words):
        raise DataError(f"{where}: {words} words, {vectors} vectors and {known} of known")
    if not 0 <= dataset.copies < max(n, 1):
        raise DataError(f"{where}: copies={dataset.copies} of {n} training examples")


def check_trainable(dataset: Dataset, where: str) -> None:
    """Refuse what nothing could be trained on; `where` names the source."""
    check_parts(dataset, where)
    for x, y in (("x", "y"), ("test_x", "test_y")):
        inputs, labels = getattr(dataset, x), getattr(dataset, y)
        if isinstance(inputs, StoredArray):
            raise DataError(f"{where}: {x} stays in a file; name a source that reads it")
        if inputs.shape[1:] != dataset.shape:
            raise DataError(
                f"{where}: inputs in {x} are of shape {inputs.shape[1:]}, in x of {dataset.shape}"
            )
        if not len(labels):
            raise DataError(f"{where}: {x} and {y} are empty")
        for name, array in ((x, inputs), (y, labels)):
            if array.dtype.kind not in "uif":
                raise DataError(f"{where}: {name} must hold numbers, not {array.dtype}")
            how = dataset.preprocessing
            blank = how is not None and how.fills and array is inputs
            unfit = np.isinf if blank else lambda values: ~np.isfinite(values)
            if array.dtype.kind == "f" and unfit(array).any():
                raise DataError(f"{where}: {name} has NaN or infinite values")
        known = len(dataset.classes)
        if known and labels.ndim != 1:
            raise DataError(
                f"{where}: {y} must be (N,) class indices, not of shape {labels.shape}"
            )
        if known and (
            labels.dtype.kind not in "iu" or not 0 <= labels.min() <= labels.max() < known
        ):
            raise DataError(f"{where}: {y} must be class indices from 0 to {known - 1}")


def _contiguous(array: NDArray[Any]) -> NDArray[Any]:
    """The array with the strides of one that was just allocated.

    Torch picks its kernels by strides, so they decide the last bits, and pickling resets them.
    NumPy takes an axis of length 1 for contiguous whatever its stride; a flat view has none.
    """
    return np.ascontiguousarray(array).reshape(-1).reshape(array.shape)


def of_arrays(where: str, arrays: Mapping[str, AnyArray], test_fraction: float) -> Dataset:
    """A classification data set from arrays as `fedsim.data.sources.arrays.Npz` names them."""
    unsplit = "x" in arrays or "y" in arrays
    keys = ("x", "y") if unsplit else ("x_train", "y_train", "x_test", "y_test")
    x, y = _inputs(where, arrays, keys[0]), _labels(where, arrays, *keys[:2])
    columns = {key: np.asarray(array) for key, array in arrays.items() if key not in keys}
    for key, column in columns.items():
        if column.shape != (len(x),):
            raise DataError(
                f"{where}: '{key}' has shape {column.shape}; a column has shape ({len(x)},), "
                f"as '{keys[0]}' has {len(x)} examples"
            )
    test = None
    if not unsplit:
        test_x = _inputs(where, arrays, "x_test")
        test = test_x, _labels(where, arrays, *keys[2:])
        if test_x.shape[1:] != x.shape[1:] or test_x.dtype != x.dtype:
            raise DataError(
                f"{where}: 'x_test' has {test_x.dtype} inputs of shape {test_x.shape[1:]}, "
                f"'x_train' {x.dtype} of {x.shape[1:]}"
            )
    return of_parts((x, y), test, None, test_fraction, where, columns)


def _array(where: str, arrays: Mapping[str, AnyArray], key: str) -> AnyArray:
    if key not in arrays:
        raise DataError(f"{where}: has no array '{key}'{nearest(key, arrays)}")
    return arrays[key]


def _inputs(where: str, arrays: Mapping[str, AnyArray], key: str) -> AnyArray:
    x = _array(where, arrays, key)
    if isinstance(x, StoredArray):
        return x
    if x.size == 0:
        raise DataError(f"{where}: '{key}', of shape {x.shape}, is empty")
    if x.ndim < 2 or x.dtype.kind not in "biuf":
        raise DataError(
            f"{where}: '{key}' is {x.dtype} of shape {x.shape}, expected numbers of shape (N, ...)"
        )
    return x if x.dtype == np.uint8 else as_float32(x, f"{where}: '{key}'", np.arange(len(x)))


def _labels(where: str, arrays: Mapping[str, AnyArray], x_key: str, key: str) -> NDArray[np.int64]:
    y, count = np.asarray(_array(where, arrays, key)), len(arrays[x_key])
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise DataError(
            f"{where}: '{key}' is {y.dtype} of shape {y.shape}, expected integers of shape (N,)"
        )
    if len(y) != count:
        raise DataError(f"{where}: '{key}' has {len(y)} labels for {count} inputs in '{x_key}'")
    labels = y.astype(np.int64)
    wrong = np.flatnonzero(labels < 0)
    if len(wrong):
        raise DataError(
            f"{where}: '{key}' has the negative label {labels[wrong[0]]} at {wrong[0]}"
        )
    return labels


def of_parts(
    train: tuple[AnyArray, NDArray[Any]],
    test: tuple[AnyArray, NDArray[Any]] | None,
    classes: tuple[str, ...] | None,
    test_fraction: float,
    what: str,
    columns: Mapping[str, NDArray[np.generic]] | None = None,
) -> Dataset:
    """A data set of inputs and labels; a test set that is not given is split off (`split_rows`).

    `classes` are empty for a regression, and None for the labels that occur, in order.
    """
    (x, y), columns = train, dict(columns or {})
    if classes is None:
        labels = y if test is None else np.concatenate([y, test[1]])
        names, both = np.unique(labels, return_inverse=True)
        classes, y = tuple(map(str, names)), both[: len(y)]
        test = (test[0], both[len(y) :]) if test else None
    if test is None:
        rows, aside = split_rows(y, classes, test_fraction, what)
        columns = {name: values[rows] for name, values in columns.items()}
        x, y, test = select(x, rows), y[rows], (select(x, aside), y[aside])
    return Dataset(x, y, *test, classes, columns=columns)


def split_rows(
    y: NDArray[Any], classes: Sequence[str], test_fraction: float, what: str
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Training rows and test rows, each in ascending order, stratified by class if there are any.

    The split does not depend on the experiment's seed, so all runs have the same test set.
    """
    examples, least = f"{len(y)} examples", 1
    if classes:
        present, counts = np.unique(y, return_counts=True)
        if counts.min() < 2:
            number = all(name.replace(".", "").isdigit() for name in classes) and len(classes) > 10
            hint = "; a number to predict is named in data.target" if number else ""
            raise DataError(
                f"{what}: class '{classes[present[counts.argmin()]]}' has 1 example; splitting "
                f"off a test set needs at least 2 per class{hint}"
            )
        least = len(present)
        examples += f" of {least} classes"
    aside = math.ceil(test_fraction * len(y))
    if min(aside, len(y) - aside) < least:
        raise DataError(
            f"{what}: {examples} cannot be split with test_fraction={test_fraction}: that leaves "
            f"{len(y) - aside} for training and {aside} for testing; each needs {least} or more"
        )
    return split_off(aside, len(y), y if classes else None, seed=0)


def split_off(
    aside: int, n: int, y: NDArray[Any] | None, seed: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The rows that stay and those set aside, of n, at random, each in ascending order.

    With labels y (n,), of each class in proportion. The rows are those of scikit-learn's
    `train_test_split`, which takes more than a second to import.
    """
    rng = np.random.RandomState(seed)
    if y is None:
        order = rng.permutation(n)
        return np.sort(order[aside:]), np.sort(order[:aside])
    order = np.argsort(y, kind="stable")
    of_classes = np.split(order, np.flatnonzero(np.diff(y[order])) + 1)
    counts = np.array([len(rows) for rows in of_classes])
    staying = _in_proportion(counts, n - aside, rng)
    _in_proportion(counts - staying, aside, rng)  # all others; for what it draws
    parts = [
        np.split(rows[rng.permutation(len(rows))], [k])
        for rows, k in zip(of_classes, staying, strict=True)
    ]
    stay, go = (np.sort(np.concatenate(part)) for part in zip(*parts, strict=True))
    return stay, go


def _in_proportion(
    counts: NDArray[np.intp], n: int, rng: np.random.RandomState
) -> NDArray[np.intp]:
    """How many of n examples each class gets: largest remainders are rounded up, ties drawn."""
    exact = counts / counts.sum() * n
    found = np.floor(exact).astype(np.intp)
    remainders = exact - found
    for remainder in np.unique(remainders)[::-1]:
        missing = n - int(found.sum())
        if missing > 0:
            found[rng.permutation(np.flatnonzero(remainders == remainder))[:missing]] += 1
    return found
