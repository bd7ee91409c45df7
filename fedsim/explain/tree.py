"""A surrogate decision tree, which turns a model's predictions into readable conditions.

The tree is grown on a model's predictions, not on labels; its accuracy is its fidelity to the
model. It is C4.5's on continuous features: binary splits x ≤ t, chosen by gain ratio.

A node's rows have the entropy H = -Σ p_c·log2 p_c bits, where p_c is the share of class c. A split
of its m rows into m_l and m_r gains H - (m_l·H_l + m_r·H_r)/m. The gain ratio is this divided by
the split information, the entropy of the shares m_l/m and m_r/m. As in Quinlan's book,

- of each feature only the threshold with the greatest gain is considered;
- only features whose gain is at least the mean of all positive gains are compared: otherwise a
  tiny gain with an even smaller split information would win;
- of those, the greatest gain ratio wins.

Equal gains go to the lower threshold, equal ratios to the lower feature. Nothing is pruned, and
there is no penalty for many thresholds (which release 8 of C4.5 has).

Sources: Quinlan, C4.5: Programs for Machine Learning (1993), sections 2.2 to 2.4; as the
explanation of a client's model: XPFL (arXiv 2410.08634), Algorithm 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.data import Dataset
from fedsim.data.dataset import feature_names
from fedsim.data.encoding import Feature
from fedsim.errors import ExperimentError

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

LEAF = -1  # instead of a feature or child
_ALIKE = 1e-9  # bits; smaller differences of gains and ratios are rounding
_CELLS = 2**18  # (feature, row) pairs at once, which limits memory


@dataclass(frozen=True)
class Tree:
    """A grown tree as flat arrays over its N nodes: the root is node 0, and children come later.

    Args:
        feature: (N,) the feature that a node tests; -1 in a leaf.
        threshold: (N,) rows with x ≤ threshold go left, others right; 0 in a leaf.
        left: (N,) index of the left child; -1 in a leaf.
        right: (N,) index of the right child.
        counts: (N, C) rows of each class at the node when the tree was grown.
    """

    feature: Ints
    threshold: Array
    left: Ints
    right: Ints
    counts: Ints

    def predict(self, x: NDArray[Any]) -> Ints:
        """(n,) classes of (n, F) rows: the most frequent of their leaf, the lowest if tied."""
        node, rows = np.zeros(len(x), np.int64), np.arange(len(x))
        while len(rows := rows[self.feature[node[rows]] != LEAF]):
            at = node[rows]
            holds = x[rows, self.feature[at]] <= self.threshold[at]
            node[rows] = np.where(holds, self.left[at], self.right[at])
        return self.counts.argmax(axis=1)[node]

    def contributions(self, x: NDArray[Any], y: Ints) -> Array:
        """Contributions of features to the share of a class, along each row's path to its leaf.

        A condition adds the share of the class among the rows that went the same way when the tree
        was grown, less that among all rows of its node. They sum to the share in the leaf less
        that in the root.

        Args:
            x: (n, F) rows.
            y: (n,) the class of each.

        Returns:
            (n, F).
        """
        shares = self.counts / self.counts.sum(axis=1, keepdims=True)
        found = np.zeros(x.shape)
        node, rows = np.zeros(len(x), np.int64), np.arange(len(x))
        while len(rows := rows[self.feature[node[rows]] != LEAF]):
            at, f = node[rows], self.feature[node[rows]]
            holds = x[rows, f] <= self.threshold[at]
            node[rows] = np.where(holds, self.left[at], self.right[at])
            found[rows, f] += shares[node[rows], y[rows]] - shares[at, y[rows]]
        return found

    @property
    def depth(self) -> int:
        return int(self.depths().max())

    @property
    def leaves(self) -> int:
        return int((self.feature == LEAF).sum())

    def depths(self) -> Ints:
        """(N,) number of conditions on the path to each node."""
        depths = np.zeros(len(self.feature), np.int64)
        for node in np.flatnonzero(self.feature != LEAF):
            depths[[self.left[node], self.right[node]]] = depths[node] + 1
        return depths

    def below(self) -> Ints:
        """(N,) number of nodes below each node."""
        below = np.zeros(len(self.feature), np.int64)
        for node in np.flatnonzero(self.feature != LEAF)[::-1]:
            below[node] = below[self.left[node]] + below[self.right[node]] + 2
        return below


def build_tree(x: NDArray[Any], y: NDArray[Any], classes: int, min_samples_leaf: int = 2) -> Tree:
    """Grow a tree, from the root down until nodes are pure or no split gains anything.

    The same bits for the same rows, in whatever order they come. Gains below 1e-9 bits are 0, and
    gains or ratios closer than that are equal.

    Args:
        x: (n, F) numbers, finite. Thresholds lie half-way between neighbours among a feature's
            values.
        y: (n,) what the model predicts, from 0 to `classes` - 1.
        classes: C.
        min_samples_leaf: rows that a split leaves on either side at least.

    Raises:
        ExperimentError: no rows or features, or values that are not finite.
    """
    if x.ndim != 2 or not x.size:
        raise ExperimentError(
            f"x has the shape {x.shape}: it must be (rows, features), with at least one of each"
        )
    if len(bad := np.argwhere(~np.isfinite(x))):
        row, column = bad[0]
        raise ExperimentError(
            f"x has {len(bad)} value(s) that are not finite numbers, the first in row {row}, "
            f"feature {column}: {x[row, column]}"
        )
    n, F = x.shape
    columns = np.ascontiguousarray(x.T, dtype=np.float64)
    labels = y.astype(np.min_scalar_type(classes - 1))  # small numbers are sorted faster
    counts = np.arange(n + 1, dtype=np.float64)
    xlogx = counts * np.log2(np.maximum(counts, 1))

    # Rows are sorted by each feature once. A node has its rows' part of each order.
    order = np.empty((F, n), np.int32)
    for column, rows in zip(columns, order, strict=True):
        rows[:] = np.argsort(column, kind="stable")
    goes_left = np.empty(n, np.bool_)
    feature: list[int] = []
    threshold: list[float] = []
    children: list[list[int]] = []
    frequencies: list[Ints] = []
    # Nodes to visit: orders, their features, and the parent and side.
    waiting = [(order, np.arange(F), LEAF, 0)]
    del order  # frees the root's
    while waiting:
        order, features, parent, side = waiting.pop()
        if parent != LEAF:
            children[parent][side] = len(feature)
        own = np.bincount(labels[order[0]], minlength=classes)
        frequencies.append(own)
        children.append([LEAF, LEAF])
        split = None
        if own.max() < own.sum():
            varies = columns[features, order[:, 0]] < columns[features, order[:, -1]]
            if not varies.all():  # constant here, so in all nodes below
                order, features = order[varies], features[varies]
            split = _split(columns, labels, order, features, own, min_samples_leaf, xlogx)
        feature.append(split[0] if split else LEAF)
        threshold.append(split[1] if split else 0.0)
        if split:
            here = order[0]
            goes_left[here] = columns[split[0], here] <= split[1]
            to_left = goes_left[order]
            # The same number of rows go left in each order, so the result is rectangular.
            for child, chosen in ((1, ~to_left), (0, to_left)):
                part = order[chosen].reshape(len(features), -1)
                waiting.append((part, features, len(feature) - 1, child))
    left, right = np.array(children, np.int64).T.copy()
    classes_at = np.stack(frequencies).astype(np.int64)
    return Tree(np.array(feature, np.int64), np.array(threshold), left, right, classes_at)


def _split(
    columns: Array,
    labels: NDArray[Any],
    order: NDArray[np.int32],
    features: Ints,
    counts: Ints,
    least: int,
    xlogx: Array,
) -> tuple[int, float] | None:
    """The feature and threshold of a node's split; None if there is no gain.

    Args:
        columns: (F, n) all values.
        labels: (n,) all classes.
        order: (f, m) the node's m rows, sorted by each of f features.
        counts: (C,) the node's rows of each class.
        xlogx: (n + 1,) k·log2 k.
    """
    m = int(counts.sum())
    if not len(features) or m < 2 * least:
        return None
    on_left = np.arange(least, m - least + 1)  # by number of rows that go left, here and below
    information = (xlogx[m] - xlogx[on_left] - xlogx[m - on_left]) / m  # of the split, in bits
    # While rows move from right to left, Σ k·log2 k over the classes of both sides changes by what
    # depends only on how many rows of the same class moved before, not on the feature.
    before = np.arange(m) - np.repeat(counts.cumsum() - counts, counts)
    after = np.repeat(counts, counts) - before
    change = (xlogx[before + 1] - xlogx[before] + xlogx[after - 1] - xlogx[after]) / m

    found = []
    together = max(_CELLS // m, 1)
    for start in range(0, len(features), together):
        rows = order[start : start + together]
        by_class = np.argsort(labels[rows], axis=1, kind="stable")
        changes = np.empty(rows.shape)
        np.put_along_axis(changes, by_class, change[None], axis=1)
        # The information gain, H(split) + H(class) - H(split and class).
        gains = information + changes.cumsum(axis=1)[:, least - 1 : m - least]
        values = columns[features[start : start + together, None], rows]
        low, high = values[:, least - 1 : m - least], values[:, least : m - least + 1]
        gains[low == high] = -np.inf
        best = _first_greatest(gains)
        one = np.arange(len(rows)), best
        found.append((gains[one], best, low[one], high[one]))
    gain, best, low, high = (np.concatenate(parts) for parts in zip(*found, strict=True))

    positive = gain > _ALIKE
    if not positive.any():
        return None
    compared = positive & (gain >= gain[positive].mean() - _ALIKE)
    chosen = int(_first_greatest(np.where(compared, gain / information[best], -np.inf)))
    below, above = float(low[chosen]), float(high[chosen])
    middle = below / 2 + above / 2  # their sum might overflow
    return int(features[chosen]), middle if below <= middle < above else below


def _first_greatest(values: Array) -> Ints:
    """Index of the maximum along the last axis, up to rounding; the first in case of ties."""
    return np.argmax(values >= values.max(axis=-1, keepdims=True) - _ALIKE, axis=-1)


def fidelity(tree: Tree, x: NDArray[Any], y_model: NDArray[Any]) -> float:
    """The share of (n, F) rows for which the tree predicts what the model does, (n,)."""
    return float((tree.predict(x) == y_model).mean())


def pixel_names(shape: tuple[int, ...]) -> list[str]:
    """Of each entry of a flattened (C, H, W) image, "pixel (row, column)", counted from 0.

    With several channels, "pixel (row, column) of channel c".
    """
    C, H, W = shape
    return [
        f"pixel ({row}, {column})" + (f" of channel {channel}" if C > 1 else "")
        for channel in range(C)
        for row in range(H)
        for column in range(W)
    ]


@dataclass(frozen=True)
class Conditions:
    """Conditions on entries of inputs in words, with features' names and own units.

    Args:
        dataset: the data.
        below: the sign of the left branch, `<` or `≤`.
        above: that of the right branch, `≥` or `>`.
    """

    dataset: Dataset
    below: str = "≤"
    above: str = ">"

    @cached_property
    def _entries(self) -> list[tuple[str, Feature | None]]:
        """The name of each entry of an input, and the feature that it is part of."""
        data = self.dataset
        if len(data.shape) == 3:
            channels, height, width = data.shape
            return [(name, None) for name in pixel_names((channels, height, width))]
        names = data.entry_names or feature_names(math.prod(data.shape))
        owners: list[Feature | None] = [f for f in data.encoding for _ in f.entries]
        return list(zip(names, owners or [None] * len(names), strict=True))

    def words(self, f: int, low: float | None, high: float | None) -> str:
        """That an entry x_f is from `low` on, or below `high`, or both."""
        name, feature = self._entries[f]
        if feature is not None and name != feature.name:  # one of several: 1 if it is so, or 0
            _, _, word = name.partition(f"{feature.name}=")
            return f"{feature.name} {'≠' if low is None else '='} {word}"
        least, most = (None if t is None else self.shown(f, t) for t in (low, high))
        if least is None:
            return f"{name} {self.below} {most}"
        if most is None:
            return f"{name} {self.above} {least}"
        return f"{least} {'≤' if self.below == '<' else '<'} {name} {self.below} {most}"

    def shown(self, f: int, threshold: float) -> str:
        """A threshold of an entry in the units and words of the data's files."""
        data, value, (_, feature) = self.dataset, threshold, self._entries[f]
        if data.mean:
            channel = f * len(data.mean) // math.prod(data.shape)
            value = value * data.std[channel] + data.mean[channel]
        if data.x.dtype == np.uint8:
            value *= 255
        low, span = (np.asarray(a).reshape(-1) for a in (data.scaling.low, data.scaling.span))
        value = float(value * span[f % len(span)] + low[f % len(low)])
        if feature is not None and feature.kind in ("ordinal", "date"):
            whole = math.ceil(value) if self.below == "<" else math.floor(value)
            return feature.shown(np.array([whole, 0.0][: len(feature.entries)]))
        return f"{value:.5g} {feature.unit if feature else ''}".strip()
