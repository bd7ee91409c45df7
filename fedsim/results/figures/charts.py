"""Charts that are drawn onto axes, in a look."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import EngFormatter
from numpy.typing import NDArray

from fedsim.results.figures.look import DASHES, PAGE, STYLES, Look, class_of

Array = NDArray[np.float64]
Scale = Literal["round", "bytes", "seconds"]  # of a horizontal axis: rounds, or what they cost

COUNTED = 12  # classes up to which counts are written into a confusion matrix
MAX_DOTS = 200  # of one cell in a figure of clients
_DARKEST = 0.65  # shade of a confusion matrix on which counts can be read
_LABEL = 60  # letters that fit across a figure
_LETTER = 0.6  # width of a letter, in its height
_LEVELS = 8  # shades of examples
_NAMED, _NAME = 30, 14  # labels that are named, and the letters of their names
_NUMBERED = 4  # cells up to which bars have their lengths beside them
_SHARES = 20  # shades of a confusion matrix
_TICKS = 12  # clients that each have a tick
_VERTICAL = 28  # letters that fit along a vertical axis


@dataclass(frozen=True)
class Line:
    """One cell in a figure: its mean over seeds, and a standard deviation below and above it.

    A line without a style is there for comparison only.
    """

    label: str
    style: int | None
    x: Array
    mean: Array
    low: Array
    high: Array

    @classmethod
    def of(
        cls, label: str, style: int | None, rounds: pd.DataFrame, column: str, x: str = "round"
    ) -> Line:
        """The line of a column of rounds, of those that all seeds have."""
        by_round = rounds.groupby("round")
        found = by_round[column].agg(["mean", "std", "count"]).assign(x=by_round[x].mean())
        seeds = rounds["seed"].nunique() if "seed" in rounds else 1
        found = found[found["count"] == seeds].fillna({"std": 0})  # of a single seed
        mean, std, at = (found[c].to_numpy(dtype=float) for c in ("mean", "std", "x"))
        return cls(label, style, at, mean, mean - std, mean + std)


def draw_lines(
    axes: Axes,
    look: Look,
    lines: Sequence[Line],
    *,
    xlabel: str = "round",
    ylabel: str = "",
    limits: tuple[float, float] | None = None,
    scale: Scale = "round",
    log: bool = False,
    target: float | None = None,
    chance: float | None = None,
) -> None:
    """Draw lines with their bands, and a `target` and `chance` if within the limits."""
    if log:
        axes.set_yscale("log")
    for line in sorted(lines, key=lambda line: line.style is not None):  # grey ones below
        _draw_line(axes, line, look, limits)
    for value, words, dashes in ((target, "target", (3, 3)), (chance, "chance", (1, 2))):
        if value is None or limits is None or not limits[0] <= value <= limits[1]:
            continue
        axes.axhline(value, color=look.text, linewidth=0.9 * look.scale, dashes=dashes)
        axes.annotate(f"{words} {value:.4g}", (0, value), xycoords=("axes fraction", "data"),
                      xytext=(4, 3), textcoords="offset points", fontsize=look.small)  # fmt: skip
    axes.set_ylim(limits)
    axes.set_xlabel(xlabel)
    if scale == "round":
        axes.locator_params(axis="x", integer=True, nbins=7)
    else:
        axes.xaxis.set_major_formatter(EngFormatter(unit="s" if scale == "seconds" else "B"))
        axes.locator_params(axis="x", nbins=5)
    if look.legend:
        axes.set_ylabel(textwrap.fill(ylabel, _VERTICAL))
    _draw_legend(axes, look, [line.label for line in lines if line.style is not None])


def _draw_line(axes: Axes, line: Line, look: Look, limits: tuple[float, float] | None) -> None:
    colour, gid = look.colour(line.style), class_of(line.style)
    dashes = [d * look.scale for d in (() if line.style is None else DASHES[line.style % STYLES])]
    width = (0.9 if line.style is None else 1.9) * look.scale
    (drawn,) = axes.plot(line.x, line.mean, color=colour, linewidth=width,
                         dashes=dashes or (None, None), gid=gid)  # fmt: skip
    if len(line.x) == 1:
        drawn.set(marker="o", markersize=3 * look.scale)
    if line.style is None:
        return
    drawn.set(label=line.label, marker="o", markevery=[-1], markersize=4.5 * look.scale)
    if not np.array_equal(line.low, line.high):
        low, high = (_near(edge, limits) for edge in (line.low, line.high))
        if limits is not None and axes.get_yscale() == "log":
            low = np.maximum(low, limits[0])  # a logarithm knows nothing below 0
        axes.fill_between(line.x, low, high, color=colour, alpha=0.13, linewidth=0, gid=gid)


def _draw_legend(axes: Axes, look: Look, labels: Sequence[str]) -> None:
    """In the axes, or above them in as few rows as labels of such lengths fit into."""
    if len(labels) < 2 or not look.legend:
        return
    if look.legend == "inside":
        axes.legend(frameon=False)
        return
    fitting = look.width / (0.55 * look.small * max(map(len, labels)) + 34)
    cast(Figure, axes.figure).legend(
        loc="outside upper left", ncols=max(1, min(len(labels), int(fitting))), frameon=False,
        handlelength=3, columnspacing=1.2, borderaxespad=0.2,
    )  # fmt: skip


def draw_clients(
    axes: Axes,
    look: Look,
    cells: Mapping[str, tuple[int | None, Array, str]],
    *,
    limits: tuple[float, float],
    xlabel: str = "",
) -> None:
    """Draw a row for each cell: a dot a client, the quartiles, and the worst client's name.

    `cells` has by label: style, a value for each client (the worst first), the worst's name.
    """
    for row, (label, (style, values, worst)) in enumerate(cells.items()):
        colour = look.text if style is None else look.lines[style]
        shown = np.sort(values)
        if len(values) > MAX_DOTS:
            shown = shown[np.linspace(0, len(values) - 1, MAX_DOTS).round().astype(int)]
        # Neighbours in rank are put at different heights, so that dots cover each other less.
        heights = row + ((np.arange(len(shown)) * 0.618) % 1 - 0.5) * 0.3
        axes.plot(shown, heights, "o", color=colour, markersize=4.2 * look.scale, alpha=0.5,
                  markeredgewidth=0)  # fmt: skip
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
        box = _near(np.array((low, high)), limits)
        axes.fill_between(box, row - 0.22, row + 0.22, color=colour, alpha=0.18, linewidth=0)
        axes.plot((middle, middle), (row - 0.22, row + 0.22), color=colour,
                  linewidth=2.4 * look.scale)  # fmt: skip
        axes.plot(values[:1], heights[:1] if values[0] == shown[0] else heights[-1:], "o",
                  markersize=6.5 * look.scale, markerfacecolor="none",
                  markeredgecolor=look.text)  # fmt: skip
        for height, text, side, points in (
            (row - 0.3, _cut(label, _LABEL), 0, look.normal),
            (row + 0.42, f"worst: {worst}", 1, look.small - 1),
        ):
            axes.text(side, height, text, transform=axes.get_yaxis_transform(), fontsize=points,
                      ha=("left", "right")[side], parse_math=False, in_layout=False)  # fmt: skip
    axes.set_ylim(len(cells) - 0.48, -0.58)
    axes.set_xlim(limits)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(True, axis="x")
    if look.legend:
        axes.set_xlabel(xlabel)


def draw_label_counts(
    axes: Axes,
    look: Look,
    counts: NDArray[np.int64],
    names: Sequence[str],
    *,
    axis: str = "class",
    heading: str = "",
    clients: Sequence[str] = (),
) -> None:
    """Draw who holds which labels, (clients, labels) counts: the darker, the more examples."""
    K, labels = counts.shape
    most = max(int(counts.max()), 1)
    _shade(axes, np.ceil(counts / most * _LEVELS).astype(int).T, _LEVELS, look.lines[0])
    axes.set_xlim(-0.6, K - 0.4)
    axes.set_ylim(labels - 0.4, -0.6)
    axes.set_xlabel("client")
    if K <= _TICKS:
        axes.set_xticks(range(K))
        if clients:
            axes.set_xticklabels(short_names(clients[:K]), rotation=90, parse_math=False)
    else:
        axes.locator_params(axis="x", integer=True, nbins=8)
    if labels <= _NAMED:
        axes.set_yticks(range(labels), labels=short_names(names), parse_math=False,
                        fontsize=look.small)  # fmt: skip
    axes.set_ylabel(axis)
    axes.grid(False)
    bar = axes.inset_axes((1.03, 0, 0.035, 1))  # says how many examples the shades stand for
    bar.barh(
        (np.arange(_LEVELS) + 0.5) / _LEVELS * most, 1, most / _LEVELS, align="center",
        color=[mpl.colors.to_rgba(look.lines[0], k / _LEVELS) for k in range(1, _LEVELS + 1)],
    )  # fmt: skip
    bar.set(xlim=(0, 1), ylim=(0, most), xticks=[])
    bar.yaxis.tick_right()
    bar.yaxis.set_label_position("right")
    bar.locator_params(axis="y", integer=True, nbins=5)
    bar.tick_params(labelsize=look.small)
    bar.set_ylabel("examples")
    bar.grid(False)
    if look.legend and heading:
        cast(Figure, axes.figure).suptitle(textwrap.fill(heading, 50), fontsize=look.normal,
                                           parse_math=False)  # fmt: skip


def confusion_height(classes: Sequence[str]) -> float:
    """Points that the squares need, beside names on the left and above those below."""
    longest = max(map(len, short_names(classes)))
    names = _LETTER * PAGE.small * longest if len(classes) <= _NAMED else 20
    side = PAGE.width - names - 40
    return side + 40 + (names if names > side / len(classes) else PAGE.small)


def draw_confusion(
    axes: Axes, look: Look, matrix: NDArray[np.int64], classes: Sequence[str]
) -> None:
    """Draw a confusion matrix (C, C): the darker a square, the larger its share of its row.

    Rows are true classes, columns predicted ones. Up to `COUNTED` classes the counts are written
    into it.
    """
    C, size = len(classes), look.small
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    darkest = _DARKEST if C <= COUNTED else 1
    _shade(axes, np.round(shares * _SHARES).astype(int), _SHARES, look.lines[0], darkest)
    square = min(axes.bbox.width, axes.bbox.height) * 72 / axes.figure.dpi / C
    if C <= COUNTED:
        fitting = square / (_LETTER * len(str(matrix.max())) + 0.6)
        for row, column in np.argwhere(matrix).tolist():
            axes.text(column, row, str(matrix[row, column]), ha="center", va="center",
                      fontsize=min(size, fitting))  # fmt: skip
    if C <= _NAMED:
        names, size = short_names(classes), min(size, 0.85 * square)
        upright = max(map(len, names)) * _LETTER * size > square
        axes.set_xticks(range(C), labels=names, parse_math=False, fontsize=size,
                        rotation=90 if upright else 0)  # fmt: skip
        axes.set_yticks(range(C), labels=names, parse_math=False, fontsize=size)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    axes.tick_params(length=0)
    axes.set_xlim(-0.5, C - 0.5)
    axes.set_ylim(C - 0.5, -0.5)
    axes.set_aspect("equal")
    axes.spines[:].set_visible(True)
    axes.grid(False)


def bars_height(rows: int, series: int) -> float:
    return 45 + rows * (_thickness(series) * series + 9)


def draw_bars(
    axes: Axes,
    look: Look,
    names: Sequence[str],
    series: Mapping[str, tuple[int | None, Array]],
    *,
    xlabel: str,
    longest: float = 1,
) -> None:
    """Draw rows of horizontal bars, one for each series, side by side.

    `series` has by label its style, and a length for each row; NaN where there is none.
    """
    numbered = len(series) <= _NUMBERED
    bar = _thickness(len(series))
    thickness = bar / (bar * len(series) + 9)
    for k, (label, (style, lengths)) in enumerate(series.items()):
        rows = np.flatnonzero(np.isfinite(lengths))
        heights = rows + (k - (len(series) - 1) / 2) * thickness
        gid = class_of(style)
        for one in axes.barh(heights, lengths[rows], height=0.85 * thickness,
                             color=look.colour(style), label=label):  # fmt: skip
            one.set_gid(gid)
        for height, length in zip(heights, lengths[rows], strict=True) if numbered else ():
            axes.annotate(f"{length:.2f}", (length, height), xytext=(4, 0), gid=gid,
                          va="center_baseline", textcoords="offset points",
                          fontsize=look.small - 1)  # fmt: skip
    axes.set_yticks(range(len(names)), labels=names, parse_math=False, fontsize=look.small)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_xlim(0, (1.1 if numbered else 1) * longest)
    axes.set_xlabel(xlabel)
    axes.grid(False)
    axes.grid(True, axis="x")
    axes.set_axisbelow(True)
    _draw_legend(axes, look, list(series))


def draw_contributions(
    axes: Axes,
    look: Look,
    names: Sequence[str],
    series: Mapping[str, tuple[Array, Array]],
    *,
    xlabel: str,
) -> None:
    """Draw bars for each client: to the right of 0 what it adds, to the left what it costs.

    `series` has by way of computing a value for each client, and half the length of its interval,
    NaN where there is none.
    """
    bar = _thickness(len(series))
    thickness = bar / (bar * len(series) + 9)
    for k, (label, (values, spread)) in enumerate(series.items()):
        heights = np.arange(len(names)) + (k - (len(series) - 1) / 2) * thickness
        axes.barh(heights, values, height=0.85 * thickness, color=look.lines[k % len(look.lines)],
                  label=label)  # fmt: skip
        known = np.isfinite(spread)
        axes.errorbar(values[known], heights[known], xerr=spread[known], fmt="none",
                      ecolor=look.text, elinewidth=1.2 * look.scale)  # fmt: skip
    axes.axvline(0, color=look.text, linewidth=0.8 * look.scale)
    axes.set_yticks(range(len(names)), labels=names, parse_math=False, fontsize=look.small)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_xlabel(xlabel)
    axes.grid(False)
    axes.grid(True, axis="x")
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=look.small)


def _thickness(series: int) -> int:  # of a bar on the page, in points
    return 12 if series <= _NUMBERED else 7


def draw_history(
    axes: Axes, look: Look, trials: Array, values: Array, best: Array, *, ylabel: str
) -> None:
    """Draw the course of a search: a dot for each trial, and the best so far as a line."""
    axes.plot(trials, values, "o", color=look.lines[0], markersize=5 * look.scale, alpha=0.6,
              markeredgewidth=0, label="trials")  # fmt: skip
    axes.plot(trials, best, color=look.lines[1], linewidth=1.9 * look.scale,
              drawstyle="steps-post", label="best so far")  # fmt: skip
    axes.set_xlabel("trial")
    axes.locator_params(axis="x", integer=True, nbins=7)
    if look.legend:
        axes.set_ylabel(ylabel)
    _draw_legend(axes, look, ["trials", "best so far"])


def _shade(
    axes: Axes, levels: NDArray[np.int64], most: int, colour: str, darkest: float = 1
) -> None:
    """Fill squares (rows, columns), the darker the higher their level; 0 is left blank."""
    corners = np.array(((0, 0), (1, 0), (1, 1), (0, 1), (0, 0))) - 0.5
    for level in range(1, most + 1):
        if len(held := np.argwhere(levels == level)[:, ::-1]):
            vertices = (held[:, None, :] + corners).reshape(-1, 2)
            codes = [Path.MOVETO, *(Path.LINETO,) * 3, Path.CLOSEPOLY] * len(held)
            axes.add_patch(PathPatch(Path(vertices, codes), color=colour,
                                     alpha=darkest * level / most, linewidth=0))  # fmt: skip


def short_names(names: Sequence[str]) -> list[str]:
    return [_cut(name, _NAME) for name in names]


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def _near(values: Array, limits: tuple[float, float] | None) -> Array:
    """Corners of a filled shape, those far out of sight brought to where a browser can draw to."""
    if limits is None:
        return values
    span = limits[1] - limits[0]
    near: Array = np.clip(values, limits[0] - 1000 * span, limits[1] + 1000 * span)
    return near
