"""What each client contributes to the score of a run, as far as it is known; see `Run`."""

from __future__ import annotations

from functools import partial

import pandas as pd

from fedsim.results.figures.charts import bars_height, draw_contributions
from fedsim.results.figures.look import Drawing
from fedsim.results.records import WITHOUT_UNIT
from fedsim.results.report.comparison import ReportData, label
from fedsim.results.report.curves import Plot
from fedsim.results.run import Run

_RUNS = 6  # whose contributions are drawn
_CLIENTS = 30  # of a run that are drawn: those that add and take most
_NAMES = {
    "shapley": "Shapley",
    "permutations": "Shapley, sampled",
    "leave_one_out": "leave-one-out",
    "multi_rounds": "estimate by round",
    "gtg_shapley": "GTG-Shapley",
}


def contributions(compared: ReportData) -> list[Plot]:
    """A figure for each score, with a panel for each run."""
    panels: dict[str, list[tuple[str, Drawing]]] = {}
    runs = [entry for entry in compared.entries if entry.run is not None]
    found = [(entry, entry.run, entry.run.contributions) for entry in runs if entry.run]
    shown = [each for each in found if not each[-1].empty][:_RUNS]
    for entry, run, known in shown:
        for score, rows in known[~known["how"].isin(WITHOUT_UNIT)].groupby("score"):
            whose = f"{label(entry.cell, compared.labels)}, seed {entry.seed}"
            panel = whose if len(runs) > 1 else ""
            panels.setdefault(str(score), []).append((panel, _drawing(run, str(score), rows)))
    return [
        Plot(f"What each client contributes to {score}", drawn) for score, drawn in panels.items()
    ]


def _drawing(run: Run, score: str, rows: pd.DataFrame) -> Drawing:
    table = rows.pivot(index="client", columns="how", values="value")
    ways = [how for how in (*_NAMES, *table.columns) if how in table.columns]
    table = table[list(dict.fromkeys(ways))]
    order = table.iloc[:, 0].abs().sort_values(ascending=False, kind="stable").index[:_CLIENTS]
    table = table.loc[table.iloc[:, 0][order].sort_values(ascending=False, kind="stable").index]
    errors = pd.DataFrame(index=table.index, columns=table.columns, dtype=float)
    if "standard_error" in rows:
        errors = rows.pivot(index="client", columns="how", values="standard_error")
    held = run.labels.groupby("client")["examples"].sum().to_dict() if len(run.labels) else {}
    names = [
        f"{run.client_name(k)}{f', {held[k]:,} examples' if k in held else ''}"
        for k in table.index
    ]
    series = {
        _NAMES.get(how, how): (table[how].to_numpy(), 2 * errors.loc[table.index, how].to_numpy())
        for how in table.columns
    }
    draw = partial(draw_contributions, names=names, series=series, xlabel=f"part of {score}")
    alt = "; ".join(
        f"{name}: {value:+.4f}" for name, value in zip(names, table.iloc[:, 0], strict=True)
    )
    height = bars_height(len(names), len(series))
    return Drawing(f"What each client contributes to {score}. {alt}.", height, draw)
