"""Grids: all combinations of values, with several seeds each."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field, model_validator
from ray import tune

from fedsim.analysis.contributions.settings import ContributionSettings
from fedsim.config.file import RawConfig
from fedsim.config.registry import Config, nearest
from fedsim.errors import ExperimentError
from fedsim.experiment import Experiment
from fedsim.results.folder import GridFolder, ResultsFolder
from fedsim.results.run import Run
from fedsim.results.summary import cell_label, summarise_cells, tidy
from fedsim.results.sweeps import Grid
from fedsim.sweep.sweep import SweepRunner, read_section
from fedsim.sweep.trials import SweepPlan, Trial, trial_status

# Columns of a grid's tables, which cannot be names of axes.
COLUMNS = (
    *("seed", "round", "client", "clients", "failed", "loss", "accuracy", "client_accuracy"),
    *("rmse", "mae", "r2", "client_r2", "worst_client_r2"),
    *("worst_client_accuracy", "train_loss", "samples", "steps", "seconds", "phase"),
    *("bytes_up", "bytes_down", "total_bytes_up", "total_bytes_down", "one_off_up"),
    *("one_off_down", "epsilon", "seeds", "reached", "pairs", "p_value", "p_holm"),
)

MOST_CELLS = 100_000


class GridSettings(Config):
    """The `grid` section: the values to combine, and how the results are compared.

    Args:
        axes: for each axis either a list of values of one key (`partition.alpha: [0.1, 1]`), or
            named variants, each with the keys that it sets
            (`method: {prox: {method.name: fedprox, method.mu: 0.1}}`). Tables and figures show the
            value or the variant's name.
        seeds: each cell is run with each of these seeds; by default with the experiment's seed.
        exclude: cells to leave out, given by the values of some axes.
        baseline: values of some axes; each cell is tested against the cell with these values.
        target: an accuracy, or R² of a regression; the bytes sent until it is reached are
            reported.
        contributions: what clients contribute to each run; by default not asked.
        concurrent: number of runs at the same time; `auto` is as many as the cluster can hold.
    """

    axes: dict[str, list[Any] | dict[str, dict[str, Any]]] = Field(min_length=1)
    seeds: list[int] | None = Field(None, min_length=1)
    exclude: list[dict[str, Any]] = Field([])
    baseline: dict[str, Any] | None = None
    target: float | None = Field(None, gt=0, le=1)
    contributions: ContributionSettings | None = None
    concurrent: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _values_are_known(self) -> GridSettings:
        if self.seeds is not None and len(set(self.seeds)) < len(self.seeds):
            raise ExperimentError("grid.seeds: names a seed twice")
        for axis, given in self.axes.items():
            if not given:
                raise ExperimentError(f"grid.axes.{axis}: has no values")
            if axis in COLUMNS or (axis in ("name", "grid") and isinstance(given, list)):
                word = "give grid.seeds" if axis == "seed" else "choose another name"
                raise ExperimentError(f"grid.axes.{axis}: is not the name of an axis; {word}")
            if len(set(self.values(axis))) < len(given):
                raise ExperimentError(f"grid.axes.{axis}: has a value twice")
        self._axes_are_apart()
        return self

    def check_part(self, part: Mapping[str, Any]) -> None:
        """Reject values of `exclude` or `baseline` that no axis has, and suggest the nearest."""
        for axis, wanted in part.items():
            if axis not in self.axes:
                raise ExperimentError(f"'{axis}' is not an axis{nearest(axis, self.axes)}")
            if self.show(axis, wanted) not in self.values(axis):
                hint = nearest(self.show(axis, wanted), map(str, self.values(axis)))
                raise ExperimentError(f"{axis} has no value {wanted!r}{hint}")

    def _axes_are_apart(self) -> None:
        """No two axes may set the same key, because one would silently override the other."""
        sets: dict[str, str] = {}
        for axis, given in self.axes.items():
            keys = {k for v in given.values() for k in v} if isinstance(given, dict) else {axis}
            for key in sorted(keys):
                if key == "seed":
                    raise ExperimentError(f"grid.axes.{axis}: sets seed; give grid.seeds")
                for other, by in sets.items():
                    one, two = f"{key}.", f"{other}."
                    if by != axis and (one.startswith(two) or two.startswith(one)):
                        raise ExperimentError(
                            f"grid.axes: both '{by}' and '{axis}' set {max(key, other, key=len)}"
                        )
                sets[key] = axis

    def show(self, axis: str, value: Any) -> Any:
        """A value of an axis as tables show it: unchanged, or as JSON.

        All values of an axis have one type, because they are a column of a table.
        """
        kinds = {_kind(v) for v in self.axes[axis]}
        plain = len(kinds) == 1 and _kind(value) in kinds and "parts" not in kinds
        return value if plain or isinstance(value, str) else json.dumps(value)

    def values(self, axis: str) -> list[Any]:
        return [self.show(axis, v) for v in self.axes[axis]]

    def shown(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """The values of some axes as tables show them."""
        return {axis: self.show(axis, value) for axis, value in part.items()}

    def cells(self) -> list[tuple[dict[str, Any], dict[str, dict[str, Any]]]]:
        """Every cell, excluded or not: its value on each axis, and what each axis sets."""
        options = []
        for axis, given in self.axes.items():
            if isinstance(given, dict):
                options.append([(axis, name, sets) for name, sets in given.items()])
            else:
                options.append([(axis, self.show(axis, v), {axis: v}) for v in given])
        count = math.prod(map(len, options))
        if count > MOST_CELLS:
            raise ExperimentError(
                f"grid.axes: {count:,} cells, each with one or more runs; the "
                f"maximum is {MOST_CELLS:,}"
            )
        return [
            ({axis: shown for axis, shown, _ in of}, {axis: sets for axis, _, sets in of})
            for of in itertools.product(*options)
        ]


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, int | float):
        return "number"
    return "text" if isinstance(value, str) else "parts"


@dataclass(frozen=True)
class CellRun:
    """One run of a grid: a cell's value on each axis, a seed, and the experiment of both."""

    values: dict[str, Any]
    seed: int
    experiment: Experiment
    folder: str  # within the grid's folder

    @property
    def label(self) -> str:
        return f"{cell_label(self.values)}, seed {self.seed}"

    def about(self, status: str, error: str | None = None) -> dict[str, Any]:
        """Its entry in the manifest; while it runs, its own manifest is more recent."""
        about = {"cell": self.values, "seed": self.seed, "folder": self.folder}
        return {**about, "status": status, "error": error}


class GridSweep(SweepRunner[Grid]):
    """The grid section of an experiment file, and all its runs: every cell with every seed."""

    folder_type, results, command = GridFolder, Grid, "grid"

    def __init__(self, config: RawConfig) -> None:
        super().__init__(config)
        self._config = config
        self.grid, base = read_section(config, "grid", GridSettings)

        def sheet_of(values: dict[str, Any], settings: dict[str, dict[str, Any]]) -> RawConfig:
            sheet = base
            for axis, sets in settings.items():
                line = config.where(("grid", "axes", axis))
                sheet = sheet.changed(sets, f"{line}: cell {cell_label(values)}")
            return sheet

        try:
            cells = self.grid.cells()
        except ExperimentError as error:
            raise ExperimentError(f"{config.where(('grid',))}: {error}") from None
        for what, parts in (("exclude", self.grid.exclude), ("baseline", [self.grid.baseline])):
            for part in parts:
                try:
                    self.grid.check_part(part or {})
                except ExperimentError as error:
                    # If the axis itself is misspelt, no cell can be built.
                    _check_one(sheet_of(*cell) for cell in cells)
                    where = config.where(("grid", what))
                    raise ExperimentError(f"{where}: grid.{what}: {error}") from None
        self._baseline = self.grid.baseline and self.grid.shown(self.grid.baseline)
        self.runs: list[CellRun] = []
        excluded = [self.grid.shown(part).items() for part in self.grid.exclude]
        kept = [cell for cell in cells if not any(part <= cell[0].items() for part in excluded)]
        if not kept:
            where = config.where(("grid", "exclude"))
            raise ExperimentError(f"{where}: grid.exclude: leaves no cell")
        for number, (values, settings) in enumerate(kept):
            cell = sheet_of(values, settings)
            name = re.sub(r"[^\w.=+-]+", "_", cell_label(values))[:60]
            for seed in self.grid.seeds or [cell.content.get("seed", 0)]:
                experiment = cell.changed({"seed": seed}, "grid.seeds").build(Experiment)
                folder = f"cells/{number:03d}-{name}/seed-{seed}"
                self.runs.append(CellRun(values, seed, experiment, folder))
        self.experiments = [run.experiment for run in self.runs]
        self.name = self.experiments[0].name

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "axes": list(self.grid.axes),
            "baseline": self._baseline,
            "target": self.grid.target,
            "cells": [run.about("missing") for run in self.runs],
        }

    def plan(self, path: Path) -> SweepPlan:
        trials = [Trial.of(run.label, path / run.folder, run.experiment) for run in self.runs]
        # Read once: a trial of a killed grid may still be finishing.
        self._left = [
            number
            for number, trial in enumerate(trials)
            if trial_status(trial.path, {}, self.grid.contributions)[0] != "finished"
        ]
        return SweepPlan(
            trial_of=lambda config: trials[config["run"]],
            examples=list({trial.path.parent: trial for trial in trials}.values()),
            count=len(trials),
            finished=len(trials) - len(self._left),
            concurrent=self.grid.concurrent,
            contributions=self.grid.contributions,
            where=self._config.where(("grid", "contributions")) + ": grid.contributions",
        )

    def tuning(self, path: Path, plan: SweepPlan) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"run": tune.grid_search(self._left)}, {}

    def conclude(
        self, folder: ResultsFolder, plan: SweepPlan, errors: Mapping[Path, str]
    ) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
        known, done = [], []
        for run in self.runs:
            path = folder.path / run.folder
            status, error = trial_status(path, errors, self.grid.contributions)
            if status == "finished":
                done.append((run.values, run.seed, Run.open(path)))
            known.append(run.about(status, error))
        rounds = tidy(done)
        axes = list(self.grid.axes)
        summary = summarise_cells(done, axes, self._baseline, self.grid.target)
        states = {about["status"] for about in known}
        left = "failed" if "failed" in states else "finished"
        status = "interrupted" if "missing" in states else left
        return {"rounds": rounds, "summary": summary}, {"status": status, "cells": known}


def _check_one(sheets: Iterable[RawConfig]) -> None:
    """Raise the first error if no experiment can be built."""
    errors = []
    for sheet in sheets:
        try:
            sheet.build(Experiment)
            return
        except ExperimentError as error:
            errors.append(error)
    raise errors[0]
