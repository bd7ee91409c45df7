"""Pictures of images that clients share: relevances, masks, and the shared images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedsim.data import Dataset
from fedsim.data.stored import bounds
from fedsim.explain.pictures.canvas import (
    RELEVANCE,
    add_scale,
    new_figure,
    place,
    plain,
    save,
    wrapped,
)
from fedsim.explain.scores.relevance import silence
from fedsim.support.words import client_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float32]

_SIDE, _LEFT, _GAP = 0.75, 1.1, 0.35  # inches: an image, the rows' names, the gap between clients
_FONT = 8  # points
_ACROSS = 4  # explained images per line
_LETTERS = 17  # of a caption's line, as wide as an image
_ROWS = ("held", "relevance", "kept", "shared")


@dataclass(frozen=True)
class Example:
    """One image that a client shares.

    Args:
        held: (C, H, W) pixels in [0, 1].
        heatmap: (H, W) signed relevances.
        mask: (H, W) factors of the pixels, 0 to 1.
        shared: (C, H, W) what the client sent, in pixels; with noise, possibly outside [0, 1].
    """

    client: int
    label: int
    held: Array
    heatmap: Array
    mask: Array
    shared: Array


def draw_shared(
    examples: Sequence[Example],
    names: Sequence[str],
    path: Path,
    title: str = "",
    called: Sequence[str] = (),
) -> None:
    """Draw what clients share: for each client four rows, and a column for each class.

    The rows: the image, its relevances (red for the class, blue against it), the mask, and what is
    shared, cut off at 0 and 1. A class of which a client has nothing is left blank.
    """
    clients = sorted({e.client for e in examples})
    labels = sorted({e.label for e in examples})
    width = _LEFT + _SIDE * len(labels)
    high = _SIDE * flatness(examples[0].heatmap)
    of_client = high * len(_ROWS) + _GAP
    height = len(clients) * of_client
    figure = new_figure(width, height)
    for e in examples:
        column = labels.index(e.label)
        top = clients.index(e.client) * of_client + _GAP
        for row, kind in enumerate(_ROWS):
            left, lower = _LEFT + column * _SIDE, top + (row + 0.06) * high
            axes = framed(figure, left, lower, 0.94 * _SIDE, 0.94 * high)
            if kind == "relevance":
                show_relevance(axes, e.heatmap)
            elif kind == "kept":
                axes.imshow(e.mask, cmap="gray", vmin=0, vmax=1)
            else:
                show_image(axes, e.held if kind == "held" else e.shared)
            if row == 0:
                axes.set_title(names[e.label], fontsize=_FONT, pad=2)
    about: dict[str, Any] = {"fontsize": _FONT, "va": "center", "transform": figure.transFigure}
    for number, client in enumerate(clients):
        top = number * of_client + _GAP
        name = plain(client_name(client, called))
        figure.text(0.06 / width, 1 - (top - 0.12) / height, name, weight="bold", **about)
        for row, kind in enumerate(_ROWS):
            figure.text(0.06 / width, 1 - (top + (row + 0.5) * high) / height, kind, **about)
    add_scale(figure, _LEFT, height + 0.1, "relevance for the class; each map has its own scale")
    save(figure, path, title)


def as_pixels(x: NDArray[Any], data: Dataset) -> Array:
    """Raw images (n, C, H, W) in [0, 1], by the range of the training images, or of bytes."""
    low, high = (0, 255) if data.x.dtype == np.uint8 else bounds(data.x)
    return (x.astype(np.float32) - low) / ((high - low) or 1)


def draw_relevances(
    images: Sequence[Array],
    heatmaps: Sequence[Array],
    captions: Sequence[str],
    path: Path,
    title: str = "",
    largest: Sequence[float] = (),
) -> None:
    """Draw images, each above the relevance of its pixels (red for the decision, blue against).

    Each map is scaled to its largest relevance, which is written below it.

    Args:
        images: (C, H, W) each, pixels in [0, 1].
        heatmaps: (H, W) each, signed relevances.
        largest: the relevances that maps are scaled to instead, as in other models' pictures.
    """
    side, below = 1.3, 0.2
    high = side * flatness(heatmaps[0])
    captions = [wrapped(caption, _LETTERS, 6) for caption in captions]
    above = 0.13 + 0.135 * max((text.count("\n") + 1 for text in captions), default=1)
    down = above + 2 * high + below
    lines = -(-len(images) // _ACROSS)
    figure = new_figure(side * min(len(images), _ACROSS), lines * down)
    scales = list(largest) or [0.0] * len(images)
    for k, (image, heatmap, caption) in enumerate(zip(images, heatmaps, captions, strict=True)):
        left, top = k % _ACROSS * side, k // _ACROSS * down + above
        for row in range(2):
            axes = framed(figure, left, top + row * high, 0.94 * side, 0.94 * high)
            if row == 0:
                show_image(axes, image)
                axes.set_title(plain(caption), fontsize=_FONT, pad=3)
            else:
                scale = show_relevance(axes, heatmap, scales[k])
                style = {"ha": "center", "va": "top", "color": "0.35", "fontsize": _FONT - 1}
                axes.text(0.5, -0.03, scale, style, transform=axes.transAxes)
            if k % _ACROSS == 0:
                axes.set_ylabel(("input", "relevance")[row], fontsize=_FONT)
    whose = "each input has its own scale (±), one for all models" if largest else ""
    whose = whose or "each map has its own scale (±)"
    add_scale(figure, 0, lines * down + 0.05, f"relevance; {whose}")
    save(figure, path, title)


def flatness(heatmap: NDArray[np.floating]) -> float:
    """Height of an image's place relative to its width: below 1 for wide images."""
    H, W = heatmap.shape
    return min(max(H / W, 0.25), 1)


def framed(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes for an image, in a thin frame."""
    axes = place(figure, left, top, width, height)
    axes.set(xticks=(), yticks=())
    axes.spines[:].set(color="0.7", linewidth=0.5)
    return axes


def show_image(axes: Axes, image: Array) -> None:
    pixels = np.clip(image, 0, 1)
    if len(pixels) == 3:
        axes.imshow(np.moveaxis(pixels, 0, -1))
    else:  # the mean of other numbers of channels
        axes.imshow(pixels.mean(axis=0), cmap="gray", vmin=0, vmax=1)


def show_relevance(axes: Axes, heatmap: NDArray[np.floating], largest: float = 0) -> str:
    """Show a map, or in words that it says nothing; returns its scale in words.

    Args:
        largest: the relevance of the darkest colour; 0 for the map's own largest.
    """
    why = silence(heatmap, "pixels")
    if not why:
        largest = largest or float(np.abs(heatmap).max())
        axes.imshow(heatmap, cmap=RELEVANCE, vmin=-largest, vmax=largest)
        return f"±{largest:.3g}"
    axes.imshow(np.zeros_like(heatmap), cmap="gray", vmin=-5, vmax=1)
    middle: dict[str, Any] = {"ha": "center", "va": "center", "transform": axes.transAxes}
    axes.text(0.5, 0.5, wrapped(f"says nothing: {why}", 18, 6), fontsize=_FONT - 1, **middle)
    return ""
