"""Runs side by side: which of them belong together, and what sets the others apart."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedsim.objectives import VALIDATION, Metric
from fedsim.results import summary
from fedsim.results.figures.look import STYLES
from fedsim.results.folder import GridFolder, SearchFolder, open_folder
from fedsim.results.report.axes import axis_labels, layout
from fedsim.results.report.entries import (
    Entry,
    Value,
    differing,
    entries_of,
    name_sections,
    names_of,
    word,
)
from fedsim.results.run import Run
from fedsim.results.sweeps import Grid, Search

DASH = "–"  # where there is nothing: a setting that a run does not have, a figure not on record
# What changes nothing in a result: names, logs, where data and processes are.
_IGNORED = ("name", "seed", "loggers", "data.root", "data.download")
WORST_DECILE = "worst_decile_client_"  # prefix of a column
_LINES = 6  # cells in one figure, if there can be several


@dataclass
class ComparedCell:
    """Runs that differ in nothing but their seeds: the finished ones, or all, if none is.

    Attributes:
        panel: which of the figures it is drawn in, where there are several.
        line: what its line is called there.
        style: which of the styles its line has; None among lines too many to be told apart.
    """

    values: dict[str, Value]
    entries: list[Entry]
    label: str
    panel: str = ""
    line: str = ""
    style: int | None = None

    @property
    def metric(self) -> Metric:
        return self.runs[0][2].primary_metric

    @property
    def runs(self) -> list[tuple[Mapping[str, Any], int, Run]]:
        """As `tidy` takes them."""
        return [(self.values, e.seed, e.run) for e in self.entries if e.run is not None]


class ReportData:
    """Runs and grids, compared; and searches.

    Args:
        rows, columns: axes of the pivot; see `axes.layout`.
        metrics: columns of the scores that are shown. The runs are judged by the first. By
            default all that tables show, and each run is judged by its primary metric.

    Attributes:
        entries: the runs, each once, however many copies of it were given.
        axes: what they differ in, seeds aside; `labels` are what papers call these.
        cells: those together that differ in nothing but their seeds.
        primary: what they are judged by; of each cell there is one.
        further: the other scores that are shown.
        elsewhere: columns of scores on a validation set, or on clients' own test examples.
        baseline: the values of some axes, of the cells that the others are tested against.
        target: a score to be reached; None unless they are judged by their primary metrics.
        rounds: the rounds of all; where clients were tested, `WORST_DECILE` and the primary
            metric's column is the score that a tenth of them falls short of.
        by: the figure of the summary by which cells are compared; see `summary.compared_by`.

    Raises:
        RunFolderError: one of the folders is none of these.
        BadInput: there is no axis that is called `rows` or `columns`, or no such score.
    """

    def __init__(
        self,
        folders: Sequence[str | Path],
        rows: str | None = None,
        columns: str | None = None,
        metrics: Sequence[str] = (),
    ) -> None:
        paths = dict.fromkeys(Path(os.path.realpath(folder)) for folder in folders)
        opened = [open_folder(path) for path in paths]
        self.grids = [Grid(folder) for folder in opened if isinstance(folder, GridFolder)]
        self.searches = [Search(folder) for folder in opened if isinstance(folder, SearchFolder)]
        names = [f.manifest.get("name", f.path.parent.name) for f in opened]
        self.title = ", ".join(dict.fromkeys(map(str, names)))
        called = names_of([folder.path for folder in opened])
        pairs = zip(opened, called, strict=True)
        entries = [entry for folder, name in pairs for entry in entries_of(folder, name)]
        name_sections(entries)
        self.entries, self.axes = distinguish(entries)
        self.labels = axis_labels(self.axes, self.entries)
        values = [entry.cell for entry in self.entries]
        self.layout = layout(self.labels, values, rows, columns)
        self.cells = cells_of(self.entries, self.labels)
        runs = [run for cell in self.cells for run in cell.runs]
        begun = [run for _, _, run in runs if len(run.rounds)]
        picked = summary.chosen(begun, metrics)
        judges = {metric.column: metric for metric in (run.primary_metric for run in begun)}
        others = {metric.column: metric for run in begun for metric in summary.further(run)}
        self.primary = picked[:1] or list(judges.values())
        self.further = picked[1:] if picked else [others[c] for c in others if c not in judges]
        self.explained = {metric.column for run in begun for metric in run.explained}
        shown = {metric.column for run in begun for metric in run.metrics}
        self.elsewhere = {
            prefix + column for prefix in summary.ELSEWHERE for column in shown
        } - shown
        baseline = self._of_grids("baseline")
        self.baseline: dict[str, Value] | None = None
        if isinstance(baseline, dict) and baseline.keys() <= set(self.axes):
            self.baseline = {axis: word(value) for axis, value in baseline.items()}
        self.target: float | None = self._of_grids("target")
        if [metric.column for metric in self.primary] != list(judges):
            self.target = None
        self.rounds, clients = summary.tidy(runs), summary.tidy(runs, "clients")
        keys = [*self.axes, "seed", "round"]
        for metric in self.primary:
            if (tested := f"test_{metric.column}") in clients:
                scores = clients.groupby(keys, sort=False)[tested]
                worst = scores.quantile(0.1 if metric.best == "max" else 0.9)
                worst = worst.rename(f"{WORST_DECILE}{metric.column}")
                self.rounds = self.rounds.join(worst, on=keys)
        self.by = summary.compared_by(begun, *picked[:1])
        self.summary = summary.summarise_cells(runs, self.axes, self.baseline, self.target, picked)
        _arrange(self)

    @cached_property
    def views(self) -> list[ReportData]:
        """The same runs judged by each of the further scores; cells that lack it are left out."""
        views = []
        for metric in self.further:
            view = copy.copy(self)
            view.primary, view.further, view.target = [metric], [], None
            runs = [run for cell in self.cells for _, _, run in cell.runs]
            view.by = summary.compared_by(runs, metric)
            table = summary.of_score(self.summary, self.axes, metric.column)
            view.summary = table[table["last_mean"].notna()].reset_index(drop=True)
            views.append(view)
        return views

    @property
    def metrics(self) -> list[Metric]:
        return [*self.primary, *self.further]

    def central(self, metric: Metric) -> bool:
        return metric.column not in self.explained | self.elsewhere

    def named(self, metric: Metric) -> str:
        return f"test {metric.label}" if self.central(metric) else metric.label

    @property
    def validated(self) -> bool:
        return any(VALIDATION + metric.column in self.rounds for metric in self.primary)

    def _of_grids(self, fact: str) -> Any:
        found = [grid.manifest.get(fact) for grid in self.grids]
        return found[0] if found and all(f == found[0] for f in found) else None

    @property
    def score(self) -> str:
        return summary.in_words(self.primary)

    @property
    def titled(self) -> str:
        """The same, and what it is of, as a title begins."""
        words = f"test {self.score}" if all(map(self.central, self.primary)) else self.score
        return words[:1].upper() + words[1:]

    @property
    def seeds(self) -> int:
        return max((len(cell.entries) for cell in self.cells), default=0)

    @property
    def going_on(self) -> list[str]:
        """Grids that do not know yet which runs they have."""
        return [grid.path.name for grid in self.grids if grid.manifest["status"] == "running"]

    @property
    def unfinished(self) -> bool:
        folders = [folder.manifest["status"] for folder in (*self.grids, *self.searches)]
        return "running" in (*folders, *(entry.status for entry in self.entries))

    @property
    def less_is_better(self) -> bool:
        return bool(self.primary) and all(metric.best == "min" for metric in self.primary)

    def cell(self, row: pd.Series[Any] | Mapping[str, Any]) -> ComparedCell:
        key = tuple(row[axis] for axis in self.axes)
        return next(cell for cell in self.cells if tuple(cell.values.values()) == key)

    def is_baseline(self, cell: ComparedCell) -> bool:
        wanted = self.baseline
        return wanted is not None and all(cell.values[a] == v for a, v in wanted.items())


def _arrange(compared: ReportData) -> None:
    """Say which cells are drawn in which panel, and in which style.

    Of too many cells for one figure, those that compete with each other share a panel. Of more
    lines than can be told apart even so, the best are, and the baseline.
    """
    cells, rows = compared.cells, compared.layout.rows
    varied = [a for a in compared.axes if len({cell.values[a] for cell in cells}) > 1]
    several = len(cells) > _LINES and len(varied) > len(rows)
    merits: dict[str, float] = {}
    for cell in cells:
        cell.line = cell.label
        if several:
            of_line = {axis: cell.values[axis] for axis in rows}
            cell.line = label(of_line, compared.labels)
            others = {a: v for a, v in cell.values.items() if a not in rows}
            cell.panel = label(others, compared.labels)
        merits.setdefault(cell.line, -np.inf)
    for _, row in compared.summary.iterrows():
        cell = compared.cell(row)
        judge = cell.metric if len(compared.primary) > 1 else compared.primary[0]
        is_first = compared.is_baseline(cell)
        merit = np.inf if is_first else summary.sign(judge) * row[f"{compared.by}_mean"]
        merits[cell.line] = np.nanmax([merits[cell.line], merit])
    told = sorted(merits, key=lambda line: -merits[line])[:STYLES]
    styles = {line: k for k, line in enumerate(line for line in merits if line in told)}
    for cell in cells:
        cell.style = styles.get(cell.line)


def label(values: Mapping[str, Value], labels: Mapping[str, str]) -> str:
    """A cell in a few words, without the settings that it does not have."""
    return summary.cell_label({labels[a]: value for a, value in values.items() if value != DASH})


def distinguish(entries: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    """Say of each run what sets it apart.

    Within grids of the same axes it is these, and what differs between runs that are alike in
    them; otherwise whatever the experiments differ in, but for what does not change a result. Runs
    that are alike in all of it, seed included, are told apart by their names, or by their folders.

    Returns:
        The runs, without those that are copies of others, and the axes: what a cell has values of.
    """
    kinds = {tuple(entry.cell) for entry in entries}
    if len(kinds) == 1 and kinds != {()}:
        by_cell: dict[tuple[Value, ...], list[Mapping[str, Value]]] = {}
        for entry in entries:
            if entry.run is not None:
                by_cell.setdefault(tuple(entry.cell.values()), []).append(entry.settings)
        keys_ = [key for settings in by_cell.values() for key in _differing(settings)]
        for entry in entries:
            # A value of an axis may be a variant's label, which says nothing of the component.
            more = {f"{k}.name" if k in entry.cell else k: _setting(entry, k, entries)
                    for k in keys_}  # fmt: skip
            entry.cell = {**entry.cell, **more}
    else:
        keys_ = _differing([entry.settings for entry in entries]) or ["method"]
        keys_.sort(key=lambda axis: axis != "method")
        for entry in entries:
            entry.cell = {axis: entry.settings.get(axis, DASH) for axis in keys_}
    keys = [(*e.cell.values(), e.seed, _setting(e, "name", entries)) for e in entries]
    there = {key for entry, key in zip(entries, keys, strict=True) if entry.run is not None}
    by_result: dict[tuple[Value, ...], Entry] = {}
    for entry, key in zip(entries, keys, strict=True):
        if entry.run is not None:
            key = (*key, entry.manifest.get("result_hash") or entry.place)
        elif key in there:  # missing from a copy of the grid alone
            continue
        by_result.setdefault(key, entry)
    found = list(by_result.values())
    for axis, values in (
        ("name", [_setting(entry, "name", entries) for entry in found]),
        ("folder", [entry.given for entry in found]),
        ("folder", [entry.place for entry in found]),
    ):
        alike = len({(*entry.cell.values(), entry.seed) for entry in found}) < len(found)
        if alike and len(set(values)) > 1:
            for entry, value in zip(found, values, strict=True):
                entry.cell[axis] = value
    return found, list(found[0].cell) if found else []


def _setting(entry: Entry, key: str, entries: Sequence[Entry]) -> Value:
    """A setting of a run; if the run is missing, what the others of its grid agree on."""
    if entry.run is None:
        agreed = {e.settings[key] for e in entries if e.given == entry.given and key in e.settings}
        return agreed.pop() if len(agreed) == 1 else DASH
    return entry.settings.get(key, DASH)


def cells_of(entries: Sequence[Entry], labels: Mapping[str, str]) -> list[ComparedCell]:
    by_values: dict[tuple[Value, ...], list[Entry]] = {}
    for entry in entries:
        by_values.setdefault(tuple(entry.cell.values()), []).append(entry)
    cells = []
    for of_cell in by_values.values():
        values, finished = of_cell[0].cell, [entry for entry in of_cell if entry.finished]
        cells.append(ComparedCell(values, finished or of_cell, label(values, labels)))
    return cells


def _differing(settings: Sequence[Mapping[str, Value]]) -> list[str]:
    """Keys with several values. One that only some have came with another component."""
    return [
        key
        for key in differing(settings, absent=False)
        if key not in _IGNORED
        and (key == "engine.clients_per_step" or not key.startswith(("engine", "checkpoint.")))
    ]
