"""Tables of features, with labels or numbers to predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from cachetools import cached
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from fedsim.config.registry import nearest, unfit
from fedsim.data.dataset import Dataset, TestFraction, split_rows
from fedsim.data.encoding import Feature, Fit, Missing, Preprocessing, Scale
from fedsim.data.source import OfficialFiles, Source, datasets
from fedsim.data.sources import files
from fedsim.data.sources.columns import (
    WHICH,
    Categories,
    as_entries,
    blanked,
    column,
    concept,
    feature_of_column,
    is_numeric,
    kind_of,
    not_a_number,
    numbers,
    present,
    refuse_objects,
    text_of,
)
from fedsim.data.sources.table_files import (
    FILE,
    empty_table,
    insist_on_column,
    is_pattern,
    paths_of,
    read_table,
    read_tables,
    with_origin,
)
from fedsim.data.stored import AnyArray, StoredArray, latest, select
from fedsim.errors import DataError, warn
from fedsim.support.words import in_short

if TYPE_CHECKING:
    import pandas as pd

OPENFL_COLLABORATORS, OPENFL_COLUMNS = 5, 15


@datasets.register
class OpenflXai(OfficialFiles):
    """The regression data of OpenFL-XAI: 11,619 + 2,417 rows of 15 inputs, 5 collaborators.

    The collaborator of each training row is in the column `collaborator`, col0 to col4; the test
    set is common to all of them. Inputs and target lie in [0, 1] as published, and are anonymous:
    the documentation of OpenFL-XAI calls the data Mortgage and names its columns, but neither the
    number of rows nor any correlation with the target fits; for Mortgage, see `mortgage`.
    """

    niche: ClassVar[bool] = True
    name: str = "openfl_xai"

    def load(self) -> Dataset:
        """x is float64 (N, 15), y float64 (N,), in the order of the collaborators."""
        first = files.find(["col0/X_train.npy"], self.name, self.root)
        top = first.parent.parent
        names = [f"col{k}" for k in range(OPENFL_COLLABORATORS)]
        train = [self._read(top, name, "train") for name in names]
        test = [self._read(top, name, "test") for name in names]
        return Dataset(
            x=np.concatenate([x for x, _ in train]),
            y=np.concatenate([y for _, y in train]),
            test_x=np.concatenate([x for x, _ in test]),
            test_y=np.concatenate([y for _, y in test]),
            classes=(),
            columns={"collaborator": np.repeat(names, [len(y) for _, y in train])},
        )

    def _read(
        self, top: Path, collaborator: str, part: str
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        x_path, y_path = (
            files.beside(top / "col0", f"{collaborator}/{array}_{part}.npy", self.name)
            for array in ("X", "y")
        )
        x = files.read_npy(x_path, OPENFL_COLUMNS)
        y = files.read_npy(y_path)
        if len(y) != len(x):
            raise DataError(f"{y_path}: {len(y)} targets for the {len(x)} rows of {x_path.name}")
        return x, y


def _as_texts(given: Any) -> Any:
    """Keys and entries of a mapping or a list as text, as cells of a table are compared."""
    if isinstance(given, Mapping):
        return {
            text_of(k): v if isinstance(v, Mapping) else _as_texts(v) for k, v in given.items()
        }
    if isinstance(given, list | tuple):
        return tuple(map(text_of, given))
    return given if given is None or isinstance(given, str) else text_of(given)


def _as_categories(given: Any) -> Any:
    """A list of columns as a mapping, and what is said of each with texts."""
    if isinstance(given, list | tuple):
        return dict.fromkeys(map(text_of, given), "one_hot")
    if not isinstance(given, Mapping):
        return given
    return {name: _as_texts(how) for name, how in given.items()}


_Cell = str | int | float | bool
Texts = Annotated[
    tuple[str, ...], BeforeValidator(_as_texts, json_schema_input_type=tuple[_Cell, ...])
]
ByText = Annotated[
    dict[str, str], BeforeValidator(_as_texts, json_schema_input_type=dict[_Cell, _Cell])
]


@datasets.register
class Table(Source):
    """Your own table: features of numbers, categories and dates, and what is to be predicted.

    Args:
        path: a `.csv` or `.tsv` file with a header line, plain or packed, or a `.parquet` file;
            or a pattern such as `sites/*.csv`: all files that match are one table, with a column
            `file` to partition by.
        label: the column of labels, of any type; the sorted labels are the classes.
        classes: the class of each label, if several labels are one class or have other names:
            `{0: healthy, 1: ill, 2: ill}`. Classes are in this order.
        target: instead of `label`, the numeric column that a regression predicts.
        features: the columns of features; by default all others that can be one. Texts can as
            categories, unless there are more than a hundred of a column.
        categorical: `auto`, texts and truth values are categories; `none`, only numbers and dates
            are features; or further columns of categories: their names, or by name `one_hot` (an
            entry of `x` for each one in the table's training rows, and one for others), `ordinal`
            (their index in ascending order), a list of the categories in their order, or the words
            for what is in the file: `{sex: {0: female, 1: male}, grade: [low, high]}`.
        units: the unit of a column of numbers, for explanations: `{age: years}`.
        blanks: what stands for a blank cell: `["?", -999]`, or by column: `{chol: [0]}`.
        missing: what becomes of blank cells: `refuse`; `drop` their rows; or numbers become the
            column's `mean`, `median` or `most_frequent` one, and categories the most frequent.
        indicator: whether a further entry of a feature with blanks says where they were.
        scale: `none`; or each number, and a regression's target, scaled in the same way for all
            clients: `minmax` to [0, 1], outside of which test rows may fall, `standard` to mean 0
            and standard deviation 1. Constant columns become 0. Entries of categories stay 0 or 1.
        fit: what `missing` and `scale` look at: the training examples of all clients (`pooled`);
            sums that clients could send (`federated`: the same numbers, and their bytes are
            counted as sent before the first round); or each client at its own examples (`client`;
            the central test set is treated as if pooled, and so is a regression's target).
        concepts: columns that models of concepts predict on the way to the label, of numbers or
            true and false; they are not features. Blank cells are values that are not known.
        columns: columns to partition by; they are not features unless also listed in `features`.
        client_column: the column that names the client of each row, for `partition.kind=natural`.
        test_path: file of the test set, with the same columns.
        test_fraction: share of the rows in the test set if there is no test file.
        in_place: read row groups of the Parquet file whenever they are needed, for features that
            do not fit into memory. A row group is always decoded completely, so a client's rows
            should be stored together.
    """

    name: str = "table"
    path: Path
    label: str | None = None
    classes: ByText | None = None
    target: str | None = None
    features: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    categorical: Annotated[
        Literal["auto", "none"] | dict[str, Literal["one_hot", "ordinal"] | Texts | ByText],
        BeforeValidator(_as_categories),
    ] = "auto"
    units: dict[str, str] = Field(default_factory=dict)
    blanks: Annotated[Texts | dict[str, Texts], BeforeValidator(_as_texts)] = ()
    missing: Missing = "refuse"
    indicator: bool = False
    scale: Scale = "none"
    fit: Fit = "pooled"
    concepts: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    client_column: str | None = None
    test_path: Path | None = None
    test_fraction: TestFraction = 0.2
    in_place: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> Table:
        if self.in_place:
            paths = [path for path in (self.path, self.test_path) if path]
            if not {path.suffix.lower() for path in paths} <= {".parquet"}:
                raise unfit("only .parquet files can be read in place")
            if self.scale != "none":
                raise unfit("features that are read in place cannot be scaled")
            for key in ("categorical", "units", "blanks", "missing", "indicator"):
                usual = type(self).model_fields[key].get_default(call_default_factory=True)
                if getattr(self, key) not in (usual, "none"):
                    raise unfit(f"features that are read in place are numbers; leave out '{key}'")
        if (self.label is None) == (self.target is None):
            given = "neither is" if self.label is None else "both are"
            raise unfit(
                "needs either a label (a column of classes) or a target (a column of numbers), "
                f"and {given} given"
            )
        what = "target" if self.label is None else "label"
        predicted = getattr(self, what)
        if predicted in (self.features or ()):
            raise unfit(f"the {what} '{predicted}' cannot be a feature as well")
        for name in self.concepts:
            if name == predicted:
                raise unfit(f"concepts: '{name}' is the {what}; leave one out")
            if name in (self.features or ()):
                raise unfit(f"concepts: '{name}' is a feature as well; leave one out")
            if name in self._parting:
                raise unfit(
                    f"concepts: '{name}' can be partitioned by already; leave it out of columns "
                    "and client_column"
                )
        if self.classes and self.label is None:
            raise unfit("classes are of a label, and a target is given")
        for key in ("categorical", "units"):
            named = getattr(self, key)
            for name in (predicted, *self.concepts):
                if not isinstance(named, str) and name in named:
                    raise unfit(f"{key}: '{name}' is what is predicted, and no feature")
        if self.fit == "federated" and self.missing == "median":
            raise unfit("fit: a median is no sum of clients' values; set missing: mean")
        if self.fit != "pooled" and not self._fits:
            raise unfit("fit: there is nothing to fit; set scale or missing")
        if self.indicator and self.missing in ("refuse", "drop"):
            raise unfit("indicator: marks blanks that are filled; set missing: mean")
        return self

    @property
    def _fits(self) -> bool:
        """Whether anything is fitted to training examples."""
        return self.scale != "none" or self.missing not in ("refuse", "drop")

    def load(self) -> Dataset:
        """x is float32 (N, entries), or float64 for a regression, in the units of the file."""
        paths = [path for path in (self.path, self.test_path) if path is not None]
        path = paths[0]
        files.check_apart(paths_of(path), [one for test in paths[1:] for one in paths_of(test)])
        tables = [(each, self._read(each)) for each in paths]
        frame = tables[0][1]
        y, test_y, classes = self._labels(tables)
        columns = {name: column(path, frame, name) for name in self._parting}
        known = [{c: concept(*each, c) for c in self.concepts} for each in tables]
        columns |= known[0]
        rows, aside = np.arange(len(y)), np.empty(0, np.intp)
        if len(tables) == 1:
            rows, aside = split_rows(y, classes, self.test_fraction, str(path))
        features, unused = self._layout(path, frame, rows)
        x = self._features(path, frame, features)
        if len(tables) == 1:
            test_x, test_y = select(x, aside), y[aside]
        else:
            test_x = self._features(*tables[1], features)
        names = map(str, (empty_table(path) if self.in_place else frame).columns)
        note = ""
        if self.features is None:
            what = "which is" if len(unused) == 1 else "which are"
            told = f" (not used: {in_short(unused)}, {what} text)" if unused else ""
            note = f"features: {in_short([feature.name for feature in features])}{told}"
        return Dataset(
            *(select(x, rows), y[rows], test_x, test_y, classes),
            columns={name: values[rows] for name, values in columns.items()},
            test_columns={c: v[aside] if len(tables) == 1 else v for c, v in known[-1].items()},
            concepts=self.concepts,
            unread_columns=tuple(name for name in names if name not in self._others),
            features=tuple(feature.name for feature in features),
            target=self.label or self.target or "",
            encoding=() if self.in_place else features,
            preprocessing=Preprocessing(self.missing, self.scale, self.fit)
            if self._fits
            else None,
            client_column=self.client_column or "",
            note=note,
        )

    @property
    def _parting(self) -> tuple[str, ...]:
        """The columns to partition by."""
        file = FILE if is_pattern(self.path) else None
        return tuple(dict.fromkeys(filter(None, [*self.columns, self.client_column, file])))

    @property
    def _others(self) -> set[str]:
        """The columns that are no features unless asked for."""
        return {self.label or self.target or "", *self.concepts, *self._parting}

    def _read(self, path: Path) -> pd.DataFrame:
        """The table, without its features if they stay in the file."""
        if self.in_place:
            return read_table(path, self._others)
        by_column = self.blanks if isinstance(self.blanks, Mapping) else {"": self.blanks}
        words = {word for own in by_column.values() for word in own}
        seen: set[str] = set()
        given = self._others - {*self.concepts}
        frame = read_tables(
            path, lambda part: blanked(part, self.blanks, given, seen), frozenset(words)
        )
        if path == self.path and (unseen := sorted(map(repr, words - seen))):
            told = f"data.blanks: no cell of {path} is {in_short(unseen)}"
            warn(told)
        if self.missing != "drop":
            return frame
        features, _ = self._layout(path, frame, np.arange(len(frame)))
        others = [name for name in map(str, frame.columns) if name in given]
        names = [*others, *(feature.name for feature in features)]
        kept = frame[names].notna().all(axis=1).to_numpy()
        if not kept.any():
            raise DataError(f"data.missing=drop: {path}: every row has an empty cell")
        if not kept.all():
            told = f"{path}: {(~kept).sum():,} of {len(frame):,} rows have empty cells"
            for name in set(self._parting) & set(others):
                lost = {*frame[name].dropna().astype(str)} - {*frame[name][kept].astype(str)}
                told += f"; all rows of {name} {in_short(sorted(lost))}" if lost else ""
            warn(f"data.missing=drop: {told}; they are left out")
        return with_origin(path, frame)[kept]

    def _labels(
        self, tables: Sequence[tuple[Path, pd.DataFrame]]
    ) -> tuple[NDArray[Any], NDArray[Any], tuple[str, ...]]:
        """Class indices or targets, those of the last table, and the names of the classes."""
        if self.target is not None:
            for where, table in tables:
                present(where, table, self.target)
            found = [numbers(where, table[self.target], np.float64) for where, table in tables]
            return found[0], found[-1], ()
        y, test_y = (column(*tables[k], str(self.label)) for k in (0, -1))
        if kind_of(y) != kind_of(test_y):
            words, test_words = {*y.astype(str)}, {*test_y.astype(str)}
            alike = words <= test_words or test_words <= words
            if "text" not in (kind_of(y), kind_of(test_y)) or not alike:
                raise DataError(
                    f"{tables[-1][0]}: label column '{self.label}' is {test_y.dtype}, "
                    f"but {y.dtype} in {tables[0][0]}"
                )
            y, test_y = y.astype(str), test_y.astype(str)
        labels, index = np.unique(np.concatenate([y, test_y]), return_inverse=True)
        names = tuple(map(str, labels))
        if self.classes is not None:
            names = tuple(map(text_of, labels))
            for name in names:
                if name not in self.classes:
                    near = nearest(name, self.classes)
                    raise DataError(f"data.classes: has no class for the label '{name}'{near}")
            classes = tuple(dict.fromkeys(self.classes.values()))
            index = np.array([classes.index(self.classes[name]) for name in names])[index]
            names = classes
        return index[: len(y)], index[len(y) :], names

    def _layout(
        self, path: Path, frame: pd.DataFrame, rows: NDArray[np.intp]
    ) -> tuple[tuple[Feature, ...], tuple[str, ...]]:
        """The features of training rows, and the names of columns of texts that are not used."""
        categorical: Categories | None = None
        if not isinstance(self.categorical, str):
            categorical = self.categorical
        elif self.categorical == "auto" and not self.in_place:
            categorical = {}
        if self.in_place:
            frame = empty_table(path)
        for name in (*(categorical or ()), *self.units, *(self.features or ())):
            insist_on_column(path, frame, name)
        others = [name for name in map(str, frame.columns) if name not in self._others]
        found, unused = [], []
        for name in self.features or others:
            series = frame[name]
            if self.in_place:  # of numbers, without rows; they are checked when they are read
                series = series if is_numeric(series) else read_table(path, {name})[name]
                rows = np.arange(len(series))
            else:
                refuse_objects(path, series)
                if series.iloc[rows].isna().all():
                    raise DataError(
                        f"{path}: column '{name}' is empty in every training row; leave it out"
                    )
            feature = feature_of_column(
                path, series, rows, categorical, chosen=self.features is not None
            )
            if feature is None:
                unused.append(name)
                continue
            unit, blanks = self.units.get(name, ""), self.blanks
            if unit and feature.kind != "number":
                raise DataError(f"data.units: '{name}' is no feature of numbers")
            if isinstance(blanks, Mapping):
                blanks = blanks.get(name, ())
            indicator = self.indicator and bool(series.isna().any())
            found.append(replace(feature, unit=unit, blanks=blanks, indicator=indicator))
        if not found:
            kind = "numeric " * self.in_place
            raise DataError(f"{path}: has no {kind}columns to use as features")
        return tuple(found), tuple(unused)

    def _features(self, path: Path, frame: pd.DataFrame, features: Sequence[Feature]) -> AnyArray:
        dtype: type[Any] = np.float64 if self.label is None else np.float32
        if self.in_place:
            return ParquetRows(path, [feature.name for feature in features], dtype)
        blanks = self.missing not in ("refuse", "drop")
        x, remarks = as_entries(path, frame, features, dtype, blanks)
        for remark in remarks:
            warn(remark)
        return x


class ParquetRows(StoredArray):
    """Rows of numbers of a Parquet file, (N, features), as float32 or float64.

    Raises:
        DataError: a column is missing or not numeric. Values are checked when they are read.
    """

    def __init__(self, path: Path, names: Sequence[str], dtype: type[Any]) -> None:
        import pyarrow.parquet as pq

        self.path, self.names = path.absolute(), tuple(names)
        _row_group.cache_clear()  # the file may have changed since an earlier run
        empty = empty_table(path)
        for name in names:
            insist_on_column(path, empty, name)
            if not is_numeric(empty[name]):
                raise not_a_number(path, read_table(path, {name})[name], WHICH)
        with files.reading(path):
            found = pq.read_metadata(path)
        rows = [found.row_group(i).num_rows for i in range(found.num_row_groups)]
        self.ends = np.cumsum(rows)
        super().__init__((int(self.ends[-1]), len(names)), dtype)

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        x = np.empty((len(rows), len(self.names)), self.dtype)
        groups = np.searchsorted(self.ends, rows, side="right")
        for group in np.unique(groups):
            where = groups == group
            start = self.ends[group - 1] if group else 0
            found = _row_group(self.path, int(group), self.names, self.dtype)
            x[where] = found[rows[where] - start]
        return x


@cached(latest())
def _row_group(
    path: Path, group: int, names: tuple[str, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    import pyarrow.parquet as pq

    with files.reading(path), pq.ParquetFile(path) as file:
        frame = file.read_row_group(group, columns=list(names)).to_pandas()
    where = Path(f"{path} (row group {group})")
    return as_entries(where, frame, tuple(map(Feature, names)), dtype, False)[0]
