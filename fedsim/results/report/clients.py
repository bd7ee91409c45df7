"""Per-client results of a report."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from fedsim.objectives import Metric
from fedsim.results.figures.charts import draw_clients
from fedsim.results.figures.look import Drawing
from fedsim.results.report.comparison import DASH, ComparedCell, ReportData
from fedsim.results.report.curves import Plot, in_sight
from fedsim.results.report.page import (
    Column,
    Datum,
    PageTable,
    capital,
    cell_columns,
    datum,
    mark_best,
    number,
)
from fedsim.results.summary import digits, sign

_ROWS = 10  # cells in one figure of clients
_TRAINING_LOSS = Metric("loss", "training loss", best="min")


class ClientScores:
    """A score of each client that all runs have on record: by cell, a row for each client."""

    def __init__(self, compared: ReportData) -> None:
        self._compared = compared
        self.metric = _TRAINING_LOSS
        self.by_cell: dict[int, pd.DataFrame] = {}
        tables = [run.clients for cell in compared.cells for _, _, run in cell.runs]
        tables = [table for table in tables if not table.empty]
        tested = [
            replace(metric, column=f"test_{metric.column}", label=f"test {metric.label}")
            for metric in (
                *compared.metrics,
                *(cell.metric for cell in compared.cells if cell.runs),
            )
        ]
        for metric in (*tested, _TRAINING_LOSS):
            column = metric.column
            if tables and all(column in t and np.isfinite(t[column]).any() for t in tables):
                by_cell = {k: _by_client(c, metric) for k, c in enumerate(compared.cells)}
                self.metric = metric
                self.by_cell = {k: rows for k, rows in by_cell.items() if len(rows)}
                break

    @property
    def judged(self) -> str:
        """What clients are judged by, in words; nothing if there is nothing to be had."""
        if not self.by_cell:
            return ""
        when = "in which each took part" if self.metric == _TRAINING_LOSS else "evaluated"
        return f"{self.metric.label} of each client, in the round {when} last"

    def figures(self) -> list[Plot]:
        if not self.by_cell:
            return []
        low_is_bad = self.metric.best == "max"
        values = np.concatenate([rows["value"] for rows in self.by_cell.values()])
        high = float(values.max())
        low, cut = in_sight(self.metric, float(values.min()), high)
        margin = 0.02 * (high - low) or 0.01
        found = []
        for part in np.array_split(list(self.by_cell), math.ceil(len(self.by_cell) / _ROWS)):
            shown = {}
            for k in part:
                cell = self._compared.cells[k]
                rows = self.by_cell[k].sort_values("value", ascending=low_is_bad, kind="stable")
                worst = f"{_named(rows.iloc[0], cell)}, {rows['value'].iloc[0]:.3g}"
                shown[cell.label] = (cell.style, rows["value"].to_numpy(), worst)
            heading = f"Clients by {self.metric.label}"
            ends = "; ".join(f"{name}: worst {worst}" for name, (_, _, worst) in shown.items())
            limits = (low - margin, high + margin)
            xlabel = capital(self.metric.label)
            draw = partial(draw_clients, cells=shown, limits=limits, xlabel=xlabel)
            drawing = Drawing(f"{heading}. {ends}.", 36 + 68 * len(shown), draw)
            found.append(Plot(heading + cut, [("", drawing)]))
        return found

    def table(self) -> PageTable:
        high, s = self.metric.best == "max", sign(self.metric)
        cells = [self._compared.cells[k] for k in self.by_cell]
        rivals = self._compared.layout.rivals(cell.values for cell in cells)
        # The worst first.
        values = [(s * rows["value"]).sort_values(kind="stable") for rows in self.by_cell.values()]
        figures = {
            "worst": [of.iloc[0] for of in values],
            f"{10 if high else 90} % quantile": [of.quantile(0.1) for of in values],
            "median": [of.median() for of in values],
            "mean": [of.mean() for of in values],
        }
        columns = cell_columns(self._compared, cells)
        columns.append((Column("clients", True), [datum(len(of)) for of in values]))
        for title, found in figures.items():
            data = [number(digits(s * figure), s * figure) for figure in found]
            columns.append((Column(title, True, high), mark_best(data, high, rivals)))
        columns.append(
            (Column("std", True), [number(digits(of.std()), of.std()) for of in values])
        )
        rows = list(self.by_cell.values())
        worst = [
            datum(_named(of_cell.loc[of.index[0]], cell))
            for of_cell, of, cell in zip(rows, values, cells, strict=True)
        ]
        columns.append((Column("worst client"), worst))
        known = [of["samples"].dropna().astype(int) for of in rows]
        spans = [
            Datum(f"{n.min()} to {n.max()}", int(n.min())) if len(n) else datum(DASH)
            for n in known
        ]
        columns.append((Column("examples each", True), spans))
        return PageTable.of(f"{capital(self.metric.label)} over clients", columns)


def _by_client(cell: ComparedCell, metric: Metric) -> pd.DataFrame:
    """A row for each seed and client: its `value` in the round that counts, and its `samples`."""
    parts = []
    for _, seed, run in cell.runs:
        if run.clients.empty:
            continue
        rows = run.clients.assign(seed=seed).sort_values(["round", "client"], kind="stable")
        known = rows[np.isfinite(rows[metric.column])].assign(value=rows[metric.column])
        if metric != _TRAINING_LOSS:  # all were evaluated in the same round
            known = known[known["round"] == known["round"].max()]
        known = known.groupby("client", as_index=False).last()[["seed", "client", "value"]]
        samples = rows["samples"] if "samples" in rows else pd.Series(np.nan, rows.index)
        last = samples.groupby(rows["client"]).last()
        parts.append(known.assign(samples=known["client"].map(last)))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _named(row: pd.Series[Any], cell: ComparedCell) -> str:
    of = f" (seed {row['seed']:.0f})" if len(cell.entries) > 1 else ""
    run = next((e.run for e in cell.entries if e.run is not None and e.seed == row["seed"]), None)
    client = int(row["client"])
    return f"{f'client {client}' if run is None else run.client_name(client)}{of}"
