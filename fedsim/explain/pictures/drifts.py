"""Picture of drifts: who was watched when, whose inputs change, and who raised an alarm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedsim.explain.pictures.canvas import LEGEND, new_figure, place, plain, save, some

if TYPE_CHECKING:
    import pandas as pd

_LANE, _WIDTH, _FONT = 0.3, 6.0, 8  # inches, inches, points
_MOST = 40  # clients
_MARKERS = "osD^v"


def draw_drifts(
    watched: pd.DataFrame, alarms: pd.DataFrame, names: Sequence[str], path: Path, title: str
) -> None:
    """Draw a lane for each client, those with a drift or an alarm first if there are many.

    Args:
        watched, alarms: as of `fedsim.Drifts`.
        names: what clients are called.
    """
    busy = alarms[["planted", "alarm"]].notna().any(axis=1)
    known = sorted(set(alarms["client"][busy]))
    shown = sorted((known + [k for k in range(len(names)) if k not in known])[:_MOST])
    figure = new_figure(_WIDTH + 1.5, _LANE * len(shown) + 1.2)
    axes = place(figure, 1.2, 0.1, _WIDTH, _LANE * len(shown))
    last, detectors = watched["round"].max(), list(dict.fromkeys(alarms["detector"]))
    band = None
    for lane, k in enumerate(shown):
        rounds = watched["round"][watched["client"] == k].unique()
        axes.scatter(rounds, np.full(len(rounds), lane), s=4, color="0.7", zorder=1)
        own = alarms[alarms["client"] == k]
        if (start := own["planted"].iloc[0]) == start:
            band = axes.barh(lane, last - start + 1, left=start - 0.5, color="#fddbc7", zorder=0)
        for d, row in enumerate(own.to_dict("records")):
            off = 0.3 * (d - (len(detectors) - 1) / 2)
            axes.scatter(
                row["alarm"], lane + off, s=22, marker=_MARKERS[d], color=f"C{d}", zorder=3
            )
    for d, name in enumerate(detectors):
        axes.scatter([], [], s=22, marker=_MARKERS[d], color=f"C{d}", label=f"first alarm, {name}")
    axes.scatter([], [], s=4, color="0.7", label="trains")
    if band is not None:
        band.set_label("inputs have changed")
    axes.set_yticks(range(len(shown)), [plain(names[k]) for k in shown], fontsize=_FONT - 1)
    axes.set(xlim=(1.5, last + 0.5), ylim=(len(shown) - 0.5, -0.5))
    axes.set_xlabel("round", fontsize=_FONT)
    axes.tick_params(axis="x", labelsize=_FONT - 1)
    axes.locator_params(axis="x", integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        **LEGEND, fontsize=_FONT - 1, ncols=3, bbox_to_anchor=(0, -1.0 / _LANE / len(shown))
    )
    save(figure, path, title + some(len(names), "clients", _MOST))
