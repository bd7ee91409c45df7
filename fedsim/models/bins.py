"""Bins of features, found by counts of values alone: what trees grow on.

Counts are sums over examples, so values that are spread over clients give the same bins as all of
them in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.models.arrays import Arrays

Array = NDArray[np.float64]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

# (features (I,), first keys (I,), shift) -> (I, 16) how many values each interval has.
AskCounts = Callable[[Ints, Ints, int], Array]


def keys_of(values: Floats) -> Ints:
    """32-bit integers in the order of the floats."""
    bits = (values + np.float32(0)).view(np.uint32).astype(np.int64)  # −0 becomes 0
    return np.where(bits < 2**31, bits + 2**31, 2**32 - 1 - bits)


def values_of(keys: Ints) -> Floats:
    """The floats of integers: the inverse of `keys_of`."""
    bits = np.where(keys >= 2**31, keys - 2**31, 2**32 - 1 - keys)
    return bits.astype(np.uint32).view(np.float32)


def count_keys(x: Floats, feature: Ints, first: Ints, shift: int) -> Array:
    """(I, 16) how many values of (n, F) are in each sixteenth of some intervals of keys.

    Intervals are of ascending features (I,), and have an ascending first key (I,); a sixteenth has
    2^shift keys.
    """
    counts = np.zeros((len(feature), 16))
    begin = np.searchsorted(feature, np.arange(x.shape[1] + 1))
    for f in np.unique(feature):
        own = first[begin[f] : begin[f + 1]]
        keys = keys_of(np.ascontiguousarray(x[:, f]))
        at = np.searchsorted(own, keys, side="right") - 1
        part = (keys - own[at]) >> shift
        inside = (at >= 0) & (part < 16)
        found = np.bincount((at * 16 + part)[inside], minlength=len(own) * 16)
        counts[begin[f] : begin[f + 1]] = found.reshape(-1, 16)
    return counts


def find_cuts(count: AskCounts, features: int, bins: int) -> Arrays:
    """Cuts of each feature into bins of about equally many values, found by counts alone.

    Floats of 32 bits, in their order, are 2^32 keys. These are divided into sixteen intervals, and
    those that hold more than a quarter of a bin again, and the outermost until they are single
    numbers. A feature with no more different intervals than bins is cut between all of them. A cut
    is half-way between the last key of an interval and the first of the next that has values, so
    of a few whole numbers it is half-way between them.

    Returns:
        `edges`, the cuts of all features in ascending order, x < edge being left of it; `starts`
        (F + 1,) the number of a feature's first bin among the bins of all features; `low` and
        `high` (F,) the least and greatest value of each feature.
    """
    feature, first = np.arange(features), np.zeros(features, np.int64)
    total: Array | None = None
    done: list[tuple[Ints, Ints, Ints, Array]] = []
    for shift in range(28, -1, -4):
        counts = np.maximum(count(feature, first, shift), 0)
        if total is None:
            total = counts.sum(axis=1)
        at, part = np.nonzero(counts)
        own, begin, held = feature[at], first[at] + (part << shift), counts[at, part]
        outer = (np.diff(own, prepend=-1) != 0) | (np.diff(own, append=features) != 0)
        heavy = (outer | (held * 4 * bins > total[own])) & (shift > 0)
        last = begin + (1 << shift) - 1
        done.append(tuple(a[~heavy] for a in (own, begin, last, held)))
        feature, first = own[heavy], begin[heavy]
        if not len(feature):  # nobody has a value
            break
    own, begin, last, held = (np.concatenate(parts) for parts in zip(*done, strict=True))
    order = np.lexsort((begin, own))
    own, begin, last, held = (a[order] for a in (own, begin, last, held))
    bound = np.searchsorted(own, np.arange(features + 1))
    edges, size = [], np.ones(features + 1, np.int64)
    low, high = np.zeros((2, features), np.float32)
    for f in range(features):
        a, b = bound[f], bound[f + 1]
        if a == b:
            continue  # nobody has a value
        low[f], high[f] = values_of(np.array([begin[a], last[b - 1]]))
        after = np.arange(a, b - 1)  # cut after these intervals
        if b - a > bins:
            share = held[a:b].cumsum() * bins // held[a:b].sum()
            after = a + np.flatnonzero(np.diff(share, prepend=0)[:-1] > 0)
        under, over = values_of(last[after]), values_of(begin[after + 1])
        middle = ((under.astype(np.float64) + over) / 2).astype(np.float32)
        edges.append(np.where(middle > under, middle, over))
        size[f + 1] += len(after)
    size[0] = 0
    return {
        "edges": np.concatenate([np.zeros(0, np.float32), *edges]),
        "starts": size.cumsum(),
        "low": low,
        "high": high,
    }


def even_cuts(low: float, high: float, features: int, bins: int) -> Arrays:
    """Cuts of all features into bins of equal width between two bounds."""
    inner = np.linspace(low, high, bins + 1)[1:-1].astype(np.float32)
    return {
        "edges": np.tile(inner, features),
        "starts": np.arange(features + 1) * bins,
        "low": np.full(features, low, np.float32),
        "high": np.full(features, high, np.float32),
    }


def lost(x: Floats, low: float, high: float) -> NDArray[np.bool_]:
    """(F,) whether bounds do not fit a feature of (n, F), so that bins between them lose it.

    More than a tenth of its values lie outside, or more values than one or two in one or two of
    256 bins.
    """
    outside = ((x < low) | (x > high)).mean(axis=0) > 0.1
    bins = np.ptp(encode(x, even_cuts(low, high, x.shape[1], 256)), axis=1)
    values = np.array([len(np.unique(column)) for column in x.T])
    found: NDArray[np.bool_] = (values > 1) & (outside | (bins < np.minimum(values - 1, 2)))
    return found


def encode(x: Floats, cuts: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
    """(F, n) the bin of each value of (n, F)."""
    codes = np.empty(x.shape[::-1], np.uint8)
    starts: Sequence[int] = cuts["starts"].tolist()
    for f in range(x.shape[1]):
        own = cuts["edges"][starts[f] - f : starts[f + 1] - f - 1]
        codes[f] = np.searchsorted(own, x[:, f], side="right")
    return codes
