"""What searches found."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from fedsim.results.folder import Folder
from fedsim.results.report.page import PageTable, Picture, plain


@dataclass(frozen=True)
class SearchResult:
    """What a search left in its folder."""

    title: str
    status: str
    trials: PageTable | None
    importance: PageTable | None
    pareto: Picture | None
    best: str
    given: str

    @classmethod
    def read(cls, folder: Folder) -> SearchResult:
        tables = {
            name: pd.read_parquet(path)
            for name in ("trials", "importance", "pareto")
            if (path := folder.path / f"{name}.parquet").exists()
        }
        trials, importance, picture = None, None, folder.path / "pareto.png"
        if "trials" in tables:
            front = set(tables["pareto"]["trial"]) if "pareto" in tables else set()
            words = "; in bold what no other trial betters in every objective" if front else ""
            trials = plain(f"Trials{words}", tables["trials"], front)
        if "importance" in tables:
            words = "Share of each objective’s variance that a hyper-parameter explains"
            importance = plain(words, tables["importance"])
        best = folder.path / "best.yaml"
        return cls(
            str(folder.manifest.get("name", folder.path.parent.name)),
            str(folder.manifest["status"]),
            trials,
            importance,
            Picture.read(picture) if picture.exists() else None,
            best.read_text(encoding="utf-8") if best.exists() else "",
            (folder.path / "experiment.yaml").read_text(encoding="utf-8"),
        )
