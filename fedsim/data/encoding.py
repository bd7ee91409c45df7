"""How columns of a table become entries of `x`, and what is fitted to the training examples.

A feature is one column of the table. It takes one entry of `x`, or several: one for each category,
and one more that marks blank cells. Blank cells are NaN until the data are fitted, after the
examples are dealt out to clients, since only their training examples may be looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedsim.errors import DataError

Kind = Literal["number", "date", "ordinal", "one_hot"]
Missing = Literal["refuse", "drop", "mean", "median", "most_frequent"]
Scale = Literal["none", "minmax", "standard"]
Fit = Literal["pooled", "federated", "client"]
Floats = NDArray[np.float64]

OTHER = "(other)"  # the entry of categories that no training row has
BLANK = "(blank)"
EPOCH = np.datetime64("1970-01-01", "D")  # dates are days since then
_ZERO = {
    "none": "",
    "minmax": "the lower end of each feature's scale",
    "standard": "each feature's mean",
}
_ROWS = 1 << 16  # examples at a time
_HALF = 30  # bits in each of the two integers of a sum


class OfCategory(str):
    """The name of an entry that is 1 for one category and else 0: `thal=normal`."""

    feature: str  # `thal`
    category: str  # `normal`

    @classmethod
    def of(cls, feature: str, category: str) -> OfCategory:
        made = cls(f"{feature}={category}")
        made.feature, made.category = feature, category
        return made


@dataclass(frozen=True)
class Feature:
    """A column of a table, and how it is written into `x`.

    A `number` is as it is; a `date` in days since 1970 (UTC); `ordinal` is the index of a
    category; `one_hot` takes an entry for each category, and one for all that are unknown.
    """

    name: str
    kind: Kind = "number"
    unit: str = ""  # of its numbers, for people
    codes: tuple[str, ...] = ()  # categories as they are in the file
    words: tuple[str, ...] = ()  # categories as they are shown
    blanks: tuple[str, ...] = ()  # what in the file stands for a blank cell, beside an empty one
    indicator: bool = False  # whether a last entry is 1 where the cell is blank
    scaled: bool = True  # whether `scale` applies to its numbers

    @property
    def entries(self) -> tuple[str, ...]:
        """The names of its entries: `age`; `thal=normal`, `thal=fixed`, `thal=(other)`."""
        own: tuple[str, ...] = (self.name,)
        if self.kind == "one_hot":
            own = tuple(OfCategory.of(self.name, word) for word in (*self.words, OTHER))
        return (*own, OfCategory.of(self.name, BLANK)) if self.indicator else own

    def shown(self, values: NDArray[Any]) -> str:
        """Its value in words, of its entries in the units of the file: "63 years", "normal"."""
        if np.isnan(values[0]) or (self.indicator and values[-1] > 0.5):
            return BLANK
        if self.kind == "one_hot":
            return (*self.words, OTHER)[int(values[: len(self.words) + 1].argmax())]
        number = float(values[0])
        if self.kind == "ordinal":
            return self.words[min(max(round(number), 0), len(self.words) - 1)]
        if self.kind == "date":
            return str(EPOCH + np.timedelta64(int(np.floor(number + 0.01)), "D"))  # rounding
        return f"{number:.6g} {self.unit}".strip()


def feature_of(features: Sequence[Feature]) -> NDArray[np.int64]:
    """(W,) the index of the feature of each entry."""
    widths = [len(feature.entries) for feature in features]
    return np.repeat(np.arange(len(widths)), widths)


@dataclass(frozen=True, eq=False)
class Scaling:
    """How numbers of a source's files become those of the data set: (v - low) / span.

    A column whose span is 0 becomes 0. By default nothing is changed.
    """

    low: NDArray[Any] | float = 0.0  # (W,), or one for all columns
    span: NDArray[Any] | float = 1.0  # likewise
    # (W,) what takes the place of blank cells, in the units of the files; NaN where they are
    # refused. None if no cell is blank.
    fill: NDArray[Any] | None = None
    zero: str = ""  # what 0 stands for, in words, if the scale gives it a meaning

    @classmethod
    def minmax(cls, train: NDArray[Any]) -> Scaling:
        """Scaling of each column of (N, F) or (N,) to [0, 1] by its minimum and maximum."""
        low = train.min(axis=0)
        return cls(low, train.max(axis=0) - low)

    def __call__(self, values: Any) -> Any:
        """Scale floats (n, W) or (n,) from the units of the files to those of the data set."""
        if self is UNSCALED:  # inputs that stay in their files are never scaled
            return values
        if self.fill is not None:
            values = np.where(np.isnan(values), self.fill, values).astype(values.dtype)
        span = np.where(np.greater(self.span, 0), self.span, np.inf).astype(values.dtype)
        return (values - self.low) / span

    def astype(self, dtype: np.dtype[Any]) -> Scaling:
        """The same, as a data set of another type of floats applies it."""
        fill = None if self.fill is None else self.fill.astype(dtype)
        low, span = (np.asarray(value, dtype) for value in (self.low, self.span))
        return Scaling(low, span, fill, self.zero)

    def undo(self, scaled: NDArray[Any]) -> NDArray[Any]:
        """Convert floats from the units of the data set back to those of the files."""
        return scaled * self.span + self.low


UNSCALED = Scaling()


@dataclass(frozen=True)
class Preprocessing:
    """What of a table is still to be fitted to the training examples of the clients.

    The keys are those of `fedsim.data.sources.tables.Table`.
    """

    missing: Missing = "refuse"
    scale: Scale = "none"
    fit: Fit = "pooled"

    @property
    def fills(self) -> bool:
        """Whether blank cells are filled."""
        return self.missing not in ("refuse", "drop")


class Fitted(NamedTuple):
    """What was fitted, and what the sums took."""

    scaling: Scaling  # how entries are filled and scaled
    sent: tuple[int, ...]  # bytes of each client
    received: int  # bytes that each client gets


class Statistics:
    """What is known of the training examples of some clients; they add up exactly, in any order.

    The examples are (n, W) in the units of the files, NaN where blank. Values are counted where
    the most frequent one matters.
    """

    def __init__(self, x: Floats, features: Sequence[Feature], missing: Missing) -> None:
        known = ~np.isnan(x)
        self.rows = len(x)
        self.count = known.sum(axis=0)
        self.low = np.where(known, x, np.inf).min(axis=0, initial=np.inf)
        self.high = np.where(known, x, -np.inf).max(axis=0, initial=-np.inf)
        self.values: dict[int, Counter[float]] = {}
        self.categories = set[tuple[str, str]]()  # that occur
        for w, feature in zip(firsts_of(features), features, strict=True):
            if feature.kind == "one_hot":
                there = np.nanmax(x[:, w : w + len(feature.codes)], axis=0, initial=0) > 0
                self.categories |= {
                    (feature.name, code)
                    for code, one in zip(feature.codes, there, strict=True)
                    if one
                }
            elif feature.kind == "ordinal" or missing == "most_frequent":
                self.values[int(w)] = Counter(x[known[:, w], w].tolist())

    def merge(self, other: Statistics) -> None:
        """Add those of other examples."""
        self.rows += other.rows
        self.count = self.count + other.count
        self.low = np.minimum(self.low, other.low)
        self.high = np.maximum(self.high, other.high)
        for w, counts in other.values.items():
            self.values[w] = self.values[w] + counts
        self.categories |= other.categories

    @property
    def nbytes(self) -> int:
        """As a message: the number of rows, three numbers an entry, each value and its count, and
        the names of categories.
        """
        counted = sum(len(counts) for counts in self.values.values())
        names = sum(len(code.encode()) + 1 for _, code in self.categories)
        return 8 * (1 + 3 * len(self.count) + 2 * counted) + names

    def unit(self, x: Floats) -> Floats:
        """Numbers (n, W) relative to the least and the greatest of all clients; NaN stays."""
        span = self.high - self.low
        return (x - self.low) / np.where(span > 0, span, 1)


def _moments(u: Floats) -> NDArray[np.int64]:
    """(2, 2, W) Σ u and Σ u² of what is known, in units of 2^-30 and 2^-60, for u in [0, 1]."""
    found = np.zeros((2, 2, u.shape[1]), np.int64)
    for power, values in enumerate((u, u * u)):
        scaled = np.nan_to_num(values) * 2.0**_HALF
        high = np.floor(scaled)
        found[power, 0] = high.astype(np.int64).sum(axis=0)
        found[power, 1] = ((scaled - high) * 2.0**_HALF).astype(np.int64).sum(axis=0)
    return found


def firsts_of(features: Sequence[Feature]) -> NDArray[np.int64]:
    """The first entry of each feature."""
    return np.cumsum([0, *(len(feature.entries) for feature in features)])[:-1]


def _chunks(x: NDArray[Any], rows: NDArray[np.int64]) -> Iterator[Floats]:
    """Rows of x as 64-bit floats, some at a time."""
    for start in range(0, max(1, len(rows)), _ROWS):
        yield x[rows[start : start + _ROWS]].astype(np.float64)


def fit(
    x: NDArray[Any],
    parts: Sequence[NDArray[np.int64]],
    features: Sequence[Feature],
    how: Preprocessing,
    who: str = "",
) -> Fitted:
    """How examples are filled and scaled, by sums over clients' training examples.

    The result does not depend on how the examples are divided among clients, not even in its
    last bit. Statistics of the scale are those of the filled columns, as in a pipeline of
    scikit-learn's `SimpleImputer` and `StandardScaler`.

    Args:
        x: (N, W) all examples in the units of the files; NaN where blank.
        parts: the rows of each client.
        features: those of W entries.
        who: whose examples they are, for messages.

    Raises:
        DataError: there is no value of a feature.
    """
    total, sent = Statistics(np.empty((0, x.shape[1])), features, how.missing), []
    for rows in parts:
        own = Statistics(np.empty((0, x.shape[1])), features, how.missing)
        for chunk in _chunks(x, rows):
            own.merge(Statistics(chunk, features, how.missing))
        sent.append(own.nbytes)
        total.merge(own)
    W, firsts = len(total.count), firsts_of(features)
    for w, feature in zip(firsts, features, strict=True):
        if not total.count[w]:
            advice = ", or set data.fit=pooled" if who else ""
            raise DataError(
                f"data.features: {who or 'training'} has no value of '{feature.name}'; leave it "
                f"out{advice}"
            )
    moments, received = np.zeros((2, 2, W), np.int64), 0
    fills = how.fills
    if how.scale == "standard" or fills:  # a second exchange, once the ranges are known
        for rows in parts:
            for chunk in _chunks(x, rows):
                moments += _moments(total.unit(chunk))
        sent = [count + moments.nbytes for count in sent]
        received += total.low.nbytes + total.high.nbytes
    low, span, fill = np.zeros(W), np.ones(W), np.full(W, np.nan)
    for w, feature in zip(firsts, features, strict=True):
        if feature.kind == "one_hot":
            if fills:
                own_entries = slice(w, w + len(feature.words) + 1)
                ones = moments[0, 0, own_entries] / 2.0**_HALF  # of entries that are not constant
                constant = total.low[own_entries] == 1
                ones = np.where(constant, total.count[own_entries], ones)
                fill[own_entries] = np.arange(len(ones)) == ones.argmax()
            continue
        if fills:
            column = None
            if how.missing == "median":  # for which sums are not enough
                column = np.concatenate([x[rows, w] for rows in parts])
            fill[w] = _filled(w, total, moments, column)
        if feature.scaled and how.scale != "none":
            low[w], span[w] = _scale(w, float(fill[w]), how, total, moments)
    scaling = Scaling(low, span, fill if fills else None, _ZERO[how.scale])
    received += low.nbytes + span.nbytes + (fill.nbytes if fills else 0)
    return Fitted(scaling, tuple(sent), received)


def _filled(
    w: int, total: Statistics, moments: NDArray[np.int64], column: NDArray[Any] | None
) -> float:
    """What takes the place of blank cells of a feature of one entry; a median needs its column."""
    if w in total.values:  # of equally frequent values the least, as scikit-learn takes
        counts = total.values[w]
        most = max(counts.values())
        return min(value for value, count in counts.items() if count == most)
    if column is not None:
        return float(np.nanmedian(column.astype(np.float64)))
    mean = _exact(moments[0, :, w]) / int(total.count[w])
    return float(total.low[w] + (total.high[w] - total.low[w]) * float(mean))


def _scale(
    w: int, fill: float, how: Preprocessing, total: Statistics, moments: NDArray[np.int64]
) -> tuple[float, float]:
    """The lower end and the span of an entry, of which blank cells are filled."""
    low, span = float(total.low[w]), float(total.high[w] - total.low[w])
    if how.scale == "minmax" or span == 0:
        return low, span
    n, blank = total.rows, total.rows - int(total.count[w])
    instead = Fraction((fill - low) / span) if blank else Fraction(0)
    mean = (_exact(moments[0, :, w]) + blank * instead) / n
    square = (_exact(moments[1, :, w]) + blank * instead**2) / n
    return low + span * float(mean), span * float(square - mean**2) ** 0.5


def _exact(parts: NDArray[np.int64]) -> Fraction:
    """A sum of two integers in units of 2^-30 and 2^-60."""
    return Fraction((int(parts[0]) << _HALF) + int(parts[1]), 1 << 2 * _HALF)
