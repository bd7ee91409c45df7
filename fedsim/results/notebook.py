"""How runs, grids and searches show themselves in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape

from fedsim.config.file import RawConfig
from fedsim.results.report.figures import STYLES, Line, draw_lines, swatch
from fedsim.results.summary import (
    FIGURES,
    STARS,
    aligned,
    best_trials,
    cell_label,
    compared_by,
    further_scores,
    pairing,
    score_facts,
    score_rows,
)
from fedsim.support.words import size

if TYPE_CHECKING:
    import pandas as pd

    from fedsim.objectives import Metric
    from fedsim.results.run import Run
    from fedsim.results.sweeps import Grid, Search

MOST_ROWS = 20
# The variables that the figures of a report are coloured by. The notebook's own text colour fits
# dark themes, too; the lines are told apart on either.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d1f", "#56b4e9", "#7b4fbf", "#888")
_STYLE = "; ".join(
    (
        *(f"--line-{k + 1}: {colour}" for k, colour in enumerate(_COLOURS)),
        *("--line-other: #999", "--figure-text: currentColor", "--figure-rule: #8886"),
        "max-width: 30em",
    )
)


def run_html(run: Run) -> str:
    """A run: what it is, what it came to, its curve."""
    rounds, content = run.rounds, RawConfig.read(run.path / "experiment.yaml").content
    title = Markup("{}: {} on {}").format(
        content.get("name", "experiment"),
        *(_named(content.get(section)) for section in ("method", "data")),
    )
    facts = [("status", f"{run.manifest['status']}, {len(rounds)} rounds")]
    curve = Markup("")
    if len(rounds):
        metric = run.primary_metric
        scores = rounds.dropna(subset=[metric.column]) if metric.column in rounds else rounds[:0]
        if len(scores):
            facts += score_facts(run).items()
            curve = _curve(metric, [_line(scores, metric.column, 0, metric.label)])
        sent = rounds.iloc[-1]
        facts.append(("sent up", size(sent["total_bytes_up"])))
        facts.append(("sent down", size(sent["total_bytes_down"])))
    if "result_hash" in run.manifest:
        facts.append(("result hash", run.result_hash))
    facts.append(("folder", str(run.path)))
    return _page(title, _facts(facts), curve)


def grid_html(grid: Grid) -> str:
    """A grid: what it is, a row for each cell, their curves."""
    done = [run for run in grid.runs if run.status == "finished"]
    title = Markup("{}: grid over {}").format(grid.name, ", ".join(grid.axes))
    how = f"{grid.status}; {len(done)} of {len(grid.manifest['cells'])} runs finished"
    if not done:
        return _page(title, _facts([("status", how), ("folder", str(grid.path))]))
    metric, summary = done[0].primary_metric, grid.summary
    rows, lines = [], []
    rounds = grid.rounds
    by_cell = rounds.dropna(subset=[metric.column]) if metric.column in rounds else rounds[:0]
    parts = {_key(cell): rows for cell, rows in by_cell.groupby(grid.axes, sort=False)}
    by = compared_by(done)
    figures = {by: f"{metric.label}, {FIGURES[by]}", "best": "best"}
    figures |= further_scores(summary, done)
    shown = score_rows(summary, grid.axes, figures)
    for number, (row, of_row) in enumerate(zip(summary.to_dict("records"), shown, strict=True)):
        style = number if len(summary) <= STYLES else None
        cell = tuple(row[axis] for axis in grid.axes)
        if cell in parts:
            label = cell_label(dict(zip(grid.axes, cell, strict=True)))
            lines.append(_line(parts[cell], metric.column, style, label))
        mark = swatch(style) if style is not None else ""
        rows.append((mark, *cell, row["seeds"], *of_row[len(cell) :]))
    header, tested = ("", *grid.axes, "seeds", *figures.values()), "p_holm" in summary
    return _page(
        title,
        _facts([("status", how), ("folder", str(grid.path))]),
        _table(header, rows),
        escape(f"{STARS} against the baseline, {pairing(summary)} (Holm)" if tested else ""),
        _curve(metric, lines) if lines else Markup(""),
    )


def search_html(search: Search) -> str:
    """A search: what it is, and its Pareto front or five best trials."""
    trials, objectives = search.trials, search.objectives
    words = ", ".join(f"{name} ({mode})" for name, mode in objectives.items())
    title = Markup("{}: search for {}").format(search.name, words)
    ended = int((trials["status"] == "finished").sum()) if len(trials) else 0
    facts = [("status", f"{search.status}; {ended} trials finished"), ("folder", str(search.path))]
    if not ended:
        return _page(title, _facts(facts))
    best, caption = best_trials(search), "Pareto front" if len(objectives) > 1 else "best trials"
    columns = ("trial", *search.space, *objectives)
    rows = list(zip(*(aligned(best[column]) for column in columns), strict=True))
    shown = Markup("<div>{}</div>{}").format(caption, _table(columns, rows))
    return _page(title, _facts(facts), shown)


def _named(section: Any) -> str:
    return str(section.get("name", "")) if isinstance(section, Mapping) else ""


def _key(cell: Any) -> tuple[Any, ...]:
    return cell if isinstance(cell, tuple) else (cell,)


def _line(rounds: pd.DataFrame, column: str, style: int | None, label: str) -> Line:
    by_round = rounds.groupby("round")[column]
    mean, std = by_round.mean(), by_round.std(ddof=1).fillna(0)
    x, y, s = (np.asarray(v, dtype=float) for v in (mean.index, mean, std))
    return Line(label, style, x, y, y - s, y + s)


def _curve(metric: Metric, lines: Sequence[Line]) -> Markup:
    low = min(float(line.low.min()) for line in lines)
    high = max(float(line.high.max()) for line in lines)
    margin = 0.05 * (high - low) or 0.5
    figure = draw_lines(
        f"{metric.label} by round", lines, xlabel="round", limits=(low - margin, high + margin)
    )
    return Markup('<div style="{}">{}{}</div>').format(_STYLE, metric.label, figure.svg())


def _facts(facts: Sequence[tuple[str, str]]) -> Markup:
    return _table((), facts)


def _table(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> Markup:
    """Cells are escaped, but for those that are markup already."""
    shown = rows[:MOST_ROWS]
    head = Markup("").join(Markup("<th>{}</th>").format(cell) for cell in header)
    body = Markup("").join(
        Markup("<tr>{}</tr>").format(
            Markup("").join(Markup('<td style="text-align: left">{}</td>').format(c) for c in row)
        )
        for row in shown
    )
    if len(rows) > len(shown):
        more = f"… and {len(rows) - len(shown)} more"
        body += Markup("<tr><td colspan={}>{}</td></tr>").format(len(rows[0]), more)
    return Markup("<table>{}<tbody>{}</tbody></table>").format(
        Markup("<thead><tr>{}</tr></thead>").format(head) if header else "", body
    )


def _page(title: Markup, *parts: Markup) -> str:
    return str(
        Markup('<div style="{}"><strong>{}</strong>{}</div>').format(
            _STYLE.replace("max-width: 30em", ""), title, Markup("").join(parts)
        )
    )
