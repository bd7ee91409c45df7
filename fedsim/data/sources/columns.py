"""Columns of a table: which kind of feature each is, and its cells as numbers."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedsim.config.registry import nearest
from fedsim.data.encoding import EPOCH, Feature, Floats, Kind
from fedsim.data.sources import files
from fedsim.data.sources.table_files import insist_on_column, origin, place
from fedsim.errors import DataError
from fedsim.support.words import in_short

if TYPE_CHECKING:
    import pandas as pd

# By column: how its cells become categories; with names for their values, or in an order.
Category = Literal["one_hot", "ordinal"] | tuple[str, ...] | Mapping[str, str]
Categories = Mapping[str, Category]
Blanks = Sequence[str] | Mapping[str, Sequence[str]]
Float = TypeVar("Float", np.float32, np.float64)

MOST_CATEGORIES = 100  # of a column that nobody named as one of categories
MOST_ENTRIES = 1000  # categories that get an entry each
EXACT = 2**53  # whole numbers below are exact in float64
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")  # as int64 is written
_DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}([T ].*)?")
_WORD, _DATES = r"[^\W\d]{3,9}\.?", "write dates as year-month-day"
_NOTATIONS = {  # that pandas does not read as numbers and dates
    r"[+-]?[\d.]*\d,\d+": "separate columns by semicolons to have decimal commas",
    r"\d{1,2}([./-])\d{1,2}\1\d{2,4}": _DATES,
    r"\d{4}(/\d{1,2}){1,2}|\d{4}-\d{1,2}": _DATES,
    rf"(\d{{1,2}}\.? )?{_WORD}( \d{{1,2}},)? \d{{4}}": _DATES,
}
_MEASURED = re.compile(r"([^\w\s.,+-]?)\s*[+-]?\d+([.,]\d+)?\s*([^\W\d_]+(/[^\W\d_]+)?|%|)")
FLAGS = ("False", "True")
_FLAGS = {"true": "True", "false": "False", "1": "True", "0": "False"}
_FILL = ", or set data.missing"
WHICH = " (data.features names the columns to use, data.categorical those of categories)"


def is_numeric(series: pd.Series[Any]) -> bool:
    """Whether a column holds numbers or truth values."""
    import pandas as pd

    return bool(pd.api.types.is_numeric_dtype(series))


def blanked(
    frame: pd.DataFrame,
    blanks: Blanks,
    others: Set[str] = frozenset(),
    seen: set[str] | None = None,
) -> pd.DataFrame:
    """A table in which some values of all columns except `others`, or of some, are blank cells.

    Those of `blanks` that occur are added to `seen`. It is a DataError if there is no such column.
    """
    if not isinstance(blanks, Mapping):
        blanks = {name: blanks for name in map(str, frame.columns) if name not in others}
    found = frame.copy(deep=False)
    for name, values in blanks.items():
        if name not in frame.columns:
            raise DataError(
                f"data.blanks: there is no column '{name}'{nearest(name, map(str, frame.columns))}"
            )
        if values:
            found[name] = _without(frame[name], values, seen)
    return found


def _without(
    series: pd.Series[Any], blanks: Sequence[str], seen: set[str] | None = None
) -> pd.Series[Any]:
    """A column in which some values are blank; of numbers, if all others are."""
    import pandas as pd

    meant = {_same_for_numbers(word): word for word in blanks}
    blank = [value for value in series.unique() if _same_for_numbers(value) in meant]
    if not blank:
        return series
    if seen is not None:
        seen |= {meant[_same_for_numbers(value)] for value in blank}
    series = series.where(~series.isin(blank))
    known = series.dropna()
    flags = any(isinstance(value, bool) for value in known.unique())
    if is_numeric(series) or flags or not all(map(files.is_number, known.unique())):
        return series
    return pd.to_numeric(series)


def _same_for_numbers(value: Any) -> str:
    """A cell as text, the same for a number in all ways to write it."""
    is_text = isinstance(value, str) and files.is_number(value)
    return text_of(float(value) if is_text else value)


def text_of(value: Any) -> str:
    """A cell as text; numbers without a decimal point where they are whole."""
    if isinstance(value, bool | np.bool_):
        return str(bool(value))
    if isinstance(value, float | np.floating):
        return str(int(value)) if float(value).is_integer() else repr(float(value))
    return str(value).strip()


def feature_of_column(
    path: Path,
    series: pd.Series[Any],
    rows: NDArray[np.intp],
    categorical: Categories | None,
    chosen: bool,
) -> Feature | None:
    """The kind of a column; None for texts that are not used unless they are `chosen`."""
    import pandas as pd

    name = str(series.name)
    known, learnt = series.dropna(), series.iloc[rows].dropna()
    if categorical is not None and name in categorical:
        return _of_categories(path, name, [*map(text_of, learnt.unique())], categorical[name])
    flags = pd.api.types.is_bool_dtype(series.dtype)
    if is_numeric(series) and not (flags and categorical is not None):
        return Feature(name)
    if flags or _are_flags(path, known):
        if categorical is None:
            raise not_a_number(path, series, WHICH)
        return Feature(name, "ordinal", codes=FLAGS, words=("no", "yes"))
    if pd.api.types.is_datetime64_any_dtype(series):
        return Feature(name, "date")
    if series.dtype.kind == "m" or any(isinstance(value, bytes) for value in known):
        raise not_a_number(path, series, WHICH)
    texts = [text_of(value) for value in known.unique()]
    words = {text for text in texts if text.lower() not in files.MISSING}
    if any(files.is_number(word) for word in words) or not words:
        raise not_a_number(path, series, WHICH)
    for pattern, advice in _NOTATIONS.items():
        if wrong := next((word for word in sorted(words) if re.fullmatch(pattern, word)), None):
            raise _unread(path, name, wrong, advice)
    if unit := _unit_of(words):
        advice = f"write numbers alone and set data.units: {{{name}: {unit}}}"
        raise _unread(path, name, min(words), advice)
    if categorical is None:
        if chosen:
            raise not_a_number(path, series, WHICH)
        return None
    if any(_DATE.fullmatch(text) for text in texts):
        return Feature(name, "date")  # `encode` refuses what is none
    if len(words) > MOST_CATEGORIES:
        if not chosen:
            return None
        raise DataError(
            f"{path}: column '{name}' has {len(words):,} different words; name it in "
            "data.categorical if they are categories, or leave it out of data.features"
        )
    return _of_categories(path, name, [*map(text_of, learnt.unique())], "one_hot")


def _unread(path: Path, name: str, word: str, advice: str) -> DataError:
    return DataError(
        f"{path}: column '{name}' has '{word:.60}'; {advice}, or name the column in "
        "data.categorical"
    )


def _unit_of(words: Set[str]) -> str:
    """The unit that is written beside every number; empty if there is none."""
    found = [_MEASURED.fullmatch(word) for word in words]
    units = {match and f"{match[1]}{match[3]}" for match in found}
    return (units.pop() or "") if len(units) == 1 and len(words) > 2 else ""


def _are_flags(path: Path, known: pd.Series[Any]) -> bool:
    if is_numeric(known):
        return False
    words = {str(value).strip().lower() for value in known.unique()}
    if not words - {*files.MISSING} or not words - {*files.MISSING} <= {"true", "false"}:
        return False
    if words & {*files.MISSING}:
        raise not_a_number(path, known, WHICH)
    return True


def _of_categories(path: Path, name: str, texts: Sequence[str], how: Category) -> Feature:
    present = set(texts)
    if isinstance(how, Mapping) or not isinstance(how, str):
        words = dict(how) if isinstance(how, Mapping) else dict(zip(how, how, strict=True))
        codes = tuple(words)
        if unnamed := sorted(present - set(codes)):
            raise DataError(
                f"data.categorical: {name}: does not have {in_short(list(map(repr, unnamed)))}, "
                f"which {'is' if len(unnamed) == 1 else 'are'} in {path}"
            )
        shown = tuple(words.values())
        if len(set(shown)) < len(shown):
            raise DataError(f"data.categorical: {name}: names a category twice")
        kind: Kind = "one_hot" if isinstance(how, Mapping) else "ordinal"
        return Feature(name, kind, codes=codes, words=shown)
    numbers = all(files.is_number(text) for text in present)
    codes = tuple(sorted(present, key=lambda code: (float(code) if numbers else 0, code)))
    if how == "one_hot" and len(codes) > MOST_ENTRIES:
        raise DataError(
            f"data.categorical: {name}: has {len(codes):,} categories, and each would get an "
            f"entry of its own ({MOST_ENTRIES:,} at most); set {{{name}: ordinal}} or leave it out"
        )
    return Feature(name, how, codes=codes, words=codes)


def as_entries(
    path: Path,
    frame: pd.DataFrame,
    features: Sequence[Feature],
    dtype: type[Float] | np.dtype[Float],
    blanks: bool,
    advice: str = _FILL,
) -> tuple[NDArray[Float], list[str]]:
    """(N, W) the entries of a table's rows, and remarks on what they do not hold.

    Args:
        blanks: whether cells may be blank; all entries of the feature are then NaN, except its
            indicator.
        advice: what else can be done about blank cells.

    Raises:
        DataError: a cell is blank, or not of the feature's kind.
    """
    columns, notes = [], []
    for feature in features:
        insist_on_column(path, frame, feature.name)
        series = _without(frame[feature.name], feature.blanks)
        refuse_objects(path, series)
        blank = series.isna().to_numpy()
        if blank.any() and not blanks:
            raise _is_blank(path, frame.assign(**{feature.name: series}), feature.name, advice)
        if feature.kind == "number":
            own: NDArray[Any] = numbers(path, series, dtype, WHICH)[:, None]
            notes += _rounded(path, series, own[:, 0])
        elif feature.kind == "date":
            own = _days(path, series)[:, None]
        else:
            own, unknown = _indices(feature, series, dtype)
            if len(unknown):
                told = in_short(sorted({repr(text_of(series.iloc[row])) for row in unknown}))
                if feature.kind == "ordinal":
                    blank = blank | np.isnan(own[:, 0])
                if feature.kind == "ordinal" and not blanks:
                    problem = (
                        "which no training row has; list all in their order in data.categorical"
                    )
                    raise _wrong(path, series, unknown[0], problem)
                what = "blank" if feature.kind == "ordinal" else "other"
                counted = "1 row has" if len(unknown) == 1 else f"{len(unknown)} rows have"
                notes.append(
                    f"data.categorical: {path}: column '{feature.name}': {counted} {told}, which "
                    f"no training row has; counted as {what}"
                )
        columns.append(own.astype(dtype))
        if feature.indicator:
            columns.append(blank[:, None].astype(dtype))
    return np.concatenate(columns, axis=1), notes


def _rounded(path: Path, series: pd.Series[Any], values: NDArray[Any]) -> list[str]:
    """A remark on whole numbers that are no longer what they were."""
    if series.dtype.kind not in "iu" or np.abs(values).max(initial=0) < 2**24:
        return []
    whole = series.to_numpy()
    changed = np.flatnonzero(values.astype(object) != whole)
    if not len(changed):
        return []
    row = changed[0]
    return [
        f"data.features: {path}: column '{series.name}': {values.dtype} cannot hold "
        f"{len(changed):,} of its numbers, such as {whole[row]}, read as {int(values[row])}; "
        "leave it out if it is an identifier, and write dates as year-month-day"
    ]


def _indices(
    feature: Feature, series: pd.Series[Any], dtype: Any
) -> tuple[NDArray[Any], list[int]]:
    """(N, 1) or (N, categories + 1) a column of categories, and the rows with unknown ones."""
    import pandas as pd

    places = {word: i for i, word in enumerate(feature.words)}
    places |= {code: places[word] for code, word in zip(feature.codes, feature.words, strict=True)}
    rows, values = pd.factorize(series)  # -1 where it is blank
    words = [text_of(value) for value in values]
    if feature.codes == FLAGS:
        words = [_FLAGS.get(word.lower(), word.lower()) for word in words]
    index: Floats = np.array([*(places.get(word, -1) for word in words), np.nan])[rows]
    unknown = np.flatnonzero(index < 0).tolist()
    if feature.kind == "ordinal":
        return np.where(index < 0, np.nan, index)[:, None], unknown
    width = len(feature.entries) - feature.indicator
    entries = np.zeros((len(index), width), dtype)
    known = np.flatnonzero(~np.isnan(index))
    entries[known, np.where(index < 0, width - 1, index)[known].astype(np.int64)] = 1
    entries[np.isnan(index)] = np.nan
    return entries, unknown


def _days(path: Path, series: pd.Series[Any]) -> Floats:
    """(N,) days since 1970 of a column of dates; NaN where it is blank."""
    import pandas as pd

    dates = pd.to_datetime(series, format="ISO8601", errors="coerce", utc=True)
    wrong = np.flatnonzero(dates.isna() & series.notna())
    if len(wrong):
        raise _wrong(path, series, wrong[0], "and dates (year-month-day) in others")
    since = dates.dt.tz_localize(None) - pd.Timestamp(EPOCH)
    return np.asarray(since / pd.Timedelta(days=1), np.float64)


def refuse_objects(path: Path, series: pd.Series[Any]) -> None:
    """Refuse a column with lists or the like in it."""
    for row, value in enumerate(series if series.dtype == object else ()):
        if not isinstance(value, Hashable):
            kind = type(value).__name__
            raise DataError(
                f"{path}: column '{series.name}' has a {kind} in row {row + 1}, not a value"
            )


def present(path: Path, frame: pd.DataFrame, name: str) -> pd.Series[Any]:
    """A column without missing values. Rows are counted from 1, below the header."""
    insist_on_column(path, frame, name)
    if frame[name].isna().any():
        raise _is_blank(path, frame, name)
    refuse_objects(path, frame[name])
    return frame[name]


def _is_blank(path: Path, frame: pd.DataFrame, name: str, advice: str = "") -> DataError:
    file, row = origin(path, frame.index, int(np.flatnonzero(frame[name].isna())[0]))
    return DataError(
        f"{file}: {place(file, row)}: column '{name}' is empty "
        f"({frame.isna().any(axis=1).sum()} of {len(frame)} rows have empty cells); fill or drop "
        f"them{advice}"
    )


def column(path: Path, frame: pd.DataFrame, name: str) -> NDArray[np.generic]:
    """A column as numbers if it is numeric, otherwise as text.

    Whole numbers are integers, also if the file has them as 1.0 or, Parquet, as text.
    """
    series = present(path, frame, name)
    if is_numeric(series):
        values = np.asarray(series.to_numpy())
        whole = values.dtype.kind == "f" and (np.abs(values) < EXACT).all()
        return values.astype(np.int64) if whole and (values == np.rint(values)).all() else values
    words = [str(value) for value in series]
    files.check_labels(words, f"{path}: column '{name}'")
    if all(map(_INTEGER.fullmatch, words)):
        return np.array(words).astype(np.int64)
    return np.array(words)


def concept(path: Path, frame: pd.DataFrame, name: str) -> Floats:
    """(N,) a column of numbers, or of true and false as 1 and 0; NaN where it is blank."""
    if name not in frame.columns:
        near = nearest(name, map(str, frame.columns))
        raise DataError(f"data.concepts: {path}: has no column '{name}'{near}")
    series = frame[name]
    refuse_objects(path, series)
    if not is_numeric(series) and _are_flags(path, series.dropna()):
        series = series.map(lambda value: _FLAGS[text_of(value).lower()] == "True", "ignore")
        series = series.astype(np.float64)
    return numbers(path, series, np.float64, "; data.concepts are numbers, or true and false")


def kind_of(labels: NDArray[np.generic]) -> str:
    """What labels are: text, flags or numbers."""
    return {"U": "text", "b": "flags"}.get(labels.dtype.kind, "numbers")


def not_a_number(path: Path, series: pd.Series[Any], hint: str = "") -> DataError:
    """The error for a column that is not numeric."""
    # The first value that is not a number, or the first one if all are numbers stored as text.
    wrong = next((row for row, value in enumerate(series) if not files.is_number(value)), 0)
    return _wrong(path, series, wrong, f"expected a number{hint}")


def _wrong(path: Path, series: pd.Series[Any], where: int, problem: str) -> DataError:
    """The error for one value of a column."""
    file, row = origin(path, series.index, int(where))
    value = series.iloc[int(where)]
    shown = f"{value!r:.60}" if isinstance(value, str) else value
    return DataError(f"{file}: column '{series.name}' has {shown} in row {row + 1}, {problem}")


def numbers(
    path: Path, series: pd.Series[Any], dtype: type[Float] | np.dtype[Float], hint: str = ""
) -> NDArray[Float]:
    """(N,) a column of finite numbers, NaN where it is blank."""
    if not is_numeric(series):
        raise not_a_number(path, series, hint)
    with np.errstate(over="ignore"):  # overflow is refused below
        values = series.to_numpy(np.float64, na_value=np.nan).astype(dtype)
    wrong = np.flatnonzero(~np.isfinite(values) & series.notna().to_numpy())
    if len(wrong):
        raise _wrong(path, series, wrong[0], f"not finite in {np.dtype(dtype)}")
    return values
