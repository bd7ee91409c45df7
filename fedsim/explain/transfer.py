"""Who has learnt from whom, of clients that learn tasks in turn: a table and a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedsim.explain.canvas import new_figure, place, save

SIDE = 0.32  # inches, of a cell


def transfer_table(rows: pd.DataFrame) -> tuple[list[str], list[str], NDArray[np.float64]]:
    """Attention of each task (rows) to each task before it that it was given (columns).

    Args:
        rows: of explainer `transfer`, in explanations.parquet.

    Returns:
        The names of both, «client/task», and (receivers, sources), NaN where nothing was given.
    """
    receivers = sorted({(c, t) for c, t in zip(rows["client"], rows["task"], strict=True)})
    sources = sorted({(c, t) for c, t in zip(rows["from_client"], rows["from_task"], strict=True)})
    table = np.full((len(receivers), len(sources)), np.nan)
    for row in rows.to_dict("records"):
        i = receivers.index((row["client"], row["task"]))
        j = sources.index((row["from_client"], row["from_task"]))
        table[i, j] = row["attention"]
    return ([f"{c}/{t}" for c, t in receivers], [f"{c}/{t}" for c, t in sources], table)


def draw_transfer(rows: pd.DataFrame, path: Path) -> None:
    """Draw that table; in each cell stands how many classes both tasks have in common.

    Args:
        rows: as for `transfer_table`, at least one.

    Raises:
        OSError: it cannot be written.
    """
    receivers, sources, table = transfer_table(rows)
    height, width = SIDE * len(receivers), SIDE * len(sources)
    figure = new_figure(width + 2.2, height + 1)
    axes = place(figure, 0.9, 0.6, width, height)
    image = axes.imshow(
        np.ma.masked_invalid(table), aspect="auto", cmap="YlGnBu", vmin=0, interpolation="nearest"
    )
    axes.set_xticks(range(len(sources)), labels=sources, rotation=90, fontsize=7)
    axes.set_yticks(range(len(receivers)), labels=receivers, fontsize=7)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("learnt from (client/task)", fontsize=8)
    axes.set_ylabel("who learns (client/task)", fontsize=8)
    largest = np.nanmax(table)
    for row in rows.to_dict("records"):
        i = receivers.index(f"{row['client']}/{row['task']}")
        j = sources.index(f"{row['from_client']}/{row['from_task']}")
        dark = row["attention"] > 0.6 * largest
        colour, number = "white" if dark else "black", str(row["shared_classes"])
        axes.text(j, i, number, ha="center", va="center", fontsize=7, color=colour)
    bar = place(figure, 0.9 + width + 0.15, 0.6, 0.12, height)
    figure.colorbar(image, cax=bar).set_label("attention, mean |α|", fontsize=8)
    bar.tick_params(labelsize=7)
    figure.text(
        0.02, 0, "numbers: classes in common; white: not given", fontsize=7, ha="left", va="top"
    )
    save(figure, path)
