"""Tables of features, with labels or numbers to predict."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import numpy as np
from cachetools import cached
from numpy.typing import NDArray
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fedsim.data.dataset import Dataset, Scaling, TestFraction, of_parts
from fedsim.data.source import OfficialFiles, Source, datasets
from fedsim.data.sources import files
from fedsim.data.sources.table_files import empty_table, insist_on_column, read_table
from fedsim.data.stored import AnyArray, StoredArray, latest
from fedsim.errors import DataError
from fedsim.support.words import in_short

if TYPE_CHECKING:
    import pandas as pd

OPENFL_COLLABORATORS, OPENFL_COLUMNS = 5, 15

WHICH_COLUMNS = " (data.features names the columns to use)"

Float = TypeVar("Float", np.float32, np.float64)
Scale = Literal["none", "minmax", "standard"]


def scaled(data: Dataset, scale: Scale) -> Dataset:
    """A table whose features, and target if it is a number, are scaled by the training rows."""
    if scale == "none":
        return data
    of_x: Scaling = getattr(Scaling, scale)(data.x)
    data = replace(data, x=of_x(data.x), test_x=of_x(data.test_x), scaling=of_x)
    if data.classes:
        return data
    of_y: Scaling = getattr(Scaling, scale)(data.y)
    return replace(data, y=of_y(data.y), test_y=of_y(data.test_y), target_scaling=of_y)


@datasets.register
class OpenflXai(OfficialFiles):
    """The regression data of OpenFL-XAI: 11,619 + 2,417 rows of 15 inputs, 5 collaborators.

    The collaborator of each training row is in the column `collaborator`, col0 to col4; the test
    set is common to all of them. Inputs and target lie in [0, 1] as published, and are anonymous:
    the documentation of OpenFL-XAI calls the data Mortgage and names its columns, but neither the
    number of rows nor any correlation with the target fits; for Mortgage, see `mortgage`.

    Args:
        root: folder that contains col0 to col4, or the sub-folder `openfl_xai/data`; by default
            $FEDSIM_DATA.
    """

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


@datasets.register
class Table(Source):
    """Your own table, CSV or Parquet, with numeric features and labels or numbers to predict.

    Args:
        path: `.csv` file with a header line, or `.parquet` file.
        label: the column of labels, of any type; the sorted labels are the classes.
        target: instead of `label`, the numeric column that a regression predicts.
        features: the columns of features; by default all other numeric columns.
        columns: columns to partition by; they are not features unless also listed in `features`.
        test_path: file of the test set, with the same columns.
        test_fraction: share of the rows in the test set if there is no test file.
        scale: `none`; or each feature, and a regression's target, scaled by the training rows, in
            the same way for all clients: `minmax` to [0, 1], outside of which test rows may fall,
            `standard` to mean 0 and standard deviation 1. Constant columns become 0.
        in_place: read row groups of the Parquet file whenever they are needed, for features that
            do not fit into memory. A row group is always decoded completely, so a client's rows
            should be stored together.
    """

    name: str = "table"
    path: Path
    label: str | None = None
    target: str | None = None
    features: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    columns: tuple[str, ...] = ()
    test_path: Path | None = None
    test_fraction: TestFraction = 0.2
    scale: Scale = "none"
    in_place: bool = False

    @model_validator(mode="after")
    def _can_be_left_in_place(self) -> Table:
        if self.in_place:
            if not {path.suffix for path in (self.path, self.test_path) if path} <= {".parquet"}:
                raise PydanticCustomError("in_place", "only .parquet files can be read in place")
            if self.scale != "none":
                raise PydanticCustomError(
                    "in_place", "features that are read in place cannot be scaled"
                )
        return self

    @model_validator(mode="after")
    def _predicts_one_thing(self) -> Table:
        if (self.label is None) == (self.target is None):
            given = "neither is" if self.label is None else "both are"
            problem = (
                "needs either a label (a column of classes) or a target (a column of numbers), "
                "and {given} given"
            )
            raise PydanticCustomError("label", problem, {"given": given})
        for what in ("label", "target"):
            name = getattr(self, what)
            if name in (self.features or ()):
                problem = "the {what} '{name}' cannot be a feature as well"
                raise PydanticCustomError("label", problem, {"what": what, "name": name})
        return self

    def load(self) -> Dataset:
        """x is as in the file: float32 (N, features), or float64 for a regression."""
        path = self.path.expanduser()
        frame = self._read(path)
        columns = {name: _column(path, frame, name) for name in self.columns}
        y, target = self._labels(path, frame), self.label or self.target or ""
        features = self.features or self._numeric(path, frame, {target, *self.columns})
        x = self._features(path, frame, features)
        test_part = None
        if self.test_path is not None:
            test_path = self.test_path.expanduser()
            test = self._read(test_path)
            test_y = self._labels(test_path, test)
            if self.label is not None and y.dtype.kind != test_y.dtype.kind:
                raise DataError(
                    f"{test_path}: label column '{self.label}' is {test_y.dtype}, "
                    f"but {y.dtype} in {path}"
                )
            test_part = self._features(test_path, test, features), test_y
        classes = () if self.label is None else None
        data = of_parts((x, y), test_part, classes, self.test_fraction, str(path), columns)
        data = scaled(replace(data, features=features, target=target), self.scale)
        names = map(str, (empty_table(path) if self.in_place else frame).columns)
        unread = [name for name in names if name not in (self.label, self.target, *self.columns)]
        note = ""
        if self.features is None:
            texts = [name for name in unread if name not in data.features]
            what = "which is" if len(texts) == 1 else "which are"
            unused = f" (not used: {in_short(texts)}, {what} text)" if texts else ""
            note = f"features: {in_short(data.features)}{unused}"
        return replace(data, unread_columns=tuple(unread), note=note)

    def _labels(self, path: Path, frame: pd.DataFrame) -> NDArray[Any]:
        if self.target is not None:
            return _numbers(path, frame, self.target, np.float64)
        return _column(path, frame, str(self.label))

    def _read(self, path: Path) -> pd.DataFrame:
        """The table, without its features if they stay in the file."""
        if not self.in_place:
            return read_table(path)
        return read_table(
            path, {name for name in (self.label, self.target) if name} | {*self.columns}
        )

    def _numeric(self, path: Path, frame: pd.DataFrame, others: set[str]) -> tuple[str, ...]:
        """The numeric columns except `others`; text columns are skipped.

        A column of numbers with a few words is refused rather than skipped silently.
        """
        import pandas as pd

        names: list[Any] = []
        columns = empty_table(path) if self.in_place else frame
        for name, series in columns.items():
            if name in others:
                continue
            if self.in_place and series.dtype.kind == "O":  # they may be numbers stored as text
                series = read_table(path, {str(name)})[name]
            if pd.api.types.is_numeric_dtype(series):
                names.append(name)
            elif series.dtype.kind == "O":
                words = {str(word).lower() for word in series.dropna()} - {*files.MISSING}
                flags = words and words <= {"true", "false"}
                if flags or any(map(files.is_number, series)):
                    raise _not_a_number(path, series, WHICH_COLUMNS)
        if not names:
            raise DataError(f"{path}: has no numeric columns to use as features")
        return tuple(names)

    def _features(self, path: Path, frame: pd.DataFrame, names: Sequence[str]) -> AnyArray:
        dtype = np.float64 if self.label is None else np.float32
        if self.in_place:
            return ParquetRows(path, names, dtype)
        return table_features(path, frame, names, dtype, WHICH_COLUMNS)


class ParquetRows(StoredArray):
    """Rows of numbers of a Parquet file, (N, features).

    Args:
        names: names of the columns.
        dtype: float32 or float64.

    Raises:
        DataError: a column is missing or not numeric. Values are checked when they are read.
    """

    def __init__(self, path: Path, names: Sequence[str], dtype: type[Any]) -> None:
        import pandas as pd
        import pyarrow.parquet as pq

        self.path, self.names = path.absolute(), tuple(names)
        _row_group.cache_clear()  # the file may have changed since an earlier run
        empty = empty_table(path)
        for name in names:
            if not pd.api.types.is_numeric_dtype(_present(path, empty, name)):
                raise _not_a_number(path, read_table(path, {name})[name], WHICH_COLUMNS)
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
    return table_features(where, frame, names, dtype, WHICH_COLUMNS)


def _present(path: Path, frame: pd.DataFrame, name: str) -> pd.Series[Any]:
    """A column without missing values. Rows are counted from 1, below the header."""
    insist_on_column(path, frame, name)
    series = frame[name]
    missing = np.flatnonzero(series.isna())
    if len(missing):
        place = f"line {missing[0] + 2}" if path.suffix == ".csv" else f"row {missing[0] + 1}"
        raise DataError(
            f"{path}: {place}: column '{name}' is empty ({frame.isna().any(axis=1).sum()} of "
            f"{len(frame)} rows have empty cells); fill or drop them"
        )
    for row, value in enumerate(series if series.dtype.kind == "O" else ()):
        if not isinstance(value, Hashable):
            kind = type(value).__name__
            raise DataError(f"{path}: column '{name}' has a {kind} in row {row + 1}, not a value")
    return series


def _column(path: Path, frame: pd.DataFrame, name: str) -> NDArray[np.generic]:
    """A column as numbers if it is numeric, otherwise as text."""
    import pandas as pd

    series = _present(path, frame, name)
    if pd.api.types.is_numeric_dtype(series):
        return np.asarray(series.to_numpy())
    values = [str(value) for value in series]
    files.check_labels(values, f"{path}: column '{name}'")
    return np.array(values)


def _not_a_number(path: Path, series: pd.Series[Any], hint: str = "") -> DataError:
    # The first value that is not a number, or the first one if all are numbers stored as text.
    row = next((row for row, value in enumerate(series) if not files.is_number(value)), 0)
    return DataError(
        f"{path}: column '{series.name}' has {series.iloc[row]!r:.60} in row {row + 1}, expected "
        f"a number{hint}"
    )


def table_features(
    path: Path,
    frame: pd.DataFrame,
    names: Sequence[str],
    dtype: type[Float] | np.dtype[Float],
    hint: str = "",
) -> NDArray[Float]:
    """(N, features) the columns of those names, of finite numbers.

    Args:
        hint: the end of messages about a column that is not numeric.
    """
    x = np.empty((len(frame), len(names)), dtype)
    for i, name in enumerate(names):
        x[:, i] = _numbers(path, frame, name, dtype, hint)
    return x


def _numbers(
    path: Path,
    frame: pd.DataFrame,
    name: str,
    dtype: type[Float] | np.dtype[Float],
    hint: str = "",
) -> NDArray[Float]:
    """(N,) a column of finite numbers."""
    import pandas as pd

    series = _present(path, frame, name)
    if not pd.api.types.is_numeric_dtype(series):
        raise _not_a_number(path, series, hint)
    with np.errstate(over="ignore"):  # overflow is refused below
        values = series.to_numpy(np.float64).astype(dtype)
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        raise DataError(
            f"{path}: column '{name}' has {series.iloc[int(wrong[0])]} in row {wrong[0] + 1}, "
            f"not finite in {np.dtype(dtype)}"
        )
    return values
