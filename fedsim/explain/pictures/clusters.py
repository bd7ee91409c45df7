"""Picture of clusters of relevance maps: where they lie, whose they are, how they look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedsim.explain.pictures.canvas import (
    AGAINST,
    FOR,
    add_scale,
    class_colours,
    new_figure,
    place,
    plain,
    save,
    wrapped,
)
from fedsim.explain.pictures.images import flatness, framed, show_image, show_relevance

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIDE, _GAP, _FONT = 1.7, 0.3, 8  # inches, inches, points
_MOST_CLUSTERS, _MOST_PARTS, _MOST_CLIENTS = 5, 5, 12


@dataclass(frozen=True)
class Panel:
    """The clusters of one class.

    Args:
        places: (n, 2) of the maps in the plane.
        clusters: (n,) the maps' clusters, counted from 0.
        clients: (n,) whose examples they explain.
        relevance: (n, ...) the maps.
        images: (n, C, H, W) the examples in [0, 1], if they are images.
        parts: names of the parts, if they are not.
        names: what clients are called.
    """

    title: str
    places: NDArray[np.float64]
    clusters: NDArray[np.int64]
    clients: NDArray[np.int64]
    relevance: NDArray[np.float64]
    images: NDArray[np.float32] | None
    parts: tuple[str, ...]
    names: Sequence[str]


def draw_clusters(panels: Sequence[Panel], path: Path, title: str) -> None:
    """Draw a line for each class: its maps in the plane, its clients, and each cluster's mean map.

    An image beside it is the cluster's example whose map is nearest to the mean.
    """
    most = max(min(int(p.clusters.max()) + 1, _MOST_CLUSTERS) for p in panels)
    images = panels[0].images is not None
    bars = max(0.16 * min(len(panels[0].names), _MOST_CLIENTS) + 0.2, 0.8)
    high = 0.85 + (_SIDE + _GAP + max(bars, _SIDE) if images else max(bars, _SIDE))
    before = 1 if images else 2  # columns before the clusters'
    figure = new_figure((before + most) * (_SIDE + _GAP) + 0.75, high * len(panels))
    colours = class_colours(10)
    for line, panel in enumerate(panels):
        top = line * high + 0.35
        axes = place(figure, 0.75, top, _SIDE, _SIDE)
        for c in range(int(panel.clusters.max()) + 1):
            own = panel.places[panel.clusters == c]
            axes.scatter(own[:, 0], own[:, 1], s=9, color=colours[c % 10])
        axes.set(xticks=(), yticks=())
        axes.set_title(plain(wrapped(panel.title, 28, 2)), fontsize=_FONT + 1, weight="bold")
        axes.set_xlabel("maps by t-SNE, by cluster", fontsize=_FONT - 1)
        corner = (0.75, top + _SIDE + _GAP) if images else (_SIDE + _GAP + 1.45, top)
        _draw_clients(place(figure, *corner, _SIDE - (not images) * 0.7, bars), panel, colours)
        for c in range(min(int(panel.clusters.max()) + 1, _MOST_CLUSTERS)):
            left = (before + c) * (_SIDE + _GAP) + 0.75
            _draw_cluster(figure, panel, c, left, top, colours[c % 10])
    if images:
        words = "mean relevance; each map has its own scale"
        add_scale(figure, _SIDE + _GAP + 0.75, high * len(panels) - 0.2, words)
    save(figure, path, title)


def _draw_clients(axes: Axes, panel: Panel, colours: Sequence[Any]) -> None:
    """Bars: how many maps of each client are in which cluster."""
    count = int(panel.clusters.max()) + 1
    table = np.zeros((count, len(panel.names)), int)
    np.add.at(table, (panel.clusters, panel.clients), 1)
    shown = np.arange(len(panel.names))
    if len(shown) > _MOST_CLIENTS:  # those that are most unlike all together
        share = table / np.maximum(table.sum(axis=0), 1)
        unlike = np.abs(share - table.sum(axis=1, keepdims=True) / table.sum()).sum(axis=0)
        shown = np.sort(np.argsort(-unlike, kind="stable")[:_MOST_CLIENTS])
    start = np.zeros(len(shown))
    for c in range(count):
        axes.barh(range(len(shown)), table[c, shown], left=start, color=colours[c % 10])
        start += table[c, shown]
    names = [plain(panel.names[k]) for k in shown.tolist()]
    axes.set_yticks(range(len(shown)), names, fontsize=_FONT - 1)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=_FONT - 1)
    axes.set_xlabel("maps", fontsize=_FONT - 1)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_cluster(figure: Any, panel: Panel, c: int, left: float, top: float, colour: Any) -> None:
    own = panel.clusters == c
    mean = panel.relevance[own].mean(axis=0, dtype=np.float64)
    told = f"cluster {c}: {own.sum()} maps"
    if panel.images is not None:
        high = _SIDE * flatness(mean)
        axes = _framed(figure, left, top, high, colour)
        show_relevance(axes, mean)
        axes.set_title(told, fontsize=_FONT)
        axes.set_xlabel("mean map", fontsize=_FONT - 1)
        unit = panel.relevance[own].reshape(own.sum(), -1)
        near = int((unit @ mean.ravel() / (np.linalg.norm(unit, axis=1) + 1e-12)).argmax())
        axes = _framed(figure, left, top + high + _GAP, high, colour)
        show_image(axes, panel.images[own][near])
        axes.set_xlabel(f"example of {plain(panel.names[panel.clients[own][near]])}",
                        fontsize=_FONT - 1)  # fmt: skip
        return
    order = np.argsort(-np.abs(mean), kind="stable")[:_MOST_PARTS][::-1]
    axes = place(figure, left + 0.75, top, _SIDE - 0.75, _SIDE)
    signs = [FOR if v > 0 else AGAINST for v in mean[order]]
    axes.barh(range(len(order)), mean[order], color=signs)
    names = [plain(wrapped(panel.parts[i], 14, 1)) for i in order]
    axes.set_yticks(range(len(order)), names, fontsize=_FONT - 1)
    axes.tick_params(axis="x", labelsize=_FONT - 2)
    axes.axvline(0, color="0.6", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(told, fontsize=_FONT, color=colour)
    axes.set_xlabel("mean relevance", fontsize=_FONT - 1)


def _framed(figure: Any, left: float, top: float, high: float, colour: Any) -> Axes:
    axes = framed(figure, left, top, _SIDE, high)
    axes.spines[:].set(color=colour, linewidth=1.5)
    return axes
