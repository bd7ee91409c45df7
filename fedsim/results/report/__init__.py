"""The report: runs and grids on one self-contained HTML page."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.config.arguments import checked
from fedsim.errors import BadInput, Damaged, RunError
from fedsim.results.manifest import meant
from fedsim.support import atomic

if TYPE_CHECKING:  # it imports pandas and matplotlib, which take long
    from fedsim.results.report.html import Report

INTERVAL = 5  # seconds between two looks at what is watched
_PATIENCE = 5  # looks in a row at a folder that is being written to

__all__ = ["report"]


@checked
def report(
    *folders: str | Path,
    out: str | Path | None = None,
    rows: str | None = None,
    columns: str | None = None,
    metric: str | Sequence[str] = (),
    latex: str | Path | None = None,
    csv: str | Path | None = None,
    figures: str | Path | None = None,
    figure: str | Sequence[str] = (),
    watch: bool = False,
) -> Path:
    """Write a report: one web page with the curves, tables and settings of runs.

    Args:
        folders: folders of runs, grids and searches, or one above (`runs/NAME`): the latest below
            counts. Several are compared.
        out: path of the page. By default `report.html`, in the folder if there is only one.
        rows, columns: the two axes of a results table such as methods × α, given by key
            (`partition.alpha`), symbol (`α`) or last part (`alpha`). By default, the axes of a
            grid with two varying axes, with methods as rows.
        metric: a score, or several, that are shown instead of all on record, as columns of
            `rounds` (`macro_f1`, `gradient/deletion`, `client_accuracy`). Runs are judged by the
            first; by default by their primary metric.
        latex: also write the results tables as LaTeX to this file; they need the package booktabs.
        csv: also write the summary as CSV to this file: one row per cell, in full precision. If
            `rows` or `columns` are given, the results table instead, one line per table row.
        figures: folder to write each figure to as PDF and PNG, sized for one column of a paper.
        figure: a figure, or several, that are written to `figures` instead of all, by the names
            of their files, or how these begin (`test-accuracy-by-round`, `test-accuracy`).
        watch: rewrite the page every few seconds, until nothing is marked as running or Ctrl-C
            (KeyboardInterrupt) is pressed. An open browser tab updates itself.

    Returns:
        The path of the page.

    Raises:
        RunFolderError: a folder does not hold a run, a grid or a search, or there are no results
            to write to a table or a figure.
        BadInput: there is no axis with the name given as `rows` or `columns`, no such score, or
            no such figure.
        RunError: a file cannot be written.

    Example:
        >>> run = fedsim.run(experiment, out=folder)
        >>> page = fedsim.report(run.path, latex=folder / "table.tex")
        >>> page.name
        'report.html'
    """
    from fedsim.results.report.html import Report

    if not folders:
        raise BadInput("give at least one folder to report")
    folders = tuple(map(meant, folders))
    page = Path(out or Path(folders[0] if len(folders) == 1 else "", "report.html"))
    metrics = [metric] if isinstance(metric, str) else list(metric)
    names = [figure] if isinstance(figure, str) else list(figure)
    if names and figures is None:
        raise BadInput("figure: says what is written to a folder; name it by figures")

    def look() -> Report:
        return Report(folders, rows=rows, columns=columns, metrics=metrics)

    found = look()
    if watch and found.compared.unfinished:
        found = _watch(page, found, look)
    drawings = {} if figures is None else found.figures(names)
    _write(page, found.html())
    if latex is not None:
        _write(Path(latex), found.latex())
    if csv is not None:
        _write(Path(csv), found.csv())
    if figures is not None:
        try:
            Path(figures).mkdir(parents=True, exist_ok=True)
            for name, drawing in drawings.items():
                drawing.save(Path(figures, name))
        except OSError as error:
            raise RunError(f"{error.filename}: cannot be written: {error.strerror}") from error
    return page


def _watch(page: Path, found: Report, look: Callable[[], Report]) -> Report:
    """Write the page again and again, until nothing is marked as running; what was found last."""
    failed = 0
    try:
        while found.compared.unfinished:
            try:
                _write(page, found.html(refresh=INTERVAL))
                time.sleep(INTERVAL)
                found, failed = look(), 0
            except Damaged:  # a run has moved its files meanwhile
                failed += 1
                if failed == _PATIENCE:
                    raise
    except KeyboardInterrupt:
        pass  # that is how one stops watching
    return found


def _write(path: Path, text: str) -> None:
    try:
        with atomic.named(path) as aside:
            aside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from error
