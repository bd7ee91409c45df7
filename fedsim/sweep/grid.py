"""Grids: every combination of some values, with several seeds each, in one go.

runs/<name>/<id>/
  experiment.yaml      the file, with its grid section
  manifest.json        versions, hardware, status, and how each run ended
  cells/<cell>/seed-<s>/   the folder of each run
  rounds.parquet       a row per cell, seed and round
  summary.parquet      a row per cell, over its seeds; also as summary.csv
  tune/                Ray Tune's own state
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from ray import tune

from fedsim.config_file import RawConfig
from fedsim.errors import ExperimentError, RunFolderError
from fedsim.experiment import Experiment, to_yaml
from fedsim.registry import Config, nearest
from fedsim.results.folder import new_path
from fedsim.results.run import load
from fedsim.results.summary import cell_label, summarise, tidy
from fedsim.sweep.trials import (
    Trial,
    TrialsFolder,
    Work,
    carry_out,
    ending,
    run_config,
    write_tables,
)

# Columns of the tables that a grid leaves; an axis cannot be called so.
COLUMNS = (
    *("seed", "round", "client", "clients", "failed", "loss", "accuracy", "client_accuracy"),
    *("rmse", "mae", "r2", "client_r2", "worst_client_r2"),
    *("worst_client_accuracy", "train_loss", "samples", "steps", "seconds", "phase"),
    *("bytes_up", "bytes_down", "total_bytes_up", "total_bytes_down", "one_off_up"),
    *("one_off_down", "epsilon", "seeds", "reached", "p_value"),
)


class Grid(Config):
    """The `grid` section: which values to combine, and how the results are compared.

    Args:
        axes: for each axis either a list of values of one key (`partition.alpha: [0.1, 1]`), or
            named variants, each with all that it sets (`method: {prox: {method.name: fedprox,
            method.mu: 0.1}}`). A variant's name, or a value, is what tables and figures show.
        seeds: each cell is run with each of them; by default with the experiment's own.
        exclude: cells to leave out, by the values of some axes.
        baseline: the values of some axes; each cell is tested against the one that has these.
        target: an accuracy, or R² of a regression; what is sent until it is reached is reported.
        concurrent: runs at the same time; `auto` is as many as the cluster can hold.
    """

    axes: dict[str, list[Any] | dict[str, dict[str, Any]]] = Field(min_length=1)
    seeds: list[int] | None = Field(None, min_length=1)
    exclude: list[dict[str, Any]] = Field([])
    baseline: dict[str, Any] | None = None
    target: float | None = Field(None, gt=0, le=1)
    concurrent: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _values_are_known(self) -> Grid:
        if self.seeds is not None and len(set(self.seeds)) < len(self.seeds):
            raise ExperimentError("grid.seeds: names a seed twice")
        for axis, given in self.axes.items():
            if not given:
                raise ExperimentError(f"grid.axes.{axis}: has no values")
            if axis in COLUMNS or (axis in ("name", "grid") and isinstance(given, list)):
                word = "give grid.seeds" if axis == "seed" else "call the axis otherwise"
                raise ExperimentError(f"grid.axes.{axis}: is not the name of an axis; {word}")
            if len(set(self.values(axis))) < len(given):
                raise ExperimentError(f"grid.axes.{axis}: has a value twice")
        self._axes_are_apart()
        for what, cells in (("exclude", self.exclude), ("baseline", [self.baseline or {}])):
            for cell in cells:
                for axis, wanted in cell.items():
                    if axis not in self.axes:
                        hint = nearest(axis, self.axes)
                        raise ExperimentError(f"grid.{what}: '{axis}' is not an axis{hint}")
                    if self.show(axis, wanted) not in self.values(axis):
                        hint = nearest(self.show(axis, wanted), map(str, self.values(axis)))
                        raise ExperimentError(f"grid.{what}: {axis} has no value {wanted!r}{hint}")
        return self

    def _axes_are_apart(self) -> None:
        """No two axes set the same key, or the one would undo the other unseen."""
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
        """A value of an axis as tables show it: as it is, or as JSON.

        All of one axis are of one type, because they are a column of a table.
        """
        kinds = {_kind(v) for v in self.axes[axis]}
        plain = len(kinds) == 1 and _kind(value) in kinds and "parts" not in kinds
        return value if plain or isinstance(value, str) else json.dumps(value)

    def values(self, axis: str) -> list[Any]:
        """The values of an axis as tables show them."""
        return [self.show(axis, v) for v in self.axes[axis]]

    def within(self, part: Mapping[str, Any], cell: Mapping[str, Any]) -> bool:
        """Whether a cell has these values of some axes."""
        return all(cell[axis] == self.show(axis, value) for axis, value in part.items())

    def shown_baseline(self) -> dict[str, Any] | None:
        """The baseline as tables show its values."""
        if self.baseline is None:
            return None
        return {axis: self.show(axis, value) for axis, value in self.baseline.items()}

    def cells(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Every cell that is not excluded: its value on each axis, and what that sets."""
        options = []
        for axis, given in self.axes.items():
            if isinstance(given, dict):
                options.append([(axis, name, sets) for name, sets in given.items()])
            else:
                options.append([(axis, self.show(axis, v), {axis: v}) for v in given])
        found = []
        for combination in itertools.product(*options):
            cell = {axis: shown for axis, shown, _ in combination}
            if not any(self.within(left_out, cell) for left_out in self.exclude):
                changes: dict[str, Any] = {}
                for _, _, sets in combination:
                    changes |= sets
                found.append((cell, changes))
        if not found:
            raise ExperimentError("grid.exclude: leaves no cell")
        return found


def _kind(value: Any) -> str:
    """What can stand together in a column of a table."""
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, int | float):
        return "number"
    return "text" if isinstance(value, str) else "parts"


@dataclass(frozen=True)
class Cell:
    """One run of a grid: its value on each axis, its seed, and its experiment."""

    values: dict[str, Any]
    seed: int
    experiment: Experiment
    folder: str  # within the grid's

    @property
    def label(self) -> str:
        return f"{cell_label(self.values)}, seed {self.seed}"


def read(sheet: RawConfig) -> tuple[Grid, list[Cell]]:
    """The grid section of an experiment file, and all its runs.

    Raises:
        ExperimentError: the section, or the experiment of a cell, does not fit the schema.
    """
    if "grid" not in sheet.content:
        raise ExperimentError(f"{sheet.where(())}: has no grid section; fedsim run carries it out")
    grid = sheet.build(Grid, "grid")
    _, base = sheet.take("grid")
    cells = []
    try:
        combinations = grid.cells()
    except ExperimentError as error:
        raise ExperimentError(f"{sheet.where(('grid',))}: {error}") from None
    for number, (values, changes) in enumerate(combinations):
        label = cell_label(values)
        cell = base.changed(changes, f"{sheet.where(('grid', 'axes'))}: cell {label}")
        name = re.sub(r"[^\w.=+-]+", "_", label)[:60]
        for seed in grid.seeds if grid.seeds is not None else [cell.content.get("seed", 0)]:
            experiment = cell.changed({"seed": seed}, "grid.seeds").build(Experiment)
            cells.append(Cell(values, seed, experiment, f"cells/{number:03d}-{name}/seed-{seed}"))
    return grid, cells


class GridFolder(TrialsFolder):
    """The folder of a grid; its tables are `rounds` and `summary`."""

    kind = "grid"


def run_grid(
    sheet: RawConfig,
    out: str | Path = "runs",
    tell: Callable[[str], None] = lambda _: None,
    on_start: Callable[[GridFolder], None] = lambda _: None,
) -> GridFolder:
    """Carry out a grid.

    Args:
        sheet: an experiment file with a grid section.
        out: the folder below which the grid's own is made.
        tell: is called with lines for the user.
        on_start: is called with the folder before the first run.

    Returns:
        Its folder. A run that failed is named in the manifest, and missing in the tables.

    Raises:
        BadInput: the grid cannot be carried out; nothing was started or written.
    """
    grid, cells = read(sheet)
    name = cells[0].experiment.name
    path = new_path(out, name).absolute()
    with ExitStack() as held:

        def begin() -> None:
            facts = {"name": name, "axes": list(grid.axes), "baseline": grid.shown_baseline()}
            content = to_yaml(sheet.content)
            folder = GridFolder.make(path, content, {**facts, "target": grid.target, "cells": []})
            held.enter_context(folder.alone())
            on_start(folder)

        return _carry_out(path, begin, grid, cells, tell)


def resume_grid(
    path: str | Path,
    tell: Callable[[str], None] = lambda _: None,
    on_start: Callable[[GridFolder], None] = lambda _: None,
) -> GridFolder:
    """Go on with a grid: only what is missing, or has failed, is run.

    Raises:
        BadInput: the folder is not that of a grid, or was edited.
    """
    with GridFolder.open(path).alone():
        folder = GridFolder.open(path)
        if folder.manifest["status"] == "finished":
            raise RunFolderError(f"{folder.path}: the grid is finished; nothing is missing")
        grid, cells = read(folder.sheet)

        def begin() -> None:
            folder.update(status="running", cells=[])  # the runs' own folders say how they are
            on_start(folder)

        return _carry_out(folder.path, begin, grid, cells, tell)


def _carry_out(
    path: Path,
    begin: Callable[[], None],
    grid: Grid,
    cells: Sequence[Cell],
    tell: Callable[[str], None],
) -> GridFolder:
    trials = [Trial(cell.label, path / cell.folder, partial(_experiment, cell)) for cell in cells]
    first = {
        cell.folder.rpartition("/")[0]: trial for cell, trial in zip(cells, trials, strict=True)
    }
    # The run folders say what is missing; what Tune has kept of an earlier session is no use.
    missing = [k for k, trial in enumerate(trials) if ending(trial.path, {})[0] != "finished"]
    work = Work(
        trial_of=partial(_trial_of, trials),
        examples=list(first.values()),
        count=len(trials),
        before=len(trials) - len(missing),
        concurrent=grid.concurrent,
    )

    def make_tuner(trainable: Any, concurrent: int) -> tune.Tuner:
        shutil.rmtree(path / "tune", ignore_errors=True)
        return tune.Tuner(
            trainable,
            param_space={"run": tune.grid_search(missing)},
            tune_config=tune.TuneConfig(
                max_concurrent_trials=concurrent, reuse_actors=work.take_turns
            ),
            run_config=run_config(path),
        )

    errors = carry_out(work, path, begin, make_tuner, tell) if missing else {}
    return _conclude(GridFolder.open(path), grid, cells, errors)


def _experiment(cell: Cell) -> Experiment:
    return cell.experiment


def _trial_of(trials: Sequence[Trial], config: Mapping[str, Any]) -> Trial:
    number: int = config["run"]
    return trials[number]


def _conclude(
    folder: GridFolder, grid: Grid, cells: Sequence[Cell], errors: Mapping[Path, str]
) -> GridFolder:
    """Write the tables of a grid, and how each of its runs ended."""
    known, done = [], []
    for cell in cells:
        path = folder.path / cell.folder
        status, error = ending(path, errors)
        if status == "finished":
            done.append((cell.values, cell.seed, load(path)))
        about = {"cell": cell.values, "seed": cell.seed, "folder": cell.folder}
        known.append({**about, "status": status, "error": error})
    rounds = tidy(done)
    table = summarise(done, list(grid.axes), grid.shown_baseline(), grid.target)
    write_tables(folder.path, {"rounds": rounds, "summary": table})
    states = {about["status"] for about in known}
    left = "interrupted" if "missing" in states else "failed" if "failed" in states else "finished"
    folder.update(status=left, cells=known)
    return folder
