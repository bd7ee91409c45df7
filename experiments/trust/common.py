"""What the questions have in common: where results lie, tests, tables, pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from tables import spread, table

from fedsim.results import significance

HERE = Path(__file__).parent
RESULTS = HERE / "results"
BAND = ("mean", "min", "max")
EXPLAINER = "integrated_gradients"  # of most grids


def paired(results: pd.DataFrame, axis: str, column: str, baseline: str) -> str:
    """p that a column differs from the baseline's, two-tailed, paired by seed."""
    rows = []
    plain = results[results["method"] == baseline].set_index([axis, "seed"])[column]
    for method, own in results.groupby("method", sort=False):
        if method in (baseline, "centralised"):
            continue
        ps = []
        for value, part in own.groupby(axis, sort=False):
            ours = part.set_index("seed")[column]
            ps.append(f"{significance.paired(ours, plain[value]).p():.3f}")
        rows.append([str(method), *ps])
    values = list(dict.fromkeys(results[axis]))
    return table([f"p, {column}, against {baseline}", *map(str, values)], rows)


def crossed(results: pd.DataFrame, axis: str, column: str, label: str) -> str:
    """Mean ± standard deviation of a column, methods down and an axis across."""
    values = list(dict.fromkeys(results[axis]))
    rows = []
    for method, own in results.groupby("method", sort=False):
        cells = [spread(own.loc[own[axis] == value, column]) for value in values]
        rows.append([str(method), *cells])
    return table([label, *(str(value) for value in values)], rows)


def lines(
    results: pd.DataFrame,
    axis: str,
    panels: Sequence[tuple[str, str, dict[str, pd.Series]]],
    path: Path,
    reverse: bool = False,
) -> None:
    """A panel for each (title, label of the vertical axis, values of each line).

    Line: mean over seeds; band: from the lowest to the highest.
    """
    values = sorted(set(results[axis]), reverse=reverse)
    figure = Figure(figsize=(4.6 * len(panels), 3.6), layout="constrained")
    places = range(len(values))
    for k, (title, label, named) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), k + 1)
        for name, column in named.items():
            of = column.groupby(results.loc[column.index, axis])
            mean, low, high = (getattr(of, how)().reindex(values) for how in BAND)
            (line,) = axes.plot(places, mean, marker="o", markersize=3, label=name)
            axes.fill_between(places, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        axes.set_xticks(places, [f"{value:g}" for value in values])
        axes.set_xlabel("α of the label skew" if axis == "partition.alpha" else "share of clients")
        axes.set_ylabel(label)
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9")
        axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=150)


def by_method(results: pd.DataFrame, column: str) -> dict[str, pd.Series]:
    of = results[results["method"] != "centralised"].groupby("method", sort=False)
    return {str(method): own[column] for method, own in of}
