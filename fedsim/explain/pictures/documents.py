"""Pictures of documents with highlighted words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsim.explain.pictures.canvas import (
    add_scale,
    new_figure,
    pale_colour,
    place,
    plain,
    save,
    wrapped,
)
from fedsim.explain.scores.relevance import silence

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, LINE, CHARACTER = 6.0, 0.2, 0.078  # inches: of a picture, a line of text, a character
_LETTERS = 86  # of a caption's line
CHOSEN, MARKED = "#ffd54d", "#1565c0"
Colour = str | tuple[float, ...]


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


def draw_rationales(
    documents: Sequence[Chosen], names: Sequence[str], path: Path, title: str = ""
) -> None:
    """Draw documents: chosen words on yellow, marked ones in blue and underlined."""
    marked = any(document.marked for document in documents)
    note = "on yellow: chosen" + "; blue, underlined: what the label is about" * marked
    grounds = [[CHOSEN if chosen else None for chosen in d.chosen] for d in documents]
    captions = [f"{n}: {d.decided}" for n, d in zip(names, documents, strict=True)]
    _draw(documents, captions, grounds, [d.marked for d in documents], note, path, title)


def draw_weighed(
    documents: Sequence[Weighed],
    names: Sequence[str],
    path: Path,
    title: str = "",
    largest: Sequence[float] = (),
) -> None:
    """Draw documents, the words that speak for a decision on red, those against it on blue.

    Args:
        largest: the relevances of the darkest colours; by default each document's largest.
    """
    scales = list(largest) or [max(map(abs, d.relevance), default=0) for d in documents]
    grounds = [grounds_of(d.relevance, r) for d, r in zip(documents, scales, strict=True)]
    captions = [
        f"{name}: {d.decided}" + f" (±{scale:.3g})" * any(ground)
        for name, d, scale, ground in zip(names, documents, scales, grounds, strict=True)
    ]
    note = "relevance of words for the decision; each document has its own scale (±)"
    note += ", one for all models" * bool(largest)
    _draw(documents, captions, grounds, [() for _ in documents], note, path, title, scale=True)


def grounds_of(relevance: Sequence[float], largest: float) -> list[Colour | None]:
    """The colour behind each word of a document; none if its relevances say nothing."""
    if silence(np.array(relevance), "words"):
        return [None] * len(relevance)
    return [pale_colour(r / largest) for r in relevance]


def _draw(
    documents: Sequence[Document],
    captions: Sequence[str],
    grounds: Sequence[Sequence[Colour | None]],
    marked: Sequence[Sequence[bool]],
    note: str,
    path: Path,
    title: str,
    scale: bool = False,
) -> None:
    lines = [in_lines(document.words) for document in documents]
    above = [wrapped(caption, _LETTERS, 4) for caption in captions]
    deep = [LINE * (1 + 0.75 * text.count("\n")) for text in above]
    height = sum(LINE * (len(rows) + 0.7) for rows in lines) + sum(deep)
    figure = new_figure(WIDTH, height)
    axes = place(figure, 0, 0, WIDTH, height)
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    y = 0.0
    for document, caption, high, rows, ground, underlined in zip(
        documents, above, deep, lines, grounds, marked, strict=True
    ):
        axes.text(0, y + 0.5 * high, plain(caption), fontsize=9, va="center")
        y += high + 0.5 * LINE
        show_words(axes, y, document.words, rows, ground, underlined)
        y += LINE * (len(rows) + 0.2)
    if scale:
        add_scale(figure, 0, height, note, pale=True)
    else:
        axes.text(0, height, note, fontsize=7, va="top")
    save(figure, path, title, "; ".join(captions))


def show_words(
    axes: Axes,
    y: float,
    words: Sequence[str],
    lines: Sequence[Sequence[tuple[int, float]]],
    grounds: Sequence[Colour | None],
    marked: Sequence[bool] = (),
) -> None:
    """Write words in `lines` of `in_lines`, the middle of the first at y, on axes in inches."""
    style: dict[str, Any] = {"family": "monospace", "fontsize": 9, "va": "center"}
    for row in lines:
        for k, x in row:
            wide = CHARACTER * len(words[k])
            if (shade := grounds[k]) is not None:
                axes.fill_between([x - 0.02, x + wide + 0.02], y - 0.09, y + 0.09, color=shade,
                                  linewidth=0)  # fmt: skip
            if line := bool(marked) and marked[k]:
                axes.plot([x, x + wide], [y + 0.08] * 2, color=MARKED, linewidth=1.2)
            axes.text(x, y, plain(words[k]), color=MARKED if line else "black", **style)
        y += LINE


def in_lines(words: Sequence[str], width: float = WIDTH) -> list[list[tuple[int, float]]]:
    """Which words (by number) are in each line of so many inches, and where they begin."""
    lines: list[list[tuple[int, float]]] = [[]]
    x = 0.0
    for k, word in enumerate(words):
        wide = CHARACTER * len(word)
        if x and x + wide > width:
            lines.append([])
            x = 0.0
        lines[-1].append((k, x))
        x += wide + CHARACTER
    return lines
