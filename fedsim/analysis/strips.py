"""Strips: how a decision on one input, and the reasons for it, grew from round to round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.analysis.replay import Whose, common_round, trained_rounds, whose_models
from fedsim.explain import Explainer, Explanation
from fedsim.explain.explainers.attributed import Attributed
from fedsim.explain.pictures.canvas import picture
from fedsim.explain.pictures.images import as_pixels
from fedsim.explain.pictures.strips import draw_strip
from fedsim.explain.scores.relevance import informative, rank_correlation
from fedsim.results.run import Run

MOST_ROUNDS, USUAL_ROUNDS = 12, 6  # of a strip
_NAMED = 3  # features or words of a cell


@dataclass(frozen=True)
class Strip(Explanation):
    """How a decision on one input, and the reasons for it, grew: by model and round.

    Args:
        cells: by model, then by round.
        file: the pictures' name.
    """

    models: tuple[str, ...]
    rounds: tuple[int, ...]
    cells: tuple[tuple[Attributed, ...], ...]
    file: str

    @property
    def title(self) -> str:
        one = self.cells[0][0]
        label, what = one.inputs.labels[0], "class" if one.probabilities else "value"
        truth = "" if label is None else f" (true {what} {label})"
        return f"{one.inputs.names[0]}{truth} by round, {one.attribution}"

    def text(self) -> str:
        one = self.cells[0][0]
        most = "half of it in" if one.images else "most for it"
        table = [("model", "round", "predicted", "like the last", "largest relevance", most)]
        for row in self.rows():
            most = ", ".join(str(row.get("for", "")).split(", ")[:_NAMED])
            if row.get("half") is not None:
                most = f"{row['half']:.1%} of pixels"
            alike = "" if row["like_last"] is None else f"{row['like_last']:.2f}"
            largest = f"±{row['largest']:.3g}"
            why = row.get("says nothing", most)
            table.append((row["model"], str(row["round"]), _told(row), alike, largest, why))
        wide = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [" " * 2 + "  ".join(map(str.ljust, row, wide)).rstrip() for row in table]
        about = [f"(baseline: {one.baseline})"] if one.baseline else []
        end = "(like the last: rank correlation with the model's map after the last round here)"
        return "\n".join([f"{self.title}:", *about, *lines, end])

    def rows(self) -> list[dict[str, Any]]:
        """By model and round: what is predicted, whether it is `right`, and `like_last`.

        The latter is the rank correlation with the model's map after the last of the rounds; None
        where either map says nothing.
        """
        found: list[dict[str, Any]] = []
        for model, cells in zip(self.models, self.cells, strict=True):
            maps = np.stack([cell.relevance[0].ravel() for cell in cells]).astype(np.float64)
            maps = maps if cells[0].images else maps[:, : len(cells[0].parts(0))]
            known = informative(maps) & informative(maps[-1:])
            both = np.nan_to_num(maps), np.nan_to_num(maps[-1:].repeat(len(maps), 0))
            alike = rank_correlation(*both)
            for k, (t, cell) in enumerate(zip(self.rounds, cells, strict=True)):
                (row,) = cell.rows()
                judged = row["label"] is not None and row["probability"] is not None
                row["right"] = row["decision"] == row["label"] if judged else None
                row["like_last"] = float(alike[k]) if known[k] and maps.shape[1] > 1 else None
                row["largest"] = float(np.abs(maps[k]).max())
                found.append({"model": model, "round": t, **row})
        return found

    def save(self, folder: Path) -> list[Path]:
        """Draw it as a PNG and an SVG, unless one format is asked for."""
        one, told, T = self.cells[0][0], [_told(row) for row in self.rows()], len(self.rounds)
        image = as_pixels(one.inputs.x, one.dataset)[0] if one.images else None
        paths = [*dict.fromkeys(picture(folder, self.file, ending) for ending in ("png", "svg"))]
        for path in paths:
            draw_strip(
                np.array([[cell.relevance[0] for cell in cells] for cells in self.cells]),
                [f"round {t}" for t in self.rounds],
                self.models,
                [told[k : k + T] for k in range(0, len(told), T)],
                path,
                self.title,
                what="class" if one.probabilities else "value",
                image=image,
                parts=() if one.images else one.parts(0),
                words=bool(one.dataset.words),
            )
        return paths


def _told(row: Mapping[str, Any]) -> str:
    """As in "5 (56%), wrong"."""
    chance = "" if row["probability"] is None else f" ({row['probability']:.0%})"
    judged = {True: ", right", False: ", wrong"}.get(row["right"], "")
    return f"{row['decision']}{chance}{judged}"


def spread(run: Run, clients: Sequence[int]) -> list[int]:
    """Some rounds spread over a run, in which these clients were trained."""
    rounds = [*range(1, run.last_round + 1)]
    if clients:
        common_round(run, clients, None)  # raises if there is none
        rounds = sorted(set.intersection(*map(set, trained_rounds(run, clients).values())))
    few = np.linspace(0, len(rounds) - 1, min(USUAL_ROUNDS, len(rounds))).round().astype(int)
    return [rounds[k] for k in few]


def strip_of(
    run: Run,
    explainer: Explainer,
    found: Sequence[Explanation],
    about: Sequence[Mapping[str, Any]],
    of: Whose | None,
) -> Strip:
    """One explanation of all of them, which are of one input."""
    cells: dict[int | None, list[Attributed]] = {}
    for one, when in zip(found, about, strict=True):
        shown = one.attributed
        assert isinstance(shown, Attributed)
        cells.setdefault(when["client"], []).append(shown)
    own = "'s own" if (of or whose_models(run)) == "personal" else ""
    names = ["global" if k is None else f"{run.client_name(k)}{own}" for k in cells]
    rounds = sorted({when["round"] for when in about})
    clients = "".join(f"-client-{k}" for k in cells if k is not None)
    times = "".join(f"-{t}" for t in rounds)
    suffix = next(iter(cells.values()))[0].inputs.suffix
    file = f"strip-{explainer.label}{clients}-rounds{times}{suffix}"
    return Strip(tuple(names), tuple(rounds), tuple(map(tuple, cells.values())), file)
