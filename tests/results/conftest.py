"""Pages that are made in a moment."""

from __future__ import annotations

import pytest

from fedsim.results.figures.look import Drawing


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without drawings, which take most of their time."""
    monkeypatch.setattr(Drawing, "svg", lambda drawing: "")
