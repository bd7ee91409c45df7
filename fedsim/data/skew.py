"""How different clients' data are, in the numbers that papers state.

Of labels: the distance of each client's distribution, (K, C) shares p_k, from that of all clients'
examples, (C,) shares p. Of a table's features: how far a client's mean is from the others', and
which cells were blank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedsim.data.dataset import Dataset
from fedsim.data.encoding import BLANK as BLANK_CELL
from fedsim.data.labels import label_table
from fedsim.data.splits import ClientSplits
from fedsim.data.stored import StoredArray

Floats = NDArray[np.float64]

BLANK = "features: share of blank cells"  # the name of a measure


class Skew(NamedTuple):
    """One measure, of all clients."""

    name: str  # what is measured, with its unit or range
    values: Floats  # (K,) by client, or (K, F) by feature; NaN where there is nothing to compare
    features: tuple[str, ...] = ()  # F names; empty if it is not about features


def hellinger(clients: Floats, all_clients: Floats) -> Floats:
    """(K,) the Hellinger distance √(½ Σ_c (√p_kc − √p_c)²), from 0 to 1."""
    return np.sqrt(((np.sqrt(clients) - np.sqrt(all_clients)) ** 2).sum(axis=1) / 2)


def jensen_shannon(clients: Floats, all_clients: Floats) -> Floats:
    """(K,) the Jensen-Shannon distance, from 0 to 1: the square root of the divergence in bits."""
    middle = (clients + all_clients) / 2

    def divergence(shares: Floats) -> Floats:
        ratio = np.divide(shares, middle, out=np.ones_like(middle), where=shares > 0)
        return (shares * np.log2(ratio)).sum(axis=1)

    both = divergence(clients) + divergence(np.broadcast_to(all_clients, clients.shape))
    return np.sqrt(np.maximum(both, 0) / 2)


def label_emd(clients: Floats, all_clients: Floats) -> Floats:
    """(K,) the earth mover's distance of labels, Σ_c |p_kc − p_c|, from 0 to 2.

    Source: Zhao et al., Federated Learning with Non-IID Data, arXiv:1806.00582, 2018, section 3.
    """
    return np.abs(clients - all_clients).sum(axis=1)


def wasserstein(values: Floats, clients: NDArray[np.int64], count: int) -> Floats:
    """(K,) the Wasserstein-1 distance of each client's numbers from those of all, in their unit.

    It is ∫₀¹ |Q_k(u) − Q(u)| du of the quantile functions, of values (n,) of clients (n,). NaN for
    a client without numbers.
    """
    order = np.lexsort((values, clients))
    values, clients = values[order], clients[order]
    whole = np.sort(values)
    share = np.arange(len(whole) + 1) / len(whole)
    integral = np.concatenate([[0.0], np.cumsum(whole)]) / len(whole)  # of Q, from 0 to `share`
    sizes = np.bincount(clients, minlength=count)
    rank = np.arange(len(values)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    # Q_k is values[i] from start[i] to end[i], and Q passes it at `cross`.
    start, end = rank / sizes[clients], (rank + 1) / sizes[clients]
    cross = np.clip(np.searchsorted(whole, values) / len(whole), start, end)
    at_start, at_cross, at_end = (np.interp(u, share, integral) for u in (start, cross, end))
    below = values * (cross - start) - (at_cross - at_start)
    above = (at_end - at_cross) - values * (end - cross)
    distance = np.bincount(clients, below + above, minlength=count)
    return np.where(sizes > 0, distance, np.nan)


def mean_difference(values: Floats, clients: NDArray[np.int64], count: int) -> Floats:
    """(K,) the standardised mean difference of each client's numbers from the other clients'.

    |m_k − m| / √((s_k² + s²)/2), of means m and variances s² of the client's numbers and of all
    others; 0 where the means are the same, infinite where they differ and nothing varies. NaN
    where a client, or all others, have no numbers. Values are (n,), NaN for none, of clients (n,).

    Source: Austin, Balance diagnostics for comparing the distribution of baseline covariates,
    Statistics in Medicine 28 (2009), section 3.1.
    """
    there = ~np.isnan(values)
    values, clients = values[there], clients[there]
    rounding = 1e-12 * np.abs(values).max(initial=0)
    values = values - (values.mean() if len(values) else 0)  # so that squares lose little
    powers = np.stack([np.bincount(clients, values**e, minlength=count) for e in range(3)])
    others = powers.sum(axis=1, keepdims=True) - powers
    with np.errstate(divide="ignore", invalid="ignore"):
        (own_mean, own_variance), (mean, variance) = (
            (total / n, squares / n - (total / n) ** 2) for n, total, squares in (powers, others)
        )
        spread = np.sqrt(np.maximum(own_variance + variance, 0) / 2)
        difference = np.abs(own_mean - mean)
        # What rounding leaves of equal numbers is nothing; of squares it leaves more.
        difference = np.where(difference <= rounding, 0, difference)
        found = difference / np.where(spread <= 1e-7 * np.abs(values).max(initial=0), 0, spread)
    return np.where(difference == 0, 0, found)


def blank_shares(
    blanks: Mapping[str, NDArray[np.bool_]], rows: NDArray[np.int64], clients: NDArray[np.int64],
    count: int,
) -> Floats:  # fmt: skip
    """(K, F) the share of a client's cells of each feature that are blank; NaN for no examples.

    `blanks` are (N,) of all examples, by feature; `rows` (n,) those that `clients` (n,) hold.
    """
    sizes = np.bincount(clients, minlength=count)[:, np.newaxis]
    held = [np.bincount(clients, blank[rows], minlength=count) for blank in blanks.values()]
    found = np.array(held).reshape(len(held), count).T
    return np.divide(found, sizes, out=np.full(found.shape, np.nan), where=sizes > 0)


def held_by(splits: ClientSplits) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(n,) all examples that clients hold, and (n,) the client of each."""
    parts = (splits.train, splits.unlabelled, splits.test)
    rows = np.concatenate([part.values for part in parts])
    clients = np.concatenate([np.repeat(np.arange(len(part)), part.lengths) for part in parts])
    return rows, clients


def label_skew(dataset: Dataset, splits: ClientSplits) -> Iterator[Skew]:
    """The measures of labels: classes, or one number to predict, in ten parts of its range.

    Nothing for several targets, whose joint distribution these measures do not describe.
    """
    if dataset.y.ndim > 1:
        return
    table = label_table(dataset, splits).astype(np.float64)
    sizes = table.sum(axis=1, keepdims=True)
    shares = np.divide(table, sizes, out=np.full(table.shape, np.nan), where=sizes > 0)
    whole = table.sum(axis=0) / max(1.0, table.sum())
    yield Skew("labels: Hellinger distance (0 to 1)", hellinger(shares, whole))
    yield Skew("labels: Jensen-Shannon distance (0 to 1)", jensen_shannon(shares, whole))
    if dataset.classes:
        yield Skew("labels: earth mover's distance (0 to 2)", label_emd(shares, whole))
        return
    rows, clients = held_by(splits)
    targets = dataset.target_scaling.undo(dataset.y).astype(np.float64)
    unit = f"in units of {dataset.target}" if dataset.target else "in the target's unit"
    distance = wasserstein(targets[rows], clients, len(splits))
    yield Skew(f"target: earth mover's distance ({unit})", distance)


def feature_skew(dataset: Dataset, splits: ClientSplits) -> Iterator[Skew]:
    """The measures of features of a table: differences of means, and shares of blank cells.

    Nothing for images, texts, and features that stay in their files. The data are not fitted yet,
    so that blank cells are known; these do not count in means.
    """
    count = len(splits)
    if dataset.x.ndim != 2 or dataset.words or isinstance(dataset.x, StoredArray):
        return
    rows, clients = held_by(splits)
    blanks, marks = dataset.blanks, f"={BLANK_CELL}"
    entries = {w: name for w, name in enumerate(dataset.entry_names) if not name.endswith(marks)}
    differences, names = np.empty((count, len(entries))), tuple(entries.values())
    for f, w in enumerate(entries):
        values = dataset.x[rows, w].astype(np.float64)
        differences[:, f] = mean_difference(values, clients, count)
    if count > 1:
        yield Skew("features: standardised mean difference", differences, names)
    if blanks:
        shares = blank_shares(blanks, rows, clients, count)
        yield Skew(BLANK, shares, tuple(blanks))


def missing_features(shares: Skew) -> dict[tuple[int, ...], list[str]]:
    """Features that are blank in all examples of some clients, by these; of shares of blanks."""
    found: dict[tuple[int, ...], list[str]] = {}
    for name, of_clients in zip(shares.features, shares.values.T, strict=True):
        if lacking := tuple(np.flatnonzero(of_clients == 1).tolist()):
            found.setdefault(lacking, []).append(name)
    return found
