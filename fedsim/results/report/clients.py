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
    axis_columns,
    capital,
    cell_data,
    datum,
    mark_best,
    number,
)
from fedsim.results.summary import digits, sign

_ROWS = 10  # cells in one figure of clients
_TRAINING_LOSS = Metric("loss", "training loss", best="min")


class ClientScores:
    """A score of each client.

    Attributes:
        metric: what clients are judged by, of which all runs have it on record; its column is that
            of clients.parquet.
        by_cell: a row for each client of each cell, by its number; none if there is nothing.
    """

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
            if tables and all(_has(table, metric.column) for table in tables):
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
        """A dot for each client."""
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
        """The same in figures."""
        low_is_bad = self.metric.best == "max"
        columns = [*axis_columns(self._compared), Column("clients", True),
                   Column("worst", True, low_is_bad),
                   Column("10 % quantile" if low_is_bad else "90 % quantile", True, low_is_bad),
                   Column("median", True, low_is_bad),
                   Column("mean", True, low_is_bad), Column("std", True), Column("worst client"),
                   Column("examples each", True)]  # fmt: skip
        rows = [self._row(self._compared.cells[k], rows) for k, rows in self.by_cell.items()]
        first = len(self._compared.axes) + 1  # of the columns with scores
        cells = [self._compared.cells[k].values for k in self.by_cell]
        mark_best(
            rows,
            dict.fromkeys(range(first, first + 4), low_is_bad),
            self._compared.layout.rivals(cells),
        )
        return PageTable(f"{capital(self.metric.label)} over clients", columns, rows)

    def _row(self, cell: ComparedCell, rows: pd.DataFrame) -> list[Datum]:
        s = sign(self.metric)
        values = (s * rows["value"]).sort_values(kind="stable")  # the worst first
        found = [values.iloc[0], values.quantile(0.1), values.median(), values.mean()]
        worst, samples = rows.loc[values.index[0]], rows["samples"].dropna().astype(int)
        return [
            *cell_data(cell),
            datum(len(rows)),
            *(number(digits(s * f), s * f) for f in found),
            number(digits(values.std()), values.std()),
            datum(_named(worst, cell)),
            Datum(f"{samples.min()} to {samples.max()}", int(samples.min()))
            if len(samples)
            else datum(DASH),
        ]


def _has(clients: pd.DataFrame, column: str) -> bool:
    return column in clients and bool(np.isfinite(clients[column]).any())


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
