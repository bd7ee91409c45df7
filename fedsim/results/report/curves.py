"""Curves: what is on record of each round, by rounds and by what was sent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from markupsafe import Markup

from fedsim.objectives import VALIDATION, Metric
from fedsim.results.figures.charts import Line, Scale, draw_lines
from fedsim.results.figures.look import Drawing, class_of, swatch
from fedsim.results.report.comparison import WORST_DECILE, ComparedCell, ReportData
from fedsim.results.report.page import capital, file_name
from fedsim.results.summary import CLOCK

_HEADINGS: dict[Scale, str] = {
    "round": " by round",
    "bytes": " by bytes sent",
    "seconds": " by simulated time",
}
_LABELS: dict[Scale, str] = {
    "round": "round",
    "bytes": "sent up and down by all clients",
    "seconds": "simulated time",
}
LINES = 265  # height of a figure of lines on the page, in points
_TRAINING_LOSS = Metric("train_loss", "training loss", best="min")


@dataclass(frozen=True)
class Plot:
    """A figure, or a row of panels with the same vertical axis."""

    heading: str
    panels: list[tuple[str, Drawing]]

    def files(self) -> Iterator[tuple[str, Drawing]]:
        heading = re.sub(r" \(.*\)|:.*", "", self.heading)
        for panel, drawing in self.panels:
            yield file_name(f"{heading} {panel.partition(';')[0]}"), drawing


def legend(compared: ReportData) -> list[tuple[str, Markup, str]]:
    styles = {cell.line: cell.style for cell in compared.cells}
    named = [
        (class_of(style), swatch(style), line)
        for line, style in styles.items()
        if style is not None
    ]
    others = len(styles) - len(named)
    return named + ([(class_of(None), swatch(None), f"{others} others")] if others else [])


def band(compared: ReportData) -> str:
    if compared.seeds > 1:
        return "Line: mean over seeds; band: one standard deviation below and above."
    return ""


def curves(compared: ReportData) -> list[Plot]:
    drawn_elsewhere = {*compared.explained, *(m.column for m in _of_clients(compared, ""))}
    shown = [
        replace(metric, label=compared.named(metric))
        for metric in compared.metrics
        if metric.column not in drawn_elsewhere
    ]
    shown += [
        replace(metric, column=VALIDATION + metric.column, label=f"validation {metric.label}")
        for metric in compared.primary
    ]
    shown.append(_TRAINING_LOSS)
    return [plot for metric in shown if (plot := draw(compared, metric))]


def of_clients(compared: ReportData) -> list[Plot]:
    """How the clients' scores on their own tests come along."""
    deciles = [
        replace(
            metric,
            column=f"{WORST_DECILE}{metric.column}",
            label=f"{metric.label} of the worst decile of clients",
        )
        for metric in compared.primary
    ]
    shown = [*_of_clients(compared, "client_"), *deciles, *_of_clients(compared, "worst_client_")]
    return [plot for metric in shown if (plot := draw(compared, metric))]


def _of_clients(compared: ReportData, prefix: str) -> list[Metric]:
    return [
        metric
        for metric in compared.metrics
        if metric.column in compared.elsewhere
        and metric.column.startswith(prefix)
        and not metric.column.startswith(VALIDATION)
    ]


def costs(compared: ReportData) -> list[Plot]:
    if len(compared.rounds) < 2:
        return []
    shown = [replace(metric, label=compared.named(metric)) for metric in compared.primary]
    scales: tuple[Scale, ...] = ("bytes", "seconds") if CLOCK in compared.rounds else ("bytes",)
    plots = (draw(compared, metric, scale) for metric in shown for scale in scales)
    return [plot for plot in plots if plot]


def draw(
    compared: ReportData,
    metric: Metric,
    scale: Scale = "round",
    columns: Mapping[str, str] | None = None,
) -> Plot | None:
    """The lines of all cells; None if there are none."""
    panels: dict[str, list[tuple[ComparedCell, Line]]] = {}
    for name, column in (columns or {"": metric.column}).items():
        if column not in compared.rounds:
            continue
        for key, rows in compared.rounds.groupby(compared.axes, sort=False):
            cell = compared.cell(dict(zip(compared.axes, key, strict=True)))
            scored = rows.assign(
                bytes=rows["total_bytes_up"] + rows["total_bytes_down"],
                seconds=rows.get(CLOCK, np.nan),
                value=rows[column].replace([np.inf, -np.inf], np.nan),
            ).dropna(subset="value")
            line = Line.of(cell.line, cell.style, scored, "value", scale)
            if len(line.x):
                panel = ", ".join(filter(None, [name, cell.panel]))
                panels.setdefault(panel, []).append((cell, line))
    lines = [line for panel in panels.values() for _, line in panel]
    if not lines or (scale == "round" and all(len(line.x) < 2 for line in lines)):
        return None
    low, high = min(line.low.min() for line in lines), max(line.high.max() for line in lines)
    if metric.chance is not None:
        low, high = min(low, metric.chance), max(high, metric.chance)
    means = np.concatenate([line.mean for line in lines])
    log = means.min() > 0 and high > 30 * np.median(means)  # one that diverged presses all flat
    if log:
        low = means.min()
    low, cut = in_sight(metric, low, high)
    margin = 0.04 * (high - low) or 0.01
    heading = capital(metric.label) + _HEADINGS[scale]
    is_score = metric.column in [m.column for m in compared.primary]
    found = []
    for panel, of_panel in panels.items():
        ends = [f"{c.line} {x.mean[-1]:.4g}" for c, x in of_panel if x.style is not None]
        draw = partial(
            draw_lines,
            lines=[line for _, line in of_panel],
            xlabel=_LABELS[scale],
            limits=(low / 1.1, high * 1.1) if log else (low - margin, high + margin),
            ylabel=capital(metric.label),
            scale=scale,
            log=log,
            target=compared.target if is_score else None,
            chance=metric.chance,
        )
        words = f"{', '.join(filter(None, [heading, panel]))}. At the end: {', '.join(ends)}."
        words += "" if metric.chance is None else f" By chance: {metric.chance:.4g}."
        found.append((panel, Drawing(words, LINES, draw)))
    return Plot(heading + (" (logarithmic)" if log else cut), found)


def in_sight(metric: Metric, low: float, high: float) -> tuple[float, str]:
    """Where an axis begins, and words for what that leaves out.

    Scores that are 1 at best, such as R², may have no lower bound: one run far below 0 would press
    all others flat.
    """
    if metric.best == "max" and low < -1 and 0 < high <= 1:
        return -1.0, " (from −1 up)"
    return low, ""
