"""What searches found."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedsim.results.report.curves import Plot
from fedsim.results.report.figures import draw_bars, draw_history
from fedsim.results.report.page import PageTable, Picture, capital, plain
from fedsim.results.sweeps import Search


@dataclass(frozen=True)
class SearchResult:
    """What a search left in its folder."""

    title: str
    status: str
    figures: list[Plot]
    trials: PageTable | None
    importance: PageTable | None
    pareto: Picture | None
    best: str
    given: str

    @classmethod
    def read(cls, folder: Search) -> SearchResult:
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
        return cls(
            str(folder.manifest.get("name", folder.path.parent.name)),
            str(folder.manifest["status"]),
            _figures(tables, objectives) if len(objectives) == 1 else [],
            trials,
            importance,
            Picture.read(picture) if picture.exists() else None,
            best.read_text(encoding="utf-8") if best.exists() else "",
            (folder.path / "experiment.yaml").read_text(encoding="utf-8"),
        )


def _figures(tables: dict[str, pd.DataFrame], objectives: dict[str, str]) -> list[Plot]:
    """How the search for one objective went, and what mattered."""
    ((objective, mode),) = objectives.items()
    found = []
    name = objective.replace("_", " ")
    if "trials" in tables and objective in tables["trials"]:
        trials = tables["trials"].sort_values("trial")
        values = trials[objective].to_numpy(dtype=float)
        finished = np.where(trials["status"] == "finished", values, np.nan)
        if np.isfinite(finished).any():
            best = (np.fmax if mode == "max" else np.fmin).accumulate(finished)
            extreme = best[np.isfinite(best)][-1]
            words = f"{capital(name)} by trial, and the best so far"
            drawing = draw_history(f"{words}: {extreme:.4g} in the end", values, best, ylabel=name)
            found.append(Plot(words, [("", drawing)]))
    if "importance" in tables:
        table = tables["importance"].dropna()
        shares = dict(zip(table["hyper-parameter"].astype(str), table[objective], strict=True))
        if shares:
            words = f"Importance for {name}"
            ends = ", ".join(f"{key} {share:.2f}" for key, share in shares.items())
            xlabel = "share of variance explained"
            drawing = draw_bars(f"{words}: {ends}", shares, xlabel=xlabel)
            found.append(Plot(words, [("", drawing)]))
    return found
