"""The named figures of runs, grids and searches, drawn onto matplotlib axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from fedsim.config.arguments import checked
from fedsim.config.registry import nearest
from fedsim.data.labels import MOST_NAMED, plot_labels
from fedsim.errors import BadInput
from fedsim.results.confusion import last_confusion, plot_confusion
from fedsim.results.pareto import draw_pair, front
from fedsim.results.summary import cell_label, of_score, on_record

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from fedsim.results.run import Run
    from fedsim.results.sweeps import Grid, Search

# Draws what it is of onto axes; by a column of its rounds, where it is about one.
Figure = Callable[[Any, "Axes", str | None], None]


@checked
def plot(
    figures: Mapping[str, Figure], of: Any, name: str, ax: Axes | None, metric: str | None
) -> Axes:
    """Draw a figure by its name.

    Raises:
        BadInput: there is no such figure, or nothing to be shown in it.
    """
    if name not in figures:
        raise BadInput(f"plot: there is no figure '{name}'{nearest(name, figures)}")
    import matplotlib as mpl
    from matplotlib import pyplot as plt
    from matplotlib.axes import Axes

    own = None
    if not isinstance(ax, Axes | None):
        raise TypeError(f"plot: ax must be matplotlib's Axes, not {ax!r:.80}")
    if ax is None:
        own, ax = plt.subplots(layout="constrained")
    try:
        with mpl.rc_context({"text.parse_math": False}):  # a $ in a name is a dollar
            figures[name](of, ax, metric)
    except BadInput:
        if own is not None:
            plt.close(own)
        raise
    return ax


def _no_metric(figure: str, metric: str | None) -> None:
    """Reject a metric for a figure that shows none.

    Raises:
        BadInput: one is given.
    """
    if metric is not None:
        raise BadInput(f"plot: '{figure}' shows no metric; leave out metric={metric}")


def _column(rounds: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rounds in which a column has a number.

    Raises:
        BadInput: there are none.
    """
    if metric not in rounds:
        known = map(str, rounds.select_dtypes("number"))
        raise BadInput(f"plot: no column '{metric}' was recorded{nearest(metric, known)}")
    return rounds.dropna(subset=[metric])


def _label(run: Run, column: str) -> str:
    """A column of the rounds, as a person calls it."""
    metric = on_record(run).get(column)
    return column.replace("_", " ") if metric is None else metric.label


def _by_round(ax: Axes, label: str) -> None:
    ax.set_xlabel("round")
    ax.set_ylabel(label)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _run_curves(run: Run, ax: Axes, metric: str | None) -> None:
    metric = metric or run.primary_metric.column
    shown = _column(run.rounds, metric)
    ax.plot(shown["round"], shown[metric])
    _by_round(ax, _label(run, metric))


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
    _no_metric("labels", metric)
    held = run.labels
    if not len(held):
        raise BadInput(f"plot: {run.path}: the run has no labels.parquet")
    names = tuple(held["label"].cat.categories)
    table = held.astype({"label": str}).pivot(index="client", columns="label", values="examples")
    counts = table.reindex(columns=names).fillna(0).to_numpy(dtype=np.int64)
    plot_labels(ax, counts, names, run.label_axis, run.manifest.get("client_names", ()))


def _run_confusion(run: Run, ax: Axes, metric: str | None) -> None:
    _no_metric("confusion", metric)
    matrix = last_confusion(run)
    if matrix.empty:
        raise BadInput(
            f"plot: {run.path}: no confusion matrix of the global model is on record; it takes "
            "evaluate.metrics=[confusion]"
        )
    plot_confusion(ax, matrix.to_numpy(), matrix.columns.tolist(), colour="C0", size=9)


def _grid_metric(grid: Grid, metric: str | None) -> tuple[str, str]:
    """A column of the rounds, and what a person calls it.

    Raises:
        BadInput: no run has finished.
    """
    done = [run for run in grid.runs if run.status == "finished"]
    if not done:
        raise BadInput(f"plot: {grid.path}: no run has finished")
    metric = metric or done[0].primary_metric.column
    return metric, _label(done[0], metric)


def _grid_curves(grid: Grid, ax: Axes, metric: str | None) -> None:
    metric, label = _grid_metric(grid, metric)
    rounds = _column(grid.rounds, metric)
    for cell, rows in rounds.groupby(grid.axes, sort=False):
        by_round = rows.groupby("round")[metric]
        mean, std = by_round.mean(), by_round.std(ddof=1).fillna(0)
        line = ax.plot(mean.index, mean, label=cell_label(dict(zip(grid.axes, cell, strict=True))))
        ax.fill_between(mean.index, mean - std, mean + std, alpha=0.15, color=line[0].get_color())
    _by_round(ax, label)
    ax.legend(frameon=False)


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
    """Those that have a value of each objective.

    Raises:
        BadInput: there are none.
    """
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
    trials = _ended_trials(search)
    finished = trials[trials["status"] == "finished"]
    best = finished[objective]
    best = best.cummax() if search.objectives[objective] == "max" else best.cummin()
    ax.plot(trials["trial"], trials[objective], "o", markersize=4, label="trials")
    ax.plot(finished["trial"], best, drawstyle="steps-post", label="best so far")
    ax.set_xlabel("trial")
    ax.set_ylabel(objective.replace("_", " "))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(frameon=False)


def _search_pareto(search: Search, ax: Axes, metric: str | None) -> None:
    _no_metric("pareto", metric)
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
    _no_metric("importance", metric)
    _ended_trials(search)
    if "hyper-parameter" not in search.importance:
        raise BadInput(f"plot: {search.path}: too few trials have finished")
    shares = search.importance.set_index("hyper-parameter")[list(search.objectives)]
    shares.plot.barh(ax=ax)
    ax.invert_yaxis()
    ax.set_ylabel("")
    ax.set_xlabel("share of the variance (fANOVA)")


RUN: dict[str, Figure] = {
    "curves": _run_curves,
    "clients": _run_clients,
    "labels": _run_labels,
    "confusion": _run_confusion,
}
GRID: dict[str, Figure] = {"curves": _grid_curves, "summary": _grid_summary}
SEARCH: dict[str, Figure] = {
    "history": _search_history,
    "pareto": _search_pareto,
    "importance": _search_importance,
}
