"""Figures of a tree that mimics a model, and of their disagreements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedsim.explain.pictures.canvas import CENTRED, LEGEND, class_colours, new_figure, place
from fedsim.explain.tree import LEAF, Ints, Tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SMALL, _FONT, _LETTER = 7, 8, 0.067  # points, points, inches
_BOX, _BAR, _LEVEL, _GAP = 0.56, 0.09, 1.0, 0.16  # inches: a node, its bar, between nodes
_MAP, _APART, _UNDER = 2.2, 0.45, 0.6  # inches: the heat map, left of it, below it


def draw_tree(
    tree: Tree,
    class_names: Sequence[str],
    condition: Callable[[int, float], str] = "feature {} ≤ {:.4g}".format,
    shape: tuple[int, ...] | None = None,
    most_levels: int = 4,
) -> Figure:
    """Draw the upper levels of a tree, and for images (C, H, W) the pixels that all of it tests.

    A node says its condition, and how many rows came by; below are their classes in colours. A
    leaf says its class and how many of its rows have it, and is tinted with its colour. Of a node
    whose children are left out it is said how many nodes are below.

    Args:
        condition: that a feature is at most a threshold, in words.
    """
    from matplotlib.patches import Patch

    depths, below = tree.depths(), tree.below()
    shown = np.flatnonzero(depths < most_levels).tolist()
    texts = {node: _in_a_box(tree, node, condition, class_names) for node in shown}
    box = max(max(map(len, lines)) for lines in texts.values()) * _LETTER + 0.16
    step = box + _GAP
    centres = _centres(tree, shown, step)
    wide = max(centres.values()) + step / 2
    cut = any(below[node] and depths[node] == most_levels - 1 for node in shown)
    high = int(depths[shown].max()) * _LEVEL + _BOX + (0.3 if cut else 0)
    colours = class_colours(len(class_names))

    size = (wide + _APART + _MAP, max(high, _MAP + _UNDER)) if shape else (wide, high)
    figure = new_figure(*size)
    axes = place(figure, 0, 0, wide, high)
    axes.set(xlim=(0, wide), ylim=(high, 0))  # inches, downwards
    axes.set_axis_off()
    for node in shown:
        middle, top = centres[node], float(depths[node]) * _LEVEL
        _draw_box(
            axes, tree.counts[node], texts[node], (middle, top, box), colours, below[node] == 0
        )
        if tree.left[node] in centres:
            for child, answer in ((tree.left[node], "yes"), (tree.right[node], "no")):
                end = centres[int(child)]
                axes.plot((middle, end), (top + _BOX, top + _LEVEL), color="0.55", linewidth=0.9)
                half = 0.5 * (middle + end), top + 0.5 * (_BOX + _LEVEL)
                patch = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
                axes.text(*half, answer, fontsize=_SMALL, color="0.35", bbox=patch, **CENTRED)
        elif below[node]:
            start = top + _BOX
            axes.plot((middle, middle), (start, start + 0.12), ":", color="0.4", linewidth=1.2)
            at, more = (middle, start + 0.14), f"… {below[node]:,} more"
            axes.text(*at, more, ha="center", va="top", fontsize=_SMALL, color="0.35")
    for text in axes.texts:
        text.set_parse_math(False)
    style = {**LEGEND, "fontsize": _FONT, "borderpad": 0, "handletextpad": 0.4}
    style |= {"handlelength": 0.9, "handleheight": 0.9, "columnspacing": 1.2}
    legend = figure.legend(
        [Patch(color=colour) for colour in colours],
        class_names,
        bbox_to_anchor=(0, 1 + 0.1 / figure.get_figheight()),
        ncols=min(len(class_names), 10),
        **style,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    if shape is not None:
        _draw_asked(place(figure, wide + _APART, 0, _MAP, _MAP), tree, shape)
    left_out = len(tree.feature) - len(shown)
    note = f"Depth of the whole tree: {tree.depth}. Leaves: {tree.leaves:,}."
    if left_out:
        note += f" Nodes left out here: {left_out:,} of {len(tree.feature):,}."
    figure.text(0, -0.12 / figure.get_figheight(), note, fontsize=_FONT, va="top", color="0.25")
    return figure


def _in_a_box(
    tree: Tree, node: int, condition: Callable[[int, float], str], class_names: Sequence[str]
) -> tuple[str, str]:
    counts = tree.counts[node]
    total, most = int(counts.sum()), int(counts.argmax())
    if tree.feature[node] != LEAF:
        asked = condition(int(tree.feature[node]), float(tree.threshold[node]))
        return f"{asked}?", f"{total:,} rows"
    return _short(class_names[most]), f"{counts[most]:,} of {total:,} rows"


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:23]}…"


def _centres(tree: Tree, shown: Sequence[int], step: float) -> dict[int, float]:
    """Horizontal positions: ends of branches one step apart, others above their children."""
    centres: dict[int, float] = {}
    pending = [0]
    while pending:
        node = pending.pop()
        if tree.left[node] in shown:
            pending += [int(tree.right[node]), int(tree.left[node])]
        else:
            centres[node] = (len(centres) + 0.5) * step
    for node in sorted(set(shown) - set(centres), reverse=True):
        centres[node] = (centres[int(tree.left[node])] + centres[int(tree.right[node])]) / 2
    return centres


def _draw_box(
    axes: Axes,
    counts: Ints,
    lines: tuple[str, str],
    place: tuple[float, float, float],
    colours: Sequence[tuple[float, float, float]],
    leaf: bool,
) -> None:
    """Draw a node at its centre, top and width: two lines, and a bar of its classes."""
    from matplotlib.patches import Rectangle

    middle, top, width = place
    left = middle - width / 2
    tint = tuple(0.75 + 0.25 * part for part in colours[int(counts.argmax())])
    box = Rectangle((left, top), width, _BOX, linewidth=0.8, zorder=2, clip_on=False)
    box.set(facecolor=tint if leaf else "white", edgecolor="0.45")
    axes.add_patch(box)
    for k, (line, size) in enumerate(zip(lines, (_FONT, _SMALL), strict=True)):
        weight = "bold" if leaf and k == 0 else "normal"
        y = top + 0.13 + 0.18 * k
        axes.text(middle, y, line, fontsize=size, weight=weight, zorder=3, **CENTRED)
    shares = counts / counts.sum() * (width - 0.12)
    starts = left + 0.06 + np.cumsum(shares) - shares
    for start, share, colour in zip(starts, shares, colours, strict=True):
        corner = (float(start), top + _BOX - _BAR - 0.06)
        axes.add_patch(Rectangle(corner, float(share), _BAR, facecolor=colour, zorder=3))


def _asked(tree: Tree, shape: tuple[int, ...]) -> Ints:
    """(H, W) number of rows for which a pixel was tested, summed over nodes."""
    inner = tree.feature != LEAF
    rows = np.bincount(
        tree.feature[inner], tree.counts[inner].sum(axis=1), minlength=math.prod(shape)
    )
    return rows.reshape(shape).sum(axis=0).astype(np.int64)


def _draw_asked(axes: Axes, tree: Tree, shape: tuple[int, ...]) -> None:
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator, NullLocator, StrMethodFormatter

    asked = _asked(tree, shape)
    axes.set_facecolor("0.93")
    drawn = axes.imshow(
        np.ma.masked_equal(asked, 0), cmap="viridis_r", norm=LogNorm(1, max(asked.max(), 10))
    )
    axes.set_title("rows tested at each pixel", fontsize=_FONT, pad=4)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.tick_params(labelsize=_SMALL, length=2)
    axes.spines[:].set_color("0.6")
    bar = axes.inset_axes((0, -0.19, 1, 0.045))
    axes.figure.colorbar(drawn, cax=bar, orientation="horizontal")
    bar.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    bar.xaxis.set_minor_locator(NullLocator())
    bar.tick_params(labelsize=_SMALL, length=2)


def draw_confusion(matrix: Ints, class_names: Sequence[str]) -> Figure:
    """Draw how often the model predicts the row's class and the tree the column's.

    The colour says which share of its row a cell of the counts (C, C) has.
    """
    C = len(class_names)
    widest = len(f"{matrix.max():,}")
    with_numbers = C <= 40
    cell = max(0.3, widest * _LETTER + 0.1) if with_numbers else 6 / C
    figure = new_figure(C * cell, C * cell)
    axes = place(figure, 0, 0, C * cell, C * cell)
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    bar = place(figure, C * cell + 0.15, 0, 0.12, C * cell)
    figure.colorbar(image, cax=bar).set_label("share of the row", fontsize=_SMALL)
    bar.tick_params(labelsize=_SMALL, length=2)
    if with_numbers:
        for (row, column), count in np.ndenumerate(matrix):
            if count:
                colour = "white" if shares[row, column] > 0.5 else "0.15"
                axes.text(column, row, f"{count:,}", fontsize=_FONT, color=colour, **CENTRED)
    level = max(map(len, class_names)) * _LETTER < cell
    short = [_short(name) for name in class_names]
    axes.set_xticks(range(C), labels=short, rotation=0 if level else 90, parse_math=False)
    axes.set_yticks(range(C), labels=short, parse_math=False)
    axes.tick_params(labelsize=_FONT if with_numbers else 4, length=0)
    axes.spines[:].set_color("0.6")
    axes.set_xlabel("the tree predicts", fontsize=_FONT)
    axes.set_ylabel("the model predicts", fontsize=_FONT)
    same, total = int(np.trace(matrix)), int(matrix.sum())
    share = f" ({same / total:.1%})" if total else ""
    axes.set_title(f"they agree on {same:,} of {total:,}{share}", fontsize=_FONT, loc="left")
    return figure
