"""Pareto fronts of trials, and their picture."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray

from fedsim.support import atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FRONT = "#0072b2"
_ORDERS = 100  # largest by least value from which on an objective is drawn by its logarithm
_LINE = 0.05  # of text, in the height of a panel's axes


def front(trials: pd.DataFrame, objectives: Mapping[str, str]) -> NDArray[np.bool_]:
    """Which trials are Pareto optimal by `objectives`, `max` or `min` for each of these columns.

    True for each row that no other equals or betters in every objective and betters in one.
    """
    signs = np.array([1.0 if mode == "max" else -1.0 for mode in objectives.values()])
    others = trials[list(objectives)].to_numpy(dtype=float) * signs
    mine = others[:, None, :]
    bettered = (others >= mine).all(axis=2) & (others > mine).any(axis=2)
    optimal: NDArray[np.bool_] = ~bettered.any(axis=1)
    return optimal


def draw(trials: pd.DataFrame, objectives: Mapping[str, str], path: Path) -> None:
    """Draw the trials, a panel for each pair of objectives, and the front among them.

    Of more than two objectives there is a panel of parallel coordinates below: a line for each
    trial, the better the higher on each axis. Objectives that span two orders of magnitude, such
    as ε, are drawn by their logarithm.
    """
    optimal = front(trials, objectives)
    pairs = list(itertools.combinations(objectives, 2))
    across = min(len(pairs), 3)
    down = -(-len(pairs) // across)
    several = len(objectives) > 2
    figure = Figure(figsize=(5.6 * across, 4.4 * (down + several)), layout="constrained")
    grid = figure.add_gridspec(down + several, across)
    for k, pair in enumerate(pairs):
        axes = figure.add_subplot(grid[k // across, k % across])
        draw_pair(axes, trials, optimal, objectives, pair)
        if k == 0:
            axes.legend(frameon=False)
    if several:
        _draw_parallel(figure.add_subplot(grid[down, :]), trials, optimal, objectives)
    with atomic.replacing(path) as aside:
        figure.savefig(aside, dpi=160, format="png")


def draw_pair(
    axes: Axes,
    trials: pd.DataFrame,
    optimal: NDArray[np.bool_],
    objectives: Mapping[str, str],
    pair: tuple[str, str],
) -> None:
    across, up = pair
    rest, best = trials[~optimal], trials[optimal].sort_values(across)
    axes.scatter(rest[across], rest[up], color="0.6", label="other trials")
    if len(objectives) == 2:
        # Between two of its trials nothing better than the worse of both is known.
        line = "steps-post" if objectives[across] == "min" else "steps-pre"
        axes.plot(best[across], best[up], drawstyle=line, color=_FRONT, lw=1, alpha=0.6)
    axes.scatter(best[across], best[up], color=_FRONT, marker="D", label="Pareto front", zorder=3)
    for number, x, y in zip(best["trial"], best[across], best[up], strict=True):
        axes.annotate(str(number), (x, y), xytext=(6, 4), textcoords="offset points")
    for axis, name in ((axes.xaxis, across), (axes.yaxis, up)):
        axis.set_label_text(_in_words(name, objectives))
        if _spans_orders(trials[name].to_numpy(dtype=float)):
            (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
        else:
            axis.set_major_locator(MaxNLocator(6))
        if trials[name].abs().max() >= 1000:
            axis.set_major_formatter(EngFormatter("B" if "bytes" in name else ""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)


def _draw_parallel(
    axes: Axes, trials: pd.DataFrame, optimal: NDArray[np.bool_], objectives: Mapping[str, str]
) -> None:
    places = range(len(objectives))
    heights = []
    for name, mode in objectives.items():
        values = trials[name].to_numpy(dtype=float)
        worst, best = values.min(), values.max()
        if mode == "min":
            worst, best = best, worst
        if _spans_orders(values):
            heights.append(np.log(values / worst) / np.log(best / worst))
        else:
            heights.append((values - worst) / ((best - worst) or 1.0))
        large = max(abs(worst), abs(best)) >= 1000
        number = EngFormatter("B" if "bytes" in name else "") if large else "{:.4g}".format
        for height, value in ((0, worst), (1, best)):
            axes.annotate(
                number(value), (len(heights) - 1, height), xytext=(4, 4 if height else -10),
                textcoords="offset points", fontsize=8, color="0.3",
            )  # fmt: skip
    lines = np.stack(heights, axis=1)
    axes.plot(places, lines[~optimal].T, color="0.75", lw=0.8)
    axes.plot(places, lines[optimal].T, color=_FRONT, lw=1.4, alpha=0.8)
    for at, numbers in _labels(trials["trial"][optimal], lines[optimal, -1]):
        axes.annotate(numbers, (places[-1], at), xytext=(22, -3), textcoords="offset points")
    axes.set_xticks(places, [_in_words(name, objectives) for name in objectives])
    axes.set_yticks([])
    axes.set_ylim(-0.12, 1.12)
    axes.set_ylabel("better →")
    axes.grid(axis="x", color="0.6")
    axes.spines[:].set_visible(False)


def _spans_orders(values: NDArray[np.float64]) -> bool:
    return bool(0 < values.min() <= values.max() / _ORDERS)


def _labels(trials: Iterable[int], heights: Iterable[float]) -> list[tuple[float, str]]:
    """Numbers of trials and where to write them, those together that would overlap."""
    labels: list[tuple[float, str]] = []
    for height, trial in sorted(zip(heights, trials, strict=True)):
        if labels and height - labels[-1][0] < _LINE:
            labels[-1] = labels[-1][0], f"{labels[-1][1]}, {trial}"
        else:
            labels.append((height, str(trial)))
    return labels


def _in_words(name: str, objectives: Mapping[str, str]) -> str:
    return f"{name.replace('_', ' ')} ({objectives[name]})"
