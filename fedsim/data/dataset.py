"""Data sets, and the base class of their sources."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import psutil
from numpy.typing import NDArray
from pydantic import AfterValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from fedsim.config.registry import Component, Registry, called, check_keywords, import_object
from fedsim.data import doubts
from fedsim.data.stored import AnyArray, StoredArray, select
from fedsim.data.subset import Indices, take_stratified
from fedsim.errors import DataError, FedsimError, FedsimWarning, in_own_code
from fedsim.support.rng import keyed_rng

if TYPE_CHECKING:
    from fedsim.data.partition import ClientSplits
    from fedsim.data.sources.adapters import Reading


INSPECTED = 10_000  # training inputs in memory, for what is doubtful about them
INSPECTED_STORED = 100  # likewise, of those in files


@dataclass(frozen=True, eq=False)
class Scaling:
    """How a source scales the numbers of its files, column by column: (v - low) / span.

    A column whose span is 0 becomes 0. By default nothing is changed.

    Args:
        low: (F,), or one for all columns.
        span: likewise.
    """

    low: NDArray[Any] | float = 0.0
    span: NDArray[Any] | float = 1.0

    @classmethod
    def minmax(cls, train: NDArray[Any]) -> Scaling:
        """Scaling of each column of (N, F) or (N,) to [0, 1] by its minimum and maximum."""
        low = train.min(axis=0)
        return cls(low, train.max(axis=0) - low)

    @classmethod
    def standard(cls, train: NDArray[Any]) -> Scaling:
        """Scaling of each column of (N, F) or (N,) to mean 0 and standard deviation 1."""
        low, span = train.mean(axis=0, dtype=np.float64), train.std(axis=0, dtype=np.float64)
        span = np.where(np.ptp(train, axis=0) > 0, span, 0)  # not by rounding
        return cls(low.astype(train.dtype), span.astype(train.dtype))

    def __call__(self, values: Any) -> Any:
        """Scale floats (n, F) or (n,) from the units of the files to those of the data set."""
        if self is UNSCALED:  # inputs that stay in their files are never scaled
            return values
        span = np.where(np.greater(self.span, 0), self.span, np.inf).astype(values.dtype)
        scaled: NDArray[Any] = (values - self.low) / span
        return scaled

    def undo(self, scaled: NDArray[Any]) -> NDArray[Any]:
        """Convert floats from the units of the data set back to those of the files."""
        values: NDArray[Any] = scaled * self.span + self.low
        return values


UNSCALED = Scaling()
_ARRAYS = ("x", "y", "test_x", "test_y", "vectors", "known")


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
        features: names of a table's inputs; empty if they have none.
        target: name of the predicted quantity, if it has one.
        words: for documents, the word of each token id: "" for id 0 (padding), and "<unknown>" for
            id 1; otherwise empty.
        vectors: (V, D) float32, the vector of each of the `words`; zeros for id 0.
        known: (V,) whether each of the `words` has a vector in the file of vectors; without a
            file, all except ids 0 and 1.
        spaced: words of documents are separated by spaces and used unchanged; otherwise texts are
            tokenised by `fedsim.data.text.tokenise`.
        test_columns: attributes of the test examples, (M,) each, by name.
        sliced_by: the one of `test_columns` whose values define slices with scores of their own;
            empty for none.
        truth: which parts of each test input are of a kind, as far as that is known, by the kind's
            name: words (M, L), features (M, F) or pixels (M, height, width). `signal` is what the
            label is about.
        scaling: what `x` was made with of the numbers in the source's files; not of uint8.
        target_scaling: what a regression's `y` was made with.
        note: what the source made of its files, in a line for the user; empty for nothing.
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
    target: str = ""
    words: tuple[str, ...] = ()
    vectors: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    known: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    spaced: bool = False
    test_columns: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    sliced_by: str = ""
    truth: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    scaling: Scaling = UNSCALED
    target_scaling: Scaling = UNSCALED
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
        from fedsim.data.sources.standard import of_arrays

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
        for name, kind in (("classes", str), ("features", str), ("mean", float), ("std", float)):
            given = getattr(self, name)
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise DataError(f"data: {name} must be a tuple, not {given!r:.80}")
            object.__setattr__(self, name, tuple(map(kind, given)))
        for name in ("columns", "test_columns", "truth"):
            given = getattr(self, name)
            if not isinstance(given, Mapping):
                raise DataError(f"data: {name} must be a dict of arrays, not {given!r:.80}")
            arrays = {k: _unmasked(f"{name}['{k}']", array) for k, array in given.items()}
            object.__setattr__(self, name, arrays)
        kinds = {"scaling": Scaling, "target_scaling": Scaling, "copies": int}
        for name, wanted in {**kinds, "target": str, "sliced_by": str, "note": str}.items():
            if not isinstance(given := getattr(self, name), wanted):
                raise DataError(f"data: {name} must be a {wanted.__name__}, not {given!r:.80}")

    def frozen(self) -> Dataset:
        """The same data set, of read-only arrays."""
        arrays = {name: frozen(getattr(self, name)) for name in _ARRAYS}
        for name in ("columns", "test_columns", "truth"):
            arrays[name] = {key: frozen(array) for key, array in getattr(self, name).items()}
        return replace(self, **arrays)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.x.shape[1:])

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
        )

    @property
    def strata(self) -> NDArray[np.int64]:
        """(N,) the strata of stratified draws: the classes, if any."""
        return self.y if self.classes else np.zeros(len(self.y), dtype=np.int64)


@dataclass(frozen=True)
class DataSpec:
    """What models and workers need to know of a data set beside its examples.

    Args:
        shape: of one input.
        num_classes: 0 for a regression.
        dtype: of a network's inputs.
        embeddings: for token ids, the vector (V, D) of each, and (V,) which have one that means
            something; else None.
    """

    shape: tuple[int, ...]
    num_classes: int
    dtype: np.dtype[Any]
    embeddings: tuple[NDArray[np.float32], NDArray[np.bool_]] | None = None


def feature_names(count: int, names: Sequence[str] = ()) -> tuple[str, ...]:
    """The features' names, or x1, x2, … where they have none.

    Raises:
        DataError: there are names, but not one for each feature.
    """
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
    """Values as an array; what is masked would count as if it were not.

    Raises:
        DataError: some are masked, or they are no array.
    """
    if np.ma.is_masked(values):
        raise DataError(f"data: {name} has masked values; fill them, or leave out their examples")
    try:
        return np.asarray(values)
    except ValueError as error:
        raise DataError(f"data: {name} is no array: {error}") from None


def check_parts(dataset: Dataset, where: str) -> None:
    """Refuse a data set whose parts do not go together; see `Dataset`.

    Args:
        where: it is from, for messages.

    Raises:
        DataError: with the reason.
    """
    for x, y in (("x", "y"), ("test_x", "test_y")):
        inputs, labels = getattr(dataset, x), getattr(dataset, y)
        if len(inputs.shape) < 2 or labels.ndim < 1 or len(inputs) != len(labels):
            raise DataError(
                f"{where}: {x} of shape {inputs.shape} and {y} of {labels.shape} do not go "
                "together; they must be (N, ...) and (N,)"
            )
    n, m = len(dataset.y), len(dataset.test_y)
    for name, count in (("columns", n), ("test_columns", m), ("truth", m)):
        for key, array in getattr(dataset, name).items():
            if array.shape[:1] != (count,) or (name != "truth" and array.ndim > 1):
                shape = f"({count}, ...)" if name == "truth" else f"({count},)"
                raise DataError(
                    f"{where}: {name}['{key}'] of shape {array.shape} must be {shape}, an entry "
                    f"for each of the {'training' if name == 'columns' else 'test'} examples"
                )
    for name in ("classes", "features"):
        names = getattr(dataset, name)
        if len(set(names)) < len(names):
            twice = next(one for one in names if names.count(one) > 1)
            raise DataError(f"{where}: {name} has '{twice}' twice")
    if dataset.features and dataset.shape != (len(dataset.features),):
        raise DataError(
            f"{where}: {len(dataset.features)} features for inputs of shape {dataset.shape}"
        )
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


def _contiguous(array: NDArray[Any]) -> NDArray[Any]:
    """The array with the strides of one that was just allocated.

    Torch picks its kernels by strides, so they decide the last bits, and pickling resets them.
    NumPy takes an axis of length 1 for contiguous whatever its stride; a flat view has none.
    """
    return np.ascontiguousarray(array).reshape(-1).reshape(array.shape)


def _count_or_share(asked: int | float | None) -> int | float | None:
    if asked is not None and (asked <= 0 or (isinstance(asked, float) and asked >= 1)):
        raise PydanticCustomError(
            "count_or_share",
            "must be a number of examples, 1 or more, or a share of them between 0 and 1",
        )
    return asked


CountOrShare = Annotated[int | float | None, AfterValidator(_count_or_share)]


class Source(Component):
    """The source of a data set: a component of the `data` section.

    Args:
        subset: number of training examples to use, or their share; by default all. Drawn at
            random, stratified by class and independent of the experiment's seed, so that all runs
            learn from the same data.
        test_subset: the same for the central test set.
    """

    name: str
    subset: CountOrShare = None
    test_subset: CountOrShare = None

    def load(self) -> Dataset:
        """Load the whole data set.

        Raises:
            DataError: a file is missing, unreadable, truncated or mislabelled; the message says
                which, where fedsim looked for it, and how to get it.
        """
        raise NotImplementedError

    def for_clients(
        self, dataset: Dataset, splits: ClientSplits, seed: int
    ) -> tuple[Dataset, ClientSplits]:
        """Adapt the training examples once they are distributed to clients.

        Args:
            dataset: the data set as loaded, or as returned by an earlier call, which is not
                changed again.
            splits: the examples that each client holds.
            seed: the experiment's seed.

        Returns:
            The data, and the examples that each client holds.

        Raises:
            DataError: the source cannot adapt to this distribution.
        """
        return dataset, splits


def held_as_loaded(problem: str) -> AfterValidator:
    """A check of a data set in another's section: clients hold its examples as it loads them.

    Args:
        problem: what to say if it changes them, with '{name}' for its name.
    """

    def check(of: Source) -> Source:
        if type(of).for_clients is not Source.for_clients:
            raise PydanticCustomError("nested", problem, {"name": of.name})
        return of

    return AfterValidator(check)


class CalledSource(Source):
    """Your own function that returns a data set: `f(**keywords)`.

    Named `package.module:function`; the other keys of the section are its keyword arguments. It
    returns a `Dataset`; or a map-style `torch.utils.data.Dataset` of pairs (x, y), a Hugging Face
    `Dataset`, or a pair (train, test) or `DatasetDict` of them. For those the section also takes
    the keys of `fedsim.data.sources.adapters.Reading`, unless the function has arguments of
    these names.
    """

    model_config = ConfigDict(extra="allow")

    name: str

    @model_validator(mode="after")
    def _keywords_fit(self) -> CalledSource:
        function, keywords, _ = self._call()
        check_keywords(function, self.name, (), keywords)
        return self

    def _call(self) -> tuple[Callable[..., Any], dict[str, Any], Reading]:
        """The function, its keywords, and how to read what it returns."""
        from fedsim.data.sources.adapters import Reading

        function = import_object(self.name, "data set")
        parameters = inspect.signature(function).parameters.values()
        takes = {parameter.name for parameter in parameters}
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            takes |= {*Reading.model_fields}
        given = self.model_extra or {}
        reading = {key: given[key] for key in given if key in {*Reading.model_fields} - takes}
        keywords = {key: given[key] for key in given if key not in reading}
        return function, keywords, Reading.model_validate(reading)

    def load(self) -> Dataset:
        from fedsim.data.sources.adapters import read

        function, keywords, reading = self._call()
        found = function(**keywords)
        if isinstance(found, Dataset):
            for key in reading.model_fields_set:
                raise DataError(f"data.{key}: {self.name} takes no '{key}', and returns a Dataset")
            return found
        return read(found, self.name, reading) or found  # load_dataset refuses anything else


def _is_section(given: Any) -> bool:
    return given is None or (isinstance(given, Mapping) and "name" in given)


class _Datasets(Registry[Source]):
    def _import(self, name: str) -> type[Source]:
        found = import_object(name, self.what)
        return CalledSource if inspect.isfunction(found) else super()._import(name)

    def _name_of(self, component: type[Source], name: str | None = None) -> str:
        return name if component is CalledSource and name else super()._name_of(component, name)

    def section(self, given: Any) -> Any:
        """As of any registry; also of a data set, and of a function that returns one.

        Data sets are those that a function may return, too: see `CalledSource`.
        """
        found = called(given, self.what, self.key)
        if found or isinstance(given, str | Source) or _is_section(given):
            return found or super().section(given)
        from fedsim.data.sources.adapters import Reading, read
        from fedsim.data.sources.from_python import keep

        if not isinstance(given, Dataset):
            given = read(given, "data", Reading()) or given
        return keep(given) if isinstance(given, Dataset) else super().section(given)


datasets = _Datasets("data set", Source)


def load_dataset(source: Source) -> Dataset:
    """What a source loads, or the subset of it that its section asks for.

    Raises:
        DataError: it cannot be loaded, for want of memory or whatever else the source raises; or
            a subset of more examples than there are is asked for.
    """
    where = f"data.name={source.name}"
    try:
        found = source.load()
    except FedsimError:
        raise
    except MemoryError as error:
        raise DataError(f"{where}: there is not enough memory: {error}") from error
    except Exception as error:  # of a source of the user's own, say
        raise DataError(f"{where}: cannot be loaded: {in_own_code(error)}") from error
    if not isinstance(found, Dataset):
        raise DataError(f"{where}: load() must return a Dataset, not {type(found).__name__}")
    check_parts(found, where)
    _warn_of_doubts(found, "scale" in type(source).model_fields)
    if source.subset is not None:
        found = _subset(found, source.subset)
    if source.test_subset is not None:
        found = _test_subset(found, source.test_subset)
    return found


def _warn_of_doubts(data: Dataset, has_scale: bool) -> None:
    count = INSPECTED_STORED if isinstance(data.x, StoredArray) else INSPECTED
    x = data.x[:count]
    found = [*doubts.of_inputs(x)]
    if data.classes:
        found += doubts.of_classes(data.classes, data.y, data.test_y)
    if x.ndim == 2 and x.dtype.kind == "f":
        names = feature_names(x.shape[1], data.features)
        found += doubts.of_identifiers(data.scaling.undo(x.astype(np.float64)), names, len(data.x))
        columns = dict(zip(names, x.T, strict=True))
        if not data.classes and data.y.ndim == 1:
            columns |= {data.target or "the target": data.y}
        found += doubts.of_scales(columns, has_scale)
    for doubt in found:
        warnings.warn(f"data: {doubt}", FedsimWarning, stacklevel=3)


def _subset(data: Dataset, asked: int | float) -> Dataset:
    """With so many of the training examples."""
    rows = _drawn("subset", asked, data.strata, "training examples")
    columns = {name: column[rows] for name, column in data.columns.items()}
    return replace(data, x=select(data.x, rows), y=data.y[rows], columns=columns)


def _test_subset(data: Dataset, asked: int | float) -> Dataset:
    """With so many of the test examples."""
    y = data.test_y
    strata = y if data.classes else np.zeros(len(y), dtype=np.int64)
    rows = _drawn("test_subset", asked, strata, "test examples")
    return replace(
        data,
        test_x=select(data.test_x, rows),
        test_y=y[rows],
        test_columns={name: column[rows] for name, column in data.test_columns.items()},
        truth={kind: where[rows] for kind, where in data.truth.items()},
    )


def _drawn(key: str, asked: int | float, strata: NDArray[np.int64], what: str) -> Indices:
    n = len(strata)
    if asked > n:
        raise DataError(f"data.{key}={asked}: there are {n:,} {what}")
    share = asked / n if isinstance(asked, int) else max(asked, 1 / n)  # one at least
    return take_stratified(np.arange(n), strata, share, keyed_rng(0, f"data/{key}"))[0]


def check_memory(source: Source, nbytes: float) -> None:
    """Refuse to make data that would not fit.

    Args:
        nbytes: that it takes, about.

    Raises:
        DataError: less is free.
    """
    free = psutil.virtual_memory().available
    if nbytes > free:
        raise DataError(
            f"data.name={source.name}: takes about {nbytes / 1e9:,.0f} GB of memory as asked for, "
            f"and {free / 1e9:.0f} GB are free"
        )
