"""Which detector finds which drift, how late, and does it say why?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from common import RESULTS
from matplotlib.figure import Figure
from tables import finished, spread, table

import fedsim
from fedsim import Grid

EXPLAINER = "gradient_x_input"
LABELS = {
    "adwin": "ADWIN of losses",
    "ks": "KS of inputs",
    "attributed_loss": "attributed loss",
}
SCORES = {
    "f1": "F1",
    "delay": "delay in rounds",
    "named": "right feature first",
    "false_alarms": "clients with a false alarm, of 10",
}


def rows(found: list[Grid]) -> pd.DataFrame:
    """A row for each run, with scores by detector."""
    rows = []
    for cell, run in finished(found):
        row = {**cell, "hash": run.result_hash, "accuracy": run.rounds["accuracy"].iloc[-1]}
        scores = fedsim.drifts(run, EXPLAINER, progress=False).scores
        for detector, score in scores.iterrows():
            row |= {f"{detector}/{name}": score[name] for name in SCORES}
        rows.append(row)
    return pd.DataFrame(rows)


def tables(results: pd.DataFrame) -> Iterator[str]:
    kinds = list(dict.fromkeys(results["drift"]))
    for score, label in SCORES.items():
        cells = [
            [kind, *(spread(own[f"{d}/{score}"], 2) for d in LABELS)]
            for kind in kinds
            for own in [results[results["drift"] == kind]]
        ]
        yield f"\n{label}\n\n" + table(["", *LABELS.values()], cells)


def draw(results: pd.DataFrame) -> None:
    """F1 and delay by drift and detector: mean over seeds, and each seed as a point."""
    results = results[~results["drift"].str.endswith("none")]
    kinds = list(dict.fromkeys(results["drift"]))
    figure = Figure(figsize=(9.2, 5.6), layout="constrained")
    for n, (score, label) in enumerate([("f1", "F1 over clients"), ("delay", "delay in rounds")]):
        axes = figure.add_subplot(2, 1, n + 1)
        for k, (detector, what) in enumerate(LABELS.items()):
            column = results[f"{detector}/{score}"]
            places = np.arange(len(kinds)) + 0.26 * (k - 1)
            means = [column[results["drift"] == kind].mean() for kind in kinds]
            axes.bar(places, means, width=0.24, color=f"C{k}", alpha=0.7, label=what)
            at = [places[kinds.index(kind)] for kind in results["drift"]]
            axes.scatter(at, column, s=5, color=f"C{k}", zorder=3, clip_on=False)
        axes.set_xticks(
            range(len(kinds)), [kind.replace(", ", "\n") for kind in kinds], fontsize=7
        )
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
    named = figure.axes[0].get_legend_handles_labels()
    figure.legend(*named, frameon=False, fontsize=8, loc="outside upper center", ncols=3)
    figure.savefig(RESULTS / "detectors.png", dpi=150)
