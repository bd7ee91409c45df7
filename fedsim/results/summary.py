"""What papers report of many runs, from the tidy table of all their rounds."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedsim.objectives import Metric
from fedsim.results.run import Run

if TYPE_CHECKING:  # it takes long to import, and so does scipy.stats: only where they are needed
    import pandas as pd

LAST = 5  # rounds that «mean of the last five» is the mean of


def in_words(metrics: Sequence[Metric]) -> str:
    """What a person calls them."""
    return " or ".join(metric.label for metric in metrics) or "score"


def sign(metric: Metric) -> int:
    """1 if much is good, -1 if little is: of scores times it the greatest is the best."""
    return 1 if metric.best == "max" else -1


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
    import pandas as pd

    parts = []
    for cell, seed, run in runs:
        rows: pd.DataFrame = getattr(run, table)
        rows = rows.rename(columns={c: f"{c}_of_run" for c in rows if c in cell})
        keys = pd.DataFrame({**cell, "seed": seed}, index=rows.index)
        parts.append(pd.concat([keys, rows], axis=1))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def of_run(rounds: pd.DataFrame, metric: Metric, target: float | None = None) -> dict[str, float]:
    """The figures of one run that papers report.

    Args:
        rounds: a row for each round; rounds without evaluation have no score.
        metric: what is reported.
        target: a score to be reached.

    Returns:
        The score in the last round (`last`), the `best`, the mean of the last five evaluated
        (`last5`); `total_bytes` sent both ways; with a target `bytes_to_target`, what had been
        sent by the end of the first round that reached it, NaN if none did.
    """
    sent = rounds["total_bytes_up"] + rounds["total_bytes_down"]
    known = metric.column in rounds
    scores = rounds[metric.column].dropna() if known else sent[:0]
    found = dict.fromkeys(("last", "best", "last5"), np.nan)
    if len(scores):
        found = {
            "last": float(scores.iloc[-1]),
            "best": float(scores.max() if metric.best == "max" else scores.min()),
            "last5": float(scores.iloc[-LAST:].mean()),
        }
    found["total_bytes"] = float(sent.iloc[-1])
    if target is not None:
        reached = scores.index[scores >= target if metric.best == "max" else scores <= target]
        found["bytes_to_target"] = float(sent.loc[reached[0]]) if len(reached) else np.nan
    return found


def summarise(
    runs: Sequence[tuple[Mapping[str, Any], int, Run]],
    axes: Sequence[str],
    baseline: Mapping[str, Any] | None = None,
    target: float | None = None,
) -> pd.DataFrame:
    """A row for each cell of a grid: mean and standard deviation over its seeds.

    Args:
        runs: as `tidy` takes them. Each is reported by its primary metric; those without a round
            are left out.
        axes: what cells have values of.
        baseline: the values of some axes. Each cell is compared with the cell that has these
            values and is otherwise equal to it.
        target: a score, for `bytes_to_target`.

    Returns:
        The axes' columns, `seeds` (how many), `<figure>_mean` and `<figure>_std` for the figures
        of `of_run` (standard deviations of samples, ddof 1; NaN for a single seed); with a target
        `reached`, how many seeds reached it (the mean of bytes is over these); with a baseline
        `p_value` of the one-tailed Welch t-test that the mean of the last five rounds is better
        than the baseline's.
    """
    import pandas as pd

    by_cell: dict[tuple[Any, ...], list[Run]] = {}
    for cell, _, run in runs:
        if len(run.rounds):
            by_cell.setdefault(tuple(cell[axis] for axis in axes), []).append(run)
    metrics = {key: of_cell[0].primary_metric for key, of_cell in by_cell.items()}
    by_run = {
        key: pd.DataFrame([of_run(run.rounds, metrics[key], target) for run in of_cell])
        for key, of_cell in by_cell.items()
    }
    table = []
    for key, figures in by_run.items():
        cell = dict(zip(axes, key, strict=True))
        row: dict[str, Any] = {**cell, "seeds": len(figures)}
        for figure, values in figures.items():
            row[f"{figure}_mean"] = values.mean()
            row[f"{figure}_std"] = values.std(ddof=1)
        if target is not None:
            row["reached"] = int(figures["bytes_to_target"].notna().sum())
        if baseline is not None:
            other = tuple({**cell, **baseline}[axis] for axis in axes)
            tested = other != key and metrics.get(other) == metrics[key]
            row["p_value"] = (
                _welch(figures["last5"], by_run[other]["last5"], metrics[key])
                if tested
                else np.nan
            )
        table.append(row)
    return pd.DataFrame(table)


def cell_label(cell: Mapping[str, Any]) -> str:
    """A cell in a few words: the method's bare name, and `key=value` for all else."""
    return ", ".join(
        str(value) if axis in ("method", "method.name") else f"{axis}={value}"
        for axis, value in cell.items()
    )


def _welch(runs: pd.Series[float], against: pd.Series[float], metric: Metric) -> float:
    """P-value of «the mean of these runs is not better than that of the others»."""
    if min(len(runs), len(against)) < 2:
        return float("nan")  # no variance to be had of one run
    from scipy.stats import ttest_ind

    better = "greater" if metric.best == "max" else "less"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nearly equal seeds cost it precision
        test = ttest_ind(runs, against, equal_var=False, alternative=better)
    return float(test.pvalue)
