"""Start grids and searches, and resume what was interrupted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.config.arguments import checked
from fedsim.config.file import RawConfig
from fedsim.experiment import plain
from fedsim.launch import run as launch
from fedsim.launch.progress import LineProgress
from fedsim.results.folder import RunFolder
from fedsim.results.run import Run
from fedsim.results.sweeps import Grid, Search, open_folder

# Ray Tune and Optuna take a second to import, so they are imported in functions.


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
    from fedsim.sweep.grid import GridSweep

    with LineProgress(progress) as shown:
        return GridSweep.run(_content(experiment, overrides), out, shown, on_start)


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
        experiment: an experiment file with a `search` section, or its content as nested dicts,
            which may hold objects as `Experiment` takes them.
        overrides: `section.key=value`, or a dict of values by `section.key`, which win over
            the file.
        out: the folder below which the search's own is made: `<out>/<name>/<id>`.
        progress: True shows a bar in a terminal or a notebook, False nothing; a function is called
            with a line for each trial that ends.
        on_start: called with the search before its first trial.

    Returns:
        The search, loaded. A failed trial is a row of `Search.trials` with the reason.

    Raises:
        BadInput: the search is invalid; nothing was started or written.
        RunError: there are no results, or they cannot be written.
    """
    from fedsim.sweep.search import SearchSweep

    with LineProgress(progress) as shown:
        return SearchSweep.run(_content(experiment, overrides), out, shown, on_start)


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
    path = folder.path
    if isinstance(folder, RunFolder):
        return launch.resume(path, progress, on_start)
    with LineProgress(progress) as shown:
        if isinstance(folder, Grid):
            from fedsim.sweep.grid import GridSweep

            return GridSweep.resume(path, shown, on_start)
        from fedsim.sweep.search import SearchSweep

        return SearchSweep.resume(path, shown, on_start)


def _content(
    given: str | Path | Mapping[str, Any] | RawConfig,
    overrides: Sequence[str] | Mapping[str, Any],
) -> RawConfig:
    overrides = plain(overrides)
    if isinstance(given, str | Path):
        return RawConfig.read(given, overrides)
    if not isinstance(given, RawConfig):
        given = RawConfig(plain(given))
    return given.overridden(overrides)
