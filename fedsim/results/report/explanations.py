"""What models explain."""

from __future__ import annotations

import pandas as pd

from fedsim.results.report.comparison import Comparison, label
from fedsim.results.report.page import PageTable, Picture, capital, distinct, listed, plain

_EXPLAINED = 6  # settings whose explanations are shown as tables
_ROWS_EXPLAINED = 8  # rows of such a table


def explanations(compared: Comparison) -> list[tuple[str, PageTable | None, list[Picture]]]:
    """What each run explains: its pictures; and as a table, for one seed of a few settings."""
    first = [cell.entries[0] for cell in compared.cells][:_EXPLAINED]
    found = []
    for entry in compared.entries:
        if entry.run is None:
            continue
        files = sorted((entry.run.path / "explanations").glob("*"))
        pictures = [Picture.read(f) for f in files if f.suffix.lower() in (".png", ".svg")]
        table = _explained(entry.run.explanations) if entry in first else None
        if pictures or table:
            found.append((f"{label(entry.cell)}, seed {entry.seed}", table, pictures))
    return found


def _explained(rows: pd.DataFrame) -> PageTable | None:
    """The explanations of the last round, as they were put on record; the first of many."""
    if rows.empty:
        return None
    last = rows[rows["round"] == rows["round"].max()].drop(columns=["round", "explainer"])
    words = f"; the first {_ROWS_EXPLAINED} of {len(last)}" if len(last) > _ROWS_EXPLAINED else ""
    caption = f"{listed(distinct(rows['explainer']))}, after the last round{words}"
    return plain(capital(caption), last.head(_ROWS_EXPLAINED))
