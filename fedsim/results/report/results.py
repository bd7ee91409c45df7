"""What came out, as papers print it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from fedsim.objectives import Metric
from fedsim.results.report.comparison import DASH, ComparedCell, Comparison, label
from fedsim.results.report.entries import Value
from fedsim.results.report.figures import swatch
from fedsim.results.report.page import (
    Column,
    Datum,
    PageTable,
    axis_columns,
    cell_data,
    datum,
    distinct,
    mark_best,
    number,
    sent,
)
from fedsim.results.summary import LAST, mean_std, sign

_MOST_FOUND = 6  # settings whose best are named one by one


def results(compared: Comparison) -> PageTable:
    """The summary: a row for each cell, the best of those that compete with each other marked."""
    high = not compared.less_is_better
    best = "best by validation" if compared.validated else "best"
    scores = {"last5": f"mean of last {LAST}", "last": "last", "best": best}
    costs = {"rounds_to_target": "rounds to", "bytes_to_target": "bytes to"}
    first, *later = (Column(title, True, high) for title in scores.values())
    columns = [*axis_columns(compared), first]
    if compared.baseline is not None:
        columns += [Column("vs. baseline", True, high), Column("p", True)]
    columns += [*later, Column("bytes sent", True)]
    if compared.target is not None:
        columns += [Column(f"{title} {compared.target:g}", True) for title in costs.values()]
    columns.append(Column("seeds", True))
    rows = [_result(compared, row) for _, row in compared.summary.iterrows()]
    judged = {k: high for k, column in enumerate(columns) if column.title in scores.values()}
    mark_best(rows, judged, _rivals(compared))
    aimed = {
        k: False
        for k, column in enumerate(columns)
        if column.title.startswith(tuple(costs.values()))
    }
    mark_best(rows, aimed, _rivals(compared, reached=True) if aimed else [])
    return PageTable(f"Test {compared.score} and communication", columns, rows)


def _rivals(compared: Comparison, reached: bool = False) -> list[list[int]]:
    """Rows of the summary that compete with each other.

    Args:
        reached: only those of which every seed reached the target.
    """
    if len(compared.primary) != 1:  # then there is nothing to compete in
        return []
    rows = [row for _, row in compared.summary.iterrows()]
    groups = compared.layout.rivals(compared.cell(row).values for row in rows)
    if reached:
        groups = [[k for k in of if rows[k]["reached"] == rows[k]["seeds"]] for of in groups]
    return groups


def _result(compared: Comparison, row: pd.Series[Any]) -> list[Datum]:
    cell = compared.cell(row)
    mixed = len(compared.primary) > 1  # then each says what it is
    note = cell.metric.label if mixed else ""
    first, *later = (_score(row, figure, note) for figure in ("last5", "last", "best"))
    found = [*cell_data(cell, _unfinished(cell)), first]
    if compared.is_baseline(cell):
        found += [Datum("baseline", None), Datum(DASH, None)]
    elif compared.baseline is not None:
        p = row["p_holm"]
        stars = "*" * sum(p < level for level in (0.05, 0.01, 0.001))
        found.append(_score(row, "difference", signed=True))
        found.append(number(f"{p:.3f}" if p >= 0.001 else f"{p:.0e}", p, note=stars))
    found += [*later, sent(row["total_bytes_mean"])]
    if compared.target is not None:
        reached, seeds = int(row["reached"]), int(row["seeds"])
        note = f"({reached}/{seeds})" if reached < seeds else ""
        rounds = row["rounds_to_target_mean"]
        found.append(number(f"{rounds:.3g}", rounds, note=note))
        found.append(sent(row["bytes_to_target_mean"], note))
    found.append(datum(int(row["seeds"])))
    return found


def _score(row: pd.Series[Any], figure: str, note: str = "", signed: bool = False) -> Datum:
    """A figure of the summary."""
    mean = row[f"{figure}_mean"]
    text = mean_std(mean, row[f"{figure}_std"])
    sign = "+" if signed and mean > 0 else ""
    return number((sign + text).replace("-", "−") if signed else text, mean, note=note)


def pivots(compared: Comparison) -> list[PageTable]:
    """The mean of the last rounds as papers have it, such as methods × α.

    There is one for each combination of the values of further axes; none if there is no second
    axis, or if cells are judged by different metrics.
    """
    over = compared.layout.columns
    if over is None or len(compared.primary) != 1:
        return []
    others, table = list(compared.layout.others), compared.summary
    if not others:
        return [_pivot(compared, over, table)]
    return [_pivot(compared, over, part) for _, part in table.groupby(others, sort=False)]


def _pivot(compared: Comparison, over: str, part: pd.DataFrame) -> PageTable:
    """A pivot of rows of the summary that are equal in all further axes."""
    down, called = compared.layout.rows, compared.labels
    high = not compared.less_is_better
    by_row: dict[tuple[Value, ...], dict[Value, Datum]] = {}
    styles: dict[tuple[Value, ...], int | None] = {}
    for _, row in part.iterrows():
        cell = compared.cell(row)
        key = tuple(cell.values[axis] for axis in down)
        by_row.setdefault(key, {})[cell.values[over]] = _score(row, "last5")
        if cell.panel:  # then the row is a line in each of the panels
            styles[key] = cell.style
    across = distinct(value for of_row in by_row.values() for value in of_row)
    if not any(isinstance(value, str) for value in across):
        across.sort()
    rows = []
    for key, of_row in by_row.items():
        first, *later = map(datum, key)
        if key in styles:
            first = replace(first, swatch=swatch(styles[key]))
        scores = (of_row.get(value, Datum(DASH, None)) for value in across)
        rows.append([first, *later, *scores])
    marked = {len(down) + k: high for k in range(len(across))}
    mark_best(rows, marked, [range(len(rows))])
    others = {axis: cell.values[axis] for axis in compared.layout.others}
    words = [f"by {called[down[0]]} and {called[over]}", label(others, called)]
    heads = [c for c in axis_columns(compared) if c.title in [called[axis] for axis in down]]
    return PageTable(
        f"Test {compared.score} {'; '.join(filter(None, words))}",
        [*heads, *(Column(str(value), True, high) for value in across)],
        rows,
        called[over],
        len(across),
    )


def pivot_frame(compared: Comparison) -> pd.DataFrame:
    """The same in full precision: a row for each row of the pivots.

    Columns: the axes but that of the pivot's columns; for each value of this axis the mean,
    `<axis>=<value>`, and the standard deviation over seeds, `<axis>=<value> std`.
    """
    over = compared.layout.columns
    index = [*compared.layout.others, *compared.layout.rows]
    parts = {}
    for value in compared.summary[over].unique():
        scores = compared.summary[compared.summary[over] == value].set_index(index)
        parts[f"{over}={value}"] = scores["last5_mean"]
        parts[f"{over}={value} std"] = scores["last5_std"]
    return pd.DataFrame(parts).reset_index()


def finding(compared: Comparison) -> str:
    """What came out, in a sentence."""
    table = compared.summary
    if table.empty or table["last5_mean"].isna().all() or len(compared.primary) > 1:
        return ""
    (metric,) = compared.primary
    if len(compared.cells) == 1:
        only = table.iloc[0]
        last, mean = (mean_std(only[f"{f}_mean"], only[f"{f}_std"]) for f in ("last", "last5"))
        return (
            f"Test {metric.label}: {last} in the last round, {mean} as mean of the last {LAST} "
            "evaluated."
        )
    extreme = "Lowest" if compared.less_is_better else "Highest"
    found = f"{extreme} test {metric.label}, as mean of the last {LAST} rounds evaluated: "
    groups = _rivals(compared)
    if len(groups) == 1:
        best = table.iloc[_best_of(groups[0], table, metric)]
        score = mean_std(best["last5_mean"], best["last5_std"])
        return f"{found}{score}, by {compared.cell(best).label}."
    wins: dict[str, list[str]] = {}
    for group in groups:
        values = compared.cell(table.iloc[_best_of(group, table, metric)]).values
        rows = compared.layout.rows
        winner = label({axis: values[axis] for axis in rows}, compared.labels)
        where = label({a: v for a, v in values.items() if a not in rows}, compared.labels)
        wins.setdefault(winner, []).append(where)
    if len(groups) > _MOST_FOUND:
        return (
            found
            + "; ".join(
                f"{winner} in {len(where)} of {len(groups)} settings"
                for winner, where in wins.items()
            )
            + "."
        )
    if len(wins) == 1:
        return f"{found}{winner}, in all {len(groups)} settings."
    return found + "; ".join(f"{w} at {', '.join(where)}" for w, where in wins.items()) + "."


def _best_of(group: Sequence[int], table: pd.DataFrame, metric: Metric) -> int:
    """The number of the best row of a group."""
    scores = sign(metric) * table["last5_mean"].iloc[list(group)]
    return group[int(scores.fillna(-np.inf).argmax())]


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
