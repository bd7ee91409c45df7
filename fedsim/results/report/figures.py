"""The figures of a report: for its page, and as files for papers.

On the page they are SVG. Text stays text, every colour is a CSS variable (`--line-1`,
`--figure-text`, …), so that a figure is as legible on a dark page as on paper, and lines have
classes of the same names, so that a page can hide them. The same data gives the same bytes.

For papers they are PDF and PNG, as wide as a column, with 8 pt type.
"""

from __future__ import annotations

import hashlib
import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib as mpl
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from numpy.typing import NDArray

from fedsim.results.confusion import plot_confusion, shade, short_names
from fedsim.support import atomic

Array = NDArray[np.float64]
Scale = Literal["round", "bytes", "seconds"]  # of a horizontal axis: rounds, or what they cost

# Told apart by dashes as well as by colours, which differ under each kind of colour blindness.
DASHES: tuple[tuple[float, ...], ...] = (
    (),
    (7, 2),
    (2, 1.6),
    (8, 2, 2, 2),
    (13, 2.5),
    (4, 2),
    (7, 2, 2, 2, 2, 2),
    (1.2, 3),
)
STYLES = len(DASHES)  # that many lines can be told apart in one figure


@dataclass(frozen=True)
class Look:
    """Where a figure is to stand.

    Args:
        lines: the colours of the `STYLES`, and `other` of further lines, `text`, `rule`.
        width: in points.
        small, normal: sizes of type, in points.
        scale: of the widths of lines and the sizes of dots.
        alone: there is no page around it: it says itself what lines and axes are.
    """

    lines: tuple[str, ...]
    other: str
    text: str
    rule: str
    width: float
    small: float
    normal: float
    scale: float
    alone: bool

    @property
    def settings(self) -> dict[str, object]:
        """For matplotlib."""
        return {
            "svg.fonttype": "none",
            "svg.hashsalt": "fedsim",
            "pdf.fonttype": 42,
            "font.size": self.normal,
            "legend.fontsize": self.small,
            "text.color": self.text,
            "axes.edgecolor": self.rule,
            "axes.labelcolor": self.text,
            "axes.linewidth": 0.8,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.grid.axis": "y",
            "axes.axisbelow": True,
            "axes.xmargin": 0.02,
            "grid.color": self.rule,
            "grid.linewidth": 0.7 * self.scale,
            "xtick.color": self.rule,
            "xtick.labelcolor": self.text,
            "ytick.color": self.rule,
            "ytick.labelcolor": self.text,
            "ytick.major.size": 0,
            "lines.scale_dashes": False,
            "text.parse_math": False,  # a $ in a name is a dollar
        }

    def colour(self, style: int | None) -> str:
        return self.other if style is None else self.lines[style]


# Of the page: stand-ins for variables. A phone shows figures a little smaller.
PAGE = Look(
    lines=tuple(f"#0000{k + 1:02x}" for k in range(STYLES)),
    other="#0000f0",
    text="#0000f1",
    rule="#0000f2",
    width=400,
    small=11,
    normal=11.5,
    scale=1,
    alone=False,
)
_VARIABLES = {
    **{colour: f"var(--line-{k + 1})" for k, colour in enumerate(PAGE.lines)},
    PAGE.other: "var(--line-other)",
    PAGE.text: "var(--figure-text)",
    PAGE.rule: "var(--figure-rule)",
}
# Of a column of a paper, with the colours of the light page.
PAPER = Look(
    lines=("#0072b2", "#d55e00", "#00523b", "#c2579f", "#000000", "#8f86e8", "#8c7a3a", "#7a0a4e"),
    other="#b4bac2",
    text="#000000",
    rule="#c8cdd3",
    width=238,
    small=7,
    normal=8,
    scale=0.65,
    alone=True,
)
MAX_DOTS = 200  # of one cell in a figure of clients
_LABEL = 60  # letters that fit across one
_TICKS = 12  # clients that each have a tick
_TITLE = 50  # letters that fit across one for papers
_AXIS = 28  # letters that fit along a vertical axis
_LEVELS = 8  # of shades
_NAMES = 30  # labels that are named
_NUMBERED = 4  # cells up to which bars have their lengths beside them

size = EngFormatter(unit="B", places=1)  # bytes as a person reads them


@dataclass(frozen=True)
class Drawing:
    """A figure that can be drawn for the page and for papers.

    Attributes:
        title: what it shows, for those who cannot see it.
        draw: draws it, given where it is to stand.
    """

    title: str
    draw: Callable[[Look], Figure]

    def svg(self) -> Markup:
        """An element of an HTML page."""
        with mpl.rc_context(PAGE.settings):
            return _svg(self.draw(PAGE), self.title)

    def save(self, stem: Path) -> list[Path]:
        """Write `<stem>.pdf` and `<stem>.png` (400 dpi).

        Raises:
            OSError: they cannot be written.
        """
        paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("pdf", "png")]
        with mpl.rc_context(PAPER.settings):
            figure = self.draw(PAPER)
            for path in paths:
                dated = {"CreationDate": None} if path.suffix == ".pdf" else None
                with atomic.named(path) as aside:
                    figure.savefig(aside, format=path.suffix[1:], dpi=400, metadata=dated)
        return paths


@dataclass(frozen=True)
class Line:
    """One cell in a figure: its mean over seeds, and a standard deviation below and above it.

    Attributes:
        label: what a legend calls it.
        style: which of the `STYLES`; None for a line that is there for comparison only.
    """

    label: str
    style: int | None
    x: Array
    mean: Array
    low: Array
    high: Array


def draw_lines(
    title: str,
    lines: Sequence[Line],
    *,
    xlabel: str,
    limits: tuple[float, float],
    ylabel: str = "",
    scale: Scale = "round",
    log: bool = False,
    target: float | None = None,
) -> Drawing:
    """Draw lines with their bands.

    Args:
        title: what the figure shows, for those who cannot see it.
        limits: of the vertical axis.
        ylabel: of a figure that stands alone.
        scale: of the horizontal axis.
        log: the vertical axis is logarithmic.
        target: a height to be marked, if it is within the limits.
    """

    def draw(look: Look) -> Figure:
        figure, axes = _figure(look, 265)
        if log:
            axes.set_yscale("log")
        for line in sorted(lines, key=lambda line: line.style is not None):  # grey ones below
            _draw_line(axes, line, look, limits)
        if target is not None and limits[0] <= target <= limits[1]:
            axes.axhline(target, color=look.text, linewidth=0.9 * look.scale, dashes=(3, 3))
            axes.annotate(
                f"target {target:g}",
                (0, target),
                xycoords=("axes fraction", "data"),
                xytext=(4, 3),
                textcoords="offset points",
                fontsize=look.small,
            )
        axes.set_ylim(limits)
        axes.set_xlabel(xlabel)
        if scale == "seconds":
            axes.xaxis.set_major_formatter(EngFormatter(unit="s"))
            axes.locator_params(axis="x", nbins=5)
        elif scale == "bytes":
            axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
            axes.locator_params(axis="x", nbins=5)
        else:
            axes.locator_params(axis="x", integer=True, nbins=7)
        if look.alone:
            axes.set_ylabel(textwrap.fill(ylabel, _AXIS))
            _draw_legend(figure, [line.label for line in lines if line.style is not None], look)
        return figure

    return Drawing(title, draw)


def _draw_line(axes: Axes, line: Line, look: Look, limits: tuple[float, float]) -> None:
    colour = look.colour(line.style)
    name = class_of(line.style)
    dashes = [d * look.scale for d in (() if line.style is None else DASHES[line.style])]
    width = (0.9 if line.style is None else 1.9) * look.scale
    (drawn,) = axes.plot(
        line.x, line.mean, color=colour, linewidth=width, dashes=dashes or (None, None), gid=name
    )
    if line.style is None:
        return
    drawn.set_label(line.label)
    size = 4.5 * look.scale
    axes.plot(line.x[-1:], line.mean[-1:], "o", color=colour, markersize=size, gid=name)
    if not np.array_equal(line.low, line.high):
        low, high = _near(line.low, limits), _near(line.high, limits)
        if axes.get_yscale() == "log":
            low = np.maximum(low, limits[0])  # a logarithm knows nothing below 0
        axes.fill_between(line.x, low, high, color=colour, alpha=0.13, linewidth=0, gid=name)


def _draw_legend(figure: Figure, labels: Sequence[str], look: Look) -> None:
    """Above the axes, in as few rows as labels of such lengths fit into."""
    if len(labels) < 2:
        return
    longest = max(map(len, labels))
    fitting = look.width / (0.55 * look.small * longest + 34)
    figure.legend(
        loc="outside upper left", ncols=max(1, min(len(labels), int(fitting))), frameon=False,
        handlelength=3, columnspacing=1.2, borderaxespad=0.2,
    )  # fmt: skip


def class_of(style: int | None) -> str:
    """By which a page hides the lines of a cell."""
    return "line-other" if style is None else f"line-{style + 1}"


def draw_clients(
    title: str,
    cells: Mapping[str, tuple[int | None, Array, str]],
    *,
    limits: tuple[float, float],
    xlabel: str = "",
) -> Drawing:
    """Draw a row for each cell: a dot a client, the quartiles, and the worst client's name.

    Args:
        title: what the figure shows, for those who cannot see it.
        cells: by label: style, a value for each client (the worst first), the worst's name.
        limits: of the horizontal axis.
        xlabel: of a figure that stands alone.
    """

    def draw(look: Look) -> Figure:
        figure, axes = _figure(look, 36 + 68 * len(cells))
        for row, (label, (style, values, worst)) in enumerate(cells.items()):
            colour = look.text if style is None else look.lines[style]
            shown = np.sort(values)
            if len(values) > MAX_DOTS:
                shown = shown[np.linspace(0, len(values) - 1, MAX_DOTS).round().astype(int)]
            # Neighbours in rank are put at different heights, so that dots cover each other less.
            heights = row + ((np.arange(len(shown)) * 0.618) % 1 - 0.5) * 0.3
            axes.plot(
                shown, heights, "o", color=colour, markersize=4.2 * look.scale, alpha=0.5,
                markeredgewidth=0,
            )  # fmt: skip
            low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
            box = _near(np.array((low, high)), limits)
            axes.fill_between(box, row - 0.22, row + 0.22, color=colour, alpha=0.18, linewidth=0)
            axes.plot(
                (middle, middle), (row - 0.22, row + 0.22), color=colour,
                linewidth=2.4 * look.scale,
            )  # fmt: skip
            axes.plot(
                values[:1], heights[:1] if values[0] == shown[0] else heights[-1:], "o",
                markersize=6.5 * look.scale, markerfacecolor="none", markeredgecolor=look.text,
            )  # fmt: skip
            short = label if len(label) <= _LABEL else f"{label[: _LABEL - 1]}…"
            for height, text, side, points in (
                (row - 0.3, short, 0, look.normal),
                (row + 0.42, f"worst: {worst}", 1, look.small - 1),
            ):
                axes.text(
                    side, height, text, transform=axes.get_yaxis_transform(), fontsize=points,
                    ha=("left", "right")[side], parse_math=False, in_layout=False,
                )  # fmt: skip
        axes.set_ylim(len(cells) - 0.48, -0.58)
        axes.set_xlim(limits)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(True, axis="x")
        if look.alone:
            axes.set_xlabel(xlabel)
        return figure

    return Drawing(title, draw)


def draw_label_counts(
    title: str,
    counts: NDArray[np.int64],
    names: Sequence[str],
    *,
    axis: str = "class",
    heading: str = "",
    clients: Sequence[str] = (),
) -> Drawing:
    """Draw who holds which labels: the darker a square, the more examples.

    Args:
        title: what the figure shows, for those who cannot see it.
        counts: (clients, labels) examples.
        names: of the labels.
        axis: what the labels are: `class`, or `target` for a regression.
        heading: of a figure that stands alone.
        clients: their names, if they have any.
    """

    def draw(look: Look) -> Figure:
        K, labels = counts.shape
        figure, axes = _figure(look, 84 + min(16.0 * max(labels, 4), 320))
        levels = np.ceil(counts / max(counts.max(), 1) * _LEVELS).astype(int)
        shade(axes, levels.T, _LEVELS, look.lines[0])
        axes.set_xlim(-0.6, K - 0.4)
        axes.set_ylim(labels - 0.4, -0.6)
        axes.set_xlabel("client")
        if clients and K <= _TICKS:
            axes.set_xticks(range(K), labels=short_names(clients[:K]), rotation=90,
                            parse_math=False)  # fmt: skip
        elif K <= _TICKS:
            axes.set_xticks(range(K))
        else:
            axes.locator_params(axis="x", integer=True, nbins=8)
        if labels <= _NAMES:
            axes.set_yticks(range(labels), labels=short_names(names), parse_math=False,
                            fontsize=look.small)  # fmt: skip
        axes.set_ylabel(axis)
        axes.grid(False)
        _draw_scale(figure, axes, look, int(counts.max()))
        if look.alone and heading:
            figure.suptitle(textwrap.fill(heading, _TITLE), fontsize=look.normal, parse_math=False)
        return figure

    return Drawing(title, draw)


def _draw_scale(figure: Figure, axes: Axes, look: Look, most: int) -> None:
    """A bar beside the axes that says how many examples the shades stand for."""
    bar = axes.inset_axes((1.03, 0, 0.035, 1))
    bar.barh(
        (np.arange(_LEVELS) + 0.5) / _LEVELS * most, 1, most / _LEVELS, align="center",
        color=[mpl.colors.to_rgba(look.lines[0], k / _LEVELS) for k in range(1, _LEVELS + 1)],
    )  # fmt: skip
    bar.set(xlim=(0, 1), ylim=(0, max(most, 1)), xticks=[])
    bar.yaxis.tick_right()
    bar.yaxis.set_label_position("right")
    bar.locator_params(axis="y", integer=True, nbins=5)
    bar.tick_params(labelsize=look.small)
    bar.set_ylabel("examples")
    bar.grid(False)


def draw_confusion(title: str, matrix: NDArray[np.int64], classes: Sequence[str]) -> Drawing:
    """Draw a confusion matrix; see `plot_confusion`.

    Args:
        title: what the figure shows, for those who cannot see it.
        matrix: (C, C) examples by true class (row) and predicted class (column).
    """

    def draw(look: Look) -> Figure:
        # As high as the squares need, beside the names on the left and above those below.
        names = (
            0.6 * PAGE.small * max(map(len, short_names(classes)))
            if len(classes) <= _NAMES
            else 20
        )
        side = PAGE.width - names - 40
        upright = names > side / len(classes)
        figure, axes = _figure(look, side + 40 + (names if upright else PAGE.small))
        plot_confusion(axes, matrix, classes, look.lines[0], look.small)
        return figure

    return Drawing(title, draw)


def draw_classes(
    title: str,
    classes: Sequence[str],
    cells: Mapping[str, tuple[int | None, Array]],
    *,
    xlabel: str,
) -> Drawing:
    """Draw a bar for each class and cell, the cells side by side.

    Args:
        title: what the figure shows, for those who cannot see it.
        cells: by label: style, and (C,) shares, 0 to 1; NaN where there is none.
    """
    numbered = len(cells) <= _NUMBERED
    bar = 12 if numbered else 7  # on the page, in points

    def draw(look: Look) -> Figure:
        figure, axes = _figure(look, 45 + len(classes) * (bar * len(cells) + 9))
        thickness = bar / (bar * len(cells) + 9)
        for k, (label, (style, shares)) in enumerate(cells.items()):
            rows = np.flatnonzero(np.isfinite(shares))
            heights = rows + (k - (len(cells) - 1) / 2) * thickness
            gid = class_of(style)
            drawn = axes.barh(heights, shares[rows], height=0.85 * thickness,
                              color=look.colour(style), label=label)  # fmt: skip
            for one in drawn:
                one.set_gid(gid)
            for height, share in zip(heights, shares[rows], strict=True) if numbered else ():
                axes.annotate(f"{share:.2f}", (share, height), xytext=(4, 0), va="center_baseline",
                              textcoords="offset points", fontsize=look.small - 1,
                              gid=gid)  # fmt: skip
        axes.set_yticks(range(len(classes)), labels=short_names(classes), parse_math=False,
                        fontsize=look.small)  # fmt: skip
        axes.set_ylim(len(classes) - 0.45, -0.55)
        axes.set_xlim(0, 1.1 if numbered else 1)
        axes.set_xticks((0, 0.25, 0.5, 0.75, 1))
        axes.set_xlabel(xlabel)
        axes.grid(False)
        axes.grid(True, axis="x")
        if look.alone:
            _draw_legend(figure, list(cells), look)
        return figure

    return Drawing(title, draw)


def draw_history(title: str, values: Array, best: Array, *, ylabel: str) -> Drawing:
    """Draw how a search went: a dot for each trial, and the best so far as a line.

    Args:
        title: what the figure shows, for those who cannot see it.
        values: (trials,) NaN for those that have none.
        best: (trials,) of those up to each trial.
    """

    def draw(look: Look) -> Figure:
        figure, axes = _figure(look, 265)
        numbers = np.arange(len(values))
        axes.plot(numbers, values, "o", color=look.lines[0], markersize=5 * look.scale, alpha=0.6,
                  markeredgewidth=0)  # fmt: skip
        axes.plot(numbers, best, color=look.lines[1], linewidth=1.9 * look.scale,
                  drawstyle="steps-post")  # fmt: skip
        axes.set_xlabel("trial")
        axes.locator_params(axis="x", integer=True, nbins=7)
        if look.alone:
            axes.set_ylabel(ylabel)
        return figure

    return Drawing(title, draw)


def draw_bars(title: str, bars: Mapping[str, float], *, xlabel: str) -> Drawing:
    """Draw a bar for each name, the longest above.

    Args:
        title: what the figure shows, for those who cannot see it.
        bars: shares, 0 to 1.
    """

    def draw(look: Look) -> Figure:
        figure, axes = _figure(look, 60 + 34 * len(bars))
        lengths = dict(sorted(bars.items(), key=lambda bar: -bar[1]))
        axes.barh(range(len(lengths)), list(lengths.values()), height=0.62, color=look.lines[0])
        for row, length in enumerate(lengths.values()):
            axes.annotate(f"{length:.2f}", (length, row), xytext=(5, 0), va="center",
                          textcoords="offset points", fontsize=look.small)  # fmt: skip
        axes.set_yticks(range(len(lengths)), labels=list(lengths), parse_math=False)
        axes.set_ylim(len(lengths) - 0.4, -0.6)
        axes.set_xlim(0, max(1.12 * max(lengths.values()), 0.01))
        axes.set_xlabel(xlabel)
        axes.grid(False)
        return figure

    return Drawing(title, draw)


def swatch(style: int | None) -> Markup:
    """A line's style as a small picture, for legends and tables."""
    colour = "other" if style is None else str(style + 1)
    dashes = "" if style is None else " ".join(f"{d:g}" for d in DASHES[style])
    return Markup(
        '<svg class="swatch" viewBox="0 0 30 10" width="30" height="10" aria-hidden="true">'
        '<line x1="1" y1="5" x2="29" y2="5" stroke-width="2.4" '
        'style="stroke: var(--line-{})" stroke-dasharray="{}"/></svg>'
    ).format(colour, dashes)


def _near(values: Array, limits: tuple[float, float]) -> Array:
    """Corners of a filled shape, those far out of sight brought to where a browser can draw to."""
    span = limits[1] - limits[0]
    near: Array = np.clip(values, limits[0] - 1000 * span, limits[1] + 1000 * span)
    return near


def _figure(look: Look, height: float) -> tuple[Figure, Axes]:
    """A figure and its axes.

    Args:
        height: on the page, in points.
    """
    scale = look.width / PAGE.width
    figure = Figure(figsize=(look.width / 72, height * scale / 72), layout="constrained")
    return figure, figure.subplots()


def _lay_out(figure: Figure) -> None:
    """Have everything where it is drawn; matplotlib would draw it twice."""
    FigureCanvasSVG(figure)
    engine, dpi = figure.get_layout_engine(), figure.dpi
    assert engine is not None
    figure.set_dpi(72)  # as of SVG
    engine.execute(figure)
    figure.set_dpi(dpi)
    figure.set_layout_engine("none")


_TAG = re.compile(r"<[^>]*>")  # what is between tags is text, to be left as it is


def _shortened(tag: re.Match[str]) -> str:
    """A tag with the page's own fonts and colours, and no more decimals than can be seen."""
    text = re.sub(r"font-family: [^;\"]*(; )?", "", tag[0])
    text = re.sub(r"#0000[0-9a-f]{2}\b", lambda found: _VARIABLES.get(found[0], found[0]), text)
    return re.sub(r'"[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), text)


def _svg(figure: Figure, title: str) -> Markup:
    """The figure as an element of an HTML page, with names of its own for its parts."""
    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    _lay_out(figure)
    figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    view = re.search(r'viewBox="[^"]*"', svg)
    assert view
    svg = svg[svg.index(">") + 1 :]
    svg = re.sub(r"<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)  # the page has it
    svg = re.sub(r"\s*\n\s*", "\n", _TAG.sub(_shortened, svg))
    svg = re.sub(r'<g id="(line-\w+)">', r'<g class="\1">', svg)
    prefix = "f" + hashlib.sha256(svg.encode()).hexdigest()[:8]
    names = re.compile(r'(?<=\bid=")|(?<=url\(#)|(?<=href="#)')
    svg = _TAG.sub(lambda tag: names.sub(f"{prefix}-", tag[0]), svg)
    return Markup(f'<svg class="figure" {view[0]} role="img"><title>{escape(title)}</title>{svg}')
