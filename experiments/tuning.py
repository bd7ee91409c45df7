"""Tune several methods with the same budget of trials: a grid whose cells are the trials.

Trials have a seed that no table has. One is scored by the mean of a metric over its last five
evaluated rounds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
from tables import finished

import fedsim
from fedsim import Grid
from fedsim.config_file import RawConfig

SEED = 100  # of no table

# What is fixed, and the axes that are tuned; an axis of several keys has tuples of values.
Space = tuple[Mapping[str, Any], Mapping[str, tuple[Any, ...]]]


def trials(space: Space) -> Iterator[dict[str, Any]]:
    """The changes of each trial: all combinations of the axes' values."""
    fixed, axes = space
    for values in product(*axes.values()):
        changes = dict(fixed)
        for keys, value in zip(axes, values, strict=True):
            several = keys.split(",")
            changes |= zip(several, value if len(several) > 1 else (value,), strict=True)
        yield changes


def search(sheet: RawConfig, spaces: Mapping[str, Space], out: Path) -> Grid:
    """Run the trials of all methods, as changes of one experiment."""
    cells = {}
    for name, space in spaces.items():
        for number, changes in enumerate(trials(space)):
            cells[f"{name} {number}"] = changes
    grid = {"axes": {"trial": cells}, "seeds": [SEED]}
    return fedsim.grid({**sheet.content, "grid": grid}, out=out, progress=print)


def scores(grid: Grid, spaces: Mapping[str, Space], metric: str) -> pd.DataFrame:
    """A row for each trial; one that diverged has no score."""
    found = {}
    for cell, run in finished([grid]):
        values = run.rounds[metric].dropna()
        found[cell["trial"]] = values.iloc[-5:].mean(), run.result_hash
    rows = []
    for name, space in spaces.items():
        for number, changes in enumerate(trials(space)):
            score, hash = found.get(f"{name} {number}", (None, None))
            rows.append([name, json.dumps(changes), score, hash])
    return pd.DataFrame(rows, columns=["method", "changes", metric, "result_hash"])


def tune(
    about: str | None,
    file: Path,
    changes: Mapping[str, Any],
    spaces: Mapping[str, Space],
    metric: str,
) -> None:
    """The script: run the trials or open a finished grid, write all scores, print the best.

    Args:
        about: what the command line says of itself.
        file: small/NAME.yaml; the scores are written to results/tuning.csv beside small/.
        changes: of the experiment, for all trials.
        spaces: of each method; the same number of trials for all.
        metric: column of `rounds`, higher is better.
    """
    assert len({len(list(trials(space))) for space in spaces.values()}) == 1
    command = argparse.ArgumentParser(description=about)
    command.add_argument(
        "overrides", nargs="*", help="KEY=VALUE, for all trials"
    )
    command.add_argument("--out", type=Path, default=Path("runs"), help="where runs lie")
    command.add_argument("--done", type=Path, help="a finished grid to score")
    arguments = command.parse_args()
    if arguments.done:
        grid = Grid.open(arguments.done)
    else:
        _, sheet = RawConfig.read(file, arguments.overrides).take("grid")
        grid = search(sheet.changed(changes, "tune.py"), spaces, arguments.out)
    table = scores(grid, spaces, metric)
    table.to_csv(file.parents[1] / "results" / "tuning.csv", index=False, float_format="%.6g")
    for name, own in table.dropna().groupby("method", sort=False):
        best = own.loc[own[metric].idxmax()]
        print(f"{name}: {best['changes']}  {best[metric]:.3f}")
