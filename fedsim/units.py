"""Numbers as a person reads them."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes, such as «1.5 MB»."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"
