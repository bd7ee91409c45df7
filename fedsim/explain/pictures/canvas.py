"""The one style of pictures: figures without a window, measured in inches, with alt texts.

Red speaks for a decision, blue against it. Each file says in words what it shows: the description
of a PNG, the title of an SVG.
"""

from __future__ import annotations

import base64
import html
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

DPI = 150
MOST_DRAWN = 100  # things in a picture
_SMALL = 7  # points
_NARROWEST, _LETTER = 4.0, 0.083  # inches: minimum width of a title's line, and of a letter
CENTRED: dict[str, Any] = {"ha": "center", "va": "center"}  # of a text
# A legend without a frame, whose lower left corner is placed.
LEGEND: dict[str, Any] = {"loc": "lower left", "frameon": False, "borderaxespad": 0}
FOR, AGAINST = "#b2182b", "#2166ac"  # of bars, as in the colour map
RELEVANCE = "RdBu_r"
_format: ContextVar[str] = ContextVar("format", default="")


@contextmanager
def drawing_as(ending: str) -> Iterator[None]:
    """Context in which pictures have a format of `labels.FORMATS`."""
    token = _format.set(ending)
    try:
        yield
    finally:
        _format.reset(token)


def picture(folder: Path, name: str, ending: str = "png") -> Path:
    """The file of a picture, whose name is allowed on all systems, PNG unless told otherwise."""
    allowed = re.sub(r"[^\w.-]", "-", name)
    return folder / f"{allowed}.{_format.get() or ending}"


def some(count: int, what: str, most: int = MOST_DRAWN) -> str:
    """The end of a title where not all are drawn: " (the first 100 of 120 inputs)"."""
    return f" (the first {most} of {count} {what})" if count > most else ""


def new_figure(width: float, height: float, **options: Any) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), **options)
    FigureCanvasAgg(figure)
    return figure


def place(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes at a position; parts outside of the figure are saved, too."""
    W, H = figure.get_size_inches()
    return figure.add_axes((left / W, 1 - (top + height) / H, width / W, height / H))


def save(figure: Figure, path: Path, title: str = "", told: str = "") -> None:
    """Save in the format of the path's ending, cropped to what was drawn.

    Args:
        told: what the picture shows, for those who do not see it; by default the panels' captions.
    """
    box = _drawn(figure)
    title = title[:1].upper() + title[1:]
    if not told:
        captions = [axes.get_title(loc) for axes in figure.axes for loc in ("left", "center")]
        told = "; ".join(" ".join(text.split()) for text in captions if text)
    if title:
        W, H = figure.get_size_inches()
        letters = int(max(box.width, _NARROWEST) / _LETTER)
        style: dict[str, Any] = {"fontsize": 10, "weight": "bold", "va": "bottom"}
        words = textwrap.fill(title, letters)
        line = figure.text(box.x0 / W, (box.y1 + 0.12) / H, words, parse_math=False, **style)
        box = box.union(
            [box, line.get_window_extent().transformed(figure.dpi_scale_trans.inverted())]
        )
    save_cropped(figure, path, ". ".join(filter(None, (title, told.replace(r"\$", "$")))), box)


def save_cropped(
    figure: Figure, where: Path | IO[bytes], alt: str = "", box: Bbox | None = None
) -> None:
    """Save in the format of the path's ending (PNG if it is no path), cropped to what is drawn.

    Args:
        box: what is drawn, in inches, if it is known.
    """
    import matplotlib as mpl

    box = (_drawn(figure) if box is None else box).padded(0.1)
    ending = where.suffix[1:].lower() if isinstance(where, Path) else "png"
    about: dict[str, Any] = {
        "png": {"Software": None, **({"Description": alt} if alt else {})},
        "svg": {"Date": None, "Title": alt or None},
        "pdf": {"CreationDate": None, "Title": alt or None},
    }
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedsim"}):
        figure.savefig(where, format=ending, dpi=DPI, bbox_inches=box, metadata=about.get(ending))


def alt_of(path: Path) -> str:
    """What a picture (PNG, SVG) says that it shows; empty if nothing."""
    if path.suffix.lower() == ".svg":
        found = re.search(r"<title>(.*?)</title>", path.read_text(encoding="utf-8"), re.DOTALL)
        return html.unescape(found[1]) if found else ""
    from PIL import Image

    with Image.open(path) as image:
        return str(image.info.get("Description", ""))


def inches(path: Path) -> float:
    """The width of a picture (PNG, SVG) of fedsim; 0 if it is another's."""
    if path.suffix.lower() == ".svg":
        found = re.search(r'<svg [^>]*width="([\d.]+)pt"', path.read_text(encoding="utf-8"))
        return float(found[1]) / 72 if found else 0
    from PIL import Image

    with Image.open(path) as image:
        return image.width / DPI


def add_scale(
    figure: Figure, left: float, top: float, words: str, largest: float = 0, pale: bool = False
) -> None:
    """Draw what the colours of relevances mean.

    Args:
        largest: the relevance of the darkest red; 0 if each map has its own.
        pale: only the colours on which black words are readable, see `pale_colour`.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap

    bar = place(figure, left, top, 2.4, 0.12)
    colours: Any = RELEVANCE
    if pale:
        colours = ListedColormap([pale_colour(r) for r in np.linspace(-1, 1, 256)])
    mappable = ScalarMappable(cmap=colours)
    mappable.set_clim(-1, 1)
    figure.colorbar(mappable, cax=bar, orientation="horizontal", ticks=(-1, 0, 1))
    low, high = (f"\n−{largest:.3g}", f"\n+{largest:.3g}") if largest else ("", "")
    bar.set_xticks((-1, 0, 1), labels=(f"against{low}", "0", f"for{high}"))
    bar.tick_params(labelsize=_SMALL, length=2)
    bar.set_xlabel(words, fontsize=_SMALL, loc="left")


def pale_colour(relevance: float) -> tuple[float, ...]:
    """The colour of a relevance from -1 to 1 as a ground for black letters."""
    return tuple(_colour_map()(0.5 + 0.3 * relevance))


@cache
def _colour_map() -> Colormap:
    import matplotlib as mpl

    return mpl.colormaps[RELEVANCE]  # makes a copy each time


def _drawn(figure: Figure) -> Bbox:
    """The box of all that is drawn, in inches."""
    figure.set_dpi(DPI)  # at another resolution hinted letters have other widths
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
    return figure.get_tightbbox()


def class_colours(classes: int) -> list[tuple[float, float, float]]:
    """(red, green, blue) of each class, from 0 to 1; distinct for up to 20 classes."""
    import matplotlib as mpl

    if classes <= 20:
        colours = mpl.colormaps["tab10" if classes <= 10 else "tab20"](np.arange(classes))
    else:
        colours = mpl.colormaps["turbo"](np.linspace(0, 1, classes))
    return [(float(r), float(g), float(b)) for r, g, b, _ in colours]


def wrapped(text: str, width: int, most: int) -> str:
    """Text in lines of `width` characters, truncated if there are more than `most`."""
    lines = [line for part in text.split("\n") for line in textwrap.wrap(part, width) or [""]]
    if len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1][: width - 1] + "…"]
    return "\n".join(lines)


def plain(text: str) -> str:
    """Text in which dollar signs do not start a formula."""
    return text.replace("$", r"\$")


def as_html(text: str, pictures: Sequence[Path], *tables: pd.DataFrame) -> str:
    """HTML that holds the pictures (PNG, SVG) itself, with tables below them."""
    parts = [f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'] if text else []
    for path in pictures:
        if kind := {".png": "image/png", ".svg": "image/svg+xml"}.get(path.suffix.lower()):
            content = base64.b64encode(path.read_bytes()).decode()
            alt = html.escape(alt_of(path) or path.stem)
            source = f'src="data:{kind};base64,{content}" alt="{alt}"'
            parts.append(f'<img {source} style="max-width: 100%">')
    parts += [table.to_html(index=False, border=0, na_rep="") for table in tables]
    return "\n".join(parts)
