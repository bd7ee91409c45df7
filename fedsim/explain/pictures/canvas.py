"""Shared code of pictures: figures without a window, measured in inches."""

from __future__ import annotations

import base64
import html
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
MOST_DRAWN = 100  # things in a picture
_NARROWEST, _LETTER = 4.0, 0.083  # inches: minimum width of a title's line, and of a letter
CENTRED: dict[str, Any] = {"ha": "center", "va": "center"}  # of a text
# A legend without a frame, whose lower left corner is placed.
LEGEND: dict[str, Any] = {"loc": "lower left", "frameon": False, "borderaxespad": 0}
_format: ContextVar[str] = ContextVar("format", default="png")


@contextmanager
def drawing_as(ending: str) -> Iterator[None]:
    """Context in which pictures have a format of `labels.FORMATS`."""
    token = _format.set(ending)
    try:
        yield
    finally:
        _format.reset(token)


def picture(folder: Path, name: str) -> Path:
    """The file of a picture, whose name is allowed on all systems."""
    allowed = re.sub(r"[^\w.-]", "-", name)
    return folder / f"{allowed}.{_format.get()}"


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


def save(figure: Figure, path: Path, title: str = "") -> None:
    """Save in the format of the path's ending, cropped to what was drawn."""
    _lay_out(figure)
    if title:
        box = figure.get_tightbbox()  # in inches
        W, H = figure.get_size_inches()
        letters = int(max(box.width, _NARROWEST) / _LETTER)
        text = textwrap.fill(title[:1].upper() + title[1:], letters)
        style: dict[str, Any] = {"fontsize": 10, "weight": "bold", "va": "bottom"}
        figure.text(box.x0 / W, (box.y1 + 0.12) / H, text, parse_math=False, **style)
    save_cropped(figure, path)


def save_cropped(figure: Figure, where: Path | IO[bytes], **options: Any) -> None:
    """Save in the format of the path's ending (PNG if it is no path), cropped to what is drawn."""
    figure.set_dpi(DPI)
    _lay_out(figure)
    box = figure.get_tightbbox().padded(0.1)
    ending = where.suffix[1:] if isinstance(where, Path) else "png"
    figure.savefig(where, format=ending, dpi=DPI, bbox_inches=box, **options)


def _lay_out(figure: Figure) -> None:
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()


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
            source = f'src="data:{kind};base64,{content}" alt="{html.escape(path.stem)}"'
            parts.append(f'<img {source} style="max-width: 100%">')
    parts += [table.to_html(index=False, border=0, na_rep="") for table in tables]
    return "\n".join(parts)
