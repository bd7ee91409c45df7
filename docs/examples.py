"""Tells mkdocstrings that what a docstring calls "Example" is what others call "Examples"."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class Examples(Extension):
    """Renames the section, so that it is shown as code and its output."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for every object, when it and its members are known."""
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
