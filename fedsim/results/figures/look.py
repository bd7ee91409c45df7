"""The looks of figures: of a report's page, of papers and of notebooks.

On the page figures are SVG. Text stays text, every colour is a CSS variable (`--line-1`,
`--figure-text`, …), so that a figure is as legible on a dark page as on paper, and lines have
classes of the same names, so that a page can hide them. The same data gives the same bytes.

For papers they are PDF and PNG, as wide as a column, with 8 pt type.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib as mpl
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from fedsim.support import atomic

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
        legend: where it says what its lines are, `above` or `inside` the axes; empty on a page,
            which says this and what its vertical axis is.
    """

    lines: tuple[str, ...]
    other: str
    text: str
    rule: str
    width: float
    small: float
    normal: float
    scale: float
    legend: Literal["", "above", "inside"] = ""

    @property
    def settings(self) -> dict[str, object]:
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
        return self.other if style is None else self.lines[style % len(self.lines)]


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
    legend="above",
)
# Of axes in a notebook, in matplotlib's own style.
AXES = Look(
    lines=tuple(f"C{k}" for k in range(10)),
    other="0.6",
    text="0.4",
    rule="0.8",
    width=400,
    small=9,
    normal=10,
    scale=0.8,
    legend="inside",
)

size = EngFormatter(unit="B", places=1)  # bytes as a person reads them


@dataclass(frozen=True)
class Drawing:
    """A figure that can be drawn for the page and for papers, its height in points of the page."""

    title: str
    height: float
    draw: Callable[[Axes, Look], None]

    def figure(self, look: Look) -> Figure:
        inch = 72 * PAGE.width / look.width  # in points of the page
        figure = Figure(figsize=(PAGE.width / inch, self.height / inch), layout="constrained")
        self.draw(figure.subplots(), look)
        return figure

    def svg(self) -> Markup:
        with mpl.rc_context(PAGE.settings):
            return _svg(self.figure(PAGE), self.title)

    def save(self, stem: Path) -> list[Path]:
        """Write `<stem>.pdf` and `<stem>.png` (400 dpi)."""
        paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("pdf", "png")]
        with mpl.rc_context(PAPER.settings):
            figure = self.figure(PAPER)
            for path in paths:
                dated = {"CreationDate": None} if path.suffix == ".pdf" else None
                with atomic.named(path) as aside:
                    figure.savefig(aside, format=path.suffix[1:], dpi=400, metadata=dated)
        return paths


def class_of(style: int | None) -> str:
    """By which a page hides the lines of a cell."""
    return "line-other" if style is None else f"line-{style + 1}"


def swatch(style: int | None) -> Markup:
    """A line's style as a small picture, for legends and tables."""
    dashes = "" if style is None else " ".join(f"{d:g}" for d in DASHES[style])
    return Markup(
        '<svg class="swatch" viewBox="0 0 30 10" width="30" height="10" aria-hidden="true">'
        '<line x1="1" y1="5" x2="29" y2="5" stroke-width="2.4" '
        'style="stroke: var(--{})" stroke-dasharray="{}"/></svg>'
    ).format(class_of(style), dashes)


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
