"""Load grids and searches from their folders."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from fedsim.config.arguments import checked
from fedsim.config.registry import importing
from fedsim.errors import ExperimentError, RunFolderError
from fedsim.experiment import Experiment
from fedsim.results import display
from fedsim.results.folder import (
    GridFolder,
    ResultsFolder,
    RunFolder,
    SearchFolder,
    open_folder,
)
from fedsim.results.manifest import is_at
from fedsim.results.run import Run
from fedsim.results.summary import further, of_run, summarise_cells, tidy
from fedsim.results.tables import Table
from fedsim.support.extras import require

if TYPE_CHECKING:
    import optuna
    import pandas as pd


class Sweep(display.Displayed):
    """The results of a grid or a search."""

    _folder_type: ClassVar[type[ResultsFolder]]

    def __init__(self, folder: ResultsFolder) -> None:
        self.path: Path = folder.path
        self.manifest: dict[str, Any] = folder.manifest
        self._folder = folder

    @classmethod
    @checked
    def open(cls, path: str | Path) -> Self:
        """Load it from its folder, finished or not, or the latest below it (`runs/NAME`).

        Raises:
            RunFolderError: it is not such a folder, or was written by another version.
        """
        return cls(cls._folder_type.open(path))

    def trust(self) -> None:
        """Allow one from elsewhere, and its runs, to import the code that its experiment names.

        Read that code first. Folders that you made yourself need no trust.
        """
        self._folder.trust()

    @property
    def name(self) -> str:
        """The experiment's name."""
        return str(self.manifest["name"])

    @property
    def status(self) -> str:
        """`running`, `finished`, `interrupted` or `failed` (some of its runs have failed)."""
        return str(self.manifest["status"])

    @property
    @abstractmethod
    def runs(self) -> list[Run]:
        """All runs, finished or not; each reads its tables on first access."""

    def _table(self, name: str) -> pd.DataFrame:
        return Table(self.path, name).read(self._folder.files.get(f"{name}.parquet"))


class Grid(Sweep):
    """The results of a grid. Loading it executes no code from its folder.

    Attributes:
        path: the grid's folder.
        manifest: versions, hardware, status.
    """

    kind = "grid"
    _folder_type = GridFolder

    def __repr__(self) -> str:
        done = sum(run.status == "finished" for run in self.runs)
        of = len(self.manifest["cells"])
        return f"<Grid {str(self.path)!r}: {self.status}, {done} of {of} runs finished>"

    @property
    def axes(self) -> list[str]:
        """The keys that vary between cells; they are columns of all tables."""
        return list(self.manifest["axes"])

    @cached_property
    def runs(self) -> list[Run]:
        return [run for _, run in self._rows if run is not None]

    @cached_property
    def cells(self) -> pd.DataFrame:
        """One row per run, cell by cell.

        Columns: the axes, `seed`, `status` (`finished`, `running`, `interrupted`, `failed`, or
        `missing` if it has not started), `error` (why it failed) and `folder` (relative to the
        grid's). Finished runs also have the figures that papers report: the primary metric in the
        last evaluated round (`last`), its `best` value and its mean over the last five evaluated
        rounds (`last5`; over all, if there are fewer), `total_bytes` (sent up and down), and with
        a target `rounds_to_target`, the first round that reached it, and `bytes_to_target`, the
        bytes sent by the end of that round (both NaN if none did). Every further score, such as
        those of `evaluate.metrics` and of explanations, has `<column>/last` and so on.
        """
        import pandas as pd

        rows = []
        for about, run in self._rows:
            row = {**about["cell"], "seed": about["seed"], **_how(about, run)}
            row["folder"] = about["folder"]
            if run is not None and row["status"] == "finished":
                target, others = self.manifest.get("target"), further(run)
                row |= of_run(run.rounds, run.primary_metric, target, others)
            rows.append(row)
        return pd.DataFrame(rows)

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row per round of each finished run.

        Columns: the axes, `seed`, and the columns of `Run.rounds`.
        """
        return self._table("rounds") if self._concluded else tidy(self._finished)

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row per cell, over the seeds that have finished.

        Columns: the axes, `seeds` (how many), and `<figure>_mean` and `<figure>_std` (sample
        standard deviation, ddof=1; NaN for one seed) for each figure in `cells`. With a target:
        `reached` (how many seeds reached it). With a baseline, for `last5`, or for `last` if runs
        evaluated fewer than five rounds: `difference_mean`, `difference_std`, `difference_low` and
        `difference_high` (95 % confidence interval), `p_value` (two-tailed t-test), `p_holm`
        (corrected for all cells) and `pairs` (seeds by which both are paired; 0 if they share
        none, and the test is Welch's). Every further score has these as `<column>/last_mean` and
        so on.
        """
        baseline = self.manifest.get("baseline")
        if self._concluded:
            found = self._table("summary")
            if baseline is None or "pairs" in found:  # else of before tests were paired
                return found
        return summarise_cells(self._finished, self.axes, baseline, self.manifest.get("target"))

    @property
    def _concluded(self) -> bool:
        """Whether its tables are up to date: not while it runs, or if a run was resumed alone."""
        if "summary.parquet" not in self._folder.files or self.status == "running":
            return False
        return all(about["status"] == _how(about, run)["status"] for about, run in self._rows)

    @cached_property
    def _rows(self) -> list[tuple[Mapping[str, Any], Run | None]]:
        paths = [(about, self.path / about["folder"]) for about in self.manifest["cells"]]
        return [(about, Run.open(path) if is_at(path) else None) for about, path in paths]

    @property
    def _finished(self) -> list[tuple[Mapping[str, Any], int, Run]]:
        rows = [(about["cell"], about["seed"], run) for about, run in self._rows if run]
        return [row for row in rows if row[-1].status == "finished"]


class Search(Sweep):
    """The results of a search. Loading it executes no code from its folder.

    The tables are written when the search ends or is interrupted; until then they are empty.

    Attributes:
        path: the search's folder.
        manifest: versions, hardware, status.
    """

    kind = "search"
    _folder_type = SearchFolder

    def __repr__(self) -> str:
        return f"<Search {str(self.path)!r}: {self.status}, {len(self.trials)} trials>"

    @property
    def objectives(self) -> dict[str, str]:
        """The objectives of the search: `max` or `min` for each column."""
        return dict(self.manifest["objectives"])

    @property
    def space(self) -> list[str]:
        """The tuned hyper-parameters, as `section.key`."""
        return list(self.manifest["space"])

    @cached_property
    def runs(self) -> list[Run]:
        paths = sorted((self.path / "trials").glob("*"))
        return [Run.open(path) for path in paths if is_at(path)]

    @cached_property
    def trials(self) -> pd.DataFrame:
        """One row per trial, in the order in which they were proposed.

        Columns: `trial` (its number), the hyper-parameters of `space`, `status` (`finished`,
        `stopped` early, `failed` or `missing`), the objectives in its last round, `rounds` (how
        many it completed), `error` (why it failed) and `folder` (of its run, relative to the
        search's).
        """
        return self._table("trials")

    @cached_property
    def pareto(self) -> pd.DataFrame:
        """The trials on the Pareto front: no other equals or betters them in every objective.

        With a single objective, the best trial.
        """
        return self._table("pareto")

    @cached_property
    def importance(self) -> pd.DataFrame:
        """The share of each objective's variance that a hyper-parameter explains, by fANOVA.

        Columns: `hyper-parameter`, and its share for each objective. The shares of an objective
        sum to 1; they are NaN if all trials have the same value.
        """
        return self._table("importance")

    @property
    def best(self) -> Experiment:
        """The best trial's experiment; with several objectives, the best by the first.

        Raises:
            RunFolderError: no trial has finished, or a component that the experiment names cannot
                be imported.
        """
        path = self.path / "best.yaml"
        if not path.exists():
            raise RunFolderError(f"{self.path}: no trial has finished; there is no best one yet")
        try:
            with importing(self._folder.trusted):
                return Experiment.load(path)
        except ExperimentError as error:
            raise RunFolderError(f"{path}: cannot be built: {error}") from error

    def study(self) -> optuna.Study:
        """The Optuna study, for Optuna's plots and tools."""
        require("optuna", "a search")
        import optuna

        return optuna.load_study(study_name=STUDY, storage=storage(self.path))


def best_trials(search: Search) -> pd.DataFrame:
    """The trials that are shown of a search: its Pareto front or five best, the best first."""
    several, trials = len(search.objectives) > 1, search.trials
    rows = search.pareto if several else trials[trials["status"] == "finished"]
    name, mode = next(iter(search.objectives.items()))
    rows = rows.sort_values(name, ascending=mode == "min", kind="stable")
    return rows if several else rows.head(5)


STUDY = "fedsim"  # the name of each search's study, in a storage of its own


def storage(path: Path) -> str:
    """Where the study of the search at `path` is, as Optuna takes it."""
    return f"sqlite:///{path}/study.db"


def _how(about: Mapping[str, Any], run: Run | None) -> dict[str, Any]:
    """`status` and `error` of a grid's run: the run knows better than the grid's manifest."""
    if run is None:
        return {"status": "missing", "error": about.get("error")}
    status, error = run.manifest["status"], run.manifest.get("error")
    if status == "running" and about["status"] == "failed":  # its process was killed
        return {"status": "failed", "error": about.get("error")}
    return {"status": status, "error": error}


@checked
def load(path: str | Path) -> Run | Grid | Search:
    """Load a run, a grid or a search from its folder, finished or not.

    No code from the folder is executed. Tables are read on first access.

    Args:
        path: the folder, or one above it (`runs/NAME`): the latest results below count.

    Raises:
        RunFolderError: it is not such a folder, or was written by another version.
    """
    folder = open_folder(path)
    if isinstance(folder, RunFolder):
        return Run(folder)
    return Grid(folder) if isinstance(folder, GridFolder) else Search(folder)
