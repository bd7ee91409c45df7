"""Start grids and searches, and resume what was interrupted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.config.arguments import checked
from fedsim.config.file import RawConfig
from fedsim.experiment import plain
from fedsim.launch import run as launch
from fedsim.launch.progress import LineProgress
from fedsim.results.folder import RunFolder, open_folder
from fedsim.results.run import Run
from fedsim.results.sweeps import Grid, Search

if TYPE_CHECKING:
    from fedsim.sweep.sweep import SweepRunner


@checked
def grid(
    experiment: str | Path | Mapping[str, Any] | RawConfig,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    out: str | Path = "runs",
    progress: bool | Callable[[str], None] = True,
    on_start: Callable[[Grid], None] = lambda _: None,
) -> Grid:
    """Run every cell of a grid with every seed, several runs at a time.

    Args:
        experiment: an experiment file with a `grid` section, or its content as nested dicts,
            which may hold objects as `Experiment` takes them.
        overrides: `section.key=value`, or a dict of values by `section.key`, which win over
            the file.
        out: the folder below which the grid's own is made: `<out>/<name>/<id>`.
        progress: True shows a bar in a terminal or a notebook, False nothing; a function is called
            with a line for each run that ends.
        on_start: called with the grid before its first run.

    Returns:
        The grid, loaded. A failed run is a row of `Grid.cells` with the reason.

    Raises:
        BadInput: the grid is invalid; nothing was started or written.
        RunError: there are no results, or they cannot be written.
    """
    done: Grid = _run("grid", experiment, overrides, out, progress, on_start)
    return done


@checked
def tune(
    experiment: str | Path | Mapping[str, Any] | RawConfig,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    out: str | Path = "runs",
    progress: bool | Callable[[str], None] = True,
    on_start: Callable[[Search], None] = lambda _: None,
) -> Search:
    """Tune the hyper-parameters of a search, several trials at a time.

    Args:
        experiment: an experiment file with a `search` section, or its content.
        overrides, out, progress, on_start: as of `grid`, with trials for runs.

    Returns:
        The search, loaded. A failed trial is a row of `Search.trials` with the reason.

    Raises:
        BadInput: the search is invalid; nothing was started or written.
        RunError: there are no results, or they cannot be written.
    """
    done: Search = _run("search", experiment, overrides, out, progress, on_start)
    return done


@checked
def resume(
    path: str | Path,
    progress: bool | Callable[[Any], None] = True,
    on_start: Callable[[Any], None] = lambda _: None,
) -> Run | Grid | Search:
    """Continue an interrupted run, grid or search.

    A run continues from its last checkpoint, and its result is the same as without the
    interruption. Of a grid or a search, only runs that are missing or failed are started.

    Args:
        path: the folder of the run, grid or search, or one above it (`runs/NAME`): the latest
            below counts.
        progress: as for `fedsim.run`, `fedsim.grid` and `fedsim.tune`.
        on_start: called with the run, grid or search before work continues.

    Raises:
        BadInput: the folder holds no run, grid or search, was edited or is finished, or its data
            changed.
        RunError: it failed again.
    """
    folder = open_folder(path)
    if isinstance(folder, RunFolder):
        return launch.resume(folder.path, progress, on_start)
    with LineProgress(progress) as shown:
        done: Grid | Search = _sweep(folder.kind).resume(folder.path, shown, on_start)
        return done


def sweep_of(config: RawConfig) -> SweepRunner[Any] | None:
    """The grid or the search of an experiment file; None of one that is a single run.

    Raises:
        ExperimentError: it does not fit the schema.
    """
    kinds = (kind for kind in ("grid", "search") if kind in config.content)
    return next((_sweep(kind)(config) for kind in kinds), None)


def _sweep(kind: str) -> type[SweepRunner[Any]]:
    # Ray Tune and Optuna take a second to import.
    if kind == "grid":
        from fedsim.sweep.grid import GridSweep

        return GridSweep
    from fedsim.sweep.search import SearchSweep

    return SearchSweep


def _run(
    kind: str,
    given: str | Path | Mapping[str, Any] | RawConfig,
    overrides: Sequence[str] | Mapping[str, Any],
    out: str | Path,
    progress: bool | Callable[[str], None],
    on_start: Callable[[Any], None],
) -> Any:
    overrides = plain(overrides)
    if isinstance(given, str | Path):
        config = RawConfig.read(given, overrides)
    else:
        config = given if isinstance(given, RawConfig) else RawConfig(plain(given))
        config = config.overridden(overrides)
    with LineProgress(progress) as shown:
        return _sweep(kind).run(config, out, shown, on_start)
