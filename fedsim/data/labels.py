"""Who holds which labels: the first thing to look at in a partition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsim.data.dataset import Dataset
from fedsim.data.partition import Holdings


def label_table(dataset: Dataset, holdings: Holdings) -> NDArray[np.int64]:
    """(K, classes) how many examples of each class each client holds, of any kind."""
    num_classes = len(dataset.classes)
    table = np.zeros((len(holdings), num_classes), dtype=np.int64)
    for part in (holdings.train, holdings.unlabelled, holdings.test):
        clients = np.repeat(np.arange(len(part)), part.lengths)
        cells = clients * num_classes + dataset.y[part.values]
        table += np.bincount(cells, minlength=table.size).reshape(table.shape)
    return table


def draw_labels(table: NDArray[np.int64], classes: tuple[str, ...], path: Path) -> None:
    """Draw a label table: a column for each client, its size above, its classes below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 3))
    clients = np.arange(len(table))
    above.bar(clients, table.sum(axis=1), width=0.9, color="0.45")
    above.set_ylabel("examples")
    above.set_title(f"{len(table)} clients, {table.sum():,} examples")
    shown = np.ma.masked_equal(table.T, 0)
    image = below.imshow(shown, aspect="auto", interpolation="nearest", cmap="YlGnBu")
    if len(classes) <= 30:
        below.set_yticks(range(len(classes)), labels=classes)
    below.set_ylabel("class")
    below.set_xlabel("client")
    below.xaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=below, label="examples (white: none)")
    figure.savefig(path, dpi=120)
