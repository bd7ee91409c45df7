"""Who lets a shortcut in, and which explainer shows it?"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from common import EXPLAINER, RESULTS, by_method, crossed, lines, paired
from scipy.stats import spearmanr
from tables import finished, spread, table

from fedsim import Grid

EXPLAINERS = ("gradient", "gradient_x_input", EXPLAINER, "occlusion", "lrp", "random")


def rows(found: list[Grid]) -> pd.DataFrame:
    """Accuracy by variant of the test set, and the relevance that explainers put on the patch."""
    rows = []
    for cell, run in finished(found):
        last = run.rounds.iloc[-1]
        row = {**cell, "hash": run.result_hash}
        row |= {
            variant: last[f"accuracy/{variant}"] for variant in ("aligned", "absent", "against")
        }
        row["reliance"] = row["aligned"] - row["against"]
        for explainer in EXPLAINERS:
            for score in ("pointing_game_shortcut", "relevance_mass_shortcut"):
                row[f"{explainer}/{score}"] = last[f"{explainer}/{score}"]
            row[f"{explainer}/deletion"] = last[f"{explainer}/deletion"]
        rows.append(row)
    return pd.DataFrame(rows)


def tables(results: pd.DataFrame) -> Iterator[str]:
    axis = "data.clients"
    yield "\n" + crossed(results, axis, "absent", "accuracy without the patch")
    yield "\n" + crossed(results, axis, "reliance", "reliance: aligned − against")
    yield "\n" + paired(results, axis, "reliance", "FedAvg")
    for score in ("pointing_game_shortcut", "relevance_mass_shortcut"):
        rows = []
        for explainer in EXPLAINERS:
            column = f"{explainer}/{score}"
            cells = [spread(own[column]) for _, own in results.groupby(axis, sort=False)]
            rho = spearmanr(results["reliance"], results[column]).statistic
            rows.append([explainer, *cells, f"{rho:.2f}"])
        values = [str(v) for v in dict.fromkeys(results[axis])]
        yield "\n" + table([score.replace("_", " "), *values, "ρ with reliance"], rows)
    yield "\n" + detection(results)


def detection(results: pd.DataFrame) -> str:
    """From which share of clients on a method's pointing game is above what it is without any."""
    rows = []
    for explainer in EXPLAINERS:
        column, cells = f"{explainer}/pointing_game_shortcut", []
        for _, own in results.groupby("method", sort=False):
            clear = own.loc[own["data.clients"] == 0, column].max()
            seen = [
                str(share)
                for share, part in own[own["data.clients"] > 0].groupby("data.clients")
                if part[column].min() > clear
            ]
            cells.append(seen[0] if seen else "–")
        rows.append([explainer, *cells])
    methods = list(dict.fromkeys(results["method"]))
    return table(["seen from which share on", *methods], rows)


def draw(results: pd.DataFrame) -> None:
    of_explainers = {
        explainer: results[f"{explainer}/pointing_game_shortcut"] for explainer in EXPLAINERS
    }
    panels = [
        ("accuracy lost when the patch lies", "aligned − against", by_method(results, "reliance")),
        ("most relevant pixel is in the patch", "share of test images", of_explainers),
    ]
    lines(results, "data.clients", panels, RESULTS / "shortcut.png")
