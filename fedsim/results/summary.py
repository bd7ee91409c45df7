"""Summaries of many runs, as papers report them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedsim.config.registry import nearest
from fedsim.errors import BadInput
from fedsim.objectives import VALIDATION, Metric
from fedsim.objectives.metrics import CLASS_ACCURACY
from fedsim.results.records import CONTRIBUTIONS
from fedsim.results.run import Run
from fedsim.results.significance import Difference, compared, holm, stars

if TYPE_CHECKING:  # it takes long to import: only where it is needed
    import pandas as pd

CLOCK = "total_simulated_seconds"  # a column of rounds with simulated devices
LAST = 5  # rounds that the mean of the last five is taken over
Compared = Literal["last5", "last"]
FIGURES = {"last": "last round", "best": "best round", "last5": f"mean of last {LAST}"}
STARS = "* p < 0.05, ** p < 0.01, *** p < 0.001"


def in_words(metrics: Sequence[Metric]) -> str:
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
    some = any(np.isfinite(std) for _, std in pairs)
    decimals = decimals_of(std for _, std in pairs) if some else None

    def text(number: float) -> str:
        if decimals is None or not abs(number) < 1e6:
            return digits(number)
        return f"{number:.{decimals}f}"

    return [
        text(mean) + (f" ± {'<0.0001' if std < 5e-5 else text(std)}" if np.isfinite(std) else "")
        for mean, std in pairs
    ]


def decimals_of(stds: Iterable[float]) -> int:
    """The decimals that show two digits of the smallest of some deviations, at most four."""
    least = min((std for std in stds if np.isfinite(std)), default=0)
    return 4 if least < 5e-5 else min(max(1 - math.floor(math.log10(least)), 0), 4)


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


def best_round(rounds: pd.DataFrame, metric: Metric) -> int | None:
    """The row of the best round, by validation if there is any, the first of equals; or None."""
    column = VALIDATION + metric.column
    column = column if column in rounds else metric.column
    if column not in rounds:
        return None
    scores = sign(metric) * rounds[column].to_numpy(dtype=float)
    return None if np.isnan(scores).all() else int(np.nanargmax(scores))


# Prefixes of scores on other examples than the central test set's.
ELSEWHERE = {
    "client_": "{}, mean over clients",
    "worst_client_": "{} of the worst client",
    VALIDATION: "validation {}",
}


_OF_CONTRIBUTIONS: dict[str, tuple[str, Literal["max", "min"]]] = {
    "lowest": ("lowest contribution by {}", "max"),
    "spread": ("spread of contributions by {}", "min"),
    "auc": ("AUC of contributions by {}", "max"),
}


def on_record(run: Run) -> dict[str, Metric]:
    """The scores in a run's rounds, by column; the primary metric is the first.

    They are the metrics of its objective and of `evaluate.metrics`, of each class and slice and on
    clients' own test examples (`evaluate.clients`), and the scores of explanations. A metric that
    returns several scores has a column for each. Reading them runs no code.
    """
    columns = [str(column) for column in run.rounds]
    by_column = {metric.column: metric for metric in run.metrics}
    classes = Metric(CLASS_ACCURACY, "class accuracy")
    found: dict[str, Metric] = {}
    for metric in (run.primary_metric, *run.metrics, classes):
        for column in columns:
            base, _, part = column.rpartition("/")
            if column == metric.column or (base == metric.column and column not in by_column):
                label = f"{metric.label}/{part}" if base == metric.column else metric.label
                found.setdefault(column, replace(metric, column=column, label=label))
    for metric in list(found.values()):
        for prefix, words in ELSEWHERE.items():
            if (column := prefix + metric.column) in columns:
                label = words.format(metric.label)
                found[column] = replace(metric, column=column, label=label, primary=False)
    for column in columns:
        if column.startswith(CONTRIBUTIONS):
            _, how, figure = column.split("/")
            label, best = _OF_CONTRIBUTIONS[figure]
            found[column] = Metric(column, label.format(how), best)
    for metric in run.explained:
        if metric.column in columns:
            explainer = metric.column.partition("/")[0]
            found[metric.column] = replace(metric, label=f"{metric.label}, by {explainer}")
    return found


def further(run: Run) -> list[Metric]:
    """The scores on record that tables show beside the primary one, none by validation."""
    left_out = (VALIDATION, f"{CLASS_ACCURACY}/")
    return [
        metric
        for column, metric in on_record(run).items()
        if column != run.primary_metric.column and not column.startswith(left_out)
    ]


def score_facts(run: Run) -> dict[str, str]:
    """What a run's scores came to: what each figure is called, and the figure in words.

    Without the scores of explanations, of which there are many.
    """
    rounds, metric, explained = run.rounds, run.primary_metric, {m.column for m in run.explained}
    found = {}
    for each in (metric, *(m for m in further(run) if m.column not in explained)):
        if len(scores := rounds.get(each.column, rounds["round"][:0]).dropna()):
            found[f"{each.label}, {FIGURES['last']}"] = digits(scores.iloc[-1])
        if each == metric and len(scores) >= LAST:
            found[f"{each.label}, {FIGURES['last5']}"] = digits(scores.iloc[-LAST:].mean())
        if each == metric and (best := best_round(rounds, each)) is not None and len(scores):
            by = " by validation" if VALIDATION + each.column in rounds else ""
            row = rounds.iloc[best]
            words = f"{digits(row[each.column])} (round {int(row['round'])})"
            found[f"{each.label}, best{by}"] = words
    return found


def budgets(run: Run) -> dict[str, str]:
    """The privacy budgets that a run has spent: what each covers, and ε and δ in words."""
    rounds, deltas = run.rounds, {}
    if "epsilon" in rounds and (privacy := run.experiment.privacy):
        deltas["epsilon", "privacy"] = privacy.delta
    if "explain_epsilon" in rounds and (explain := run.experiment.explain) and explain.share:
        deltas["explain_epsilon", "privacy of shared explanations"] = explain.share.delta
    return {
        name: f"ε {rounds[column].iloc[-1]:.3g}, δ {delta:g}"
        for (column, name), delta in deltas.items()
        if len(rounds)
    }


def chosen(runs: Iterable[Run], names: Sequence[str]) -> list[Metric]:
    known = {column: metric for run in runs for column, metric in on_record(run).items()}
    for name in names:
        if name not in known:
            raise BadInput(f"metric: no score '{name}' is on record{nearest(name, known)}")
        if names.count(name) > 1:
            raise BadInput(f"metric: '{name}' is named twice")
    return [known[name] for name in names]


def tidy(
    runs: Sequence[tuple[Mapping[str, Any], int, Run]],
    table: Literal["rounds", "clients"] = "rounds",
) -> pd.DataFrame:
    """The tables of many runs as one: the values of their cells, seeds, and their own columns."""
    import pandas as pd

    parts = []
    for cell, seed, run in runs:
        rows: pd.DataFrame = getattr(run, table)
        rows = rows.rename(columns={c: f"{c}_of_run" for c in rows if c in cell})
        keys = pd.DataFrame({**cell, "seed": seed}, index=rows.index)
        parts.append(pd.concat([keys, rows], axis=1))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def of_run(
    rounds: pd.DataFrame,
    metric: Metric,
    target: float | None = None,
    others: Iterable[Metric] = (),
) -> dict[str, float]:
    """The figures of one run that papers report.

    Returns:
        The figures of `Grid.cells`. With simulated devices also `simulated_seconds` of all rounds,
        and with a target `seconds_to_target`.
    """
    sent = rounds["total_bytes_up"] + rounds["total_bytes_down"]
    scores = rounds[metric.column].dropna() if metric.column in rounds else sent[:0]
    found = _scores(rounds, metric)
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
    for other in others:
        found |= {f"{other.column}/{name}": n for name, n in _scores(rounds, other).items()}
    return found


def _scores(rounds: pd.DataFrame, metric: Metric) -> dict[str, float]:
    scores = rounds[metric.column].dropna() if metric.column in rounds else None
    if scores is None or scores.empty:
        return dict.fromkeys(("last", "best", "last5"), np.nan)
    best = best_round(rounds, metric)
    return {
        "last": float(scores.iloc[-1]),
        "best": np.nan if best is None else float(rounds[metric.column].iloc[best]),
        "last5": float(scores.iloc[-LAST:].mean()),
    }


def compared_by(runs: Iterable[Run], metric: Metric | None = None) -> Compared:
    """The figure by which runs are compared: by a score, or each by its primary metric.

    It is the mean of the last five evaluated rounds (`last5`), or the score in the last round
    (`last`) if a run has evaluated fewer than five: a mean over all of them would be mostly of
    the first rounds. Unfinished runs count only if none is finished.
    """
    runs = [run for run in runs if len(run.rounds)]
    columns = [(run, (metric or run.primary_metric).column) for run in runs]
    evaluated = [
        int(run.rounds[column].notna().sum())
        for run, column in [(r, c) for r, c in columns if r.status == "finished"] or columns
        if column in run.rounds
    ]
    return "last5" if min(evaluated, default=LAST) >= LAST else "last"


def summarise_cells(
    runs: Sequence[tuple[Mapping[str, Any], int, Run]],
    axes: Sequence[str],
    baseline: Mapping[str, Any] | None = None,
    target: float | None = None,
    metrics: Sequence[Metric] = (),
) -> pd.DataFrame:
    """A row for each cell of a grid: mean and standard deviation over its seeds.

    Args:
        runs: as `tidy` takes them; those without a round are left out.
        axes: what cells have values of.
        baseline: the values of some axes. Each cell is compared with the cell that has these
            values and is otherwise equal to it.
        target: a value of the primary metric, for `rounds_to_target` and `bytes_to_target`.
        metrics: the scores that are reported, of all runs; by default the primary metric of each,
            and what is `further` on record of any.

    Returns:
        The columns of `Grid.summary`; the means of rounds and bytes to a target are over the seeds
        that reached it.
    """
    import pandas as pd

    by_cell: dict[tuple[Any, ...], list[tuple[int, Run]]] = {}
    for cell, seed, run in runs:
        if len(run.rounds):
            by_cell.setdefault(tuple(cell[axis] for axis in axes), []).append((seed, run))
    each = [run for of_cell in by_cell.values() for _, run in of_cell]
    judges = {key: (*metrics, of_cell[0][1].primary_metric)[0] for key, of_cell in by_cell.items()}
    others = {metric.column: metric for metric in metrics[1:]}
    if not metrics:
        others = {metric.column: metric for run in each for metric in further(run)}
        for judge in judges.values():
            others.pop(judge.column, None)
    by = {"": compared_by(each, *metrics[:1])}
    by |= {f"{column}/": compared_by(each, metric) for column, metric in others.items()}
    by_run = {}
    for key, of_cell in by_cell.items():
        rows = [of_run(run.rounds, judges[key], target, others.values()) for _, run in of_cell]
        by_run[key] = pd.DataFrame(rows, index=[seed for seed, _ in of_cell])
    table = []
    for key, figures in by_run.items():
        cell = dict(zip(axes, key, strict=True))
        line: dict[str, Any] = {**cell, "seeds": len(figures)}
        for figure, values in figures.items():
            line[f"{figure}_mean"] = values.mean()
            line[f"{figure}_std"] = values.std(ddof=1)
        if target is not None:
            line["reached"] = int(figures["bytes_to_target"].notna().sum())
        if baseline is not None:
            other = tuple({**cell, **baseline}[axis] for axis in axes)
            alike = other != key and judges.get(other) == judges[key]
            for prefix, figure in by.items():
                pair = [by_run[k][prefix + figure] for k in (key, other)] if alike else None
                line |= {prefix + name: number for name, number in _against(pair).items()}
        table.append(line)
    found = pd.DataFrame(table)
    if baseline is not None and len(found):
        corrected = {f"{prefix}p_holm": holm(found[f"{prefix}p_value"]) for prefix in by}
        found = pd.concat([found, pd.DataFrame(corrected)], axis=1)
    return found


def of_score(summary: pd.DataFrame, axes: Sequence[str], column: str) -> pd.DataFrame:
    """What a summary has of a further score, under the names of the primary metric's columns."""
    own = [c for c in map(str, summary) if c.rpartition("/")[0] == column]
    found = summary[[*axes, "seeds", *own]]
    return found.rename(columns={c: c.rpartition("/")[2] for c in own})


def further_scores(summary: pd.DataFrame, runs: Sequence[Run]) -> dict[str, str]:
    """What further scores of a summary are compared by, such as `f1/last5`: what it is called."""
    metrics = {metric.column: metric for run in runs for metric in further(run)}
    by = {c: compared_by(runs, m) for c, m in metrics.items() if f"{c}/last_mean" in summary}
    return {f"{c}/{f}": f"{metrics[c].label}, {FIGURES[f]}" for c, f in by.items()}


def score_rows(
    summary: pd.DataFrame, axes: Sequence[str], figures: Iterable[str]
) -> list[list[str]]:
    """A row for each cell: its values of the axes, and mean ± standard deviation of figures."""
    columns = [[str(value) for value in summary[axis]] for axis in axes]
    for figure in figures:
        texts = mean_std(summary[f"{figure}_mean"], summary[f"{figure}_std"])
        ps = summary.get(f"{figure.rpartition('/')[0]}/p_holm".lstrip("/"))
        if figure != "best" and ps is not None:
            texts = [text + stars(p) for text, p in zip(texts, ps, strict=True)]
        columns.append(texts)
    return [list(row) for row in zip(*columns, strict=True)]


def pairing(summary: pd.DataFrame) -> str:
    none_shared = summary.filter(regex="(^|/)pairs$").to_numpy() == 0
    tested = summary.filter(regex="(^|/)p_value$").notna().to_numpy()
    welch = bool((none_shared & tested).any())
    return "paired by seed" + " (Welch's where no seed is shared)" * welch


def _against(pair: Sequence[pd.Series[float]] | None) -> dict[str, float]:
    """The comparison of two series of scores by seed; NaN for none."""
    found, std = Difference(np.nan, np.nan, np.nan), np.nan
    if pair is not None:
        found = compared(*pair)
        ours, theirs = (each.groupby(level=0).mean() for each in pair)
        std = (ours - theirs).std(ddof=1)
    return {
        "difference_mean": found.mean,
        "difference_std": std,
        "difference_low": found.low,
        "difference_high": found.high,
        "pairs": found.pairs,
        "p_value": found.p(),
    }


def cell_label(cell: Mapping[str, Any]) -> str:
    return ", ".join(
        str(value) if axis in ("method", "method.name") else f"{axis}={value}"
        for axis, value in cell.items()
    )
