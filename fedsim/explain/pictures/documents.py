"""Pictures of documents with highlighted words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsim.explain.pictures.canvas import new_figure, place, plain, save
from fedsim.explain.scores.relevance import silence

WIDTH, LINE, CHARACTER = 9.0, 0.2, 0.078  # inches: of a picture, a line of text, a character
CHOSEN, MARKED = "#ffd54d", "#1565c0"
Colour = str | tuple[float, float, float, float]


def in_short(decision: str, probability: float | None, label: str | None) -> str:
    """As in "predicted positive (93%), true class negative"; a regression has no probability."""
    chance, what = ("", "value") if probability is None else (f" ({probability:.0%})", "class")
    truth = "" if label is None else f", true {what} {label}"
    return f"predicted {decision}{chance}{truth}"


@dataclass(frozen=True)
class Document:
    """The words that a model reads, its decision and the probability, and the true class."""

    words: tuple[str, ...]
    decision: str
    probability: float
    label: str | None

    @property
    def decided(self) -> str:
        return in_short(self.decision, self.probability, self.label)


@dataclass(frozen=True)
class Chosen(Document):
    """The words that a model selected, and those of the annotated rationale, empty if unknown."""

    chosen: tuple[bool, ...]
    marked: tuple[bool, ...]

    def in_words(self) -> str:
        """The document with selected words in brackets, and annotated ones between underscores."""
        shown = []
        for k, word in enumerate(self.words):
            word = f"_{word}_" if self.marked and self.marked[k] else word
            shown.append(f"[{word}]" if self.chosen[k] else word)
        return f"{self.decided}: {' '.join(shown) or '(no word)'}"


@dataclass(frozen=True)
class Weighed(Document):
    """The relevance of each word for a decision; positive ones speak for it."""

    relevance: tuple[float, ...]

    @property
    def decided(self) -> str:
        why = silence(np.array(self.relevance), "words")
        return super().decided + (f"; {why}, so this says nothing" if why else "")


def draw_rationales(documents: Sequence[Chosen], path: Path, title: str = "") -> None:
    """Draw documents: chosen words on yellow, marked ones in blue and underlined."""
    marked = any(document.marked for document in documents)
    note = "on yellow: chosen" + "; blue, underlined: what the label is about" * marked
    grounds = [[CHOSEN if chosen else None for chosen in d.chosen] for d in documents]
    _draw(documents, grounds, [d.marked for d in documents], note, path, title)


def draw_weighed(documents: Sequence[Weighed], path: Path, title: str = "") -> None:
    """Draw documents, the words that speak for a decision on red, those against it on blue."""
    import matplotlib as mpl

    grounds: list[list[Colour | None]] = []
    for document in documents:
        if silence(np.array(document.relevance), "words"):
            grounds.append([None] * len(document.words))
            continue
        largest = max(map(abs, document.relevance))
        # Only the pale half of the colour map, on which black words are readable.
        shades = (0.5 + 0.3 * r / largest for r in document.relevance)
        grounds.append([mpl.colormaps["RdBu_r"](shade) for shade in shades])
    note = "on red: words that speak for the decision; on blue: against it"
    _draw(documents, grounds, [() for _ in documents], note, path, title)


def _draw(
    documents: Sequence[Document],
    grounds: Sequence[Sequence[Colour | None]],
    marked: Sequence[Sequence[bool]],
    note: str,
    path: Path,
    title: str,
) -> None:
    lines = [_lines(document.words) for document in documents]
    height = sum(LINE * (len(rows) + 1.7) for rows in lines) + LINE
    figure = new_figure(WIDTH, height)
    axes = place(figure, 0, 0, WIDTH, height)
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    y = LINE
    style = {"family": "monospace", "fontsize": 9, "va": "center"}
    for document, rows, ground, underlined in zip(documents, lines, grounds, marked, strict=True):
        colour = "black" if document.label in (None, document.decision) else "#c62828"
        axes.text(0, y, plain(document.decided), fontsize=9, va="center", color=colour)
        y += LINE
        for row in rows:
            for k, x in row:
                word, wide = document.words[k], CHARACTER * len(document.words[k])
                if (shade := ground[k]) is not None:
                    axes.fill_between(
                        [x - 0.02, x + wide + 0.02], y - 0.09, y + 0.09, color=shade, linewidth=0
                    )
                if line := bool(underlined) and underlined[k]:
                    axes.plot([x, x + wide], [y + 0.08] * 2, color=MARKED, linewidth=1.2)
                ink = MARKED if line else "black"
                axes.text(x, y, plain(word), color=ink, **style)  # type: ignore[arg-type]
            y += LINE
        y += 0.7 * LINE
    axes.text(0, height, note, fontsize=7, va="top")
    save(figure, path, title)


def _lines(words: Sequence[str]) -> list[list[tuple[int, float]]]:
    lines: list[list[tuple[int, float]]] = [[]]
    x = 0.0
    for k, word in enumerate(words):
        wide = CHARACTER * len(word)
        if x and x + wide > WIDTH:
            lines.append([])
            x = 0.0
        lines[-1].append((k, x))
        x += wide + CHARACTER
    return lines
