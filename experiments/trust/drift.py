"""Which client drifts, and why?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from common import RESULTS
from matplotlib.figure import Figure
from numpy.typing import NDArray
from tables import finished, spread, table

from fedsim import Grid
from fedsim.results.maps import importance
from fedsim.results.run import Run

WATCHED = {"sage": "attributed loss", "test_accuracy": "accuracy", "test_loss": "loss"}
REFERENCE = slice(8, 18)  # rounds that a client is compared with; it is watched from the end on
LOOK = 10  # rounds from the drift on whose mean map says which column it is
ALARMS = 0.05  # share of clients that do not drift for which an alarm is raised


DETECTORS = {  # each by itself, and as a trailing mean of some rounds
    f"{name}/{window}": (name, window, f"{what}, {window} rounds" if window > 1 else what)
    for window in (1, 5)
    for name, what in WATCHED.items()
}


def rows(found: list[Grid]) -> pd.DataFrame:
    """Who is taken to drift, from when on and why, by what a client is watched by.

    A client's statistic is the distance from its mean over the reference rounds, in units of such
    distances there, mean over the clients of the run. The threshold is the one that a share of
    `ALARMS` of clients exceeds where none drifts.
    """
    runs = list(finished(found))
    watched = [{name: _watched(run, name) for name in WATCHED} for _, run in runs]
    clear = [own for (cell, _), own in zip(runs, watched, strict=True) if cell["drift"] == "none"]
    rows = []
    for (cell, run), own in zip(runs, watched, strict=True):
        change = run.manifest.get("change", {"round": 0, "clients": [], "features": []})
        last = run.rounds.iloc[-1]
        row = {**cell, "hash": run.result_hash, "accuracy": last["accuracy"]}
        for detector, (name, window, _) in DETECTORS.items():
            most = np.concatenate([_distance(o[name], window).max(axis=0) for o in clear])
            over = _distance(own[name], window) > np.quantile(most, 1 - ALARMS)
            first = {
                k: int(over[:, k].argmax()) + REFERENCE.stop
                for k in np.flatnonzero(over.any(axis=0)).tolist()
            }
            right = [
                k for k, t in first.items() if k in change["clients"] and t >= change["round"]
            ]
            row[f"{detector}/found"] = len(right)
            row[f"{detector}/false"] = len(first) - len(right)
            if not change["clients"]:
                continue
            row[f"{detector}/f1"] = 2 * len(right) / (len(first) + len(change["clients"]))
            if right:
                row[f"{detector}/delay"] = np.mean([first[k] - change["round"] for k in right])
        if change["clients"]:
            before, after = (
                own["sage"][rounds.start - 1 : rounds.stop - 1].mean(axis=0)
                for rounds in (REFERENCE, slice(change["round"], change["round"] + LOOK))
            )
            largest = np.abs(after - before)[change["clients"]].argmax(axis=1) + 1
            row["why"] = np.mean([f"x{f}" in change["features"] for f in largest])
        rows.append(row)
    return pd.DataFrame(rows)


def _watched(run: Run, name: str) -> NDArray[np.float64]:
    """(rounds, clients, 1) a score of each client in each round, or (…, columns) its mean map."""
    if name != "sage":
        table = run.clients.pivot(index="round", columns="client", values=name)
        return table.to_numpy()[:, :, None]
    rounds = run.maps["round"].unique()
    return np.stack([importance(run, name, t).drop(index="all clients") for t in rounds])


def _distance(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """(rounds watched, clients) how far each client is from its own past; see `rows`.

    Args:
        window: rounds of the trailing mean that is taken first.
    """
    means = np.lib.stride_tricks.sliding_window_view(values, window, axis=0).mean(axis=-1)
    values = np.concatenate([values[: window - 1], means])
    past = values[REFERENCE.start - 1 : REFERENCE.stop - 1]  # rounds count from 1
    n, mean = len(past), past.mean(axis=0)
    unit = np.linalg.norm((past - mean) * n / (n - 1), axis=2).mean()  # each from the others
    far: NDArray[np.float64] = np.linalg.norm(values[REFERENCE.stop - 1 :] - mean, axis=2) / unit
    return far


def tables(results: pd.DataFrame) -> Iterator[str]:
    scores = {"f1": "F1", "found": "found of 2", "false": "false alarms", "delay": "delay"}
    drifts = list(dict.fromkeys(results["drift"]))
    columns = {f"{name}/{score}": f"{label}, {what}" for score, label in scores.items()
               for name, (*_, what) in DETECTORS.items()}  # fmt: skip
    columns["why"] = "largest change is the column that drifts"
    columns["accuracy"] = "accuracy on the central test set"
    rows = [
        [label, *(spread(results.loc[results["drift"] == kind, column], 2) for kind in drifts)]
        for column, label in columns.items()
    ]
    yield "\n" + table(["", *drifts], rows)


def draw(results: pd.DataFrame) -> None:
    """F1 and delay by what drifts: mean over seeds, and each seed as a point."""
    results = results[results["drift"] != "none"]
    drifts = list(dict.fromkeys(results["drift"]))
    figure = Figure(figsize=(9.2, 3.6), layout="constrained")
    panels = {"f1": "F1 over clients", "delay": "delay in rounds, of clients found"}
    for n, (score, label) in enumerate(panels.items()):
        axes = figure.add_subplot(1, 2, n + 1)
        for k, (name, (_, window, what)) in enumerate(DETECTORS.items()):
            colour, alpha = f"C{k % len(WATCHED)}", 0.8 if window == 1 else 0.35
            places = np.arange(len(drifts)) + 0.13 * (k - 2.5)
            column = results[f"{name}/{score}"]
            means = [column[results["drift"] == kind].mean() for kind in drifts]
            axes.bar(places, means, width=0.12, label=what, color=colour, alpha=alpha)
            at = [places[drifts.index(kind)] for kind in results["drift"]]
            axes.scatter(at, column, s=8, color=colour, zorder=3, clip_on=False)
        axes.set_xticks(range(len(drifts)), drifts, fontsize=7)
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
    named = figure.axes[0].get_legend_handles_labels()
    figure.legend(*named, frameon=False, fontsize=7, loc="outside upper center", ncols=6)
    figure.savefig(RESULTS / "drift.png", dpi=150)
