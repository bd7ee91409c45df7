"""Continual learning: accuracy on each task over time, and transfer between clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedsim.errors import ExperimentError
from fedsim.explain import ExplainedData, ExplainedModel, Explainer, Explanation
from fedsim.explain.explainer import explainers
from fedsim.explain.inputs import Inputs
from fedsim.explain.pictures.canvas import (
    class_colours,
    new_figure,
    picture,
    place,
    plain,
    save,
    some,
)
from fedsim.objectives.continual import continual
from fedsim.support.words import MOST_ROWS, client_name, columns, short

if TYPE_CHECKING:
    import pandas as pd

SIDE = 0.32  # inches per cell
MOST_CURVES = 12  # clients whose curves are drawn


def draw_curves(
    tasks: pd.DataFrame, path: Path, title: str = "", names: Sequence[str] = ()
) -> None:
    """Draw accuracy on each task over the rounds, a row for each of the first clients."""
    seen = tasks[tasks["seen"]]
    clients = sorted(seen["client"].unique())[:MOST_CURVES]
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
        axes.set_ylabel(plain(client_name(client, names)), fontsize=8)
        axes.tick_params(labelsize=7, labelbottom=row == len(clients) - 1)
        if row == len(clients) - 1:
            axes.set_xlabel("round", fontsize=8)
    figure.legend(loc="upper left", bbox_to_anchor=((0.8 + width) / (width + 1.6), 1), fontsize=7)
    save(figure, path, title)


def transfer_table(rows: pd.DataFrame) -> tuple[list[str], list[str], NDArray[np.float64]]:
    """Attention of each task (rows) to each earlier task that it received (columns).

    Returns:
        The names of both, "client/task", and (receivers, sources), NaN where nothing was received.
    """
    receivers = sorted(set(zip(rows["client"], rows["task"], strict=True)))
    sources = sorted(set(zip(rows["from_client"], rows["from_task"], strict=True)))
    table = np.full((len(receivers), len(sources)), np.nan)
    for row in rows.to_dict("records"):
        i = receivers.index((row["client"], row["task"]))
        j = sources.index((row["from_client"], row["from_task"]))
        table[i, j] = row["attention"]
    return ([f"{c}/{t}" for c, t in receivers], [f"{c}/{t}" for c, t in sources], table)


def draw_transfer(rows: pd.DataFrame, path: Path, title: str = "") -> None:
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
    axes.set_ylabel("learner (client/task)", fontsize=8)
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
        0.02, 0, "numbers: common classes; white: not received", fontsize=7, ha="left", va="top"
    )
    save(figure, path, title)


@explainers.register
class TasksExplainer(Explainer):
    """Continual learning: accuracy on each task over time, and transfer between clients."""

    niche: ClassVar[bool] = True
    name: str = "tasks"
    takes_inputs: ClassVar[bool] = False
    whole_run: ClassVar[bool] = True

    def check(self, model: ExplainedModel, data: ExplainedData) -> None:
        if "tasks" not in data.tables or data.tables["tasks"].empty:
            raise ExperimentError(f"{model.title}: its clients do not learn a sequence of tasks")

    def explain(
        self, model: ExplainedModel, data: ExplainedData, inputs: Inputs, rng: Generator
    ) -> Explanation:
        given = data.tables["explanations"]
        if not given.empty:
            given = given[given["explainer"] == "transfer"]
        return Tasks(model.title, data.tables["tasks"], given, model.record, data.clients)


@dataclass(frozen=True)
class Tasks(Explanation):
    """A sequence of tasks that clients have learnt, and rows of explainer `transfer`."""

    title: str
    tasks: pd.DataFrame
    given: pd.DataFrame
    record: Path | None
    clients: Sequence[str] = ()

    def text(self) -> str:
        measures = continual(self.tasks)
        lines = [
            f"{what}: {value:.4f}"
            for what, value in (
                ("accuracy over all tasks of all clients", measures.tta),
                ("after a task's first round", measures.first_round),
                ("forgotten since the best round, of tasks before the last", measures.forgetting),
                ("backward transfer", measures.backward),
                ("forward transfer", measures.forward),
            )
            if not math.isnan(value)
        ]
        if self.given.empty:
            return "\n".join(lines)
        rows = [
            (
                *(f"{f['client']}/{f['task']}", f"{f['from_client']}/{f['from_task']}"),
                *(str(f["shared_classes"]), f"{f['score']:.4f}", f"{f['attention']:.4f}"),
            )
            for f in self.given.head(MOST_ROWS).to_dict("records")
        ]
        shared = self.given.groupby(["client", "task"])["of_best_choice"].first().mean()
        lines += [
            f"classes in common with received tasks, relative to the best choice: {shared:.1%}",
            "\nwho learns from whom (client/task):",
            columns(("learns", "from", "classes in common", "score", "attention"), rows),
        ]
        if len(self.given) > MOST_ROWS:
            where = f", in {short(self.record)}" if self.record else ""
            lines.append(f"… and {len(self.given) - MOST_ROWS} more{where}")
        return "\n".join(lines)

    def rows(self) -> list[dict[str, float | int | str | None]]:
        last = self.tasks[self.tasks["round"] == self.tasks["round"].max()]
        found = last[["client", "task", "accuracy"]].to_dict("records")
        return [{str(name): value for name, value in row.items()} for row in found]

    def save(self, folder: Path) -> list[Path]:
        paths = [picture(folder, "tasks")]
        clients = self.tasks["client"].nunique()
        title = f"accuracy on tasks{some(clients, 'clients', MOST_CURVES)}, {self.title}"
        draw_curves(self.tasks, paths[0], title, self.clients)
        if not self.given.empty:
            paths.append(picture(folder, "transfer"))
            draw_transfer(self.given, paths[1], f"who learns from whom, {self.title}")
        return paths
