"""Paths and tables in texts of explanations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

MOST_ROWS = 30  # of a table
MOST_NAMED = 20  # in a line

# Control characters but for tabs and line feeds, and those that reorder or break lines.
CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    r"""Text with control characters as text, so that it cannot steer a terminal.

    >>> print(visible("\x1b[31mred"))
    \x1b[31mred
    """
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def short(path: Path) -> str:
    """A path as a person would type it from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in text, its columns flush right."""
    table = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(map(str.rjust, row, widths)) for row in table)
    return "\n".join(lines)


def in_short(names: Sequence[str]) -> str:
    """Names, the first ones if there are many: "a, b, c and 9 more"."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def duration(seconds: float) -> str:
    """A time, such as "3 min 20 s"."""
    if not seconds >= 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def size(count: float) -> str:
    """Bytes, such as "1.5 MB"."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"


def client_name(client: int, names: Sequence[str] = ()) -> str:
    """What a client is called in the data, such as "Kiel"; or else "client 3"."""
    return names[client] if client < len(names) else f"client {client}"
