"""Scores of relevances: sparseness, similarity of two, and agreement with the ground truth.

Relevances are (n, P), for n inputs with P parts each (pixels, features or words), signed and
finite. A truth is (n, P): the parts that decide, as far as they are known. Each score is (n,), one
per input, in float64. The padding of a document counts as parts without relevance, so documents
of different lengths are better scored one by one, without padding. Maps in which all parts are
alike follow each formula's convention; in runs they score what chance does (see `informative`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
Truth = NDArray[np.bool_]
_ROUNDING = 1e-5  # relative to the largest relevance of an input
_NEARLY = 0.1  # a change of outputs, relative to them, that is small


def mean_defined(values: Scores) -> float | None:
    """The mean of scores that are not NaN; None if all are."""
    defined = values[~np.isnan(values)]
    return math.fsum(defined.tolist()) / len(defined) if len(defined) else None


def informative(
    *maps: NDArray[Any], present: NDArray[np.bool_] | None = None
) -> NDArray[np.bool_]:
    """(n,) whether each of some maps is finite and tells the parts of an input apart.

    Parts that differ by rounding alone are alike. A single part has no other to be told from.

    >>> rows = np.array([[2.0, 2.0], [0.0, 0.0], [2.0, 1.0], [np.nan, 1.0]])
    >>> informative(rows).tolist()
    [False, False, True, False]

    Args:
        maps: (n, P) each.
        present: (n, P) which parts the inputs have; by default all.
    """
    present = np.ones(maps[0].shape, np.bool_) if present is None else present
    found = np.ones(len(present), np.bool_)
    for relevance in maps:
        finite = (np.isfinite(relevance) | ~present).all(axis=1)
        rows = np.where(present & finite[:, None], relevance, 0)
        risen = np.where(present, rows - rows[:, :1], 0)  # missing parts come last
        spread = risen.max(axis=1, initial=0) - risen.min(axis=1, initial=0)
        alike = spread <= _ROUNDING * np.abs(rows).max(axis=1, initial=0)
        found &= finite & ~(alike & (present.sum(axis=1) > 1))
    return found


def completeness_gap(total: Scores, end: Scores, start: Scores) -> Scores:
    """(n,) how far relevances are from the change of an output: |Σ R − Δ| / |Δ|, Δ = f(x) − f(x').

    At least 0; less is better. A Δ that is small beside the outputs counts as a tenth of |f(x)| +
    |f(x')|, as otherwise a small error would be a large gap. NaN where both outputs are 0.

    >>> completeness_gap(np.array([1.5, 0.0]), np.array([3.0, 0.0]), np.array([1.0, 0.0])).tolist()
    [0.25, nan]

    Args:
        total: (n,) Σ R.
        end, start: (n,) f(x) and f(x').
    """
    with np.errstate(invalid="ignore"):  # logits of classes that a model cannot predict
        change = end - start
        scale = np.maximum(np.abs(change), _NEARLY * (np.abs(end) + np.abs(start)))
        gap: Scores = np.abs(total - change) / np.where(scale > 0, scale, np.nan)
    return gap


def silence(relevance: NDArray[Any], parts: str) -> str:
    """Why a map says nothing of one input; empty if it does.

    Args:
        relevance: of the input's parts.
        parts: what they are: `pixels`, `features` or `words`.
    """
    own = relevance.reshape(1, -1)
    if not np.isfinite(own).all():
        return f"the relevance of some of its {parts} is not finite"
    if not own.any():
        return "no part of it is relevant"
    if informative(own).all():
        return ""
    return f"all of its {parts} are equally relevant ({own[0, 0]:.4g})"


def sparseness(relevance: NDArray[Any]) -> Scores:
    """How unevenly relevance is spread: the Gini index of |R|.

    With |R| in rising order, r_1 ≤ … ≤ r_P: Σ_k (2k − P − 1)·r_k / (P·Σ_k r_k).

    In [0, 1), without a unit; 0: all parts alike, (P − 1)/P: one part alone. More is simpler. A
    row of zeros scores 0.

    >>> sparseness(np.array([[0, -3, 0, 0], [1, 1, -1, 1]])).tolist()
    [0.75, 0.0]

    Source: Chalasani et al. (ICML 2020); the index as in Hurley and Rickard (IEEE Transactions on
    Information Theory 2009).
    """
    size = np.sort(_sizes(relevance), axis=1)
    P = size.shape[1]
    weight = 2 * np.arange(1, P + 1) - P - 1
    gini: Scores = (size * weight).sum(axis=1) / (P * size.sum(axis=1))
    return gini.clip(0, 1)


def effective_parts(relevance: NDArray[Any]) -> Scores:
    """How many parts an explanation is about: exp(−Σ_p q_p ln q_p) with q = |R| / Σ|R|.

    In [1, P], in parts: as many equally relevant ones would have that entropy. Less is simpler. A
    row of zeros scores P, because all its parts are alike.

    >>> effective_parts(np.array([[0, -3, 0, 0], [1, 1, -1, 1]])).round(9).tolist()
    [1.0, 4.0]

    Source: Bhatt et al. (IJCAI 2020), whose complexity is the entropy itself, in nats.
    """
    size = _sizes(relevance)
    q = size / size.sum(axis=1, keepdims=True)
    nats: Scores = -(q * np.log(q, out=np.zeros_like(q), where=q > 0)).sum(axis=1)
    return np.exp(nats).clip(1, q.shape[1])


def rank_correlation(a: NDArray[Any], b: NDArray[Any]) -> Scores:
    """Whether two explanations put parts in the same order: Spearman's ρ, mean ranks for ties.

    In [−1, 1], without a unit; 1: the same order, −1: the reverse one; 0 is chance. More is more
    alike. Where all parts of a row are alike, in one explanation or in both, there is no order: 0.
    A single part: 1 if the two rows are equal, else NaN.

    Source: Spearman (1904).
    """
    from scipy.stats import rankdata  # SciPy is slow to import

    a, b = _rows(a), _rows(b)
    ranks = (rankdata(rows, axis=1) - (rows.shape[1] + 1) / 2 for rows in (a, b))
    if a.shape[1] == 1:
        return np.where((a == b)[:, 0], 1, np.nan)
    return np.nan_to_num(_cosine(*ranks))


def top_k_overlap(a: NDArray[Any], b: NDArray[Any], k: int) -> Scores:
    """The share of the k parts of largest R in one explanation that also are in the other.

    In [0, 1]; k/P is chance. More is more alike. It is the mean over the orders of equal parts,
    except that equal rows score 1 if not all of their parts are alike.

    >>> top_k_overlap(np.array([[5, 4, 1, -9]]), np.array([[1, 3, -2, 2]]), k=2).tolist()
    [0.5]

    Raises:
        ValueError: there are no k parts.
    """
    P = a.shape[1]
    if not 1 <= k <= P:
        raise ValueError(f"k={k}: must be from 1 to {P}, the number of parts")
    a, b = _rows(a), _rows(b)
    share = (_among(a, np.full(len(a), k)) * _among(b, np.full(len(b), k))).sum(axis=1) / k
    same = (a == b).all(axis=1) & (a != a[:, :1]).any(axis=1)
    return np.where(same, 1, share)


def parts_compared(P: int, top_k: int | None) -> int:
    """k of `top_k_overlap` for an input of P parts: `explain.top_k`, or else a tenth of them."""
    return max(1, round(P / 10)) if top_k is None else min(top_k, P)


def cosine(a: NDArray[Any], b: NDArray[Any]) -> Scores:
    """How alike two explanations are, whatever their scale: ⟨a, b⟩ / (‖a‖·‖b‖).

    In [−1, 1], without a unit. More is more alike; 0 is chance, which rows of zeros score.
    """
    return np.nan_to_num(_cosine(_scaled(_rows(a)), _scaled(_rows(b))))


def relevance_mass(relevance: NDArray[Any], truth: Truth) -> Scores:
    """The share of the positive relevance that is where the truth is.

    In [0, 1]; |truth|/P is chance, which a row without any positive relevance scores. More is
    better. Where the truth is empty: NaN.

    >>> truth = np.array([[True, True, False, False]])
    >>> relevance_mass(np.array([[2, 1, 1, -5]]), truth).tolist()
    [0.75]

    Source: Arras et al. (Information Fusion 2022), relevance mass accuracy, of sums over channels
    of which the positive part counts.
    """
    positive = _scaled(np.maximum(_rows(relevance), 0))
    total = positive.sum(axis=1)
    positive = np.where(total[:, None] > 0, positive, 1)
    inside = (positive * truth).sum(axis=1)
    return _where_known(inside / positive.sum(axis=1), truth)


def relevance_rank(relevance: NDArray[Any], truth: Truth) -> Scores:
    """Of as many parts of largest R as the truth has: the share that is where the truth is.

    In [0, 1]; |truth|/P is chance. More is better. The mean over the orders of equal parts. Where
    the truth is empty: NaN.

    >>> truth = np.array([[True, True, False, False]])
    >>> relevance_rank(np.array([[2, 1, 1.5, -5]]), truth).tolist()
    [0.5]

    Source: Arras et al. (Information Fusion 2022), relevance rank accuracy.
    """
    size = np.sum(truth, axis=1)
    hits = (_among(_rows(relevance), size) * truth).sum(axis=1)
    return _where_known(hits / np.maximum(size, 1), truth)


def pointing_game(relevance: NDArray[Any], truth: Truth) -> Scores:
    """Whether the part of largest R is where the truth is: 1, or else 0.

    Of several largest parts, the share that is. The mean over inputs is a share, too; |truth|/P is
    chance. More is better. Where the truth is empty: NaN.

    >>> truth = np.array([[True, True, False, False]])
    >>> pointing_game(np.array([[3, 1, 3, 2]]), truth).tolist()
    [0.5]

    Source: Zhang et al. (IJCV 2018), without their tolerance of 15 pixels around the truth.
    """
    first = _among(_rows(relevance), np.ones(len(relevance), np.int64))
    return _where_known((first * truth).sum(axis=1), truth)


def places(relevance: NDArray[Any]) -> NDArray[np.int64]:
    """(n, P) the rank of each part by decreasing R: 0 for the most relevant one; ties by index.

    >>> places(np.array([[1, 7, -2, 7]])).tolist()
    [[2, 0, 3, 1]]
    """
    order = np.argsort(-_rows(relevance), axis=1, kind="stable")
    found = np.empty(order.shape, np.int64)
    np.put_along_axis(found, order, np.arange(order.shape[1])[None], axis=1)
    return found


def _among(rows: Scores, k: NDArray[np.int64]) -> Scores:
    """(n, P) how often each part is among the k largest, over all orders of equal ones.

    Args:
        k: (n,) from 1 to P; rows of 0 have none.
    """
    falling = -np.sort(-rows, axis=1)
    last = np.take_along_axis(falling, np.maximum(k, 1)[:, None] - 1, axis=1)
    above, equal = rows > last, rows == last
    left = k[:, None] - above.sum(axis=1, keepdims=True)
    return above + equal * (left / equal.sum(axis=1, keepdims=True)).clip(0, 1)


def _rows(relevance: NDArray[Any]) -> Scores:
    return np.asarray(relevance, dtype=np.float64, order="C")


def _scaled(rows: Scores) -> Scores:
    """Rows scaled to maximum magnitude 1, so that no sum overflows, except zeros."""
    largest = np.abs(rows).max(axis=1, keepdims=True)
    return rows / np.where(largest > 0, largest, 1)


def _sizes(relevance: NDArray[Any]) -> Scores:
    """|R|, scaled so that each row's maximum is 1; ones for rows of zeros."""
    size = _scaled(np.abs(_rows(relevance)))
    return np.where(size.any(axis=1, keepdims=True), size, 1)


def _cosine(a: Scores, b: Scores) -> Scores:
    """Cosine of each pair of rows; NaN if one is all zero."""
    norms = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
    unknown = np.full_like(norms, np.nan)
    found: Scores = np.divide((a * b).sum(axis=1), norms, out=unknown, where=norms > 0)
    return found.clip(-1, 1)


def _where_known(found: NDArray[Any], truth: Truth) -> Scores:
    return np.where(np.any(truth, axis=1), found, np.nan)
