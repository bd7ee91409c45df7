"""Running sweeps (grids and searches): creating, resuming and concluding them.

Each kind of sweep is a subclass of `SweepRunner`. `trials` runs trials on Ray Tune.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import pandas as pd

from fedsim.config.file import RawConfig, to_yaml
from fedsim.config.registry import Config, importing
from fedsim.data import Dataset
from fedsim.errors import ExperimentError, RunError, RunFolderError
from fedsim.experiment import Experiment
from fedsim.results.folder import ResultsFolder, new_path
from fedsim.results.sweeps import Sweep
from fedsim.support import atomic
from fedsim.sweep.trials import SweepPlan, run_trials

F = TypeVar("F", bound=Sweep)
S = TypeVar("S", bound=Config)


class SweepRunner(ABC, Generic[F]):
    """A grid or a search, as an experiment file describes it, and what runs it.

    Raises:
        ExperimentError: the section, or an experiment that follows from it, does not fit the
            schema.
    """

    folder_type: type[ResultsFolder]
    results: type[F]
    command: str  # of fedsim that runs it
    name: str
    experiments: list[Experiment]  # of its runs, or representative ones

    @abstractmethod
    def __init__(self, config: RawConfig) -> None:
        self.loaded: dict[str, Dataset] = {}  # by planning it, by `data_key`

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """The content of its manifest at the start."""

    @abstractmethod
    def plan(self, path: Path) -> SweepPlan:
        """Its trials, for the path of its folder."""

    @abstractmethod
    def tuning(self, path: Path, plan: SweepPlan) -> tuple[dict[str, Any], dict[str, Any]]:
        """The space of missing trials, and further settings of Tune."""

    @abstractmethod
    def conclude(
        self, folder: ResultsFolder, plan: SweepPlan, errors: Mapping[Path, str]
    ) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
        """Its tables, and entries of the manifest about its end.

        `errors` are of trials that failed in this session, by path.
        """

    @classmethod
    def run(
        cls,
        config: RawConfig,
        out: str | Path = "runs",
        tell: Callable[[str], None] = lambda _: None,
        on_start: Callable[[F], None] = lambda _: None,
    ) -> F:
        """Run a sweep; see `fedsim.grid` and `fedsim.tune`."""
        sweep = cls(config)
        path = new_path(out, sweep.name).absolute()
        with ExitStack() as held:

            def begin() -> None:
                facts = {"started_in": str(config.folder), **sweep.facts()}
                folder = sweep.folder_type.make(path, to_yaml(config.content), facts)
                held.enter_context(folder.alone())
                on_start(sweep.results(folder))

            return sweep._run(path, begin, tell)

    @classmethod
    def resume(
        cls,
        path: str | Path,
        tell: Callable[[str], None] = lambda _: None,
        on_start: Callable[[F], None] = lambda _: None,
    ) -> F:
        """Resume a sweep: only missing and failed trials are run; see `fedsim.resume`."""
        with cls.folder_type.open(path).alone():
            folder = cls.folder_type.open(path)
            if folder.manifest["status"] == "finished":
                raise RunFolderError(f"{folder.path}: the {folder.kind} is finished")
            for line in folder.repaired:
                tell(line)
            config = RawConfig.read(folder.path / "experiment.yaml")
            started_in = Path.cwd() / folder.manifest.get("started_in", "")
            with importing(folder.trusted):
                sweep = cls(replace(config, folder=started_in))

            def begin() -> None:
                folder.update(status="running", **sweep.facts())
                on_start(sweep.results(folder))

            return sweep._run(folder.path, begin, tell)

    def _run(self, path: Path, begin: Callable[[], None], tell: Callable[[str], None]) -> F:
        plan = self.plan(path)
        errors: dict[Path, str] = {}
        if plan.finished < plan.count:
            try:
                tuning = partial(self.tuning, path, plan)
                errors = run_trials(plan, path, begin, tuning, tell, self.loaded)
            except RunError:
                self.folder_type.open(path).update(status="failed")
                raise
        folder = self.folder_type.open(path)
        tables, facts = self.conclude(folder, plan, errors)
        with folder.writing():
            files = write_tables(path, tables)
        folder.update(files=files, **facts)
        if folder.manifest["status"] == "interrupted":  # Ray Tune ends its trials at Ctrl-C
            raise KeyboardInterrupt
        return self.results(folder)


def read_section(config: RawConfig, name: str, schema: type[S]) -> tuple[S, RawConfig]:
    """The section of a sweep, and the experiment file without it."""
    if name not in config.content:
        others = {"grid": "grid", "search": "tune"}
        command = next((others[each] for each in others if each in config.content), "run")
        raise ExperimentError(
            f"{config.where(())}: has no {name} section; run it with: fedsim {command} "
            f"{config.where(())}"
        )
    return config.build(schema, name), config.take(name)[1]


def write_tables(path: Path, tables: Mapping[str, pd.DataFrame]) -> dict[str, str]:
    """Write tables as Parquet, and small ones also as CSV; the checksums of the Parquet files."""
    checksums = {}
    for name, table in tables.items():
        file = path / f"{name}.parquet"
        with atomic.replacing(file) as aside:
            table.to_parquet(aside)
        checksums[file.name] = atomic.checksum(file)
        if name != "rounds":
            with atomic.replacing(path / f"{name}.csv") as aside:
                table.to_csv(aside, index=False)
    return checksums
