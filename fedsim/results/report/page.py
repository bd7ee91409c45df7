"""Tables and pictures of pages and papers, and numbers as people read them."""

from __future__ import annotations

import base64
import math
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from fedsim.explain.pictures.canvas import alt_of, inches
from fedsim.results.figures.look import size, swatch
from fedsim.results.report.comparison import DASH, ComparedCell, ReportData
from fedsim.results.report.entries import Entry, Value
from fedsim.results.summary import aligned
from fedsim.support.words import duration

_WORDS = 60  # letters; what is longer is prose


@dataclass(frozen=True)
class Column:
    """Of a table: figures stand to the right; hashes and folders may be broken anywhere; prose has
    several lines. Where much is good (`high`), the first click puts the highest first.
    """

    title: str
    figure: bool = False
    high: bool = False
    code: bool = False
    prose: bool = False

    @property
    def kind(self) -> str:
        if self.prose:
            return "prose"
        return "figure" if self.figure else "code" if self.code else "word"


@dataclass(frozen=True)
class Datum:
    """What stands in a table: the text, and what it is sorted by (None comes last)."""

    text: str
    value: Value | None
    best: bool = False
    note: str = ""
    swatch: str = ""


FilledColumn = tuple[Column, Sequence[Datum]]  # with the content of each row


@dataclass(frozen=True)
class PageTable:
    """A table, with a `spanner` above the titles of the last columns, `spanned` by it."""

    caption: str
    columns: list[Column]
    rows: list[list[Datum]]
    spanner: str = ""
    spanned: int = 0

    @classmethod
    def of(cls, caption: str, columns: Sequence[FilledColumn]) -> PageTable:
        rows = zip(*(data for _, data in columns), strict=True)
        return cls(caption, [column for column, _ in columns], [list(row) for row in rows])

    def latex(self, notes: Sequence[str]) -> str:
        """The table for a paper; `notes` are sentences about it, for comments above it."""
        lines = [[_tex(column.title) for column in self.columns]]
        for row in self.rows:
            words = [_tex(f"{d.text} {d.note}".strip()) for d in row]
            lines.append(
                [rf"\textbf{{{w}}}" if d.best else w for w, d in zip(words, row, strict=True)]
            )
        head, *body = [" & ".join(line) + r" \\" for line in lines]
        above = []
        if self.spanner:
            first = len(self.columns) - self.spanned + 1
            spanner = rf"\multicolumn{{{self.spanned}}}{{c}}{{{_tex(self.spanner)}}} \\"
            above = ["& " * (first - 1) + spanner, rf"\cmidrule{{{first}-{len(self.columns)}}}"]
        parts = [
            f"% {_tex(self.caption)}",
            r"% needs \usepackage{booktabs}",
            *(f"% {note}" for note in notes),
            rf"\begin{{tabular}}{{{''.join('lr'[column.figure] for column in self.columns)}}}",
            *(r"\toprule", *above, head, r"\midrule", *body, r"\bottomrule"),
            r"\end{tabular}",
        ]
        return "\n".join(parts) + "\n"


@dataclass(frozen=True)
class Picture:
    """A picture, made part of the page.

    Args:
        words: its caption.
        alt: what it shows, if more is known than that.
        width: in CSS pixels, below which its letters are hard to read; a phone scrolls it.
    """

    words: str
    uri: str
    alt: str = ""
    width: int = 0

    @classmethod
    def read(cls, path: Path) -> Picture:
        kind = {".png": "image/png", ".svg": "image/svg+xml"}[path.suffix.lower()]
        content = base64.b64encode(path.read_bytes()).decode()
        words = path.stem.replace("_", " ").replace("-", " ").strip()
        return cls(words, f"data:{kind};base64,{content}", alt_of(path), int(64 * inches(path)))


def plain(caption: str, content: pd.DataFrame, best: Collection[Any] = ()) -> PageTable:
    """A table as it stands in a file, without empty columns. `best` are rows, by their first."""
    columns: list[FilledColumn] = []
    for name, values in content.dropna(axis="columns", how="all").items():
        figures = pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)
        prose = not figures and bool((values.astype(str).str.len() > _WORDS).any())
        if not figures:
            data = [Datum(DASH, None) if pd.isna(value) else datum(value) for value in values]
        elif "bytes" in str(name) and values.max() >= 1000:
            data = [sent(value) for value in values]
        else:
            data = list(map(number, aligned(values), values))
        columns.append((Column(str(name), figures, code=name == "folder", prose=prose), data))
    table = PageTable.of(caption, columns)
    for row in table.rows:
        if row[0].value in best:
            row[:] = [replace(d, best=True) for d in row]
    return table


def axis_columns(compared: ReportData, cells: Iterable[Mapping[str, Value]]) -> list[FilledColumn]:
    cells = list(cells)
    columns: list[FilledColumn] = []
    for axis in compared.axes:
        values = (cell.values[axis] for cell in compared.cells)
        words = any(isinstance(value, str) and value != DASH for value in values)
        column = Column(compared.labels[axis], figure=not words)
        columns.append((column, [datum(cell[axis]) for cell in cells]))
    return columns


def cell_columns(compared: ReportData, cells: Sequence[ComparedCell]) -> list[FilledColumn]:
    (column, names), *others = axis_columns(compared, (cell.values for cell in cells))
    styled = [
        replace(name, swatch=swatch(cell.style)) for name, cell in zip(names, cells, strict=True)
    ]
    return [(column, styled), *others]


def entry_columns(compared: ReportData, entries: Sequence[Entry]) -> list[FilledColumn]:
    return [
        *axis_columns(compared, (entry.cell for entry in entries)),
        (Column("seed", True), [datum(entry.seed) for entry in entries]),
        (Column("status"), [datum(entry.status) for entry in entries]),
    ]


def datum(value: Any) -> Datum:
    return Datum(str(value), value)


def number(text: str, value: float, note: str = "") -> Datum:
    """A figure, or a dash for one that there is none of."""
    known = math.isfinite(value)
    return Datum(text, float(value), note=note) if known else Datum(DASH, None)


def sent(count: float, note: str = "") -> Datum:
    return number(size(count) if math.isfinite(count) else "", count, note=note)


def lasted(seconds: float, note: str = "") -> Datum:
    return number(duration(seconds) if math.isfinite(seconds) else "", seconds, note=note)


def mark_best(column: Sequence[Datum], high: bool, groups: Iterable[Sequence[int]]) -> list[Datum]:
    """A column with the best of each group marked, and what is equal to it as it stands there."""
    best = {n for group in groups for n in best_of({n: column[n] for n in group}, high)}
    return [replace(datum, best=n in best) for n, datum in enumerate(column)]


def best_of(rivals: Mapping[int, Datum], high: bool) -> list[int]:
    """The best of some figures and those equal to it as printed; none of fewer than two."""
    scores = {n: d.value for n, d in rivals.items() if isinstance(d.value, float)}
    if len(scores) < 2:
        return []
    best = (max if high else min)(scores, key=scores.__getitem__)
    decimals = len(rivals[best].text.partition(" ")[0].partition(".")[2])
    return [n for n, s in scores.items() if round(s, decimals) == round(scores[best], decimals)]


def distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def listed(values: Sequence[Any]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return f"{shown}, … ({len(values)} in all)" if len(values) > 8 else shown


def capital(text: str) -> str:
    """As a sentence or a title begins."""
    return text[:1].upper() + text[1:]


def file_name(words: str) -> str:
    """A name for a file: small letters, digits and hyphens, which LaTeX takes as it is."""
    spelled = "".join(_GREEK.get(c, c) for c in words)
    plain = unicodedata.normalize("NFKD", spelled).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9_]+", "-", plain.lower().replace(".", "_")).strip("-_")


def _spelled(letter: str) -> str:
    """The name of a Greek letter, as TeX has it."""
    words = unicodedata.name(letter).split()  # "GREEK SMALL LETTER ALPHA"
    name = {"LAMDA": "lambda"}.get(words[-1], words[-1].lower())
    if "FINAL" in words:
        return "varsigma"
    return name.capitalize() if "CAPITAL" in words else name


_GREEK = {letter: _spelled(letter) for letter in "αβγδεζηθικλμνξπρςστυφχψωΓΔΘΛΞΠΣΦΨΩ"}
_TEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "±": r"$\pm$", DASH: "--", "*": "$^{*}$"},
    **{"−": "$-$", "²": "$^{2}$"},
    **{letter: rf"$\{name}$" for letter, name in _GREEK.items()},
}


def _tex(text: str) -> str:
    return "".join(_TEX.get(c, c) for c in text)
