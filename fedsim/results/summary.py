"""What papers report of many runs, from the tidy table of all their rounds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedsim.config_file import RawConfig
from fedsim.objectives import VALIDATION, Metric
from fedsim.results.run import Run

if TYPE_CHECKING:  # it takes long to import, and so does scipy.stats: only where they are needed
    import pandas as pd

CLOCK = "total_simulated_seconds"  # a column of rounds with simulated devices
LAST = 5  # rounds that the mean of the last five is taken over
Compared = Literal["last5", "last"]


def in_words(metrics: Sequence[Metric]) -> str:
    """What a person calls them."""
    return " or ".join(metric.label for metric in metrics) or "score"


def sign(metric: Metric) -> int:
    """1 if much is good, -1 if little is: of scores times it the greatest is the best."""
    return 1 if metric.best == "max" else -1


def digits(score: float) -> str:
    """A score as a person reads it: four decimals, unless it is far from 0."""
    return f"{score:.4f}" if abs(score) < 1000 else f"{score:.6g}"


def mean_std(means: Iterable[float], stds: Iterable[float]) -> list[str]:
    """A column of means and standard deviations as papers print it: rounded to the same decimals.

    They are as many as two digits of the smallest deviation take, at most four. A deviation too
    small for four decimals is written `<0.0001`. A mean without a deviation (NaN) stands alone; a
    column without any is rounded by `digits`.
    """
    pairs = list(zip(means, stds, strict=True))
    found = [std for _, std in pairs if np.isfinite(std)]
    decimals = max((_decimals(std) for std in found), default=None)

    def text(number: float) -> str:
        if decimals is None or not abs(number) < 1e6:
            return digits(number)
        return f"{number:.{decimals}f}"

    return [
        text(mean) + (f" ± {'<0.0001' if std < 5e-5 else text(std)}" if np.isfinite(std) else "")
        for mean, std in pairs
    ]


def _decimals(std: float) -> int:
    """How many show two digits of a deviation, at most four."""
    return 4 if std < 5e-5 else min(max(1 - math.floor(math.log10(std)), 0), 4)


def aligned(values: Iterable[Any]) -> list[str]:
    """A column as a person reads it: its numbers with the same decimals, four or five digits.

    If two digits of the smallest need more decimals than that (learning rates), each number has
    four digits of its own.
    """
    values = list(values)
    numbers = [v for v in values if isinstance(v, float)]
    sizes = [abs(v) for v in numbers if v and math.isfinite(v)]
    if not sizes:
        decimals = 0
    else:
        largest, smallest = (math.floor(math.log10(of(sizes))) for of in (max, min))
        most = max(4 - largest if largest >= 0 else 3 - largest, 0)
        if largest > 5 or most < 1 - smallest:
            return [f"{v:.4g}" if isinstance(v, float) else str(v) for v in values]
        ends = (f"{v:.{most}f}".partition(".")[2].rstrip("0") for v in numbers)
        decimals = max(map(len, ends))
    return [f"{v:.{decimals}f}" if isinstance(v, float) else str(v) for v in values]


def chosen_by(rounds: pd.DataFrame, metric: Metric) -> str:
    """The column by which the best round is chosen: of the validation set, if there is one."""
    column = VALIDATION + metric.column
    return column if column in rounds else metric.column


def best_round(rounds: pd.DataFrame, metric: Metric) -> int | None:
    """The row of the best round, the first of equals; None if no round was evaluated.

    Args:
        rounds: a run's table.
        metric: by which it is judged: on the validation set, if there is one, or else on the test
            set.
    """
    column = chosen_by(rounds, metric)
    if column not in rounds:
        return None
    scores = sign(metric) * rounds[column].to_numpy(dtype=float)
    return None if np.isnan(scores).all() else int(np.nanargmax(scores))


def further_scores(run: Run) -> dict[str, float]:
    """The last scores of the run's `evaluate.metrics`, by label; the accuracy of each class is not
    among them.
    """
    content = RawConfig.read(run.path / "experiment.yaml").content  # which imports no metric
    labels = {metric.column: metric.label for metric in run.metrics}
    found = {}
    for name in content.get("evaluate", {}).get("metrics", ()):
        _, own, metric = name.rpartition(":")
        for column in map(str, run.rounds):
            if column == metric or (own and column.startswith(f"{metric}/")):
                scores = run.rounds[column].dropna()
                if len(scores):
                    found[labels.get(column, column)] = float(scores.iloc[-1])
    return found


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
        The score in the last round (`last`), that in the best (`best`; see `best_round`), the
        mean of the last five evaluated, or of all if there are fewer (`last5`); `total_bytes`
        sent both ways; with a target `rounds_to_target`, the first round that reached it, and
        `bytes_to_target`, what had been sent by the end of that round, NaN if none did. With
        simulated devices also `simulated_seconds` of all rounds, and `seconds_to_target`.
    """
    sent = rounds["total_bytes_up"] + rounds["total_bytes_down"]
    known = metric.column in rounds
    scores = rounds[metric.column].dropna() if known else sent[:0]
    found = dict.fromkeys(("last", "best", "last5"), np.nan)
    if len(scores):
        best = best_round(rounds, metric)
        found = {
            "last": float(scores.iloc[-1]),
            "best": np.nan if best is None else float(rounds[metric.column].iloc[best]),
            "last5": float(scores.iloc[-LAST:].mean()),
        }
    found["total_bytes"] = float(sent.iloc[-1])
    costs = {"rounds_to_target": rounds["round"], "bytes_to_target": sent}
    if CLOCK in rounds:
        found["simulated_seconds"] = float(rounds[CLOCK].iloc[-1])
        costs["seconds_to_target"] = rounds[CLOCK]
    if target is not None:
        reached = scores.index[scores >= target if metric.best == "max" else scores <= target]
        first = reached[:1]
        for figure, values in costs.items():
            found[figure] = float(values.loc[first[0]]) if len(first) else np.nan
    return found


def compared_by(runs: Iterable[Run]) -> Compared:
    """The figure by which runs are compared.

    It is the mean of the last five evaluated rounds (`last5`), or the score in the last round
    (`last`) if a run has evaluated fewer than five: a mean over all of them would be mostly of
    the first rounds. Unfinished runs count only if none is finished.
    """
    runs = [run for run in runs if len(run.rounds)]
    evaluated = [
        int(run.rounds[run.primary_metric.column].notna().sum())
        for run in [run for run in runs if run.status == "finished"] or runs
        if run.primary_metric.column in run.rounds
    ]
    return "last5" if min(evaluated, default=LAST) >= LAST else "last"


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
        target: a score, for `rounds_to_target` and `bytes_to_target`.

    Returns:
        The axes' columns, `seeds` (how many), `<figure>_mean` and `<figure>_std` for the figures
        of `of_run` (standard deviations of samples, ddof 1; NaN for a single seed). With a target
        `reached`: how many seeds reached it; the means of rounds and bytes are over these. With a
        baseline, by the figure that `compared_by` names: `difference_mean` and `difference_std`,
        of the cell's score less the baseline's, paired by seed; `p_value` of the one-tailed Welch
        t-test that the score is better than the baseline's; `p_holm`, the same corrected by Holm's
        method for all cells that are compared.

    The test is not paired. Accuracies on a test set are multiples of 1/n: a few seeds often have
    equal differences, for which a paired t-test would give a p of 0.
    """
    import pandas as pd

    by_cell: dict[tuple[Any, ...], list[tuple[int, Run]]] = {}
    for cell, seed, run in runs:
        if len(run.rounds):
            by_cell.setdefault(tuple(cell[axis] for axis in axes), []).append((seed, run))
    metrics = {key: of_cell[0][1].primary_metric for key, of_cell in by_cell.items()}
    by_run = {
        key: pd.DataFrame(
            [of_run(run.rounds, metrics[key], target) for _, run in of_cell],
            index=[seed for seed, _ in of_cell],
        )
        for key, of_cell in by_cell.items()
    }
    by = compared_by(run for _, _, run in runs)
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
            row |= dict.fromkeys(("difference_mean", "difference_std", "p_value"), np.nan)
            if other != key and metrics.get(other) == metrics[key]:
                ours, theirs = figures[by], by_run[other][by]
                differences = _by_seed(ours) - _by_seed(theirs)  # NaN: one lacks it
                row["difference_mean"] = differences.mean()
                row["difference_std"] = differences.std(ddof=1)
                row["p_value"] = _welch(ours, theirs, metrics[key])
        table.append(row)
    found = pd.DataFrame(table)
    if baseline is not None and len(found):
        found["p_holm"] = _holm(found["p_value"].to_numpy(dtype=float))
    return found


def _by_seed(scores: pd.Series[float]) -> pd.Series[float]:
    return scores.groupby(level=0).mean()


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


def _holm(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """P-values corrected for how many there are (Holm 1979); NaN stands for no test."""
    order = np.argsort(p)[: np.isfinite(p).sum()]  # NaN comes last
    corrected = np.full(len(p), np.nan)
    steps = p[order] * np.arange(len(order), 0, -1)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return corrected
