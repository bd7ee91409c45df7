"""Bars of what features are worth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedsim.explain.pictures import rule_bases as figures
from fedsim.explain.pictures.rule_bases import draw_bars


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that would be saved."""
    saved: list[Figure] = []
    monkeypatch.setattr(figures, "save", lambda figure, path, title: saved.append(figure))
    return saved


def test_panels_share_a_scale_that_holds_all_bars(drawn: list[Figure]) -> None:
    relevance = np.array([[4.0, -6.0], [0.2, 0.1]])
    draw_bars(relevance, ["a", "b"], ["one", "other"], Path("x.png"), xlabel="relevance for it")
    (figure,) = drawn
    one, other = figure.axes
    assert one.get_xlim() == other.get_xlim()
    assert one.get_xlim()[0] < -6 < 4 < one.get_xlim()[1]
    assert (one.get_xlabel(), other.get_xlabel()) == ("", "relevance for it")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["for it", "against it"]


def test_what_only_speaks_for_it_needs_no_legend(drawn: list[Figure]) -> None:
    draw_bars(np.array([[0.0, 2.0]]), ["a", "b"], [""], Path("x.png"))
    assert not drawn[0].legends
