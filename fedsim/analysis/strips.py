"""Strips: how a decision on one input, and the reasons for it, grew from round to round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
        clients: of each model whose it is; None for the global one.
        cells: by model, then by round; None where there is no such model.
        file: the pictures' name.
        why: of a model and a round, by their places, why there is none.
    """

    models: tuple[str, ...]
    clients: tuple[int | None, ...]
    rounds: tuple[int, ...]
    cells: tuple[tuple[Attributed | None, ...], ...]
    file: str
    why: Mapping[tuple[int, int], str] = field(default_factory=dict)

    @property
    def first(self) -> Attributed:
        """Any of its explanations, which tells what they have in common."""
        return next(cell for cells in self.cells for cell in cells if cell is not None)

    @property
    def title(self) -> str:
        one = self.first
        label, what = one.inputs.labels[0], "class" if one.probabilities else "value"
        truth = "" if label is None else f" (true {what} {label})"
        return f"{one.inputs.names[0]}{truth} by round, {one.attribution}"

    def text(self) -> str:
        one = self.first
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
            there = [(t, c) for t, c in zip(self.rounds, cells, strict=True) if c is not None]
            for t, cell in there:
                (row,) = cell.rows()
                row["right"] = _right(row)
                row["like_last"] = alike(cell, there[-1][1])
                row["largest"] = float(np.abs(cell.relevance[0]).max())
                found.append({"model": model, "round": t, **row})
        return found

    def save(self, folder: Path) -> list[Path]:
        """Draw it as a PNG and an SVG, unless one format is asked for.

        Of two rounds, a last column has the later's maps less the earlier's; of one round, those
        of clients less the first model's.
        """
        one = self.first
        captions = [
            [
                self.why.get((i, j), "") if cell is None else _told(cell.rows()[0])
                for j, cell in enumerate(cells)
            ]
            for i, cells in enumerate(self.cells)
        ]
        columns, pairs = [f"round {t}" for t in self.rounds], self._pairs()
        if pairs:
            two = len(self.rounds) == 2
            less = f"round {self.rounds[1]} less {self.rounds[0]}" if two else "less the first"
            columns.append(less)
            for i, of in enumerate(captions):
                of.append(_both(*pairs[i]) if i in pairs else "")
        nothing = np.zeros_like(one.relevance[0])
        relevance = np.array([[nothing] * len(columns) for _ in self.models])
        absent = set(np.ndindex(*relevance.shape[:2]))
        for i, cells in enumerate(self.cells):
            shown = [None if cell is None else cell.relevance[0] for cell in cells]
            if i in pairs:
                shown.append(pairs[i][0].relevance[0] - pairs[i][1].relevance[0])
            for j, own in enumerate(shown):
                if own is not None:
                    relevance[i, j] = own
                    absent.remove((i, j))
        image = as_pixels(one.inputs.x, one.dataset)[0] if one.images else None
        paths = [*dict.fromkeys(picture(folder, self.file, ending) for ending in ("png", "svg"))]
        for path in paths:
            draw_strip(
                relevance,
                columns,
                self.models,
                captions,
                path,
                self.title,
                what="class" if one.probabilities else "value",
                image=image,
                parts=() if one.images else one.parts(0),
                words=bool(one.dataset.words),
                absent=absent,
            )
        return paths

    def _pairs(self) -> dict[int, tuple[Attributed, Attributed]]:
        """By model, the two maps whose difference is shown."""
        if len(self.rounds) > 2:
            return {}
        two = len(self.rounds) == 2
        found = {}
        for i, cells in enumerate(self.cells):
            a, b = cells[-1], (cells if two else self.cells[0])[0]
            if a is not None and b is not None and (two or i):
                found[i] = a, b
        return found


def alike(one: Attributed, other: Attributed) -> float | None:
    """The rank correlation of two maps of an input; None where either says nothing."""
    parts = one.relevance[0].size if one.images else len(one.parts(0))
    maps = (each.relevance[:1].reshape(1, -1)[:, :parts] for each in (one, other))
    a, b = (each.astype(np.float64) for each in maps)
    if parts < 2 or not (informative(a) & informative(b))[0]:
        return None
    return float(rank_correlation(a, b)[0])


def _both(one: Attributed, other: Attributed) -> str:
    """What the difference of two maps is about."""
    a, b = one.decisions[0], other.decisions[0]
    if not one.probabilities:
        return "of the values"
    return f"both for {a}" if a == b else f"of different decisions, {a} and {b}"


def _right(row: Mapping[str, Any]) -> bool | None:
    """Whether a class is the true one; None if it is not known, or if it is a number."""
    known = row["label"] is not None and row["probability"] is not None
    return row["decision"] == row["label"] if known else None


def _told(row: Mapping[str, Any]) -> str:
    """As in "5 (56%), wrong", of a row of an attribution."""
    chance = "" if row["probability"] is None else f" ({row['probability']:.0%})"
    right = _right(row)
    judged = "" if right is None else ", right" if right else ", wrong"
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
    found: Mapping[tuple[int | None, int], Explanation],
    of: Whose | None,
    why: Mapping[tuple[int | None, int], str] | None = None,
) -> Strip:
    """One explanation of all of them, which are of one input.

    Args:
        found: by client, None for the global model, and round.
        of: which of clients' models.
        why: of models that there are not, why.
    """
    why = why or {}
    models = [*dict.fromkeys(k for k, _ in (*found, *why))]
    models.sort(key=lambda k: (k is not None, k))
    rounds = sorted({t for _, t in (*found, *why)})
    own = "'s own" if (of or whose_models(run)) == "personal" else ""
    names = ["global" if k is None else f"{run.client_name(k)}{own}" for k in models]
    cells = tuple(tuple(_cell(found.get((k, t))) for t in rounds) for k in models)
    clients = "".join(f"-client-{k}" for k in models if k is not None)
    times = "".join(f"-{t}" for t in rounds)
    strip = Strip(
        tuple(names),
        tuple(models),
        tuple(rounds),
        cells,
        "",
        {(models.index(k), rounds.index(t)): text for (k, t), text in why.items()},
    )
    suffix = strip.first.inputs.suffix
    return replace(strip, file=f"strip-{explainer.label}{clients}-rounds{times}{suffix}")


def _cell(one: Explanation | None) -> Attributed | None:
    shown = None if one is None else one.attributed
    assert shown is None or isinstance(shown, Attributed)
    return shown
