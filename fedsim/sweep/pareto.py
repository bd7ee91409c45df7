"""Which trials no other betters in every objective, and their picture."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray

from fedsim import atomic


def front(trials: pd.DataFrame, objectives: Mapping[str, str]) -> NDArray[np.bool_]:
    """Which trials are Pareto optimal.

    Args:
        trials: a row for each, with a column for each objective.
        objectives: `max` or `min` for each.

    Returns:
        True for each row that no other equals or betters in every objective and betters in one.
    """
    signs = np.array([1.0 if mode == "max" else -1.0 for mode in objectives.values()])
    values = trials[list(objectives)].to_numpy(dtype=float) * signs
    others = values[None, :, :]
    mine = values[:, None, :]
    bettered = (others >= mine).all(axis=2) & (others > mine).any(axis=2)
    optimal: NDArray[np.bool_] = ~bettered.any(axis=1)
    return optimal


def draw(trials: pd.DataFrame, objectives: Mapping[str, str], path: Path) -> None:
    """Draw the trials, a panel for each pair of objectives, and the front among them.

    Args:
        trials: with columns `trial` (its number) and one for each objective.
    """
    optimal = front(trials, objectives)
    pairs = list(itertools.combinations(objectives, 2))
    figure = Figure(figsize=(5.6 * len(pairs), 4.4), layout="constrained")
    for k, (across, up) in enumerate(pairs):
        axes = figure.add_subplot(1, len(pairs), k + 1)
        rest, best = trials[~optimal], trials[optimal].sort_values(across)
        axes.scatter(rest[across], rest[up], color="0.6", label="other trials")
        if len(objectives) == 2:
            # Between two of its trials nothing better than the worse of both is known.
            line = "steps-post" if objectives[across] == "min" else "steps-pre"
            axes.plot(best[across], best[up], drawstyle=line, color="#0072b2", lw=1, alpha=0.6)
        axes.scatter(
            best[across], best[up], color="#0072b2", marker="D", label="Pareto front", zorder=3
        )
        for number, x, y in zip(best["trial"], best[across], best[up], strict=True):
            axes.annotate(str(number), (x, y), xytext=(6, 4), textcoords="offset points")
        for axis, name in ((axes.xaxis, across), (axes.yaxis, up)):
            axis.set_label_text(f"{name.replace('_', ' ')} ({objectives[name]})")
            axis.set_major_locator(MaxNLocator(6))
            if trials[name].abs().max() >= 1000:
                axis.set_major_formatter(EngFormatter("B" if "bytes" in name else ""))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
        if k == 0:
            axes.legend(frameon=False)
    with atomic.replacing(path) as aside:
        figure.savefig(aside, dpi=160, format="png")
