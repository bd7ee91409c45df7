"""Documents with the words that a model chose, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsim.explain.canvas import new_figure, place, plain, save

WIDTH, LINE, CHARACTER = 9.0, 0.2, 0.078  # inches: of a picture, a line of text, a character
CHOSEN, MARKED = "#ffd54d", "#1565c0"


@dataclass(frozen=True)
class Chosen:
    """The words that a model chose of a document, and what it decided by them.

    Args:
        words: of the document, as far as the model reads it.
        chosen: for each word.
        marked: for each word, whether the label is about it; empty if that is not known.
        decision: the class, with its probability.
        label: the true class, if there is one.
    """

    words: tuple[str, ...]
    chosen: tuple[bool, ...]
    marked: tuple[bool, ...]
    decision: str
    probability: float
    label: str | None

    def in_words(self) -> str:
        """The document with chosen words in brackets, and marked ones between underscores."""
        shown = []
        for k, word in enumerate(self.words):
            word = f"_{word}_" if self.marked and self.marked[k] else word
            shown.append(f"[{word}]" if self.chosen[k] else word)
        truth = "" if self.label is None else f", is {self.label}"
        decided = f"{self.decision} ({self.probability:.0%}){truth}"
        return f"{decided}: {' '.join(shown) or '(no word)'}"


def draw_rationales(documents: Sequence[Chosen], path: Path) -> None:
    """Draw documents: chosen words on yellow, marked ones in blue and underlined.

    Raises:
        OSError: it cannot be written.
    """
    lines = [_lines(document.words) for document in documents]
    height = sum(LINE * (len(rows) + 1.7) for rows in lines) + LINE
    figure = new_figure(WIDTH, height)
    axes = place(figure, 0, 0, WIDTH, height)
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    y = LINE
    style = {"family": "monospace", "fontsize": 9, "va": "center"}
    for document, rows in zip(documents, lines, strict=True):
        truth = "" if document.label is None else f", is {document.label}"
        right = document.label in (None, document.decision)
        said = f"{document.decision} ({document.probability:.0%}){truth}"
        axes.text(
            0, y, plain(said), fontsize=9, va="center", color="black" if right else "#c62828"
        )
        y += LINE
        for row in rows:
            for k, x in row:
                word, wide = document.words[k], CHARACTER * len(document.words[k])
                marked = bool(document.marked) and document.marked[k]
                if document.chosen[k]:
                    axes.fill_between(
                        [x - 0.02, x + wide + 0.02], y - 0.09, y + 0.09, color=CHOSEN, linewidth=0
                    )
                if marked:
                    axes.plot([x, x + wide], [y + 0.08] * 2, color=MARKED, linewidth=1.2)
                colour = MARKED if marked else "black"
                axes.text(x, y, plain(word), color=colour, **style)  # type: ignore[arg-type]
            y += LINE
        y += 0.7 * LINE
    if any(document.marked for document in documents):
        note = "on yellow: chosen; blue, underlined: what the label is about"
    else:
        note = "on yellow: chosen"
    axes.text(0, height, note, fontsize=7, va="top")
    save(figure, path)


def _lines(words: Sequence[str]) -> list[list[tuple[int, float]]]:
    """The words of each line, by number, and where they begin."""
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
