"""HTML of runs, grids and searches for notebooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from markupsafe import Markup, escape

from fedsim.config.file import RawConfig
from fedsim.objectives import Metric
from fedsim.results import summary
from fedsim.results.figures.charts import Line, draw_lines
from fedsim.results.figures.look import STYLES, Drawing, swatch
from fedsim.results.figures.plots import cell_lines
from fedsim.results.run import Run
from fedsim.results.sweeps import Grid, Search, best_trials
from fedsim.support.words import size

MOST_ROWS = 20
# The variables that the figures of a report are coloured by. The notebook's own text colour fits
# dark themes, too; the lines are told apart on either.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d1f", "#56b4e9", "#7b4fbf", "#888")
_STYLE = "; ".join(
    (
        *(f"--line-{k + 1}: {colour}" for k, colour in enumerate(_COLOURS)),
        *("--line-other: #999", "--figure-text: currentColor", "--figure-rule: #8886"),
    )
)


def _of_run(run: Run) -> str:
    rounds, content = run.rounds, RawConfig.read(run.path / "experiment.yaml").content
    sections = [content.get(section) for section in ("method", "data")]
    names = [str(s.get("name", "")) if isinstance(s, Mapping) else "" for s in sections]
    title = Markup("{}: {} on {}").format(content.get("name", "experiment"), *names)
    facts = [("status", f"{run.manifest['status']}, {len(rounds)} rounds")]
    curve = Markup("")
    if len(rounds):
        metric = run.primary_metric
        if metric.column in rounds and rounds[metric.column].notna().any():
            facts += summary.score_facts(run).items()
            scores = rounds.dropna(subset=[metric.column])
            curve = _curve(metric, [Line.of(metric.label, 0, scores, metric.column)])
        sent = rounds.iloc[-1]
        facts.append(("sent up", size(sent["total_bytes_up"])))
        facts.append(("sent down", size(sent["total_bytes_down"])))
    if "result_hash" in run.manifest:
        facts.append(("result hash", run.result_hash))
    return _page(title, _table((), [*facts, ("folder", str(run.path))]), curve)


def _of_grid(grid: Grid) -> str:
    done = [run for run in grid.runs if run.status == "finished"]
    title = Markup("{}: grid over {}").format(grid.name, ", ".join(grid.axes))
    how = f"{grid.status}; {len(done)} of {len(grid.manifest['cells'])} runs finished"
    facts = _table((), [("status", how), ("folder", str(grid.path))])
    if not done:
        return _page(title, facts)
    metric, cells, rounds = done[0].primary_metric, grid.summary, grid.rounds
    by = summary.compared_by(done)
    figures = {by: f"{metric.label}, {summary.FIGURES[by]}", "best": "best"}
    figures |= summary.further_scores(cells, done)
    several = len(cells) > STYLES
    rows = []
    shown = summary.score_rows(cells, grid.axes, figures)
    for k, (seeds, of_row) in enumerate(zip(cells["seeds"], shown, strict=True)):
        mark = "" if several else swatch(k)
        rows.append((mark, *of_row[: len(grid.axes)], seeds, *of_row[len(grid.axes) :]))
    lines: list[Line] = []
    if metric.column in rounds:
        scores = rounds.dropna(subset=[metric.column])
        lines = [*cell_lines(grid, metric.column, scores).values()]
    curve = _curve(metric, [replace(x, style=None) for x in lines] if several else lines)
    header, tested = ("", *grid.axes, "seeds", *figures.values()), "p_holm" in cells
    words = (
        f"{summary.STARS} against the baseline, {summary.pairing(cells)} (Holm)" if tested else ""
    )
    return _page(title, facts, _table(header, rows), escape(words), curve)


def _of_search(search: Search) -> str:
    trials, objectives = search.trials, search.objectives
    words = ", ".join(f"{name} ({mode})" for name, mode in objectives.items())
    title = Markup("{}: search for {}").format(search.name, words)
    ended = int((trials["status"] == "finished").sum()) if len(trials) else 0
    how = f"{search.status}; {ended} trials finished"
    facts = _table((), [("status", how), ("folder", str(search.path))])
    if not ended:
        return _page(title, facts)
    best, caption = best_trials(search), "Pareto front" if len(objectives) > 1 else "best trials"
    columns = ("trial", *search.space, *objectives)
    rows = list(zip(*(summary.aligned(best[column]) for column in columns), strict=True))
    return _page(title, facts, Markup("<div>{}</div>").format(caption), _table(columns, rows))


PAGES: dict[str, Callable[[Any], str]] = {"run": _of_run, "grid": _of_grid, "search": _of_search}


def _curve(metric: Metric, lines: Sequence[Line]) -> Markup:
    lines = [line for line in lines if len(line.x)]
    if not lines:
        return Markup("")
    low = min(float(line.low.min()) for line in lines)
    high = max(float(line.high.max()) for line in lines)
    margin = 0.05 * (high - low) or 0.5
    limits = (low - margin, high + margin)
    draw = partial(draw_lines, lines=lines, limits=limits)
    figure = Drawing(f"{metric.label} by round", 265, draw)
    style = f"{_STYLE}; max-width: 30em"
    return Markup('<div style="{}">{}{}</div>').format(style, metric.label, figure.svg())


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
    page = Markup('<div style="{}"><strong>{}</strong>{}</div>')
    return str(page.format(_STYLE, title, Markup("").join(parts)))
