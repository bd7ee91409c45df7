"""What papers report of many runs, from the tidy table of all their rounds."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy.stats import ttest_ind

from fedsim.results.run import Run

LAST = 5  # rounds that «mean of the last five» is the mean of


@dataclass(frozen=True)
class Score:
    """The number that models are judged by first: the higher the better, and at most 1.

    Attributes:
        column: of the table of rounds.
        words: what a person calls it.
    """

    column: str
    words: str


# Of a classification, of a regression. R² = 1 - Σ(y - ŷ)² / Σ(y - ȳ)² has no lower bound, and is
# NaN where all targets are the same.
SCORES = (Score("accuracy", "accuracy"), Score("r2", "R²"))


def scores_of(rounds: pd.DataFrame | Mapping[str, Any]) -> list[Score]:
    """The scores on record in a table of rounds, or in the row of one; a run has one at most."""
    return [s for s in SCORES if s.column in rounds and not np.all(pd.isna(rounds[s.column]))]


def score_of(rounds: pd.DataFrame | Mapping[str, Any]) -> Score | None:
    """The score on record in a run's table of rounds, or in the row of one, if there is any."""
    return next(iter(scores_of(rounds)), None)


def in_words(scores: Sequence[Score]) -> str:
    """What a person calls them; accuracy, as long as none is on record."""
    return " or ".join(score.words for score in scores or SCORES[:1])


def digits(score: float) -> str:
    """A score as a person reads it: four decimals, unless it is far from 0."""
    return f"{score:.4f}" if abs(score) < 1000 else f"{score:.6g}"


def tidy(
    runs: Sequence[tuple[Mapping[str, Any], int, Run]],
    table: Literal["rounds", "clients"] = "rounds",
) -> pd.DataFrame:
    """The tables of many runs as one.

    Args:
        runs: of each run its cell (a value for each axis), its seed, and the run.
        table: `rounds` or `clients`.

    Returns:
        A column for each axis, `seed`, and then the columns of the runs' own tables.
    """
    parts = []
    for cell, seed, run in runs:
        rows: pd.DataFrame = getattr(run, table)
        rows = rows.rename(columns={c: f"{c}_of_run" for c in rows if c in cell})
        keys = pd.DataFrame({**cell, "seed": seed}, index=rows.index)
        parts.append(pd.concat([keys, rows], axis=1))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def of_run(rounds: pd.DataFrame, target: float | None = None) -> dict[str, float]:
    """The figures of one run that papers report.

    Args:
        rounds: a row for each round; rounds without evaluation have no score.
        target: a score to be reached.

    Returns:
        The score in the last round (`last`), the `best`, the mean of the last five evaluated
        (`last5`); `total_bytes` sent both ways; with a target `bytes_to_target`, what had been
        sent by the end of the first round that reached it, NaN if none did.
    """
    sent = rounds["total_bytes_up"] + rounds["total_bytes_down"]
    score = score_of(rounds)
    scores = pd.Series(dtype=float) if score is None else rounds[score.column].dropna()
    found = dict.fromkeys(("last", "best", "last5"), np.nan)
    if len(scores):
        found = {
            "last": float(scores.iloc[-1]),
            "best": float(scores.max()),
            "last5": float(scores.iloc[-LAST:].mean()),
        }
    found["total_bytes"] = float(sent.iloc[-1])
    if target is not None:
        reached = scores.index[scores >= target]
        found["bytes_to_target"] = float(sent.loc[reached[0]]) if len(reached) else np.nan
    return found


def summarise(
    rounds: pd.DataFrame,
    axes: Sequence[str],
    baseline: Mapping[str, Any] | None = None,
    target: float | None = None,
) -> pd.DataFrame:
    """A row for each cell of a grid: mean and standard deviation over its seeds.

    Args:
        rounds: as `tidy` makes them.
        axes: the columns that say which cell a row belongs to.
        baseline: the values of some axes. Each cell is compared with the cell that has these
            values and is otherwise equal to it.
        target: a score, for `bytes_to_target`.

    Returns:
        The axes' columns, `seeds` (how many), `<figure>_mean` and `<figure>_std` for the figures
        of `of_run` (standard deviations of samples, ddof 1; NaN for a single seed); with a target
        `reached`, how many seeds reached it (the mean of bytes is over these); with a baseline
        `p_value` of the one-tailed Welch t-test that the mean of the last five rounds is greater
        than the baseline's.
    """
    if rounds.empty:
        return pd.DataFrame()
    by_run = pd.DataFrame(
        [
            {**_cell(axes, key), "seed": key[-1], **of_run(rows, target)}
            for key, rows in rounds.groupby([*axes, "seed"], sort=False)
        ]
    )
    groups = by_run.groupby(list(axes), sort=False) if axes else [((), by_run)]
    cells = [(_cell(axes, key), runs) for key, runs in groups]
    table = []
    for cell, runs in cells:
        row: dict[str, Any] = {**cell, "seeds": len(runs)}
        for figure in [c for c in by_run if c not in (*axes, "seed")]:
            row[f"{figure}_mean"] = runs[figure].mean()
            row[f"{figure}_std"] = runs[figure].std(ddof=1)
        if target is not None:
            row["reached"] = int(runs["bytes_to_target"].notna().sum())
        if baseline is not None:
            others = {**cell, **baseline}
            against = next((r for c, r in cells if c == others and c != cell), None)
            row["p_value"] = np.nan if against is None else _welch(runs["last5"], against["last5"])
        table.append(row)
    return pd.DataFrame(table)


def cell_label(cell: Mapping[str, Any]) -> str:
    """A cell in a few words: the method's bare name, and `key=value` for all else."""
    return ", ".join(
        str(value) if axis in ("method", "method.name") else f"{axis}={value}"
        for axis, value in cell.items()
    )


def _cell(axes: Sequence[str], key: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(axes, key, strict=False))


def _welch(runs: pd.Series[float], against: pd.Series[float]) -> float:
    """P-value of «the mean of these runs is not greater than that of the others»."""
    if min(len(runs), len(against)) < 2:
        return float("nan")  # no variance to be had of one run
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nearly equal seeds cost it precision
        test = ttest_ind(runs, against, equal_var=False, alternative="greater")
    return float(test.pvalue)
