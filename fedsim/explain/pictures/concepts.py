"""Pictures of what concepts add to decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedsim.explain.pictures.canvas import (
    AGAINST,
    FOR,
    LEGEND,
    new_figure,
    place,
    plain,
    wrapped,
)
from fedsim.explain.pictures.images import show_image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.float64]

MOST_BARS = 20  # concepts of a panel
_NAMES, _WIDTH, _BAR, _SIDE, _GAP = 2.2, 3.2, 0.17, 0.9, 0.42  # inches
_FONT, _SMALL = 9, 7.5  # points


@dataclass(frozen=True)
class Panel:
    """One input: its concepts in words, what each adds, and what it would add if it were true.

    Args:
        would: (J,) NaN where that is not known.
        image: (C, H, W) pixels in [0, 1]; None if it is no image.
    """

    caption: str
    concepts: tuple[str, ...]
    adds: Array
    would: Array
    image: NDArray[np.float32] | None = None


def draw_concepts(panels: Sequence[Panel], signs: tuple[str, str]) -> Figure:
    """Draw bars of contributions, a panel for each input, all on one scale.

    A mark is what a concept would add with its true value.

    Args:
        signs: what red bars do, and blue ones.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    bars = max((min(len(p.concepts), MOST_BARS) for p in panels), default=1)
    left = _NAMES + (_SIDE + 0.1 if any(p.image is not None for p in panels) else 0)
    high = max(_BAR * bars + 0.1, _SIDE if left > _NAMES else 0)
    figure = new_figure(left + _WIDTH, len(panels) * (high + _GAP))
    every = np.concatenate([[0.0], *(v for p in panels for v in (p.adds, p.would))])
    every = every[np.isfinite(every)]
    margin = 0.05 * np.ptp(every) or 1.0
    for k, panel in enumerate(panels):
        top = k * (high + _GAP) + _GAP
        if panel.image is not None:
            frame = place(figure, 0, top, _SIDE, _SIDE)
            frame.set(xticks=(), yticks=())
            show_image(frame, panel.image)
        axes = place(figure, left, top, _WIDTH, high)
        shown = len(panel.concepts[:MOST_BARS])
        adds, would = panel.adds[:shown], panel.would[:shown]
        axes.barh(range(shown), adds, 0.7, color=np.where(adds > 0, FOR, AGAINST).tolist())
        axes.plot(would, range(shown), "|k", markersize=7, markeredgewidth=1.6)
        names = [plain(wrapped(name, 34, 1)) for name in panel.concepts[:shown]]
        axes.set_yticks(range(shown), names, fontsize=_SMALL)
        axes.set(xlim=(every.min() - margin, every.max() + margin), ylim=(bars - 0.4, -0.6))
        axes.axvline(0, color="black", linewidth=0.6)
        axes.tick_params(axis="x", labelsize=_SMALL, labelbottom=k == len(panels) - 1)
        axes.spines[["top", "right"]].set_visible(False)
        caption: dict[str, Any] = {"fontsize": _FONT, "ha": "left", "va": "bottom"}
        where = (-left / _WIDTH, 1 + 0.05 / high)
        text = plain(wrapped(panel.caption, 80, 1))
        axes.text(*where, text, caption, transform=axes.transAxes)
    if len(panels):
        colours = zip((FOR, AGAINST), signs, strict=True)
        handles: list[Any] = [Patch(color=colour, label=word) for colour, word in colours]
        if any(np.isfinite(p.would).any() for p in panels):
            mark: dict[str, Any] = {
                "color": "k",
                "marker": "|",
                "linestyle": "none",
                "markeredgewidth": 1.6,
            }
            handles.append(Line2D([], [], **mark, label="with its true value"))
        style = {**LEGEND, "loc": "upper left", "ncols": 3, "fontsize": _SMALL, "borderpad": 0}
        figure.legend(
            handles=handles, bbox_to_anchor=(0, -0.3 / figure.get_size_inches()[1]), **style
        )
    return figure
