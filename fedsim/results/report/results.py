"""What came out, as papers print it."""

from __future__ import annotations

from typing import Any

import pandas as pd

from fedsim.results.report.comparison import DASH, ComparedCell, Comparison
from fedsim.results.report.page import (
    Column,
    Datum,
    PageTable,
    axis_columns,
    cell_data,
    datum,
    distinct,
    mean_std,
    number,
    sent,
)
from fedsim.results.summary import LAST, sign


def results(compared: Comparison) -> PageTable:
    """The summary as papers print it."""
    high = not compared.less_is_better
    columns = [*axis_columns(compared), Column(f"mean of last {LAST}", True, high)]
    if compared.baseline is not None:
        columns.append(Column("p", True))
    columns += [Column(title, True, high) for title in ("last", "best")]
    columns.append(Column("bytes sent", True))
    if compared.target is not None:
        columns.append(Column(f"bytes to {compared.target:g}", True))
    columns.append(Column("seeds", True))
    rows = [_result(compared, row) for _, row in compared.summary.iterrows()]
    return PageTable(f"Test {compared.score} and communication", columns, rows)


def _result(compared: Comparison, row: pd.Series[Any]) -> list[Datum]:
    cell = compared.cell(row)
    mixed = len(compared.primary) > 1  # then none is the best, and each says what it is
    note = cell.metric.label if mixed else ""
    scores = {}
    for figure in ("last5", "last", "best"):
        mean = row[f"{figure}_mean"]
        text = mean_std(mean, row[f"{figure}_std"])
        scores[figure] = number(text, mean, _is_best(compared, f"{figure}_mean", mean), note)
    found = [*cell_data(cell, _unfinished(cell)), scores["last5"]]
    if compared.is_baseline(cell):
        found.append(Datum("baseline", None))
    elif compared.baseline is not None:
        p = row["p_value"]
        stars = "*" * sum(p < level for level in (0.05, 0.01, 0.001))
        found.append(number(f"{p:.3f}" if p >= 0.001 else f"{p:.0e}", p, note=stars))
    found += [scores["last"], scores["best"], sent(row["total_bytes_mean"])]
    if compared.target is not None:
        reached, seeds = int(row["reached"]), int(row["seeds"])
        note = f"({reached}/{seeds})" if reached < seeds else ""
        found.append(sent(row["bytes_to_target_mean"], note))
    found.append(datum(int(row["seeds"])))
    return found


def _is_best(compared: Comparison, column: str, mean: float) -> bool:
    """Whether no other cell has a better mean, if there are others to compare it with."""
    if len(compared.cells) < 2 or len(compared.primary) != 1:
        return False
    means = compared.summary[column]
    return bool(mean == (means.min() if compared.less_is_better else means.max()))


def finding(compared: Comparison) -> str:
    """What came out, in a sentence."""
    table = compared.summary
    if table.empty or table["last5_mean"].isna().all() or len(compared.primary) > 1:
        return ""
    (metric,) = compared.primary
    best = table.iloc[int((sign(metric) * table["last5_mean"]).argmax())]
    score = mean_std(best["last5_mean"], best["last5_std"])
    if len(compared.cells) == 1:
        last = mean_std(best["last_mean"], best["last_std"])
        return (
            f"Test {metric.label}: {last} in the last round, {score} as mean of the last {LAST} "
            "evaluated."
        )
    return (
        f"{'Lowest' if compared.less_is_better else 'Highest'} test {metric.label}, as mean of "
        f"the last {LAST} rounds evaluated: {score}, by {compared.cell(best).label}."
    )


def missing(compared: Comparison) -> PageTable:
    """The runs that are not finished."""
    columns = [*axis_columns(compared), Column("seed", True), Column("status"),
               Column("on disk"), Column("why")]  # fmt: skip
    return PageTable(
        "Runs that are not finished",
        columns,
        [
            [
                *(datum(entry.cell[axis]) for axis in compared.axes),
                datum(entry.seed),
                datum(entry.status),
                Datum(entry.progress, entry.rounds),
                datum(entry.error or DASH),
            ]
            for entry in compared.entries
            if not entry.finished
        ],
    )


def _unfinished(cell: ComparedCell) -> str:
    """How far a cell has come of which no run is finished."""
    shown = [entry for entry in cell.entries if entry.rounds and not entry.finished]
    if not shown:
        return ""
    least, *_, most = sorted([*shown, shown[0]], key=lambda entry: entry.rounds)
    span = "" if least.rounds == most.rounds else f"{least.rounds} to "
    return f"({', '.join(distinct(e.status for e in shown))}, {span}{most.progress})"
