"""The report: runs and grids on one HTML page that needs nothing but a browser."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup, escape

from fedsim.errors import RunFolderError
from fedsim.results import figures
from fedsim.results.comparison import (
    DASH,
    Cell,
    Value,
    cells_of,
    entries_of,
    label,
    names_of,
    open_folder,
    tell_apart,
    word,
)
from fedsim.results.figures import Line
from fedsim.results.page import (
    Column,
    Datum,
    Picture,
    Table,
    datum,
    duration,
    mean_std,
    number,
    plain,
    sent,
)
from fedsim.results.summary import (
    LAST,
    SCORES,
    digits,
    in_words,
    scores_of,
    summarise,
    tidy,
)

# What curves are drawn of, if it is on record.
_MEASURES = {
    "accuracy": "Test accuracy",
    "r2": "Test R²",
    "loss": "Test loss",
    "rmse": "Test error, root mean square (RMSE)",
    "mae": "Test error, mean absolute (MAE)",
    "train_loss": "Training loss, mean over examples",
    "client_accuracy": "Accuracy on the clients’ own tests, mean",
    "worst_client_accuracy": "Accuracy of the worst client",
    "client_r2": "R² on the clients’ own tests, mean",
    "worst_client_r2": "R² of the worst client",
}
# What a client is judged by: the column of clients.parquet, its words, and whether low is bad.
_JUDGED = {
    "test_accuracy": ("test accuracy", True),
    "test_r2": ("test R²", True),
    "test_loss": ("test loss", False),
    "loss": ("training loss", False),
}
_LINES = 6  # cells in one figure, if there can be several
_ROWS = 10  # cells in one figure of clients
_EXPLAINED = 6  # settings whose explanations are shown as tables
_ROWS_EXPLAINED = 8  # rows of such a table


@dataclass(frozen=True)
class Figure:
    """One, or a row of panels with the same vertical axis."""

    heading: str
    panels: list[tuple[str, Markup]]


@dataclass(frozen=True)
class Search:
    """What a search left in its folder."""

    title: str
    status: str
    trials: Table | None
    importance: Table | None
    pareto: Picture | None
    best: str
    given: str


class Report:
    """Runs and grids, compared; searches, shown.

    Args:
        folders: of runs, grids and searches.

    Attributes:
        entries: the runs, each once, however many copies of it were given.
        axes: what they differ in, seeds aside.
        cells: those together that differ in nothing but their seeds.
        scores: what they are judged by; of each cell there is one.
        score: the same in words.

    Raises:
        RunFolderError: one of the folders is none of these.
    """

    def __init__(self, folders: Sequence[str | Path]) -> None:
        opened = [open_folder(p) for p in dict.fromkeys(Path(f).resolve() for f in folders)]
        self._grids = [folder for folder in opened if folder.kind == "grid"]
        self._searches = [folder for folder in opened if folder.kind == "search"]
        called = names_of([folder.path for folder in opened])
        self.entries, self.axes = tell_apart(
            [
                entry
                for folder, name in zip(opened, called, strict=True)
                for entry in entries_of(folder, name)
            ]
        )
        self.cells = cells_of(self.entries)
        self.rounds = tidy([run for cell in self.cells for run in cell.runs])
        self.scores = scores_of(self.rounds)
        self.score = in_words(self.scores)
        names = [f.manifest.get("name", f.path.parent.name) for f in opened]
        self.title = ", ".join(dict.fromkeys(map(str, names)))
        baseline = self._of_grids("baseline")
        self.baseline: dict[str, Value] | None = None
        if isinstance(baseline, dict) and baseline.keys() <= set(self.axes):
            self.baseline = {axis: word(value) for axis, value in baseline.items()}
        self.target: float | None = self._of_grids("target")
        self.summary = summarise(self.rounds, self.axes, self.baseline, self.target)
        self._arrange()

    def _of_grids(self, fact: str) -> Any:
        """What all grids name alike."""
        found = [grid.manifest.get(fact) for grid in self._grids]
        return found[0] if found and all(f == found[0] for f in found) else None

    # -- to be written ----------------------------------------------------------------------------

    def csv(self) -> str:
        """The summary table, in full precision.

        Raises:
            RunFolderError: there is none.
        """
        self._insist()
        return str(self.summary.to_csv(index=False))

    def latex(self) -> str:
        """The table of results for a paper.

        Raises:
            RunFolderError: there is none.
        """
        self._insist()
        return self.results().latex(self.score)

    def _insist(self) -> None:
        if self.summary.empty:
            raise RunFolderError("no table to write: no rounds of runs or grids are on disk")

    def html(self) -> str:
        """The page. The same folders give the same bytes."""
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )
        environment.filters |= {"sha256": _sha256, "breakable": _breakable}
        return environment.get_template("report.html").render(report=self, last=LAST)

    # -- what was run -----------------------------------------------------------------------------

    @property
    def lead(self) -> str:
        """What was run, in a sentence."""
        if not any(entry.run for entry in self.entries):
            return ""
        seeds = len({entry.seed for entry in self.entries})
        rounds = _listed(self._settings("train.rounds"))
        return (
            f"{_listed(self._settings('method'))} on {_listed(self._settings('data'))}: "
            f"{_listed(self._facts('clients'))} clients, "
            f"{rounds} round{'s' * (rounds != '1')}, "
            f"{seeds} seed{'s' * (seeds > 1)}."
        )

    @property
    def finding(self) -> str:
        """What came out, in a sentence."""
        if self.summary.empty or self.summary["last5_mean"].isna().all() or len(self.scores) > 1:
            return ""
        best = self.summary.iloc[int(self.summary["last5_mean"].argmax())]
        score = mean_std(best["last5_mean"], best["last5_std"])
        if len(self.cells) == 1:
            last = mean_std(best["last_mean"], best["last_std"])
            return (
                f"Test {self.score}: {last} in the last round, {score} as mean of the last {LAST} "
                "evaluated."
            )
        return (
            f"Highest test {self.score}, as mean of the last {LAST} rounds evaluated: {score}, by "
            f"{self._cell(best).label}."
        )

    @property
    def going_on(self) -> list[str]:
        """Grids that do not know yet which runs they have."""
        return [grid.path.name for grid in self._grids if grid.manifest["status"] == "running"]

    @property
    def seeds(self) -> int:
        """The most that any cell has."""
        return max((len(cell.entries) for cell in self.cells), default=0)

    @property
    def band(self) -> str:
        """What the lines and bands of the figures are."""
        if self.seeds > 1:
            return "Line: mean over seeds; band: from the lowest seed to the highest."
        return ""

    @property
    def overview(self) -> list[tuple[str, str]]:
        """What was run, as names and values."""
        keys = {
            "Method": "method",
            "Data": "data",
            "Partition": "partition",
            "Model": "model",
            "Participation": "train.participation",
            "Rounds": "train.rounds",
            "Local epochs": "train.local_epochs",
            "Batch size": "train.batch_size",
            "Optimiser": "train.optimizer",
            "Learning rate": "train.optimizer.lr",
        }
        for axis in self.axes:
            if axis not in ("name", "folder") and axis.removesuffix(".name") not in keys.values():
                keys[axis] = axis
        found = {name: self._settings(key) for name, key in keys.items()}
        found["Clients"] = self._facts("clients")
        found["Seeds"] = sorted({entry.seed for entry in self.entries})
        finished = sum(entry.finished for entry in self.entries)
        found["Runs"] = [f"{finished} of {len(self.entries)} finished"]
        started = sorted(map(datetime.fromisoformat, self._facts("created")))
        found["Started"] = [f"{at:%Y-%m-%d %H:%M} {at.tzname() or ''}" for at in started[:1]]
        seconds = [entry.manifest.get("wall_seconds", 0) for entry in self.entries]
        found["Time"] = [
            duration(sum(seconds)) + (", all runs together" if len(seconds) > 1 else "")
        ]
        return [(name, _listed(values)) for name, values in found.items() if values]

    def _settings(self, key: str) -> list[Any]:
        return _distinct(e.settings[key] for e in self.entries if key in e.settings)

    def _facts(self, key: str) -> list[Any]:
        return _distinct(e.manifest[key] for e in self.entries if key in e.manifest)

    def missing(self) -> Table:
        """The runs that are not finished."""
        columns = [*self._axes(), Column("seed", True), Column("status"),
                   Column("on disk"), Column("why")]  # fmt: skip
        return Table(
            "Runs that are not finished",
            columns,
            [
                [
                    *(datum(entry.cell[axis]) for axis in self.axes),
                    datum(entry.seed),
                    datum(entry.status),
                    Datum(entry.progress, entry.rounds),
                    datum(entry.error or DASH),
                ]
                for entry in self.entries
                if not entry.finished
            ],
        )

    # -- results ----------------------------------------------------------------------------------

    def results(self) -> Table:
        """The summary as papers print it."""
        columns = [*self._axes(), Column(f"mean of last {LAST}", True, True)]
        if self.baseline is not None:
            columns.append(Column("p", True))
        columns += [Column(title, True, True) for title in ("last", "best")]
        columns.append(Column("bytes sent", True))
        if self.target is not None:
            columns.append(Column(f"bytes to {self.target:g}", True))
        columns.append(Column("seeds", True))
        rows = [self._result(row) for _, row in self.summary.iterrows()]
        return Table(f"Test {self.score} and communication", columns, rows)

    def _result(self, row: pd.Series[Any]) -> list[Datum]:
        cell = self._cell(row)
        mixed = len(self.scores) > 1  # then none is the best, and each says what it is
        note = in_words(scores_of(tidy(cell.runs))) if mixed else ""
        scores = {}
        for figure in ("last5", "last", "best"):
            mean = row[f"{figure}_mean"]
            best = len(self.cells) > 1 and mean == self.summary[f"{figure}_mean"].max()
            text = mean_std(mean, row[f"{figure}_std"])
            scores[figure] = number(text, mean, best and not mixed, note)
        found = [*self._head(cell, _unfinished(cell)), scores["last5"]]
        if self._is_baseline(cell):
            found.append(Datum("baseline", None))
        elif self.baseline is not None:
            p = row["p_value"]
            stars = "*" * sum(p < level for level in (0.05, 0.01, 0.001))
            found.append(number(f"{p:.3f}" if p >= 0.001 else f"{p:.0e}", p, note=stars))
        found += [scores["last"], scores["best"], sent(row["total_bytes_mean"])]
        if self.target is not None:
            reached, seeds = int(row["reached"]), int(row["seeds"])
            note = f"({reached}/{seeds})" if reached < seeds else ""
            found.append(sent(row["bytes_to_target_mean"], note))
        found.append(datum(int(row["seeds"])))
        return found

    def _axes(self) -> list[Column]:
        return [
            Column(
                axis,
                figure=not any(
                    isinstance(value, str) and value != DASH
                    for value in (cell.values[axis] for cell in self.cells)
                ),
            )
            for axis in self.axes
        ]

    def _head(self, cell: Cell, note: str = "") -> list[Datum]:
        """The data of a row that say which cell it is."""
        first, *others = cell.values.values()
        style = figures.swatch(cell.style)
        return [Datum(str(first), first, note=note, swatch=style), *map(datum, others)]

    def _cell(self, row: pd.Series[Any] | Mapping[str, Any]) -> Cell:
        key = tuple(row[axis] for axis in self.axes)
        return next(cell for cell in self.cells if tuple(cell.values.values()) == key)

    # -- figures ----------------------------------------------------------------------------------

    def _arrange(self) -> None:
        """Say which cells are drawn in which panel, and in which style.

        If there are too many cells to be seen in one figure, there is a panel for each value of
        all axes but one. If there are more lines than can be told apart even so, the best are, and
        the baseline.
        """
        varied = [a for a in self.axes if len({cell.values[a] for cell in self.cells}) > 1]
        several = len(self.cells) > _LINES and len(varied) > 1
        axis = "method" if "method" in varied else next(iter(varied), "")
        score: dict[str, float] = {}
        for cell in self.cells:
            cell.line = cell.label
            if several:
                cell.line = str(cell.values[axis])
                cell.panel = label({a: v for a, v in cell.values.items() if a != axis})
            score.setdefault(cell.line, -np.inf)
        for _, row in self.summary.iterrows():
            cell = self._cell(row)
            merit = np.inf if self._is_baseline(cell) else row["last5_mean"]
            score[cell.line] = np.nanmax([score[cell.line], merit])
        told = sorted(score, key=lambda line: -score[line])[: figures.STYLES]
        styles = {line: k for k, line in enumerate(line for line in score if line in told)}
        for cell in self.cells:
            cell.style = styles.get(cell.line)

    def _is_baseline(self, cell: Cell) -> bool:
        wanted = self.baseline
        return wanted is not None and all(cell.values[a] == v for a, v in wanted.items())

    def legend(self) -> list[tuple[Markup, str]]:
        """The lines of the figures."""
        styles = {cell.line: cell.style for cell in self.cells}
        named = [(figures.swatch(k), line) for line, k in styles.items() if k is not None]
        others = len(styles) - len(named)
        return named + ([(figures.swatch(None), f"{others} others")] if others else [])

    def curves(self) -> list[Figure]:
        """What is on record of each round, of runs with more than one."""
        found = [m for m in _MEASURES if m in self.rounds and self.rounds[m].notna().any()]
        panels = {cell.panel for cell in self.cells}
        if len(panels) > 1:
            found = [m for m in found if m in [*(s.column for s in SCORES), "loss"]]
        return [figure for measure in found if (figure := self._draw(measure))]

    def traffic(self) -> list[Figure]:
        """Scores against communication, if that is more than a single point."""
        if len(self.rounds) < 2:
            return []
        drawn = [self._draw(score.column, in_bytes=True) for score in self.scores]
        return [figure for figure in drawn if figure]

    def _draw(self, measure: str, in_bytes: bool = False) -> Figure | None:
        """The lines of all cells; None if there are none."""
        panels: dict[str, list[tuple[Cell, Line]]] = {}
        for key, rows in self.rounds.groupby(self.axes, sort=False):
            cell = self._cell(dict(zip(self.axes, key, strict=True)))
            line = _line(rows, measure, cell.style, in_bytes)
            if line is not None and (in_bytes or len(line.x) > 1):
                panels.setdefault(cell.panel, []).append((cell, line))
        lines = [line for panel in panels.values() for _, line in panel]
        if not lines:
            return None
        low, high = min(line.low.min() for line in lines), max(line.high.max() for line in lines)
        middle = float(np.median(np.concatenate([line.mean for line in lines])))
        log = low > 0 and high > 30 * middle  # a run that diverged would press all others flat
        low, cut = _in_sight(measure, low, high)
        margin = 0.04 * (high - low) or 0.01
        heading = _MEASURES[measure] + (" by bytes sent" if in_bytes else " by round")
        found = []
        for panel, of_panel in panels.items():
            ends = [f"{c.line} {x.mean[-1]:.4g}" for c, x in of_panel if x.style is not None]
            svg = figures.draw_lines(
                f"{', '.join(filter(None, [heading, panel]))}. At the end: {', '.join(ends)}.",
                [line for _, line in of_panel],
                xlabel="sent up and down by all clients" if in_bytes else "round",
                limits=(low / 1.1, high * 1.1) if log else (low - margin, high + margin),
                in_bytes=in_bytes,
                log=log,
                target=self.target if measure in [s.column for s in self.scores] else None,
            )
            found.append((panel, svg))
        return Figure(heading + (" (logarithmic)" if log else cut), found)

    # -- clients ----------------------------------------------------------------------------------

    @cached_property
    def _clients(self) -> tuple[str, dict[int, pd.DataFrame]]:
        """What clients are judged by, and a row for each client of each cell, by its number."""
        runs = [run for cell in self.cells for _, _, run in cell.runs if not run.clients.empty]
        for measure in _JUDGED:
            if runs and all(_has(run.clients, measure) for run in runs):
                by_cell = {k: _by_client(cell, measure) for k, cell in enumerate(self.cells)}
                return measure, {k: rows for k, rows in by_cell.items() if len(rows)}
        return "", {}

    @property
    def judged(self) -> str:
        """What clients are judged by, in words; nothing if there is nothing to be had."""
        measure, by_cell = self._clients
        if not by_cell:
            return ""
        when = "in which each took part last" if measure == "loss" else "evaluated last"
        return f"{_JUDGED[measure][0]} of each client, in the round {when}"

    def client_figures(self) -> list[Figure]:
        """How the clients fare, a dot for each."""
        measure, by_cell = self._clients
        if not by_cell:
            return []
        words, low_is_bad = _JUDGED[measure]
        values = np.concatenate([rows["value"] for rows in by_cell.values()])
        high = float(values.max())
        low, cut = _in_sight(measure, float(values.min()), high)
        margin = 0.02 * (high - low) or 0.01
        found = []
        for part in np.array_split(list(by_cell), math.ceil(len(by_cell) / _ROWS)):
            shown = {}
            for k in part:
                rows = by_cell[k].sort_values("value", ascending=low_is_bad, kind="stable")
                worst = f"{_named(rows.iloc[0], self.cells[k])}, {rows['value'].iloc[0]:.3g}"
                shown[self.cells[k].label] = (self.cells[k].style, rows["value"].to_numpy(), worst)
            heading = f"Clients by {words}"
            ends = "; ".join(f"{name}: worst {worst}" for name, (_, _, worst) in shown.items())
            limits = (low - margin, high + margin)
            svg = figures.draw_clients(f"{heading}. {ends}.", shown, limits=limits)
            found.append(Figure(heading + cut, [("", svg)]))
        return found

    def client_table(self) -> Table:
        """How the clients fare, in figures."""
        measure, by_cell = self._clients
        words, low_is_bad = _JUDGED[measure]
        columns = [*self._axes(), Column("clients", True), Column("worst", True, low_is_bad),
                   Column("10 % quantile" if low_is_bad else "90 % quantile", True, low_is_bad),
                   Column("median", True, low_is_bad),
                   Column("mean", True, low_is_bad), Column("std", True), Column("worst client"),
                   Column("examples each", True)]  # fmt: skip
        table = []
        for k, rows in by_cell.items():
            sign = 1 if low_is_bad else -1
            values = sign * rows["value"].sort_values(ascending=low_is_bad, kind="stable")
            found = [values.iloc[0], values.quantile(0.1), values.median(), values.mean()]
            found = [sign * f for f in found]
            worst, samples = rows.loc[values.index[0]], rows["samples"].dropna().astype(int)
            table.append(
                [
                    *self._head(self.cells[k]),
                    datum(len(rows)),
                    *(number(digits(f), f) for f in found),
                    number(digits(values.std()), values.std()),
                    datum(_named(worst, self.cells[k])),
                    Datum(f"{samples.min()} to {samples.max()}", int(samples.min()))
                    if len(samples)
                    else datum(DASH),
                ]
            )
        return Table(f"{words[0].upper()}{words[1:]} over clients", columns, table)

    # -- explanations, searches -------------------------------------------------------------------

    def explanations(self) -> list[tuple[str, Table | None, list[Picture]]]:
        """What each run explains: its pictures; and as a table, for one seed of a few settings."""
        first = [cell.entries[0] for cell in self.cells][:_EXPLAINED]
        found = []
        for entry in self.entries:
            if entry.run is None:
                continue
            files = sorted((entry.run.path / "explanations").glob("*"))
            pictures = [Picture.read(f) for f in files if f.suffix.lower() in (".png", ".svg")]
            table = _explained(entry.run.explanations) if entry in first else None
            if pictures or table:
                found.append((f"{label(entry.cell)}, seed {entry.seed}", table, pictures))
        return found

    def searches(self) -> list[Search]:
        """What searches found."""
        found = []
        for folder in self._searches:
            tables = {
                name: pd.read_parquet(path)
                for name in ("trials", "importance", "pareto")
                if (path := folder.path / f"{name}.parquet").exists()
            }
            trials, importance, picture = None, None, folder.path / "pareto.png"
            if "trials" in tables:
                front = set(tables["pareto"]["trial"]) if "pareto" in tables else set()
                words = "; in bold what no other trial betters in every objective" if front else ""
                trials = plain(f"Trials{words}", tables["trials"], front)
            if "importance" in tables:
                words = "Share of each objective’s variance that a hyper-parameter explains"
                importance = plain(words, tables["importance"])
            best = folder.path / "best.yaml"
            found.append(
                Search(
                    str(folder.manifest.get("name", folder.path.parent.name)),
                    str(folder.manifest["status"]),
                    trials,
                    importance,
                    Picture.read(picture) if picture.exists() else None,
                    best.read_text(encoding="utf-8") if best.exists() else "",
                    _experiment(folder.path),
                )
            )
        return found

    # -- where it comes from ----------------------------------------------------------------------

    def grids(self) -> list[tuple[str, str]]:
        """The files of the grids, by their folders' names."""
        return [(grid.path.name, _experiment(grid.path)) for grid in self._grids]

    def experiments(self) -> list[tuple[str, str]]:
        """The resolved experiment of each cell's first run."""
        return [
            (f"{cell.label}, seed {seed}", _experiment(run.path))
            for cell in self.cells
            for _, seed, run in cell.runs[:1]
        ]

    def provenance(self) -> Table:
        """Status, time and hashes of each run."""
        hashes = ("result_hash", "data_hash", "partition_hash", "experiment_hash")
        columns = [*self._axes(), Column("seed", True), Column("status"), Column("time", True),
                   *(Column(name.replace("_", " "), code=True) for name in hashes),
                   Column("folder", code=True)]  # fmt: skip
        rows = []
        given = {entry.given for entry in self.entries}
        common = f"{given.pop()}/" if len(given) == 1 else ""
        for entry in self.entries:
            seconds = entry.manifest.get("wall_seconds", np.nan)
            rows.append(
                [
                    *(datum(entry.cell[axis]) for axis in self.axes),
                    datum(entry.seed),
                    datum(entry.status),
                    number(duration(seconds), seconds),
                    *(datum(entry.manifest.get(name, DASH)) for name in hashes),
                    datum(entry.place.removeprefix(common)),
                ]
            )
        return Table("Every run, with its hashes", columns, rows)

    def environments(self) -> list[tuple[int, list[tuple[str, str]]]]:
        """Versions and hardware, with how many runs had these."""
        manifests = [entry.manifest for entry in self.entries if entry.run is not None]
        counts = Counter(
            tuple(_environment(manifest))
            for manifest in manifests or [folder.manifest for folder in self._searches]
        )
        return [(count, list(facts)) for facts, count in counts.items()]


def _explained(rows: pd.DataFrame) -> Table | None:
    """The explanations of the last round, as they were put on record; the first of many."""
    if rows.empty:
        return None
    last = rows[rows["round"] == rows["round"].max()].drop(columns=["round", "explainer"])
    words = f"; the first {_ROWS_EXPLAINED} of {len(last)}" if len(last) > _ROWS_EXPLAINED else ""
    caption = f"{_listed(_distinct(rows['explainer']))}, after the last round{words}"
    return plain(caption[0].upper() + caption[1:], last.head(_ROWS_EXPLAINED))


def _experiment(path: Path) -> str:
    return (path / "experiment.yaml").read_text(encoding="utf-8")


def _environment(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    hardware = manifest.get("hardware", {})
    facts = {
        **manifest.get("packages", {}),
        "python": manifest.get("python"),
        "git revision": manifest.get("git_revision"),
        "processor": hardware.get("machine"),
        "CPUs": hardware.get("cpus"),
        "GPUs": ", ".join(hardware.get("gpus", [])) or "none",
        "client actors": manifest.get("actors"),
        "clients per step": manifest.get("clients_per_step"),
        "device of the server": manifest.get("server_device"),
    }
    return [(name, str(value)) for name, value in facts.items() if value is not None]


def _line(rows: pd.DataFrame, measure: str, style: int | None, in_bytes: bool) -> Line | None:
    """The line of a cell, over the rounds that all of its seeds have."""
    rows = rows.assign(
        sent=rows["total_bytes_up"] + rows["total_bytes_down"],
        value=rows[measure].replace([np.inf, -np.inf], np.nan),
    ).dropna(subset="value")
    if rows.empty:
        return None
    rounds = rows.groupby("round")
    found = rounds["value"].agg(["mean", "min", "max", "count"]).assign(sent=rounds["sent"].mean())
    found = found[found["count"] == rows["seed"].nunique()]
    if found.empty:
        return None
    x = found["sent"] if in_bytes else found.index.to_series()
    columns = (x, found["mean"], found["min"], found["max"])
    return Line(style, *(column.to_numpy(dtype=float) for column in columns))


def _in_sight(measure: str, low: float, high: float) -> tuple[float, str]:
    """Where an axis begins, and words for what that leaves out.

    An R² below 0 says that the mean of the targets would be better, and by how much has no limit:
    one such run would press all others flat.
    """
    if measure.endswith("r2") and low < -1 and high > 0:
        return -1.0, " (from −1 up)"
    return low, ""


def _has(clients: pd.DataFrame, measure: str) -> bool:
    return measure in clients and bool(np.isfinite(clients[measure]).any())


def _by_client(cell: Cell, measure: str) -> pd.DataFrame:
    """A row for each seed and client: its `value` in the round that counts, and its `samples`."""
    parts = []
    for _, seed, run in cell.runs:
        if run.clients.empty:
            continue
        rows = run.clients.assign(seed=seed).sort_values(["round", "client"], kind="stable")
        known = rows[np.isfinite(rows[measure])].assign(value=rows[measure])
        if measure != "loss":  # all were evaluated in the same round
            known = known[known["round"] == known["round"].max()]
        known = known.groupby("client", as_index=False).last()[["seed", "client", "value"]]
        samples = rows["samples"] if "samples" in rows else pd.Series(np.nan, rows.index)
        last = samples.groupby(rows["client"]).last()
        parts.append(known.assign(samples=known["client"].map(last)))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _named(row: pd.Series[Any], cell: Cell) -> str:
    of = f" (seed {row['seed']:.0f})" if len(cell.entries) > 1 else ""
    return f"client {row['client']:.0f}{of}"


def _unfinished(cell: Cell) -> str:
    """How far a cell has come of which no run is finished."""
    shown = [entry for entry in cell.entries if entry.rounds and not entry.finished]
    if not shown:
        return ""
    least, *_, most = sorted([*shown, shown[0]], key=lambda entry: entry.rounds)
    span = "" if least.rounds == most.rounds else f"{least.rounds} to "
    return f"({', '.join(_distinct(e.status for e in shown))}, {span}{most.progress})"


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _listed(values: Sequence[Any]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return f"{shown}, … ({len(values)} in all)" if len(values) > 8 else shown


def _breakable(text: str) -> Markup:
    """A name that may be broken between its parts («partition.alpha»)."""
    return Markup(re.sub(r"\.(?=[A-Za-z])", ".<wbr>", escape(text)))


def _sha256(text: str) -> str:
    """As a content security policy wants it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
