"""Tasks that clients learn in turn: how accuracy on each develops, and who learns from whom."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedsim.explain.canvas import class_colours, new_figure, place, save

SIDE = 0.32  # inches, of a cell
MOST_DRAWN = 12  # clients whose curves are drawn


def draw_curves(tasks: pd.DataFrame, path: Path) -> None:
    """Draw accuracy on each task over the rounds, a row for each of the first clients.

    Args:
        tasks: of a run, at least one row.

    Raises:
        OSError: it cannot be written.
    """
    seen = tasks[tasks["seen"]]
    clients = sorted(seen["client"].unique())[:MOST_DRAWN]
    T = int(seen["task"].max()) + 1
    colours = class_colours(T)
    begins = seen.groupby("task")["round"].min()
    width, height, gap = 5.0, 1.1, 0.12
    figure = new_figure(width + 1.6, len(clients) * (height + gap) + 0.5)
    for row, client in enumerate(clients):
        axes = place(figure, 0.7, row * (height + gap), width, height)
        own = seen[seen["client"] == client]
        for task, curve in own.groupby("task"):
            label = f"task {task}" if row == 0 else None
            colour = colours[int(task)]
            (line,) = axes.plot(curve["round"], curve["accuracy"], ".-", color=colour, label=label)
            line.set(linewidth=1.2, markersize=3)
        for start in begins.iloc[1:]:
            axes.axvline(start - 0.5, color="0.8", linewidth=0.7, zorder=0)
        axes.set_xlim(seen["round"].min() - 0.5, seen["round"].max() + 0.5)
        axes.set_ylim(0, 1.02)
        axes.set_ylabel(f"client {client}", fontsize=8)
        axes.tick_params(labelsize=7, labelbottom=row == len(clients) - 1)
        if row == len(clients) - 1:
            axes.set_xlabel("round", fontsize=8)
    figure.legend(loc="upper left", bbox_to_anchor=((0.8 + width) / (width + 1.6), 1), fontsize=7)
    save(figure, path)


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


def draw_tasks(tasks: pd.DataFrame, given: pd.DataFrame, folder: Path) -> list[Path]:
    """Draw the curves into a folder, and who learns from whom, if anyone does; their paths.

    Args:
        tasks: of a run, at least one row.
        given: of explainer `transfer`.

    Raises:
        OSError: they cannot be written.
    """
    folder.mkdir(exist_ok=True)
    paths = [folder / "tasks.png"]
    draw_curves(tasks, paths[0])
    if not given.empty:
        paths.append(folder / "transfer.png")
        draw_transfer(given, paths[1])
    return paths
