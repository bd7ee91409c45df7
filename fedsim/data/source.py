"""The base class of sources of data sets, and sources that are objects in Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import psutil
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from fedsim.config.registry import (
    Component,
    Registry,
    called,
    check_keywords,
    import_object,
    unfit,
)
from fedsim.data import doubts
from fedsim.data.dataset import Dataset, check_parts
from fedsim.data.sources import from_python
from fedsim.data.sources.adapters import Reading, read
from fedsim.data.splits import ClientSplits, Indices, take_stratified
from fedsim.data.stored import StoredArray, select
from fedsim.errors import DataError, FedsimError, in_own_code, warn
from fedsim.support.rng import keyed_rng

INSPECTED = 10_000  # training inputs in memory, for what is doubtful about them
INSPECTED_STORED = 100  # likewise, of those in files


def _count_or_share(asked: int | float | None) -> int | float | None:
    if asked is not None and (asked <= 0 or (isinstance(asked, float) and asked >= 1)):
        raise unfit("must be a number of examples, 1 or more, or a share of them between 0 and 1")
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


class OfficialFiles(Source):
    """A data set in official files below a data root; see `fedsim.data.sources.files.find`.

    Args:
        root: folder that contains the files, or has them in one of the data set's usual
            sub-folders, which a message lists if they are not found; by default $FEDSIM_DATA.
    """

    root: Path | None = None


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
        function, keywords, reading = self._call()
        found = function(**keywords)
        if isinstance(found, Dataset):
            for key in reading.model_fields_set:
                raise DataError(f"data.{key}: {self.name} takes no '{key}', and returns a Dataset")
            return found
        return read(found, self.name, reading) or found  # load_dataset refuses anything else


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
        is_section = given is None or (isinstance(given, Mapping) and "name" in given)
        if found or is_section or isinstance(given, str | Source):
            return found or super().section(given)
        if not isinstance(given, Dataset):
            given = read(given, "data", Reading()) or given
        return from_python.keep(given) if isinstance(given, Dataset) else super().section(given)


datasets = _Datasets("data set", Source)


class Wrapping(Source):
    """A data set in which some clients' examples are changed.

    The data set that it wraps must not change any itself.

    Args:
        of: the data set (a `data` section), in memory.
    """

    niche: ClassVar[bool] = True
    cannot: ClassVar[str]  # do what, as the end of a message: "cannot drift"
    # Of changes, for `documents`, `tables` and `images`; the first is the default.
    kinds: ClassVar[Mapping[str, Sequence[str]]]
    of: Annotated[SerializeAsAny[Source], BeforeValidator(datasets.parse)]

    @field_validator("of")
    @classmethod
    def _clients_hold_it_as_loaded(cls, of: Source) -> Source:
        if type(of).for_clients is not Source.for_clients:
            raise unfit(f"clients {cls.cannot} if '{of.name}' already changes their examples")
        return of

    def kind_for(self, data: Dataset, chosen: str | None) -> Any:
        """The chosen kind of change, or the default for such data.

        Raises:
            DataError: it is not for these data, or they stay in files.
        """
        inputs = f"inputs of shape {data.shape}"
        what = {1: "tables", 3: "images"}.get(len(data.shape), inputs)
        what = "documents" if data.words else what
        if what not in self.kinds:
            *most, last = self.kinds
            others = f"{', '.join(most)} and {last}"
            raise DataError(f"data.of: {what} {self.cannot}; only {others} can")
        known = self.kinds[what]
        if (kind := chosen or known[0]) not in known:
            raise DataError(f"data.kind={kind}: is not for {what}; known: {', '.join(known)}")
        if isinstance(data.x, StoredArray) or isinstance(data.test_x, StoredArray):
            raise DataError(
                f"data.of: inputs that stay in files {self.cannot}; leave out in_place"
            )
        return kind


@datasets.register
class FromPython(Source):
    """A data set that was given as an object in Python.

    An experiment that is made with `data=dataset` has it written to `arrays/<hash>.npz` in the
    folder of all data, once, so that the run can be resumed, replayed and explained later.

    Args:
        hash: of its content.
        root: the folder of all data; by default $FEDSIM_DATA, or else ~/.cache/fedsim.
    """

    niche: ClassVar[bool] = True
    name: str = "from_python"
    hash: str = Field(pattern=r"^[0-9a-f]{16}$")
    root: Path | None = None

    def load(self) -> Dataset:
        """As it was given."""
        return from_python.kept(self.hash, self.root)


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
        found = found.taking(_drawn("subset", source.subset, found.strata, "training examples"))
    if source.test_subset is not None:
        found = _test_subset(found, source.test_subset)
    return found


def _warn_of_doubts(data: Dataset, has_scale: bool) -> None:
    count = INSPECTED_STORED if isinstance(data.x, StoredArray) else INSPECTED
    x = data.x[:count]
    found = [*doubts.of_inputs(x)]
    if data.words:
        found += doubts.of_words(x)
    if data.classes:
        found += doubts.of_classes(data.classes, data.y, data.test_y)
    for feature in data.encoding:
        found += doubts.of_names(f"the categories of '{feature.name}'", feature.words)
    for name, values in data.columns.items():
        if values.dtype.kind == "U":
            found += doubts.of_names(f"the values of '{name}'", np.unique(values).tolist())
    if x.ndim == 2 and x.dtype.kind == "f":
        known = np.flatnonzero(~np.isnan(x).any(axis=0))  # entries without a blank cell
        x, names = x[:, known], [data.entry_names[w] for w in known]
        found += doubts.of_identifiers(data.scaling.undo(x.astype(np.float64)), names, len(data.x))
        all_names, every = data.entry_names, data.x[:count].T
        columns = {name: v[~np.isnan(v)] for name, v in zip(all_names, every, strict=True)}
        columns = {name: values for name, values in columns.items() if len(values)}
        if not data.classes and data.y.ndim == 1:
            columns |= {data.target or "the target": data.y}
        if data.preprocessing is None or data.preprocessing.scale == "none":
            found += doubts.of_scales(columns, has_scale)
    for doubt in found:
        warn(f"data: {doubt}")


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
    """Refuse to make data of about so many bytes if they would not fit."""
    free = psutil.virtual_memory().available
    if nbytes > free:
        raise DataError(
            f"data.name={source.name}: takes about {nbytes / 1e9:,.0f} GB of memory as asked for, "
            f"and {free / 1e9:.0f} GB are free"
        )
