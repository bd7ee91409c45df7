"""Pictures of the relevance maps that a run has stored: agreement, removal of parts, drift."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedsim.explain.pictures.canvas import add_scale, new_figure, place, save_cropped
from fedsim.explain.pictures.images import flatness, show_relevance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
_FONT = 8
_SIDE = 1.1  # inches per map


def draw_agreement(names: Sequence[str], matrix: Array, what: str) -> bytes:
    """Draw the similarity, at most 1, of explanations of all pairs of models, as a PNG."""
    cell = 0.42 if len(names) <= 12 else 0.2
    side = cell * len(names)
    figure = new_figure(side + 2.6, side + 1.1)
    axes = place(figure, 1.1, 0.1, side, side)
    low = float(np.nanmin(matrix, initial=0.0))
    drawn = axes.imshow(matrix, cmap="viridis", vmin=min(low, 0.0), vmax=1)
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=_FONT)
    axes.set_yticks(range(len(names)), names, fontsize=_FONT)
    axes.tick_params(length=0)
    if len(names) <= 12:
        for (i, j), value in np.ndenumerate(matrix):
            if np.isfinite(value):
                colour = "black" if value > 0.6 else "white"
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=6, color=colour)
    bar = figure.colorbar(drawn, cax=place(figure, side + 1.25, 0.1, 0.12, side))
    bar.set_label(what, fontsize=_FONT)
    bar.ax.tick_params(labelsize=_FONT)
    return _png(figure)


def draw_removal(curves: Mapping[str, Mapping[str, Array]], ylabel: str) -> bytes:
    """Draw deletion and insertion curves by explainer, median and quartiles of inputs, as a PNG.

    `curves` are (m, steps + 1) by name of the curve, then by explainer.
    """
    import matplotlib as mpl

    width, height, gap = 3.4, 1.7, 0.7
    figure = new_figure(width + 0.7, len(curves) * (height + gap) + 0.2)
    colours = mpl.colormaps["tab10"](np.arange(10))
    for k, (name, of_explainers) in enumerate(curves.items()):
        axes = place(figure, 0.6, 0.25 + k * (height + gap), width, height)
        for n, (explainer, curve) in enumerate(of_explainers.items()):
            share = np.linspace(0, 100, curve.shape[1])
            low, middle, high = np.quantile(curve, (0.25, 0.5, 0.75), axis=0)
            axes.plot(share, middle, color=colours[n % 10], label=explainer, linewidth=1.4)
            axes.fill_between(share, low, high, color=colours[n % 10], alpha=0.18, linewidth=0)
        axes.set_title(name, fontsize=_FONT + 1)
        verb = "removed" if name == "deletion" else "added"
        axes.set_xlabel(f"% of parts {verb}, most relevant first", fontsize=_FONT)
        axes.set_ylabel(ylabel, fontsize=_FONT)
        axes.tick_params(labelsize=_FONT)
        axes.spines[["top", "right"]].set_visible(False)
        if k == 0:
            axes.legend(fontsize=_FONT - 1, frameon=False)
    return _png(figure)


def draw_drift(maps: Mapping[int, Sequence[Array]], names: Sequence[str]) -> bytes:
    """Draw maps (H, W) of the same inputs by round, as a PNG: red is for the decision."""
    high = _SIDE * max((flatness(one) for each in maps.values() for one in each[:1]), default=1)
    figure = new_figure(_SIDE * len(maps) + 1.0, high * len(names) + 0.4)
    for column, (t, of_inputs) in enumerate(maps.items()):
        for row, relevance in enumerate(of_inputs):
            left, top = 0.9 + column * _SIDE, 0.3 + row * high
            axes = place(figure, left, top, 0.94 * _SIDE, 0.94 * high)
            show_relevance(axes, relevance)
            axes.set_xticks([])
            axes.set_yticks([])
            if row == 0:
                axes.set_title(f"round {t}", fontsize=_FONT, pad=3)
            if column == 0:
                axes.set_ylabel(names[row], fontsize=_FONT)
    top = 0.35 + high * len(names)
    add_scale(figure, 0.9, top, "relevance for the decision; each map has its own scale")
    return _png(figure)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    save_cropped(figure, buffer)
    return buffer.getvalue()
