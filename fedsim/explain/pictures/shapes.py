"""Figures of shape functions: what each feature adds, over how often its values occur."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedsim.explain.pictures.canvas import LEGEND, class_colours, new_figure, place, plain, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]

COLUMNS = 4  # of panels
MOST_TICKS = 8  # categories that are named in a panel
BINS = 20  # of a number's values
_WIDTH, _HIGH, _LOW = 2.1, 1.25, 0.22  # inches: a panel's width, its curves, its histogram
_GAP, _CAPTION, _TICKS = 0.2, 0.24, 0.24  # inches: between panels, above, below
_LETTER, _LETTERS = 0.075, 14  # inches of a letter, and how many of a category's name
_OWN, _OTHERS, _BARS = "#1f4e79", ("#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e"), "0.75"
_SMALL, _FONT = 7.5, 9  # points


@dataclass(frozen=True)
class Axis:
    """The values of a feature at which its shape function is shown.

    Args:
        name: of the feature, with its unit if it has one.
        words: (P,) the values in words.
        at: (P,) the values in the units of the table, NaN for a blank cell; None for categories.
        share: (P,) share of the training examples with each value, or nearest to it.
        values: (N,) the training examples' values in the units of the table, of numbers.
        dated: numbers are dates, told by their words.
    """

    name: str
    words: tuple[str, ...]
    at: Array | None
    share: Array
    values: Array
    dated: bool = False

    @property
    def numbers(self) -> slice:
        """Which of the values are numbers; the last may be a blank cell."""
        assert self.at is not None
        return slice(-1 if np.isnan(self.at[-1]) else None)

    @property
    def beyond(self) -> float:
        """Where a blank cell is drawn, right of the numbers."""
        assert self.at is not None
        least, most = self.at[self.numbers][[0, -1]]
        return float(most + 0.12 * ((most - least) or 1))


def draw_shapes(
    axes: Sequence[Axis],
    shapes: Mapping[str, Sequence[Array]],
    of: Sequence[str],
) -> Figure:
    """Draw shape functions, a panel for each feature, all with one vertical scale.

    Numbers are curves, categories bars. Below is how often values occur.

    Args:
        axes: of each feature.
        shapes: (P, S) of each feature, by model; the first is the one that is explained.
        of: (S,) what scores are for; the models differ in colour if there is one score, else in
            their dashes.
    """
    columns = min(COLUMNS, len(axes))
    below = [_under(axes[k : k + columns]) for k in range(0, len(axes), columns)]
    across, tops = _WIDTH + _GAP, np.cumsum([0, *(_CAPTION + _HIGH + _LOW + b for b in below)])
    figure = new_figure(columns * across, tops[-1])
    every = np.concatenate([[0.0], *(s.ravel() for own in shapes.values() for s in own)])
    low, high = np.min(every[np.isfinite(every)]), np.max(every[np.isfinite(every)])
    margin = 0.06 * (high - low) or 1.0
    styles = _styles([*shapes], of)
    for k, axis in enumerate(axes):
        row, column = divmod(k, columns)
        left, top = column * across, tops[row] + _CAPTION
        panel = place(figure, left, top, _WIDTH, _HIGH)
        under = place(figure, left, top + _HIGH, _WIDTH, _LOW)
        panel.set_title(plain(wrapped(axis.name, int(_WIDTH / 0.075), 1)), fontsize=_FONT, pad=3)
        panel.axhline(0, color="0.7", linewidth=0.7)
        for number, ((name, word), style) in enumerate(styles.items()):
            values = shapes[name][k][:, of.index(word)]
            _draw(panel, axis, values, style, (number, len(styles)))
        panel.set(ylim=(low - margin, high + margin))
        panel.locator_params(axis="y", nbins=5)
        panel.tick_params(labelsize=_SMALL, length=2.5, labelbottom=False, bottom=False)
        if column:
            panel.set_yticklabels(())
        _draw_share(under, axis)
        under.set_xlim(panel.get_xlim())
        for one in (panel, under):
            one.spines[["top", "right"]].set_visible(False)
        panel.spines["bottom"].set_visible(False)
    if len(styles) > 1:
        from matplotlib.lines import Line2D

        width, height = figure.get_size_inches()
        longest = max(len(style["label"]) for style in styles.values())
        ncols = max(1, min(len(styles), int(width / (_LETTER * longest + 0.5))))
        figure.legend(
            handles=[Line2D([], [], **style) for style in styles.values()],
            bbox_to_anchor=(0, 1 + 0.05 / height),
            **{**LEGEND, "ncols": ncols, "fontsize": _FONT, "borderpad": 0},
        )
    return figure


def _under(axes: Sequence[Axis]) -> float:
    """Inches below a row of panels, where the names of categories stand upright."""
    words = [len(word) for axis in axes if axis.at is None for word in axis.words]
    return _TICKS + 0.8 * _LETTER * min(max(words, default=0), _LETTERS)


def _styles(models: Sequence[str], of: Sequence[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """How each model's function of each score is drawn."""
    found = {}
    for m, name in enumerate(models):
        for s, word in enumerate(of):
            if len(of) == 1:
                colour: Any = _OTHERS[(m - 1) % len(_OTHERS)] if m else _OWN
                style: dict[str, Any] = {"label": name, "linestyle": "-"}
            else:
                colour = class_colours(len(of))[s]
                style = {"label": word if not m else f"{word}, {name}"}
                style |= {"linestyle": ("-", "--", ":", "-.")[m % 4], "alpha": 0.5 if m else 1}
            found[name, word] = {**style, "color": colour, "linewidth": 1.0 if m else 1.8}
            found[name, word]["zorder"] = 2 if m else 3
    return found


def _draw(
    panel: Axes, axis: Axis, values: Array, style: dict[str, Any], of_all: tuple[int, int]
) -> None:
    """One function, the i-th of n: a curve of numbers, bars of categories side by side."""
    if axis.at is not None:
        panel.plot(axis.at[axis.numbers], values[axis.numbers], **style)
        if np.isnan(axis.at[-1]):
            mark = {"linestyle": "none", "marker": "_", "markersize": 9, "markeredgewidth": 1.8}
            panel.plot([axis.beyond], values[-1:], **{**style, **mark})
        return
    number, count = of_all
    width = 0.7 / count
    places = np.arange(len(values)) - 0.35 + (number + 0.5) * width
    panel.bar(places, values, width, color=style["color"], alpha=style.get("alpha"))
    panel.set_xlim(-0.6, len(values) - 0.4)


def _draw_share(under: Axes, axis: Axis) -> None:
    """How often values occur, downwards, and what they are."""
    if axis.at is None:
        under.bar(range(len(axis.share)), axis.share, 0.7, color=_BARS)
        shown = [*range(0, len(axis.words), -(-len(axis.words) // MOST_TICKS))]
        words = [plain(wrapped(axis.words[p], _LETTERS, 1)) for p in shown]
        under.set_xticks(shown, words, rotation=90 if max(map(len, words)) > 2 else 0)
    else:
        blank = axis.share[-1] if np.isnan(axis.at[-1]) else 0.0
        counts, edges = np.histogram(axis.values, BINS)
        width, shares = np.diff(edges), counts / len(axis.values) * (1 - blank)
        under.bar(edges[:-1], shares, width, align="edge", color=_BARS)
        places = axis.at[axis.numbers]
        if axis.dated:
            under.set_xticks(places[[0, -1]], np.array(axis.words)[axis.numbers][[0, -1]])
        else:
            under.locator_params(axis="x", nbins=4)
        if blank:
            under.bar([axis.beyond], [blank], width[0], color=_BARS)
            under.text(axis.beyond, 0, "blank", fontsize=_SMALL, ha="center", va="bottom")
    under.set_yticks(())
    under.invert_yaxis()
    under.tick_params(labelsize=_SMALL, length=2.5)
