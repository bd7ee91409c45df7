"""A report as text: what is on its page, what its figures draw, and its tables for papers."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import astuple
from functools import partial
from html.parser import HTMLParser
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
from markupsafe import Markup

from fedsim.results.figures.charts import Line
from fedsim.results.figures.look import Drawing
from fedsim.results.report.html import Report

BLOCKS = {"title", "h1", "h2", "h3", "p", "li", "dt", "dd", "table", "caption", "tr", "figcaption"}
BLOCKS |= {"img", "summary", "details", "figure", "pre"}
DATA = {"counts", "cells", "matrix", "series", "trials", "values", "best"}  # of figures
TOLD = {"id", "href", "alt", "src", "colspan", "data-line", "open"}


def text_of(report: Report) -> str:
    """All of a report, figures with four digits and hashes of experiments left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drawing, "svg", _drawing)
        page = _Page(report.html()).text
    parts = {"PAGE": re.sub(r"\b[0-9a-f]{16}\b", "(hash)", page)}
    if not report.compared.summary.empty:
        table = pd.read_csv(io.StringIO(report.csv()))
        shown = table.map(lambda value: _told(value) if isinstance(value, float) else value)
        parts |= {"LATEX": report.latex(), "CSV": shown.to_csv(index=False)}
    plots = [plot for of_section in report.plots.values() for plot in of_section]
    plots += [plot for search in report.searches for plot in search["figures"]]
    parts["FILES"] = "\n".join(name for plot in plots for name, _ in plot.files())
    return "\n".join(f"{name}\n\n{text.strip()}\n" for name, text in parts.items())


class _Page(HTMLParser):
    """The text of a page: a line for each block and row of a table, with what else it says."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self._parts: list[str] = []
        self._value = ""  # what the present cell is sorted by
        self._begins = 0  # part with which the cell begins
        self._tags = [""]
        self.feed(re.sub(r"(data:[\w/+]+;base64),[^\"]*", r"\1", page))

    @property
    def text(self) -> str:
        lines = ("".join(self._parts)).splitlines()
        return "\n".join(line.rstrip() for line in lines if line.strip())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        told = [f"{key}={found[key]}" for key in found if key in TOLD]
        kind = found.get("class")
        if found.get("data-first") == "descending":
            told.append("high")
        if tag in BLOCKS:
            words = [tag, *told, *(["sortable"] if kind == "sortable" else [])]
            self._parts.append(f"\n{' '.join(words)}: ")
        elif tag in ("td", "th"):
            told += [kind] if kind and kind != "word" else []
            self._parts.append(f"| {''.join(f'[{word}] ' for word in told)}")
            self._value, self._begins = found.get("data-value") or "", len(self._parts)
        elif tag == "strong":
            self._parts.append("*")
        elif tag == "line":
            colour = (found["style"] or "").removeprefix("stroke: var(--").rstrip(")")
            self._parts.append(
                f"({' '.join([colour, *(found['stroke-dasharray'] or '').split()])})"
            )
        elif told:
            self._parts.append(f"<{' '.join(told)}>")
        if tag not in ("meta", "img", "line"):
            self._tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "line":
            self._tags.pop()
        if tag == "strong":
            self._parts.append("*")
        elif tag in ("td", "th"):
            shown = re.sub(r"^\(line.*?\)", "", "".join(self._parts[self._begins :])).strip(
                " *\xa0"
            )
            same = not self._value or shown.startswith(_number(self._value))
            self._parts.append(" " if same else f" {{{_number(self._value)}}} ")

    def handle_data(self, data: str) -> None:
        within = self._tags[-1]
        if within == "pre":  # an experiment, of which the first line will do
            data = data.partition("\n")[0]
        elif within != "b":  # a drawing
            data = re.sub(r"\s+", " ", data)
        if within not in ("style", "script", "tr"):
            self._parts.append(data)


def _number(text: str) -> str:
    try:
        return _told(float(text))
    except ValueError:
        return text


def _drawing(drawing: Drawing) -> Markup:
    """In place of a figure's SVG: what it is given to draw."""
    draw = cast(partial[None], drawing.draw)
    given = dict(draw.keywords)
    lines = [f"{draw.func.__name__}, {drawing.height:.4g} pt: {drawing.title}"]
    lines += [f"  {_told(line)}" for line in given.pop("lines", ())]
    lines += [f"  {key}: {_told(given.pop(key))}" for key in list(given) if key in DATA]
    lines.append(f"  {_told(given)}")
    return Markup("<b>{}</b>").format("\n" + "\n".join(lines) + "\n")


def _told(value: Any) -> str:
    match value:
        case Line():
            return _told(astuple(value))
        case np.ndarray():
            return "[" + " ".join(map(_told, value.tolist())) + "]"
        case list() | tuple():
            return "(" + ", ".join(map(_told, value)) + ")"
        case Mapping():
            return "; ".join(f"{key}: {_told(of)}" for key, of in value.items())
        case float():
            return f"{round(value, 9) + 0.0:.4g}"
    return str(value)
