"""Tune several methods with the same budget of trials: two grids whose cells are the trials.

All trials of a method are run with one seed, and the best three of them with two further seeds;
the best of these on average is chosen, where a run that diverged counts as 0. (With one seed, the
best of many trials tends to be a lucky one, or close to diverging.) No table has these seeds. The
score of a run is the mean of a metric over its last evaluated rounds, five unless stated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

import fedsim
from fedsim import Grid
from fedsim.config.file import RawConfig

SEED, FURTHER = 100, (101, 102)
FINALISTS = 3

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


def search(
    sheet: RawConfig, cells: Mapping[str, Mapping[str, Any]], seeds: Sequence[int], out: Path
) -> Grid:
    """Run trials, as changes of one experiment."""
    grid = {"axes": {"trial": cells}, "seeds": list(seeds)}
    return fedsim.grid({**sheet.content, "grid": grid}, out=out, progress=print)


def scores(grid: Grid, metric: str, last: int) -> pd.DataFrame:
    """A row for each run: trial, seed, score and hash; 0 and no hash if it diverged."""
    rows = []
    for entry in grid.manifest["cells"]:
        score, hash = 0.0, None
        if entry["status"] == "failed":
            assert "diverged" in entry["error"], entry
        else:
            assert entry["status"] == "finished", entry
            run = fedsim.load(grid.path / entry["folder"])
            score, hash = run.rounds[metric].dropna().iloc[-last:].mean(), run.result_hash
        rows.append([entry["cell"]["trial"], entry["seed"], score, hash])
    return pd.DataFrame(rows, columns=["trial", "seed", metric, "result_hash"])


def method_of(trial: str) -> str:
    """The name of its method, which its number follows."""
    return trial.rpartition(" ")[0]


def best(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The trial of each method that is best on average over all seeds: its rows."""
    every = table[table.groupby("trial")["seed"].transform("count") == 1 + len(FURTHER)]
    means = every.groupby(["method", "trial"], sort=False)[metric].mean()
    chosen = [trial for _, trial in means.groupby("method", sort=False).idxmax()]
    return every[every["trial"].isin(chosen)]


def tune(
    about: str | None,
    file: Path,
    changes: Mapping[str, Any],
    spaces: Mapping[str, Space],
    metric: str,
    last: int = 5,
) -> None:
    """The script: run the trials or open finished grids, write all scores, print the best.

    Args:
        about: what the command line says of itself.
        file: small/NAME.yaml; the scores are written to results/tuning.csv beside small/.
        changes: of the experiment, for all trials.
        spaces: of each method; the same number of trials for all.
        metric: column of `rounds`, higher is better.
        last: number of evaluated rounds, at the end of a run, whose mean is its score.
    """
    cells = {f"{name} {k}": c for name, s in spaces.items() for k, c in enumerate(trials(s))}
    assert len({len(list(trials(space))) for space in spaces.values()}) == 1
    command = argparse.ArgumentParser(description=about)
    command.add_argument("overrides", nargs="*", help="KEY=VALUE, for all trials")
    command.add_argument("--out", type=Path, default=Path("runs"), help="where runs lie")
    command.add_argument("--done", type=Path, nargs="+", help="a finished grid, or both")
    arguments = command.parse_args()
    _, sheet = RawConfig.read(file, arguments.overrides).take("grid")
    sheet = sheet.changed(changes, "tune.py")
    done = [Grid.open(path) for path in arguments.done or ()]

    first = scores(done[0] if done else search(sheet, cells, [SEED], arguments.out), metric, last)
    ranked = first.sort_values(metric, ascending=False, kind="stable")
    finalists = ranked.groupby(ranked["trial"].map(method_of)).head(FINALISTS)["trial"]
    again = {trial: cells[trial] for trial in cells if trial in set(finalists)}
    second = done[1] if done[1:] else search(sheet, again, FURTHER, arguments.out)
    table = pd.concat([first, scores(second, metric, last)], ignore_index=True)
    table["method"] = table["trial"].map(method_of)
    table["changes"] = [json.dumps(cells[trial]) for trial in table["trial"]]
    table = table[["method", "trial", "changes", "seed", metric, "result_hash"]]
    table.to_csv(file.parents[1] / "results" / "tuning.csv", index=False, float_format="%.6g")
    for trial, runs in best(table, metric).groupby("trial", sort=False):
        print(f"{trial}: {runs['changes'].iloc[0]}  {runs[metric].mean():.3f}")
