"""Figures of rule bases: what they show, for rules of any kind."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedsim.explain.pictures import rule_bases as figures
from fedsim.explain.pictures.canvas import save
from fedsim.explain.pictures.rule_bases import (
    draw_activations,
    draw_bars,
    draw_partitions,
    draw_rules,
)
from fedsim.models.rules import Array, Condition, Prediction, Rule, Rules
from fedsim.models.tree_rules import GREATEST, LEAST, TreeRules
from fedsim.models.tsk import Tsk

pytestmark = pytest.mark.filterwarnings("error")

NAMES = ("x1", "x2", "x3")
LONG = "Three-month-rate-secondary-market"
FUZZY: Rules = {
    "antecedents": np.array([[0, 1, 2], [2, 1, 2], [0, 0, 2], [2, 0, 2]]),
    "consequents": np.zeros((4, 4)),
    "weights": np.array([0.1, 0.4, 0.1, 0.2]),
}
# x1 ≤ 0.2; 0.2 < x1 ≤ 0.6 and x3 > 0.5; 0.2 < x1 ≤ 0.6 and x3 ≤ 0.5; x1 > 0.6
LOW, HIGH = [LEAST] * 3, [GREATEST] * 3
CRISP: Rules = {
    "low": np.array([LOW, [0.2, LEAST, 0.5], [0.2, *LOW[1:]], [0.6, *LOW[1:]]]),
    "high": np.array([[0.2, *HIGH[1:]], [0.6, *HIGH[1:]], [0.6, GREATEST, 0.5], HIGH]),
    "values": np.array([0.1, 0.2, 0.3, 0.4]),
    "weights": np.array([10.0, 4000.0, 30.0, 20.0]),
}
EXPLAINED = {
    "tsk": Tsk().explain(FUZZY, NAMES),
    "tree_rules": TreeRules().explain(CRISP, NAMES),
}
PREDICTED = {
    "tsk": lambda x: Tsk().predict(FUZZY, x),
    "tree_rules": lambda x: TreeRules().predict(CRISP, x),
}
KINDS = tuple(EXPLAINED)
SOURCES = np.array([1, 2, 3, 4])
NONE = np.nan


def examples(n: int = 50, features: int = 3) -> Array:
    return np.random.default_rng(0).random((n, features))


def words(figure: Figure) -> str:
    """The notes below it."""
    return " ".join(text.get_text().replace("\n", " ") for text in figure.texts)


def heights(bars: Any) -> list[float]:
    return [bar.get_height() for bar in bars]


def curve(line: Any) -> Array:
    """(points, 2) of a line where it is drawn."""
    drawn = line.get_xydata()
    found: Array = drawn[~np.isnan(drawn[:, 1])]
    return found


def labels(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.get_ticklabels()]


def rule(*conditions: Condition, weight: float = 1.0, features: int = 3) -> Rule:
    return Rule(conditions, np.zeros(features + 1), weight)


def box(feature: int, low: float, high: float) -> Condition:
    words = f"{low} < f ≤ {high}"
    return Condition(feature, words, words, lambda v: 1.0 * ((low < v) & (v <= high)))


def test_fuzzy_partitions() -> None:
    x = examples()
    figure = draw_partitions(EXPLAINED["tsk"], x, NAMES)
    assert [panel.get_title() for panel in figure.axes] == list(NAMES)
    lines = [{line.get_label(): line for line in panel.lines} for panel in figure.axes]
    assert [list(drawn) for drawn in lines] == [
        ["x1 is LOW", "x1 is HIGH"],
        ["x2 is LOW", "x2 is MEDIUM"],
        ["x3 is HIGH"],
    ]
    triangle = curve(lines[1]["x2 is MEDIUM"])
    assert np.allclose(triangle[:, 1], 1 - 2 * np.abs(triangle[:, 0] - 0.5))
    assert np.allclose(triangle[[0, -1]], [[0, 0], [1, 0]])
    # Where a set has no membership, its line is not drawn over the others.
    assert curve(lines[2]["x3 is HIGH"])[:, 0].min() == pytest.approx(0.5)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["LOW", "MEDIUM", "HIGH"]
    named = "x1 is LOW", "x2 is MEDIUM", "x3 is HIGH"
    colours = [drawn[name].get_color() for drawn, name in zip(lines, named, strict=True)]
    assert [line.get_color() for line in legend.get_lines()] == colours


def test_crisp_partitions() -> None:
    figure = draw_partitions(EXPLAINED["tree_rules"], examples(), NAMES)
    assert not figure.legends  # each feature has words of its own
    boxes = [
        {drawn.get_label(): drawn.get_paths()[0].get_extents() for drawn in panel.collections}
        for panel in figure.axes
    ]
    ends = [{words: (b.x0, b.x1) for words, b in drawn.items()} for drawn in boxes]
    assert list(ends[0]) == ["x1 ≤ 0.2", "0.2 < x1 ≤ 0.6", "x1 > 0.6"]
    assert np.allclose(list(ends[0].values()), [(0, 0.2), (0.2, 0.6), (0.6, 1)], atol=2e-3)
    assert ends[1] == {}
    assert [text.get_text() for text in figure.axes[1].texts] == ["no condition"]
    levels = sorted((b.y0, b.y1) for b in boxes[0].values())
    assert all(below[1] < above[0] for below, above in pairwise(levels))


def test_histograms_of_the_values() -> None:
    x = np.array([[0.01, 0.0], [0.02, 1.0], [0.51, 2.0], [0.5, -1.0]])
    figure = draw_partitions([rule(features=2)], x, ("a", "b"))
    expected = np.zeros((2, figures.BINS))
    expected[0, [0, 10]] = 1
    expected[1, [0, -1]] = 1
    assert [heights(panel.containers[0]) for panel in figure.axes] == expected.tolist()
    assert "4 examples" in words(figure)
    assert "2 values outside [0, 1]" in words(figure)


@pytest.mark.parametrize(("features", "panels"), [(1, 1), (7, 7), (47, 40)])
def test_number_of_panels(features: int, panels: int, tmp_path: Path) -> None:
    names = [f"{LONG}-{f}" for f in range(features)]
    base = {
        "antecedents": np.arange(2 * features).reshape(2, features) % 3,
        "consequents": np.zeros((2, 1)),
        "weights": np.ones(2),
    }
    rules = Tsk().explain(base, names)
    figure = draw_partitions(rules, examples(features=features), names)
    assert len(figure.axes) == panels
    assert ("Left out: 7 features" in words(figure)) == (features == 47)
    save(draw_rules(rules, SOURCES[:2], names), tmp_path / "rules.png")


def test_features_that_most_rules_use_are_drawn() -> None:
    names = [f"f{f}" for f in range(62)]
    rules = [rule(box(61, 0, 0.5), features=62), rule(box(61, 0.5, 1), features=62)]
    figure = draw_partitions(rules, examples(features=62), names)
    expected = [*names[:39], "f61"]
    assert [panel.get_title() for panel in figure.axes] == expected
    figure = draw_rules(rules, SOURCES[:2], names, 40)
    assert labels(figure.axes[0].xaxis) == [*names[:59], "f61"]
    assert "Left out: 2 features" in words(figure)


def heat(figure: Figure) -> Array:
    """(R, F) what the heat map shows, NaN where it is blank."""
    found: Array = figure.axes[0].collections[0].get_array().filled(np.nan)
    return found


def test_fuzzy_rules() -> None:
    figure = draw_rules(EXPLAINED["tsk"], SOURCES, NAMES, 40)
    table, weights, _ = figure.axes
    # By weight; equal ones in their order. Row 0 is at the top.
    assert heat(figure).tolist() == [[1, 0.5, 1], [1, 0, 1], [0, 0.5, 1], [0, 0, 1]]
    assert labels(table.yaxis) == ["2", "4", "1", "3"]
    assert labels(table.xaxis) == list(NAMES)
    assert table.yaxis_inverted()
    assert table.get_ylim() == weights.get_ylim()
    assert [bar.get_width() for bar in weights.containers[0]] == [0.4, 0.2, 0.1, 0.1]
    assert [text.get_text() for text in weights.texts[:4]] == ["0.4", "0.2", "0.1", "0.1"]
    assert labels(weights.yaxis) == ["2", "4", "1", "3"]  # clients
    assert "Left out" not in words(figure)


def test_crisp_rules() -> None:
    figure = draw_rules(EXPLAINED["tree_rules"], SOURCES * 7, NAMES, 3)
    expected = [[0.4, NONE, 0.75], [0.4, NONE, 0.25], [0.8, NONE, NONE]]
    assert np.allclose(heat(figure), expected, atol=2e-3, equal_nan=True)
    assert labels(figure.axes[0].yaxis) == ["2", "3", "4"]
    assert labels(figure.axes[1].yaxis) == ["14", "21", "28"]
    assert [text.get_text() for text in figure.axes[1].texts[:3]] == ["4,000", "30", "20"]
    assert "Left out: 1 lighter rule of 4." in words(figure)


def test_where_a_condition_points() -> None:
    rules = [
        rule(box(0, 0.3, 0.3003), box(1, 0, 0.5), box(1, 0.4, 1), box(2, 2, 3)),
        rule(Condition(0, "f is odd", "odd", lambda v: np.where(v < 0.2, 0.3, 0.1))),
    ]
    figure = draw_rules(rules, SOURCES[:2], NAMES, 40)
    expected = [[0.3, 0.45, NONE], [0.1, NONE, NONE]]
    assert np.allclose(heat(figure), expected, atol=2e-3, equal_nan=True)
    (crosses,) = figure.axes[0].lines
    assert crosses.get_xydata().tolist() == [[2, 0]]
    assert "holds nowhere" in words(figure)


@pytest.mark.parametrize("kind", KINDS)
def test_activations(kind: str) -> None:
    x = np.vstack([examples(40), np.full((3, 3), 0.25)])  # where no fuzzy rule fires
    found = PREDICTED[kind](x)
    figure = draw_activations(found)
    above, below = figure.axes
    drawn = {bars.get_label(): heights(bars) for bars in above.containers}
    assert drawn["fires"] == [sum(w > 0 for w in found.firing[:, j]) / 43 for j in range(4)]
    decides = np.add(drawn["decides"], drawn.get("decides without firing", 0))
    assert np.allclose(decides, [sum(found.deciding == j) / 43 for j in range(4)])
    assert all(d <= f for d, f in zip(drawn["decides"], drawn["fires"], strict=True))
    shares = [height for bars in below.containers for height in heights(bars)]
    active = (found.firing > 0).sum(axis=1)
    assert shares == [sum(active == k) / 43 for k in range(active.max() + 1)]
    title = below.get_title(loc="left")
    if kind == "tsk":
        none = sum(active == 0)
        assert none >= 3
        assert title == f"No rule fires for {100 * none / 43:.3g}% of the examples ({none} of 43)."
        assert sum(drawn["decides without firing"]) == pytest.approx(none / 43)
    else:
        assert title == "For each of the 43 examples a rule fires."
        assert "decides without firing" not in drawn


@pytest.mark.parametrize("count", [1, 200])
def test_activations_of_few_and_many_rules(count: int) -> None:
    rng = np.random.default_rng(0)
    firing = rng.random((60, count)) * (rng.random((60, count)) < 0.5)
    found = Prediction(firing[:, 0], firing.argmax(axis=1), firing, firing)
    figure = draw_activations(found)
    numbers = [int(text) for text in labels(figure.axes[0].xaxis)]
    assert (numbers[0], numbers[-1]) == (1, count)
    assert len(numbers) <= 40
    assert figure.axes[0].get_ylim()[0] == 0


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        ([rule()], (LONG, "a", "b")),
        ([rule(weight=0.0), rule(box(0, 0.1, 0.2), weight=0.0)], ("x" * 90, "", "a\nb")),
        ([rule(box(0, 2, 3), weight=-2.0)], ("$a$", "$", "$\\frac$")),
        (
            [rule(Condition(2, "about 0.3", "about 0.3", lambda v: np.exp(-((v - 0.3) ** 2))))],
            ("_", "%", "{"),
        ),
    ],
    ids=["no conditions", "no weight", "holds nowhere", "no triangle"],
)
def test_odd_rules_and_names(rules: list[Rule], names: tuple[str, ...], tmp_path: Path) -> None:
    save(draw_partitions(rules, examples(), names), tmp_path / "partitions.png")
    figure = draw_rules(rules, SOURCES[: len(rules)], names)
    save(figure, tmp_path / "rules.png")
    # The name is as given, as far as there is room.
    label = labels(figure.axes[0].xaxis)[0].replace(r"\$", "$")
    assert re.sub("…$", "", label) == names[0][: len(label) - label.endswith("…")]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    found: list[Figure] = []
    monkeypatch.setattr(figures, "save", lambda figure, path, title: found.append(figure))
    return found


def test_bars_share_a_scale(tmp_path: Path, drawn: list[Figure]) -> None:
    relevance = np.array([[4.0, -6.0], [0.2, 0.1]])
    draw_bars(relevance, ["a", "b"], ["one", "other"], tmp_path, xlabel="relevance for it")
    draw_bars(np.array([[0.0, 2.0]]), ["a", "b"], [""], tmp_path)  # only speaks for it
    one, other = drawn[0].axes
    assert one.get_xlim() == other.get_xlim()
    assert one.get_xlim()[0] < -6 < 4 < one.get_xlim()[1]
    assert (one.get_xlabel(), other.get_xlabel()) == ("", "relevance for it")
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["for it", "against it"]
    assert not drawn[1].legends


def test_values_do_not_touch_the_frame(tmp_path: Path, drawn: list[Figure]) -> None:
    draw_bars(np.array([[4.35e7, -1.9e7]]), ["a", "b"], [""], tmp_path)
    (axes,) = drawn[0].axes
    assert {text.get_text() for text in axes.texts} == {"+4.35e+07", "−1.9e+07"}
    frame = axes.get_window_extent()
    for text in axes.texts:
        box = text.get_window_extent()
        assert frame.x0 + 2 < box.x0 < box.x1 < frame.x1 - 2
