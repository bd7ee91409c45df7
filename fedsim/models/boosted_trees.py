"""Gradient-boosted trees on bins: the ensemble, and how a tree grows from sums.

XGBoost, Chen and Guestrin (KDD 2016), Eq. 5 to 7, with the histogram algorithm. A tree needs no
examples, only sums of gradients and hessians by node, feature and bin, so it may grow where no
example is. Gradients are multiples of a fixed step, a power of two. So their sums are exact in
64-bit floats, whatever their order or grouping, and so is what is subtracted from them: examples
that are spread over clients give the same tree, to the bit, as all of them in one place.

Symbols: n examples, F features, C trees a round (one for two classes or a number, otherwise one
for each class), T rounds. Of a tree's N = 2^(depth + 1) − 1 nodes the root is 0, and the children
of node i are 2i + 1 (left) and 2i + 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedsim.models.arrays import ArrayModel, Arrays
from fedsim.models.bins import Array, Floats, Ints
from fedsim.models.model import models

TREES = ("feature", "threshold", "value", "cover")  # the arrays (T, C, N) of an ensemble
LEAF = -1  # instead of a feature
# A sum of n gradients up to 1 is a multiple of 2^-26 below n, exact in float64 for n ≤ 2^25, also
# after a division by the number of clients and back.
STEP = 2.0**-26
ROW_LIMIT = 1 << 20  # (tree, row) pairs at a time, which limits memory
BIN_LIMIT = 1 << 19  # likewise (node, bin) pairs

# (tree, nodes) -> what `histograms` returns, summed over all examples, and whose they are: equal
# values for the same. The tree's thresholds are numbers of bins. None, if nobody answers, ends it.
AskSums = Callable[[Arrays, Ints], tuple[Array, Any] | None]


@models.register
class BoostedTrees(ArrayModel):
    """Gradient-boosted decision trees on bins of the features (XGBoost, Chen & Guestrin 2016).

    For classification and regression, on tables and images (each pixel is a feature). A leaf with
    the sums G of gradients and H of hessians has the value −η·G/(H + λ) (Eq. 5); a split into a
    left and a right part gains G_l²/(H_l + λ) + G_r²/(H_r + λ) − G²/(H + λ), and must gain more
    than γ (Eq. 7 without its ½, as in XGBoost's code). The greatest gain wins, of equal ones that
    of the first feature and the lowest threshold. An example goes left if x < threshold.

    Two classes have one tree a round, whose sum f is the log-odds of the second class (logits −f/2
    and f/2); more classes have one tree each, for the softmax; a regression has one.

    The ensemble is `feature` (T, C, N), −1 in leaves; `threshold`; `value`, of each node as if it
    were a leaf; `cover`, its H; `base` (C,), with which sums begin; and `classes` (1,), how many,
    0 for a regression.

    Args:
        depth: most conditions on a path.
        bins: most bins of a feature; traffic and time grow with them.
        eta: η, the learning rate.
        lam: λ, L2 regularisation of leaves' values.
        gamma: γ, least gain of a split.
        min_child_weight: least H of a child.
    """

    name: str = "boosted_trees"
    kind: ClassVar[str] = "tree ensemble"
    explainer: ClassVar[str] = "tree_shap"
    depth: int = Field(6, ge=1, le=10)
    bins: int = Field(64, ge=2, le=256)
    eta: float = Field(0.3, gt=0, le=1)
    lam: float = Field(1.0, ge=0)
    gamma: float = Field(0.0, ge=0)
    min_child_weight: float = Field(1.0, ge=0)

    def outputs(self, arrays: Arrays, x: Floats) -> Array:
        f = raw_scores(arrays, rows_of(x))
        return np.stack([-f[0], f[0]], axis=1) / 2 if arrays["classes"] == 2 else f.T

    def empty(self, classes: int, base: Array | None = None) -> Arrays:
        """An ensemble of no rounds, for so many classes; 0 for a regression."""
        C = classes if classes > 2 else 1
        N = 2 ** (self.depth + 1) - 1
        trees: Arrays = {name: np.zeros((0, C, N), np.float32) for name in TREES}
        trees["feature"] = trees["feature"].astype(np.int32)
        trees["base"] = np.zeros(C) if base is None else base
        trees["classes"] = np.array([classes])
        return trees

    def histogram_bytes(self, classes: int, features: int, examples: int) -> int:
        """Memory of the sums of a level of all trees of a round, at most."""
        nodes = min(2 ** (self.depth - 1), examples) * (classes if classes > 2 else 1)
        return 16 * nodes * features * self.bins

    def grow(self, ask: AskSums, cuts: Arrays, C: int) -> Arrays:
        """C trees, from the root down, level by level; as an ensemble of one round.

        Each level asks for the children with fewer examples, and gets the others by subtraction
        from their parents, unless other examples were summed.

        Args:
            ask: returns the sums of nodes (A, 2) of the unfinished trees, each by its tree and
                its number, in ascending order.
            cuts: of the bins; see `fedsim.models.bins.find_cuts`.
        """
        N = 2 ** (self.depth + 1) - 1
        tree: Arrays = {name: np.zeros((1, C, N), np.float32) for name in TREES}
        tree["feature"] = np.full((1, C, N), LEAF, np.int32)
        by_bin = {"feature": tree["feature"], "threshold": np.zeros((1, C, N), np.float32)}
        nodes = np.stack([np.arange(C), np.zeros(C, np.int64)], axis=1)
        sums, who = ask(by_bin, nodes) or (np.zeros((C, 2, int(cuts["starts"][-1]))), None)
        for level in range(self.depth):
            feature, cut, left, total = self.best_splits(sums, cuts)
            if level == 0:
                self._settle(tree, nodes, total)
            split = np.flatnonzero(feature != LEAF)
            parents, at = nodes[split], tuple(nodes[split].T)
            tree["feature"][0][at] = feature[split]
            by_bin["threshold"][0][at] = cut[split] + 1
            tree["threshold"][0][at] = cuts["edges"][
                cuts["starts"][feature[split]] - feature[split] + cut[split]
            ]
            children = parents * (1, 2) + (0, 1), parents * (1, 2) + (0, 2)
            left, right = left[split], total[split] - left[split]
            self._settle(tree, children[0], left)
            self._settle(tree, children[1], right)
            if level + 1 == self.depth or not len(split):
                break
            fewer = (left[:, 1] <= right[:, 1])[:, None]
            smaller = np.where(fewer, children[0], children[1])
            larger = np.where(fewer, children[1], children[0])
            if (answer := ask(by_bin, smaller)) is None:
                break
            of_smaller, now = answer
            if now == who:
                of_larger = sums[split] - of_smaller
            else:  # others have answered
                if (answer := ask(by_bin, larger)) is None:
                    break
                of_larger, last = answer
                who = now if last == now else object()
            nodes = np.concatenate([smaller, larger])
            order = np.lexsort(nodes.T[::-1])
            nodes, sums = nodes[order], np.concatenate([of_smaller, of_larger])[order]
        return tree

    def _settle(self, tree: Arrays, nodes: Ints, sums: Array) -> None:
        """Write the values of nodes (A, 2) with the sums (A, 2) of G and H, and their cover."""
        G, H = sums.T
        w = np.divide(-self.eta * G, H + self.lam, out=np.zeros(len(G)), where=H + self.lam > 0)
        at = tuple(nodes.T)
        tree["value"][0][at], tree["cover"][0][at] = w, H

    def best_splits(self, sums: Array, cuts: Arrays) -> tuple[Ints, Ints, Array, Array]:
        """The best split of each of A nodes, by their sums (A, 2, B).

        Returns:
            (A,) the feature, −1 if there is no gain; (A,) the number of its cut; (A, 2) G and H
            of the left part; and (A, 2) of both.
        """
        size = np.diff(cuts["starts"])
        A, F, most = len(sums), len(size), int(size.max())
        if (together := max(1, BIN_LIMIT // (F * most))) < A:
            parts = [self.best_splits(sums[a : a + together], cuts) for a in range(0, A, together)]
            return tuple(map(np.concatenate, zip(*parts, strict=True)))  # type: ignore[return-value]
        by_bin = np.zeros((A, 2, F, most))
        by_bin[:, :, np.arange(most) < size[:, None]] = sums
        left = by_bin.cumsum(axis=3)
        total = left[:, :, :, -1:]
        (G_l, H_l), (G, H) = left.swapaxes(0, 1), total.swapaxes(0, 1)
        G_r, H_r = G - G_l, H - H_l
        least = self.min_child_weight
        allowed = (H_l >= least) & (H_r >= least) & (H_l > 0) & (H_r > 0)
        allowed &= np.arange(most) < size[:, None] - 1
        gain = np.full(H_l.shape, -np.inf)
        lam = self.lam
        with np.errstate(divide="ignore", invalid="ignore"):
            score = G_l * G_l / (H_l + lam) + G_r * G_r / (H_r + lam) - G * G / (H + lam)
        np.copyto(gain, score - self.gamma, where=allowed)
        best = gain.reshape(A, -1).argmax(axis=1)
        feature, cut = np.divmod(best, most)
        nodes = np.arange(A)
        gains = gain[nodes, feature, cut] > 0
        return (
            np.where(gains, feature, LEAF),
            cut,
            left[nodes, :, feature, cut],
            total[nodes, :, np.where(gains, feature, 0), 0],
        )

    def boost(self, g: Array, h: Array, codes: NDArray[np.uint8], cuts: Arrays) -> Arrays:
        """C trees, grown in one place on the bins (F, n) of examples; g and h are (C, n)."""

        def ask(tree: Arrays, nodes: Ints) -> tuple[Array, None]:
            place = places(leaf_of(tree, codes.T), nodes)
            return histograms(place, len(nodes), codes, cuts, g, h), None

        return self.grow(ask, cuts, len(g))


@dataclass(frozen=True)
class Gradients:
    """Gradients g and hessians h of the loss at scores, as multiples of their units times 2^-26.

    Cross-entropy of the log-odds of two classes, h = p·(1 − p), or of the softmax, where XGBoost
    takes h = 2·p·(1 − p); for a regression half the squared error, h = 1.
    """

    y: NDArray[Any]  # (n,) classes or targets
    classes: int  # 0 for a regression
    weights: Array | None = None  # (n,) factor of each example's loss; by default 1
    units: tuple[float, float] = (1.0, 1.0)  # powers of two of the size of g and of h

    def __call__(self, f: Array) -> tuple[Array, Array]:
        """(C, n) g and h, of scores (C, n)."""
        if not self.classes:
            g, h = f - self.y, np.ones_like(f)
        else:
            p = _logistic(f) if self.classes == 2 else softmax(f)
            own = self.y if self.classes == 2 else self.y == np.arange(self.classes)[:, None]
            g, h = p - own, p * (1 - p) * (1 if self.classes == 2 else 2)
        if self.weights is not None:
            g, h = g * self.weights, h * self.weights
        return to_step(g, self.units[0]), to_step(h, self.units[1])


def _logistic(f: Array) -> Array:
    from scipy.special import expit  # SciPy is slow to import

    return np.asarray(expit(f))


def softmax(f: Array) -> Array:
    """(C, n) the softmax over C, of each column as if it were alone: the same bits."""
    e = np.exp(f - f.max(axis=0))
    p: Array = e / functools.reduce(np.add, e)
    return p


def to_step(values: Array, unit: float = 1.0) -> Array:
    """Values rounded to multiples of 2^-26 of a unit, a power of two."""
    rounded: Array = np.rint(values / (STEP * unit)) * (STEP * unit)
    return rounded


def unit_of(size: float) -> float:
    """The least power of two that numbers up to a size do not exceed; 1 for none but 0."""
    return 2.0 ** float(np.ceil(np.log2(size))) if size > 0 else 1.0


def rows_of(x: NDArray[Any]) -> Floats:
    """(n, ...) inputs as rows (n, F)."""
    return np.ascontiguousarray(x.reshape(len(x), -1), dtype=np.float32)


def leaf_of(trees: Arrays, x: NDArray[Any]) -> Ints:
    """(T·C, n) the node of each tree at which each row of (n, F) ends; or row of bins."""
    feature, threshold = (trees[name].reshape(-1) for name in ("feature", "threshold"))
    N = trees["feature"].shape[-1]
    root = np.arange(0, len(feature), N)[:, None]
    node = np.zeros((len(root), len(x)), np.int64)
    by_row, by_feature = (stride // x.itemsize for stride in x.strides)
    first, entries = np.arange(len(x)) * by_row, x.ravel(order="K")
    for _ in range(N.bit_length() - 1):
        f = feature.take(root + node)
        if f.max(initial=LEAF) == LEAF:  # all have arrived
            break
        at = first + np.maximum(f, 0) * by_feature
        right = entries.take(at) >= threshold.take(root + node)
        node = np.where(f == LEAF, node, 2 * node + 1 + right)
    return node


def raw_scores(trees: Arrays, x: Floats, f: Array | None = None, since: int = 0) -> Array:
    """(C, n) base + the sum of the trees' values for rows (n, F), added round by round.

    `f` are the scores of the first `since` rounds, if they are known.
    """
    T, C, N = trees["feature"].shape
    f = np.repeat(trees["base"][:, None], len(x), axis=1) if f is None else f.copy()
    together = max(1, ROW_LIMIT // max(1, (T - since) * C))
    new = {name: trees[name][since:] for name in ("feature", "threshold")}
    root = np.arange(0, (T - since) * C * N, N)[:, None]
    values = trees["value"][since:].reshape(-1)
    for start in range(0, len(x) if since < T else 0, together):
        rows = slice(start, start + together)
        found = values.take(root + leaf_of(new, x[rows])).reshape(T - since, C, -1)
        for own in found:
            f[:, rows] += own
    return f


def appended(trees: Arrays, *more: Arrays, scale: float = 1.0) -> Arrays:
    """An ensemble with further rounds, whose values are scaled."""
    found = {name: np.concatenate([trees[name], *(m[name] for m in more)]) for name in TREES}
    found["value"][len(trees["value"]) :] *= np.float32(scale)
    return {**trees, **found}


def places(leaves: Ints, nodes: Ints) -> Ints:
    """(C, n) which of the nodes (A, 2), by tree and number, each row is in; −1 for none.

    `leaves` (C, n) are the nodes at which the rows end.
    """
    found = np.full((len(leaves), max(leaves.max(initial=0), nodes[:, 1].max()) + 1), -1)
    found[tuple(nodes.T)] = np.arange(len(nodes))
    return np.take_along_axis(found, leaves, axis=1)


def histograms(
    place: Ints, A: int, codes: NDArray[np.uint8], cuts: Arrays, g: Array, h: Array
) -> Array:
    """(A, 2, B) sums of g and h (C, n) by node, and by feature and bin.

    `place` (C, n) is as of `places`, `codes` (F, n) are the rows' bins.
    """
    starts = cuts["starts"]
    most, found = int(np.diff(starts).max()), np.zeros((A, 2, int(starts[-1])))
    for c in range(len(place)):
        rows = np.flatnonzero(place[c] >= 0)
        if not len(rows):
            continue
        node, g_c, h_c = (array.take(rows) for array in (place[c], g[c], h[c]))
        own = slice(node.min(), node.max() + 1)
        first, size = (node - own.start) * most, (own.stop - own.start) * most
        for f, column in enumerate(
            codes if len(rows) == place.shape[1] else codes.take(rows, axis=1)
        ):
            at, bins = first + column, slice(starts[f], starts[f + 1])
            for k, weights in enumerate((g_c, h_c)):
                summed = np.bincount(at, weights, minlength=size).reshape(-1, most)
                found[own, k, bins] = summed[:, : bins.stop - bins.start]
    return found
