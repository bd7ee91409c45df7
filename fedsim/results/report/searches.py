"""Results of the searches of a report."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from fedsim.results.figures.charts import bars_height, draw_bars, draw_history
from fedsim.results.figures.look import Drawing
from fedsim.results.figures.plots import history
from fedsim.results.report.curves import LINES, Plot
from fedsim.results.report.overview import experiment
from fedsim.results.report.page import Picture, capital, plain
from fedsim.results.sweeps import Search


def search_result(folder: Search) -> dict[str, Any]:
    """What a search left in its folder, for the page."""
    tables = {
        name: table
        for name in ("trials", "importance", "pareto")
        if len(table := getattr(folder, name))
    }
    objectives = folder.manifest["objectives"]
    trials, importance, picture = None, None, folder.path / "pareto.png"
    if "trials" in tables:
        front = set(tables["pareto"]["trial"]) if "pareto" in tables else set()
        several = "; in bold what no other trial betters in every objective"
        words = (several if len(objectives) > 1 else "; the best in bold") if front else ""
        trials = plain(f"Trials{words}", tables["trials"], front)
    if "importance" in tables and len(objectives) > 1:
        words = "Share of each objective’s variance that a hyper-parameter explains"
        importance = plain(words, tables["importance"])
    best = folder.path / "best.yaml"
    return {
        "title": str(folder.manifest.get("name", folder.path.parent.name)),
        "status": str(folder.manifest["status"]),
        "figures": _figures(tables, objectives) if len(objectives) == 1 else [],
        "trials": trials,
        "importance": importance,
        "pareto": Picture.read(picture) if picture.exists() else None,
        "best": best.read_text(encoding="utf-8") if best.exists() else "",
        "given": experiment(folder.path),
    }


def _figures(tables: dict[str, pd.DataFrame], objectives: dict[str, str]) -> list[Plot]:
    (objective,) = objectives
    found = []
    name = objective.replace("_", " ")
    if "trials" in tables and objective in tables["trials"]:
        trials, values, best = history(tables["trials"], objective, objectives)
        if np.isfinite(best).any():
            words = f"{capital(name)} by trial, and the best so far"
            title = f"{words}: {best[np.isfinite(best)][-1]:.4g} in the end"
            draw = partial(draw_history, trials=trials, values=values, best=best, ylabel=name)
            found.append(Plot(words, [("", Drawing(title, LINES, draw))]))
    if "importance" in tables:
        table = tables["importance"].dropna().sort_values(objective, ascending=False)
        names, shares = table["hyper-parameter"].astype(str).tolist(), table[objective]
        if names:
            words = f"Importance for {name}"
            ends = ", ".join(f"{n} {share:.2f}" for n, share in zip(names, shares, strict=True))
            draw = partial(
                draw_bars,
                names=names,
                series={"": (0, shares.to_numpy())},
                xlabel="share of variance explained",
                longest=max(shares.max(), 0.01),
            )
            height = bars_height(len(names), 1)
            found.append(Plot(words, [("", Drawing(f"{words}: {ends}", height, draw))]))
    return found
