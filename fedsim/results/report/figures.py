"""The figures of a report: SVG to stand in an HTML page that says which colours to take.

Text stays text, and every colour is a CSS variable (`--line-1`, `--figure-text`, …), so that a
figure is as legible on a dark page as on paper. The same data gives the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from numpy.typing import NDArray

Array = NDArray[np.float64]

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
_LINES = tuple(f"#0000{k + 1:02x}" for k in range(STYLES))  # stand-ins for variables
_OTHER, _TEXT, _RULE = "#0000f0", "#0000f1", "#0000f2"
_VARIABLES = {
    **{colour: f"var(--line-{k + 1})" for k, colour in enumerate(_LINES)},
    _OTHER: "var(--line-other)",
    _TEXT: "var(--figure-text)",
    _RULE: "var(--figure-rule)",
}
_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedsim",
    "font.size": 11.5,
    "text.color": _TEXT,
    "axes.edgecolor": _RULE,
    "axes.labelcolor": _TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "grid.color": _RULE,
    "grid.linewidth": 0.7,
    "xtick.color": _RULE,
    "xtick.labelcolor": _TEXT,
    "ytick.color": _RULE,
    "ytick.labelcolor": _TEXT,
    "ytick.major.size": 0,
    "lines.scale_dashes": False,
}
_WIDTH = 400  # of a figure, in units of its view box; a phone shows them a little smaller
MAX_DOTS = 200  # of one cell in a figure of clients
_LABEL = 60  # letters that fit across one

size = EngFormatter(unit="B", places=1)  # bytes as a person reads them


@dataclass(frozen=True)
class Line:
    """One cell in a figure: its mean over seeds, and from the least seed to the greatest.

    Attributes:
        style: which of the `STYLES`; None for a line that is there for comparison only.
    """

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
    in_bytes: bool = False,
    log: bool = False,
    target: float | None = None,
) -> Markup:
    """Draw lines with their bands.

    Args:
        title: what the figure shows, for those who cannot see it.
        limits: of the vertical axis.
        in_bytes: the horizontal axis is of bytes, not of rounds.
        log: the vertical axis is logarithmic.
        target: a height to be marked, if it is within the limits.
    """
    with mpl.rc_context(_SETTINGS):
        figure, axes = _figure(265)
        if log:
            axes.set_yscale("log")
        for line in sorted(lines, key=lambda line: line.style is not None):  # grey ones below
            colour = _OTHER if line.style is None else _LINES[line.style]
            dashes = () if line.style is None else DASHES[line.style]
            width = 0.9 if line.style is None else 1.9
            axes.plot(
                line.x, line.mean, color=colour, linewidth=width, dashes=dashes or (None, None)
            )
            if line.style is not None:
                axes.plot(line.x[-1:], line.mean[-1:], "o", color=colour, markersize=4.5)
                if not np.array_equal(line.low, line.high):
                    low, high = _near(line.low, limits), _near(line.high, limits)
                    axes.fill_between(line.x, low, high, color=colour, alpha=0.16, linewidth=0)
        if target is not None and limits[0] <= target <= limits[1]:
            axes.axhline(target, color=_TEXT, linewidth=0.9, dashes=(3, 3))
            axes.annotate(
                f"target {target:g}",
                (0, target),
                xycoords=("axes fraction", "data"),
                xytext=(4, 3),
                textcoords="offset points",
                fontsize=11,
            )
        axes.set_ylim(limits)
        axes.set_xlabel(xlabel)
        if in_bytes:
            axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
            axes.locator_params(axis="x", nbins=5)
        else:
            axes.locator_params(axis="x", integer=True, nbins=7)
        return _svg(figure, title)


def draw_clients(
    title: str,
    cells: Mapping[str, tuple[int | None, Array, str]],
    *,
    limits: tuple[float, float],
) -> Markup:
    """Draw a row for each cell: a dot a client, the quartiles, and the worst client's name.

    Args:
        title: what the figure shows, for those who cannot see it.
        cells: by label: style, a value for each client (the worst first), the worst's name.
        limits: of the horizontal axis.
    """
    with mpl.rc_context(_SETTINGS):
        figure, axes = _figure(36 + 68 * len(cells))
        for row, (label, (style, values, worst)) in enumerate(cells.items()):
            colour = _TEXT if style is None else _LINES[style]
            shown = np.sort(values)
            if len(values) > MAX_DOTS:
                shown = shown[np.linspace(0, len(values) - 1, MAX_DOTS).round().astype(int)]
            # Neighbours in rank are put at different heights, so that dots cover each other less.
            heights = row + ((np.arange(len(shown)) * 0.618) % 1 - 0.5) * 0.3
            axes.plot(
                shown, heights, "o", color=colour, markersize=4.2, alpha=0.5, markeredgewidth=0
            )
            low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
            box = _near(np.array((low, high)), limits)
            axes.fill_between(box, row - 0.22, row + 0.22, color=colour, alpha=0.18, linewidth=0)
            axes.plot((middle, middle), (row - 0.22, row + 0.22), color=colour, linewidth=2.4)
            axes.plot(
                values[:1], heights[:1] if values[0] == shown[0] else heights[-1:], "o",
                markersize=6.5, markerfacecolor="none", markeredgecolor=_TEXT,
            )  # fmt: skip
            short = label if len(label) <= _LABEL else f"{label[: _LABEL - 1]}…"
            for height, text, side, points in (
                (row - 0.3, short, 0, 11.5),
                (row + 0.42, f"worst: {worst}", 1, 10),
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
        return _svg(figure, title)


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


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH / 72, height / 72), layout="constrained")
    return figure, figure.subplots()


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
    figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    view = re.search(r'viewBox="[^"]*"', svg)
    assert view
    svg = svg[svg.index(">") + 1 :]
    svg = re.sub(r"<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)  # the page has it
    svg = re.sub(r"\s*\n\s*", "\n", _TAG.sub(_shortened, svg))
    prefix = "f" + hashlib.sha256(svg.encode()).hexdigest()[:8]
    names = re.compile(r'(?<=\bid=")|(?<=url\(#)|(?<=href="#)')
    svg = _TAG.sub(lambda tag: names.sub(f"{prefix}-", tag[0]), svg)
    return Markup(f'<svg class="figure" {view[0]} role="img"><title>{escape(title)}</title>{svg}')
