"""Explanations in notebooks: text, pictures, tables."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

_KINDS = {".png": "image/png", ".svg": "image/svg+xml"}


def as_html(text: str, pictures: Sequence[Path], *tables: pd.DataFrame) -> str:
    """HTML that holds the pictures (PNG, SVG) itself, with tables below them."""
    parts = [f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'] if text else []
    for path in pictures:
        kind = _KINDS.get(path.suffix.lower())
        if kind:
            content = base64.b64encode(path.read_bytes()).decode()
            name = html.escape(path.stem)
            parts.append(
                f'<img src="data:{kind};base64,{content}" alt="{name}" style="max-width: 100%">'
            )
    parts += [table.to_html(index=False, border=0, na_rep="") for table in tables]
    return "\n".join(parts)
