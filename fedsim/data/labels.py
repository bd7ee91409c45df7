"""Tables and figures of the labels that each client holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedsim.data.dataset import Dataset
from fedsim.data.splits import ClientSplits
from fedsim.errors import BadInput
from fedsim.support import atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BINS = 10  # of a regression's targets
FORMATS = ("png", "pdf", "svg", "eps", "jpg", "jpeg", "tif", "tiff", "webp")  # of pictures
MOST_NAMED = 40  # clients


def label_names(dataset: Dataset) -> tuple[str, ...]:
    """The classes; for a regression the bins of its targets, for example "0.0-0.1".

    There are ten of equal width between the minimum and maximum of training targets, in the
    target's units, or one if all targets are the same. A bin includes its lower end; the last also
    includes its upper end.
    """
    return dataset.classes or _bin_names(_edges(dataset.target_scaling.undo(dataset.y)))


def label_table(dataset: Dataset, splits: ClientSplits) -> NDArray[np.int64]:
    """(K, labels) number of each client's examples of each label, of all kinds.

    The labels are those of `label_names`.
    """
    labels, num_labels = dataset.y, len(dataset.classes)
    if not dataset.classes:
        targets = dataset.target_scaling.undo(dataset.y)
        edges = _edges(targets)
        num_labels = len(edges) - 1
        # Only inner edges, because the maximum is an edge, too.
        labels = np.searchsorted(edges[1:-1], targets, side="right")
    table = np.zeros((len(splits), num_labels), dtype=np.int64)
    for part in (splits.train, splits.unlabelled, splits.test):
        clients = np.repeat(np.arange(len(part)), part.lengths)
        cells = clients * num_labels + labels[part.values]
        table += np.bincount(cells, minlength=table.size).reshape(table.shape)
    return table


def label_rows(dataset: Dataset, splits: ClientSplits) -> pa.Table:
    """The same table with a row for each label that a client holds.

    Columns: `client`, `label` (its name; the dictionary includes labels that nobody holds) and
    `examples`, their number.
    """
    table = label_table(dataset, splits)
    clients, labels = np.nonzero(table)
    names = pa.DictionaryArray.from_arrays(labels.astype(np.int32), list(label_names(dataset)))
    return pa.table({"client": clients, "label": names, "examples": table[clients, labels]})


def _edges(y: NDArray[np.float64]) -> NDArray[np.float64]:
    """(bins + 1,) edges of the bins of targets."""
    edges = np.linspace(y.min(), y.max(), BINS + 1)
    # Targets too close for distinct edges are one bin, too.
    return edges if (np.diff(edges) > 0).all() else np.array([y.min(), y.max()])


def _bin_names(edges: NDArray[np.float64]) -> tuple[str, ...]:
    """Names of the bins, with the fewest digits that are accurate to a 20th of a bin."""
    low, *_, high = ends = [edge + 0.0 for edge in edges.tolist()]  # + 0.0 turns -0 into 0
    if len(ends) == 2:
        return (f"{low:g}" if low == high else f"{low!r} to {high!r}",)
    width = (high - low) / BINS
    first = -math.floor(math.log10(width))  # digits after the point; below 0, zeros before it
    for digits in (first - 1, first, first + 1):
        rounded = [round(end, digits) + 0.0 for end in ends]
        if all(abs(r - end) <= width / 20 for r, end in zip(rounded, ends, strict=True)):
            break
    largest = max(-low, high)
    if digits <= 6 and largest < 1e7:
        texts = [f"{end:.{max(digits, 0)}f}" for end in rounded]
    else:
        significant = max(math.floor(math.log10(largest)) + digits + 1, 1)
        texts = [f"{end:.{significant}g}" for end in rounded]
    between = " to " if any("-" in text for text in texts) else "-"
    return tuple(f"{start}{between}{end}" for start, end in pairwise(texts))


def draw_labels(
    table: NDArray[np.int64],
    names: tuple[str, ...],
    path: Path,
    axis: str = "class",
    clients: Sequence[str] = (),
) -> None:
    """Draw a label table (K, labels): a column for each client, its size above, its labels below.

    `axis` is the kind of label, `class` or `target`. More than 40 clients are not named.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 3))
    above.bar(np.arange(len(table)), table.sum(axis=1), width=0.9, color="0.45")
    above.set_ylabel("examples")
    above.set_title(f"{len(table)} clients, {table.sum():,} examples")
    plot_labels(below, table, names, axis, clients)
    with atomic.named(path) as aside:
        figure.savefig(aside, format=picture_format(path), dpi=120)


def picture_format(path: Path) -> str:
    """The format of a picture, by the ending of its name."""
    ending = path.suffix[1:].lower()
    if ending not in FORMATS:
        raise BadInput(f"{path}: the name of a picture must end in .{', .'.join(FORMATS)}")
    return ending


def plot_labels(
    axes: Axes,
    table: NDArray[np.int64],
    names: tuple[str, ...],
    axis: str = "class",
    clients: Sequence[str] = (),
) -> None:
    """Draw a label table onto axes, a column for each client; see `draw_labels`."""
    from matplotlib.ticker import MaxNLocator

    shown = np.ma.masked_equal(table.T, 0)
    image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap="YlGnBu")
    if len(names) <= 30:
        axes.set_yticks(range(len(names)), labels=names)
    axes.set_ylabel(axis)
    axes.set_xlabel("client")
    if 0 < len(clients) <= MOST_NAMED:
        axes.set_xticks(range(len(clients)), labels=clients, rotation=90)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.figure.colorbar(image, ax=axes, label="examples (white: none)")
