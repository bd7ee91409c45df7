"""What scripts of experiments have in common: grids that are run or done, means, tests, tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

import fedsim
from fedsim import Grid
from fedsim.config.file import RawConfig
from fedsim.results.significance import Difference, holm, paired, shown_p


def parser(about: str | None) -> argparse.ArgumentParser:
    """Of the command line that all of them have."""
    made = argparse.ArgumentParser(description=about)
    made.add_argument("names", nargs="*", default=[], help="grids; by default all")
    made.add_argument("--out", type=Path, default=Path("runs"), help="where runs lie")
    made.add_argument("--done", type=Path, nargs="+", help="finished grids to tabulate")
    return made


def grids(
    arguments: argparse.Namespace,
    folder: Path,
    names: Iterable[str],
    change: Callable[[RawConfig], RawConfig] = lambda sheet: sheet,
) -> dict[str, list[Grid]]:
    """The grids of each name: those given as done, or else those asked for, which are run.

    Args:
        arguments: of `parser`.
        folder: of the experiment; its grids are small/NAME.yaml, and called "folder-NAME".
        names: of all of them.
        change: of a file before it is run.
    """
    found: dict[str, list[Grid]] = {}
    if arguments.done:
        for grid in map(Grid.open, arguments.done):
            name = str(grid.manifest["name"]).removeprefix(f"{folder.name}-")
            found.setdefault(name, []).append(grid)
        return found
    sheets = {
        name: change(RawConfig.read(folder / "small" / f"{name}.yaml"))
        for name in arguments.names or names
    }  # all of them before the first is run, so that what is missing is said at once
    return {
        name: [fedsim.grid(sheet, out=arguments.out, progress=print)]
        for name, sheet in sheets.items()
    }


def finished(grids: Iterable[Grid]) -> Iterator[tuple[dict[str, Any], fedsim.Run]]:
    """What was varied in each finished run, its seed with it, and the run; of twins the last."""
    cells: dict[tuple[Any, ...], tuple[Grid, dict[str, Any]]] = {}
    for grid in grids:
        for entry in grid.manifest["cells"]:
            if entry["status"] == "finished":
                cells[(*entry["cell"].items(), entry["seed"])] = (grid, entry)
    for grid, entry in cells.values():
        yield {**entry["cell"], "seed": entry["seed"]}, fedsim.load(grid.path / entry["folder"])


def tested(differences: Mapping[str, Difference]) -> dict[str, list[str]]:
    """Cells of a table: each difference with its interval, p by Holm, what is detectable."""
    corrected = holm(each.p() for each in differences.values())
    return {
        name: [str(each), shown_p(p), f"{each.detectable:.3f}"]
        for (name, each), p in zip(differences.items(), corrected, strict=True)
    }


def against(results: pd.DataFrame, ours: str, column: str = "accuracy") -> dict[str, list[str]]:
    """Of each other method: ours less theirs with its interval, p by Holm, what is detectable.

    Args:
        results: rows with `method`, `seed` and the column.
    """
    by_seed = results.pivot(index="seed", columns="method", values=column)
    others = [str(name) for name in results["method"].unique() if name != ours]
    return tested({name: paired(by_seed[ours], by_seed[name]) for name in others})


def spread(values: pd.Series, digits: int = 3) -> str:
    """Mean ± standard deviation."""
    values = values.dropna()
    if not len(values):
        return "–"
    std = f" ± {values.std():.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():z.{digits}f}{std}".replace("-", "−")


def table(header: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    lines = ["| " + " | ".join(header) + " |", "| --- " * len(header) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
