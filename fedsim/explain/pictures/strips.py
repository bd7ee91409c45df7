"""Maps of one input side by side: a line for each model, all on one scale."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedsim.explain.pictures.canvas import (
    AGAINST,
    FOR,
    add_scale,
    new_figure,
    place,
    plain,
    save,
    wrapped,
)
from fedsim.explain.pictures.documents import LINE, grounds_of, in_lines, show_words
from fedsim.explain.pictures.images import Array, flatness, framed, show_image, show_relevance
from fedsim.explain.scores.relevance import silence

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEFT, _GAP, _FONT = 0.9, 0.12, 8  # inches: names of models; between cells; points
_LETTER, _LINE = 0.07, 0.14  # inches of a caption
_IMAGE, _BARS, _TEXT, _FEATURES = 1.3, 1.6, 2.1, 1.4  # inches: widths of cells, and of names
_MOST = 10  # features
_PANEL = 3.0  # inches: width of a panel above


def draw_strip(
    relevance: NDArray[np.floating],
    columns: Sequence[str],
    models: Sequence[str],
    captions: Sequence[Sequence[str]],
    path: Path,
    title: str,
    *,
    what: str,
    image: Array | None = None,
    parts: Sequence[str] = (),
    words: bool = False,
    above: tuple[float, Callable[[Axes], None]] | None = None,
    absent: Collection[tuple[int, int]] = (),
) -> None:
    """Draw the maps (M, T, ...) of one input: a line for each model, with T columns.

    Args:
        columns: what each column is, such as "round 3".
        captions: by model, then column: what is predicted.
        what: what relevances are for, the predicted `class` or `value`.
        image: (C, H, W) the input in [0, 1], if it is an image.
        parts: else, its features with their values, or its words.
        words: parts are words, in their order, and the rest of the maps is padding.
        above: the height in inches of a panel above them, and what draws it.
        absent: places without a map, whose captions say why.
    """
    first = _LEFT
    if image is not None:
        wide, high, kind = _IMAGE, _IMAGE * flatness(relevance[0, 0]), "pixels"
        first += wide + _GAP  # the input itself
    else:
        relevance = relevance.reshape(*relevance.shape[:2], -1)[..., : len(parts)]
        kind = "words" if words else "features"
        lines = in_lines(parts, _TEXT)
        size = np.where(np.isfinite(relevance), np.abs(relevance), 0).max(axis=(0, 1))
        order = np.argsort(-size, kind="stable")[:_MOST][::-1]
        wide, high = (_TEXT, LINE * len(lines)) if words else (_BARS, 0.16 * len(order) + 0.1)
        first += 0 if words else _FEATURES
    largest = float(np.abs(relevance[np.isfinite(relevance)]).max(initial=0)) or 1.0
    silent = [
        ["" if (i, j) in absent else silence(own, kind) for j, own in enumerate(of)]
        for i, of in enumerate(relevance)
    ]
    whole = [
        [
            f"{text}; {why}, so this says nothing" if why else text
            for text, why in zip(*of, strict=True)
        ]
        for of in zip(captions, silent, strict=True)
    ]
    told = [  # a map says itself that it says nothing
        [wrapped(text, int(wide / _LETTER), 6) for text in of]
        for of in (whole if image is None else captions)
    ]
    heads = [_LINE * (1 + max(text.count("\n") for text in of)) + 0.06 for of in told]
    begin = 0.25 if above is None else above[0] + 0.75
    tops = np.cumsum([begin, *(own + high + _GAP for own in heads)])
    across = [first + column * (wide + _GAP) for column in range(len(columns))]
    width, height = across[-1] + wide, float(tops[-1])
    figure = new_figure(width, height)

    def write(x: float, y: float, text: str, weight: str = "bold") -> None:
        style = {"fontsize": _FONT, "va": "center", "weight": weight}
        figure.text(x / width, 1 - y / height, plain(text), style)

    if above is not None:
        above[1](place(figure, _LEFT, 0, max(width - _LEFT, _PANEL), above[0]))
    for x, name in zip(across, columns, strict=True):
        write(x, begin - 0.13, name)
    for i, model in enumerate(models):
        top = tops[i] + heads[i]
        write(0, top + 0.5 * high, wrapped(model, int(_LEFT / _LETTER), 4))
        if image is not None and i == 0:
            write(_LEFT, begin - 0.13, "input")
            show_image(framed(figure, _LEFT, top, wide, high), image)
        for j, x in enumerate(across):
            own = relevance[i, j]
            axes = framed(figure, x, top, wide, high)
            if (i, j) in absent:
                axes.set_axis_off()
            elif image is not None:
                show_relevance(axes, own, largest)
            elif words:
                axes.set(xlim=(-0.03, wide), ylim=(high, 0))
                axes.set_axis_off()
                show_words(axes, LINE / 2, parts, lines, grounds_of(own, largest))
            else:
                if not silent[i][j]:
                    colours = [FOR if r > 0 else AGAINST for r in own[order]]
                    axes.barh(range(len(order)), own[order], color=colours)
                axes.axvline(0, color="black", linewidth=0.6)
                axes.set(xlim=(-1.05 * largest, 1.05 * largest), ylim=(-0.7, len(order) - 0.3))
                if j == 0:
                    names = [plain(wrapped(parts[k], 24, 1)) for k in order]
                    axes.set_yticks(range(len(order)), names, fontsize=_FONT - 1)
                if (i, j) == (len(models) - 1, 0):
                    ends = f"−{largest:.3g}", "0", f"+{largest:.3g}"
                    axes.set_xticks((-largest, 0, largest), ends, fontsize=_FONT - 1)
            axes.set_title(plain(told[i][j]), fontsize=_FONT, loc="left", pad=3)
    if image is None and not words:
        few = f"; the {len(order)} most relevant of {len(parts)} features"
        note = f"relevance; red: for the {what} predicted in each cell, blue: against it; "
        note += "one scale for all"
        figure.text(first / width, -0.25 / height, note + few * (len(order) < len(parts)),
                    fontsize=_FONT - 1, va="top")  # fmt: skip
    else:
        note = f"relevance for the {what} predicted in each cell; one scale for all"
        add_scale(figure, first, height + 0.02, note, largest, pale=words)
    alt = [
        f"{model}: " + ", ".join(f"{t} {text}" for t, text in zip(columns, of, strict=True))
        for model, of in zip(models, whole, strict=True)
    ]
    save(figure, path, title, "; ".join(alt))
