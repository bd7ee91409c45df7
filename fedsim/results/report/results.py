"""Tables of results as papers print them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from fedsim.results.figures.look import swatch
from fedsim.results.report.comparison import DASH, ComparedCell, ReportData, label
from fedsim.results.report.entries import Value
from fedsim.results.report.page import (
    Column,
    Datum,
    FilledColumn,
    PageTable,
    axis_columns,
    best_of,
    capital,
    cell_columns,
    datum,
    distinct,
    entry_columns,
    lasted,
    mark_best,
    number,
    sent,
)
from fedsim.results.significance import stars
from fedsim.results.summary import LAST, STARS, decimals_of, mean_std

_MOST_FOUND = 6  # settings whose best are named one by one


def results(compared: ReportData) -> PageTable:
    """The summary: a row for each cell, the best of those that compete with each other marked.

    Of one of the `views` it is the compared figure and its test alone.
    """
    high, whole = not compared.less_is_better, "total_bytes_mean" in compared.summary
    best = "best by validation" if compared.validated else "best"
    scores = {"last5": f"mean of last {LAST}", "last": "last", "best": best}
    if compared.by == "last":
        scores = {"last": "last round", "best": best}
    if not whole:
        scores = {compared.by: scores[compared.by]}
    rows = [row for _, row in compared.summary.iterrows()]
    cells = [compared.cell(row) for row in rows]
    rivals = _rivals(compared)
    (first, names), *axes = cell_columns(compared, cells)
    notes = map(_unfinished, cells)
    columns: list[FilledColumn] = [(first, _noted(names, notes)), *axes]
    for figure, title in scores.items():
        data = mark_best(_scores(compared, figure), high, rivals)
        if len(compared.primary) > 1:  # then each says what it is
            data = _noted(data, (cell.metric.label for cell in cells))
        columns.append((Column(title, True, high), data))
    if compared.baseline is not None:
        after = len(axes) + 2  # beside what is tested
        columns[after:after] = _against_baseline(compared, rows, cells)
    if whole:
        data = [sent(row["total_bytes_mean"]) for row in rows]
        columns.append((Column("bytes sent", True), data))
    if timed := "simulated_seconds_mean" in compared.summary:
        data = [lasted(row["simulated_seconds_mean"]) for row in rows]
        columns.append((Column("simulated time", True), data))
    if compared.target is not None:
        reached = _rivals(compared, reached=True)
        for title, data in _costs(rows, timed).items():
            column = Column(f"{title} {compared.target:g}", True)
            columns.append((column, mark_best(data, False, reached)))
    columns.append((Column("seeds", True), [datum(int(row["seeds"])) for row in rows]))
    return PageTable.of(f"{compared.titled}{' and communication' * whole}", columns)


def _noted(data: Iterable[Datum], notes: Iterable[str]) -> list[Datum]:
    return [replace(datum, note=note) for datum, note in zip(data, notes, strict=True)]


def _costs(rows: Sequence[pd.Series[Any]], timed: bool) -> dict[str, list[Datum]]:
    titles = ["rounds to", "bytes to", *(["time to"] if timed else [])]
    found: dict[str, list[Datum]] = {title: [] for title in titles}
    for row in rows:
        reached, seeds = int(row["reached"]), int(row["seeds"])
        note = f"({reached}/{seeds})" if reached < seeds else ""
        rounds = row["rounds_to_target_mean"]
        found["rounds to"].append(number(f"{rounds:.3g}", rounds, note=note))
        found["bytes to"].append(sent(row["bytes_to_target_mean"], note))
        if timed:
            found["time to"].append(lasted(row["seconds_to_target_mean"], note))
    return found


def _against_baseline(
    compared: ReportData, rows: Sequence[pd.Series[Any]], cells: Sequence[ComparedCell]
) -> list[FilledColumn]:
    table, differences, ps = compared.summary, [], []
    decimals = decimals_of(table["difference_high"] - table["difference_mean"]) if rows else 0
    for row, cell in zip(rows, cells, strict=True):
        if compared.is_baseline(cell):
            differences.append(Datum("baseline", None))
            ps.append(Datum(DASH, None))
            continue
        mean, low, high = (row[f"difference_{end}"] for end in ("mean", "low", "high"))
        text = f"{mean:+z.{decimals}f}"
        if low < high:
            text += f" ({low:+z.{decimals}f} to {high:+z.{decimals}f})"
        differences.append(number(text.replace("-", "−"), mean))
        p = row["p_holm"]
        note = f"{stars(p)} unpaired".strip() if _is_unpaired(row) else stars(p)
        ps.append(number(f"{p:.3f}" if p >= 0.001 else f"{p:.0e}", p, note=note))
    more = not compared.less_is_better
    return [(Column("vs. baseline", True, more), differences), (Column("p", True), ps)]


def _rivals(compared: ReportData, reached: bool = False) -> list[list[int]]:
    """Rows of the summary that compete, if asked those of which all seeds reached the target."""
    if len(compared.primary) != 1:  # then there is nothing to compete in
        return []
    rows = [row for _, row in compared.summary.iterrows()]
    groups = compared.layout.rivals(compared.cell(row).values for row in rows)
    if reached:
        groups = [[k for k in of if rows[k]["reached"] == rows[k]["seeds"]] for of in groups]
    return groups


def _is_unpaired(row: pd.Series[Any]) -> bool:
    return bool(row["pairs"] == 0 and row["p_value"] == row["p_value"])


def _scores(compared: ReportData, figure: str) -> list[Datum]:
    if compared.summary.empty:
        return []
    means = compared.summary[f"{figure}_mean"]
    texts = mean_std(means, compared.summary[f"{figure}_std"])
    return [number(text, mean) for text, mean in zip(texts, means, strict=True)]


def pivots(compared: ReportData) -> list[PageTable]:
    """What runs are compared by as papers show it, such as methods × α."""
    over = compared.layout.columns
    if over is None or len(compared.primary) != 1:
        return []
    others, table = list(compared.layout.others), compared.summary
    if not others:
        return [_pivot(compared, over, table)]
    return [_pivot(compared, over, part) for _, part in table.groupby(others, sort=False)]


def _pivot(compared: ReportData, over: str, part: pd.DataFrame) -> PageTable:
    down, called = compared.layout.rows, compared.labels
    high, marked = not compared.less_is_better, _marked(compared)
    by_row: dict[tuple[Value, ...], dict[Value, Datum]] = {}
    styles: dict[tuple[Value, ...], int | None] = {}
    for k, (_, row) in zip(part.index, part.iterrows(), strict=True):
        cell = compared.cell(row)
        key = tuple(cell.values[axis] for axis in down)
        by_row.setdefault(key, {})[cell.values[over]] = marked[k]
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
        rows.append([first, *later, *(of_row.get(value, Datum(DASH, None)) for value in across)])
    others = {axis: cell.values[axis] for axis in compared.layout.others}
    words = [f"by {called[down[0]]} and {called[over]}", label(others, called)]
    by_axis = dict(zip(compared.axes, axis_columns(compared, ()), strict=True))
    heads = [by_axis[axis][0] for axis in down]  # in the order of the cells
    return PageTable(
        f"{compared.titled} {'; '.join(filter(None, words))}",
        [*heads, *(Column(str(value), True, high) for value in across)],
        rows,
        called[over],
        len(across),
    )


def pivot_frame(compared: ReportData) -> pd.DataFrame:
    """The same in full precision: a row for each row of the pivots.

    Columns: the axes but that of the pivot's columns; for each value of this axis the mean,
    `<axis>=<value>`, the standard deviation over seeds, `<axis>=<value> std`, and with a baseline
    `<axis>=<value> p`. Of the further scores, the same below `<column>/`.
    """
    over = compared.layout.columns
    index = [*compared.layout.others, *compared.layout.rows]
    parts = {}
    for view in (compared, *compared.views):
        prefix = "" if view is compared else f"{view.primary[0].column}/"
        for value in view.summary[over].unique():
            scores = view.summary[view.summary[over] == value].set_index(index)
            columns = {"": f"{view.by}_mean", " std": f"{view.by}_std", " p": "p_holm"}
            for ending, column in columns.items():
                if column in scores:
                    parts[f"{prefix}{over}={value}{ending}"] = scores[column]
    return pd.DataFrame(parts).reset_index()


def all_scores(compared: ReportData) -> PageTable:
    """A row for each score, a column for each cell; no rows if there is but one score."""
    cells = [compared.cell(row) for _, row in compared.summary.iterrows()]
    rows = []
    for view in (compared, *compared.views) if compared.further else ():
        labels = [compared.cell(row).label for _, row in view.summary.iterrows()]
        shown = dict(zip(labels, _marked(view), strict=True))
        name = Datum(view.titled, view.titled)
        rows.append([name, *(shown.get(cell.label, Datum(DASH, None)) for cell in cells)])
    columns = [
        Column("score", prose=True),
        *(Column(cell.label or "value", True, True) for cell in cells),
    ]
    return PageTable("Every score", columns, rows)


def about_all(compared: ReportData) -> list[str]:
    return [
        f"Each score as the mean of the last {LAST} rounds that have it, or in the last of these "
        "if they are fewer: mean ± standard deviation over seeds. Bold: the best of those that "
        "compete.",
        *_tests(compared, differences=False),
    ]


def notes(compared: ReportData, pivot: bool) -> list[str]:
    """What a reader has to know about the pivots, or about the summary, sentence by sentence."""
    central = all(map(compared.central, compared.primary))
    score = f"{capital(compared.score)}{' on the central test set' * central}"
    whole = "total_bytes_mean" in compared.summary
    if pivot or not whole:
        found = [f"{score}{_by(compared)}: mean ± standard deviation over seeds."]
    elif compared.by == "last5":
        found = [
            f"{score}: the mean of the last {LAST} rounds evaluated, the last and the best, "
            "each as mean ± standard deviation over seeds."
        ]
    else:
        found = [f"{score}: the last round and the best, as mean ± standard deviation over seeds."]
    if compared.by == "last":
        found.append(
            f"Runs are compared by their last round, because some evaluated fewer than {LAST} "
            "rounds."
        )
    layout, called = compared.layout, compared.labels
    if layout.competing and len(compared.primary) == 1 and any(_winners(compared)):
        each = ", ".join(called[axis] for axis in layout.alike)
        bold = f"Bold: the best {called[layout.competing[0]]}{f' for each {each}' if each else ''}"
        found.append(f"{bold}; results that are equal as printed are all bold.")
    if pivot:
        return [*found, *_tests(compared, differences=False)]
    if whole:
        chosen = "the validation set" if compared.validated else "the test set itself"
        found.append(f"The best round is chosen on {chosen}.")
        found.append("Bytes are those of all clients, up and down.")
    if compared.target is not None:
        found.append(
            f"Rounds and bytes to {compared.target:g}: the first round in which the "
            f"{compared.score} was reached and what had been sent by its end, mean over the seeds "
            "that reached it."
        )
    return [*found, *_tests(compared, differences=True)]


def _tests(compared: ReportData, differences: bool) -> list[str]:
    if compared.baseline is None:
        return []
    called, table = compared.labels, compared.summary
    against = ", ".join(f"{called[a]} = {value}" for a, value in compared.baseline.items())
    other = f"the cell with {against} and all else equal"
    test = "a two-tailed t-test of the difference, paired by seed, corrected by Holm's method for "
    found = []
    if differences:
        found.append(
            f"vs. baseline: the difference to {other}{_by(compared)}, with its 95 % confidence "
            f"interval. p: {test}all comparisons in the table."
        )
    if any(_is_unpaired(row) for _, row in table.iterrows()):
        found.append("Unpaired: no seed in common with the baseline; Welch's t-test.")
    if len(table) and (table["p_value"].isna() & table["difference_mean"].notna()).any():
        found.append("No p: a single pair, or the same difference at every seed.")
    return [*found, f"{STARS}." if differences else f"{STARS} against {other}: {test}all cells."]


def _by(compared: ReportData) -> str:
    if compared.by == "last":
        return " in the last round"
    return f", as mean of the last {LAST} rounds evaluated"


def finding(compared: ReportData) -> str:
    table = compared.summary
    if table.empty or table[f"{compared.by}_mean"].isna().all() or len(compared.primary) > 1:
        return ""
    (metric,) = compared.primary
    scores = [score.text for score in _scores(compared, compared.by)]
    if len(compared.cells) == 1:
        if compared.by == "last":
            return f"{compared.titled}: {scores[0]} in the last round."
        last = _scores(compared, "last")[0].text
        return (
            f"{compared.titled}: {last} in the last round, {scores[0]} as mean of the last "
            f"{LAST} evaluated."
        )
    cells = [compared.cell(row) for _, row in table.iterrows()]
    groups = _winners(compared)
    if not any(groups):  # scores of different problems
        if len(cells) > _MOST_FOUND:
            return ""
        told = "; ".join(f"{s} at {c.label}" for s, c in zip(scores, cells, strict=True))
        return f"{compared.titled}{_by(compared)}: {told}."
    extreme = "Lowest" if compared.less_is_better else "Highest"
    found = f"{extreme} {compared.named(metric)}{_by(compared)}: "
    layout, called = compared.layout, compared.labels
    wins: dict[str, list[str]] = {}
    for group in filter(None, groups):
        names = [label({a: cells[k].values[a] for a in layout.competing}, called) for k in group]
        if len(names) > _MOST_FOUND:
            names = [*names[: _MOST_FOUND - 1], f"{len(names) - _MOST_FOUND + 1} others"]
        tied = f"{', '.join(names[:-1])} and {names[-1]} (tied)" if names[1:] else names[0]
        where = {a: v for a, v in cells[group[0]].values.items() if a not in layout.competing}
        wins.setdefault(tied, []).append(label(where, called))
    if len(groups) == 1:
        return f"{found}{scores[groups[0][0]]}, by {tied}."
    if len(groups) > _MOST_FOUND:
        told = "; ".join(f"{w} in {len(of)} of {len(groups)} settings" for w, of in wins.items())
        return f"{found}{told}."
    if len(wins) == 1 and all(groups):
        return f"{found}{tied}, in all {len(groups)} settings."
    return found + "; ".join(f"{w} at {', '.join(where)}" for w, where in wins.items()) + "."


def _marked(compared: ReportData) -> list[Datum]:
    """The scores that runs are compared by, of each row of the summary: best ones, and stars."""
    high, rivals = not compared.less_is_better, _rivals(compared)
    ps = compared.summary.get("p_holm", [math.nan] * len(compared.summary))
    return _noted(mark_best(_scores(compared, compared.by), high, rivals), map(stars, ps))


def _winners(compared: ReportData) -> list[list[int]]:
    """Of each group of rows of the summary that compete, the best and those equal as printed."""
    high = not compared.less_is_better
    scores = _scores(compared, compared.by)
    return [best_of({k: scores[k] for k in group}, high) for group in _rivals(compared)]


def missing(compared: ReportData) -> PageTable:
    entries = [entry for entry in compared.entries if not entry.finished]
    columns: list[FilledColumn] = [
        *entry_columns(compared, entries),
        (Column("on disk"), [Datum(entry.progress, entry.rounds) for entry in entries]),
        (Column("why"), [datum(entry.error or DASH) for entry in entries]),
    ]
    return PageTable.of("Runs that are not finished", columns)


def _unfinished(cell: ComparedCell) -> str:
    """How far a cell has come of which no run is finished."""
    shown = [entry for entry in cell.entries if entry.rounds and not entry.finished]
    if not shown:
        return ""
    least, *_, most = sorted([*shown, shown[0]], key=lambda entry: entry.rounds)
    span = "" if least.rounds == most.rounds else f"{least.rounds} to "
    return f"({', '.join(distinct(e.status for e in shown))}, {span}{most.progress})"
