"""The figures of `Run.plot`, `Grid.plot` and `Search.plot`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from fedsim.config.registry import nearest
from fedsim.data.labels import MOST_NAMED, plot_labels
from fedsim.errors import BadInput
from fedsim.results.display import Draw
from fedsim.results.figures.charts import (
    Array,
    Line,
    draw_bars,
    draw_confusion,
    draw_history,
    draw_lines,
)
from fedsim.results.figures.look import AXES
from fedsim.results.figures.pareto import draw_pair, front
from fedsim.results.run import Run
from fedsim.results.summary import cell_label, of_score, on_record
from fedsim.results.sweeps import Grid, Search


def _column(rounds: pd.DataFrame, metric: str) -> pd.DataFrame:
    if metric not in rounds:
        known = map(str, rounds.select_dtypes("number"))
        raise BadInput(f"plot: no column '{metric}' was recorded{nearest(metric, known)}")
    return rounds.dropna(subset=[metric])


def _label(run: Run, column: str) -> str:
    metric = on_record(run).get(column)
    return column.replace("_", " ") if metric is None else metric.label


def _run_curves(run: Run, ax: Axes, metric: str | None) -> None:
    metric = metric or run.primary_metric.column
    label = _label(run, metric)
    draw_lines(ax, AXES, [Line.of(label, 0, _column(run.rounds, metric), metric)], ylabel=label)


def _run_clients(run: Run, ax: Axes, metric: str | None) -> None:
    column = f"test_{metric or run.primary_metric.column}"
    clients = run.clients
    if column not in clients:
        raise BadInput(
            f"plot: clients.parquet has no '{column}'; it takes evaluate.clients=true and "
            "partition.test_fraction above 0"
        )
    scores = clients.dropna(subset=[column])
    rows = scores[scores["round"] == scores["round"].max()].sort_values(column)
    last = rows[column]
    if run.manifest.get("client_names") and len(rows) <= MOST_NAMED:
        names = [run.client_name(k) for k in rows["client"]]
        ax.set_xticks(range(1, len(rows) + 1), labels=names, rotation=90)
    ax.plot(np.arange(1, len(last) + 1), last, "o", markersize=4)
    ax.axhline(last.mean(), color="0.5", linewidth=1, linestyle="--", label="mean")
    ax.set_xlabel("client, from worst to best" if run.primary_metric.best == "max" else "client")
    ax.set_ylabel(f"{_label(run, column.removeprefix('test_'))} on its own test examples")
    ax.legend(frameon=False)


def _run_labels(run: Run, ax: Axes, metric: str | None) -> None:
    held = run.labels
    if not len(held):
        raise BadInput(f"plot: {run.path}: the run has no labels.parquet")
    names = tuple(held["label"].cat.categories)
    table = held.astype({"label": str}).pivot(index="client", columns="label", values="examples")
    counts = table.reindex(columns=names).fillna(0).to_numpy(dtype=np.int64)
    plot_labels(ax, counts, names, run.label_axis, run.manifest.get("client_names", ()))


def last_confusion(run: Run) -> pd.DataFrame:
    """The confusion matrix of the global model in the last round that has one.

    Returns:
        (C, C) examples by true class (row) and predicted class (column), in the order of the
        classes; empty if there is no such matrix on record.
    """
    rows = run.confusion
    if len(rows):
        rows = rows[rows["client"].isna()]
    if rows.empty:
        return pd.DataFrame()
    rows = rows[rows["round"] == rows["round"].max()]
    found = {*rows["target"], *rows["prediction"]}
    known = list(run.labels["label"].cat.categories) if len(run.labels) else []
    classes = known if found <= set(known) else sorted(found)
    matrix = rows.pivot_table("count", "target", "prediction", aggfunc="sum")
    whole: pd.DataFrame = matrix.reindex(index=classes, columns=classes).fillna(0).astype(np.int64)
    return whole


def _run_confusion(run: Run, ax: Axes, metric: str | None) -> None:
    matrix = last_confusion(run)
    if matrix.empty:
        raise BadInput(
            f"plot: {run.path}: no confusion matrix of the global model is on record; it takes "
            "evaluate.metrics=[confusion]"
        )
    draw_confusion(ax, AXES, matrix.to_numpy(), matrix.columns.tolist())


def _grid_metric(grid: Grid, metric: str | None) -> tuple[str, str]:
    done = [run for run in grid.runs if run.status == "finished"]
    if not done:
        raise BadInput(f"plot: {grid.path}: no run has finished")
    metric = metric or done[0].primary_metric.column
    return metric, _label(done[0], metric)


def _grid_curves(grid: Grid, ax: Axes, metric: str | None) -> None:
    metric, label = _grid_metric(grid, metric)
    lines = cell_lines(grid, metric, _column(grid.rounds, metric))
    draw_lines(ax, AXES, list(lines.values()), ylabel=label)


def cell_lines(grid: Grid, metric: str, rounds: pd.DataFrame) -> dict[tuple[Any, ...], Line]:
    """The line of each cell of a grid, by its values of the axes; its style is its number."""
    numbers = {cell: k for k, cell in enumerate(grid.summary[grid.axes].itertuples(False, None))}
    return {
        cell: Line.of(
            cell_label(dict(zip(grid.axes, cell, strict=True))), numbers[cell], rows, metric
        )
        for cell, rows in rounds.groupby(grid.axes, sort=False)
    }


def _grid_summary(grid: Grid, ax: Axes, metric: str | None) -> None:
    column, label = _grid_metric(grid, metric)
    rows = grid.summary
    if metric is not None and f"{metric}/last_mean" in rows:
        rows = of_score(rows, grid.axes, column)
    elif column != _grid_metric(grid, None)[0]:
        columns = map(str, rows)
        known = (c.removesuffix("/last_mean") for c in columns if c.endswith("/last_mean"))
        raise BadInput(f"plot: the summary has no score '{metric}'{nearest(metric, known)}")
    names = [cell_label({axis: row[axis] for axis in grid.axes}) for _, row in rows.iterrows()]
    places = np.arange(len(rows))
    ax.errorbar(rows["last_mean"], places, xerr=rows["last_std"].fillna(0), fmt="o", capsize=3)
    ax.set_yticks(places, names)
    ax.invert_yaxis()
    ax.set_xlabel(f"{label}, last round: mean ± standard deviation over seeds")


def _ended_trials(search: Search) -> pd.DataFrame:
    trials, objectives = search.trials, list(search.objectives)
    known = trials.columns.isin(objectives).sum() == len(objectives)
    if not known or not len(ended := trials.dropna(subset=objectives)):
        raise BadInput(f"plot: {search.path}: no trial has ended")
    return ended


def _search_history(search: Search, ax: Axes, metric: str | None) -> None:
    objective = metric or next(iter(search.objectives))
    if objective not in search.objectives:
        hint = nearest(objective, search.objectives)
        raise BadInput(f"plot: '{objective}' is not an objective of the search{hint}")
    draw_history(ax, AXES, *history(_ended_trials(search), objective, search.objectives),
                 ylabel=objective.replace("_", " "))  # fmt: skip


def history(
    trials: pd.DataFrame, objective: str, objectives: Mapping[str, str]
) -> tuple[Array, Array, Array]:
    """The numbers of trials, their values of an objective, and the best finished one so far."""
    trials = trials.sort_values("trial")
    values = trials[objective].to_numpy(dtype=float)
    finished = np.where(trials["status"] == "finished", values, np.nan)
    best = (np.fmax if objectives[objective] == "max" else np.fmin).accumulate(finished)
    return trials["trial"].to_numpy(dtype=float), values, best


def _search_pareto(search: Search, ax: Axes, metric: str | None) -> None:
    names = list(search.objectives)
    if len(names) < 2:
        raise BadInput(
            "plot: 'pareto' takes two objectives, and the search has one; see 'history'"
        )
    trials = _ended_trials(search)
    trials = trials[trials["status"] == "finished"]
    if not len(trials):
        raise BadInput(f"plot: {search.path}: no trial has finished")
    optimal = front(trials, search.objectives)
    draw_pair(ax, trials, optimal, search.objectives, (names[0], names[1]))
    ax.legend(frameon=False)


def _search_importance(search: Search, ax: Axes, metric: str | None) -> None:
    _ended_trials(search)
    if "hyper-parameter" not in search.importance:
        raise BadInput(f"plot: {search.path}: too few trials have finished")
    table = search.importance
    shares = {name: (k, table[name].to_numpy(float)) for k, name in enumerate(search.objectives)}
    names = table["hyper-parameter"].astype(str).tolist()
    longest = max(table[list(shares)].max(), default=1)
    draw_bars(ax, AXES, names, shares, xlabel="share of the variance (fANOVA)", longest=longest)


FIGURES: dict[str, dict[str, Draw]] = {
    "run": {
        "curves": _run_curves,
        "clients": _run_clients,
        "labels": _run_labels,
        "confusion": _run_confusion,
    },
    "grid": {"curves": _grid_curves, "summary": _grid_summary},
    "search": {
        "history": _search_history,
        "pareto": _search_pareto,
        "importance": _search_importance,
    },
}
