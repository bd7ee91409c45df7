"""Figures of rule bases: the meaning of conditions, the rules, and their activations.

They work for any kind of rules: a condition is sampled over the range [0, 1] of its feature. It is
crisp if it holds either fully or not at all there.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedsim.explain.pictures.canvas import (
    AGAINST,
    CENTRED,
    FOR,
    LEGEND,
    new_figure,
    place,
    plain,
    save,
    wrapped,
)
from fedsim.explain.scores.relevance import silence
from fedsim.models.rules import Array, Condition, Prediction, Rule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

MOST_PANELS = 40
MOST_COLUMNS = 60  # features of the heat map
MOST_TERMS = 9  # with more, each feature has its own terms
BINS = 20  # of a feature's values
_STEPS = 12_000  # of a sampled range; includes the peaks of up to 7 uniform fuzzy sets
_SMALL, _FONT = 8, 9  # points
_PANEL, _PANEL_OF_FEW, _GAP, _ROW = (1.65, 1.05), (2.6, 1.7), 0.2, 0.2  # inches
_PALE, _SOLID, _NONE = "#a9c6e3", "#1f4e79", "#d95f02"


@dataclass(frozen=True)
class _Shape:
    """The memberships of one condition or several together at points evenly spaced from 0 to 1."""

    points: Array
    values: Array

    @property
    def crisp(self) -> bool:
        return bool(np.isin(self.values, (0, 1)).all())

    @property
    def centre(self) -> float:
        """The centre of the region of greatest membership; NaN without membership."""
        greatest = self.values.max()
        if greatest <= 0:
            return float("nan")
        best = self.points[self.values >= greatest - 1e-9]
        return float((best[0] + best[-1]) / 2)

    @property
    def support(self) -> tuple[Array, Array]:
        """Points and values, NaN where it does not hold; one 0 stays on either side."""
        holds = np.pad(self.values > 0, 1)
        near = holds[:-2] | holds[1:-1] | holds[2:]
        return self.points, np.where(near, self.values, np.nan)

    @property
    def stretches(self) -> list[tuple[float, float]]:
        """The intervals where it holds, accurate to half a step."""
        changes = np.diff(self.values > 0, prepend=False, append=False)
        ends = np.flatnonzero(changes).reshape(-1, 2)
        half = self.points[1] / 2
        return [
            (max(float(self.points[a]) - half, 0.0), min(float(self.points[b - 1]) + half, 1.0))
            for a, b in ends
        ]


def _sample(conditions: Sequence[Condition]) -> _Shape:
    points = np.linspace(0, 1, _STEPS + 1)
    return _Shape(points, np.min([c.membership(points) for c in conditions], axis=0))


def draw_partitions(
    rules: Sequence[Rule], x: Array, names: Sequence[str], ticks: Sequence[Sequence[str]] = ()
) -> Figure:
    """Draw what the conditions mean: a panel for each feature, over a histogram of its values.

    Fuzzy conditions are drawn as their membership functions. Crisp ones are boxes along which they
    hold, one above the other so that none hides another. Their colours say where they point, as
    in `draw_rules`. Of more than 40 features, the 40 that most rules use are drawn.

    Args:
        ticks: for each feature what stands evenly along its range; by default numbers from 0 to 1.
    """
    features = _most_used(rules, len(names), MOST_PANELS)
    shapes = _shapes(rules, features)
    fuzzy = [f for f in features if not all(shape.crisp for shape in shapes[f].values())]
    terms = _terms(rules, shapes, fuzzy)
    columns = next(c for c, most in ((4, 4), (5, 30), (6, MOST_PANELS)) if len(features) <= most)
    columns = min(columns, len(features))
    rows = -(-len(features) // columns)
    width, height = _PANEL if len(features) > 3 else _PANEL_OF_FEW
    letters = int(width / 0.072)
    titles = [plain(wrapped(names[f], letters, 2)) for f in features]
    across = width + _GAP
    above = 0.4 if any("\n" in title for title in titles) else 0.26
    down = height + above + (0.18 if ticks else 0)

    figure = new_figure(columns * across - _GAP, rows * down + height - down)
    colours = _colours()
    for k, (f, title) in enumerate(zip(features, titles, strict=True)):
        row, column = divmod(k, columns)
        panel = place(figure, column * across, row * down, width, height)
        panel.set_title(title, fontsize=_FONT, pad=3)
        counts, edges = np.histogram(x[:, f], BINS, (0, 1))
        shares = counts / max(counts.max(), 1)
        panel.bar(edges[:-1], shares, 1 / BINS, align="edge", color="0.86", label="_values")
        if f in fuzzy:
            for words, shape in shapes[f].items():
                colour = colours(shape.centre)
                panel.plot(*shape.support, color=colour, linewidth=1.6, label=words)
        else:
            _draw_boxes(panel, shapes[f], colours)
        panel.set(xlim=(0, 1), ylim=(0, 1.06), yticks=())
        _set_ticks(panel, ticks[f] if ticks else ("0", "0.5", "1"), letters)
        if not ticks and k + columns < len(features):
            panel.set_xticklabels(())
        if f in fuzzy or (fuzzy and not shapes[f]):
            panel.set_yticks((0, 0.5, 1), labels=("0", "0.5", "1") if column == 0 else ())
            if column == 0:
                panel.set_ylabel("membership", fontsize=_SMALL)
        panel.tick_params(labelsize=_SMALL, length=2.5)
        panel.spines[["top", "right"]].set_visible(False)

    if terms:
        from matplotlib.lines import Line2D

        handles = [Line2D([], [], color=colours(at), linewidth=1.6) for at in terms.values()]
        place_of = (0, 1 + (above + 0.05) / figure.get_size_inches()[1])
        style = {**LEGEND, "ncols": len(terms), "fontsize": _FONT, "borderpad": 0}
        figure.legend(handles, [*map(plain, terms)], bbox_to_anchor=place_of, **style)
    notes = []
    if any(shapes[f] for f in features if f not in fuzzy):
        notes.append(
            "Coloured: the conditions on the feature, each along the values for which it holds."
        )
    scale = ", highest bar = 1" if fuzzy else ""
    notes.append(f"Grey: histogram of the feature's values in {_many(len(x), 'example')}{scale}.")
    if outside := int(((x[:, features] < 0) | (x[:, features] > 1)).sum()):
        where = "the axes" if ticks else "[0, 1]"
        notes.append(f"Not drawn: {_many(outside, 'value')} outside {where}.")
    if left_out := len(names) - len(features):
        notes.append(f"Left out: {_many(left_out, 'feature')} that the fewest rules use.")
    _note(figure, notes, max(columns * across, 4.2), 0.35)
    return figure


def _set_ticks(panel: Axes, ticks: Sequence[str], letters: int) -> None:
    """Words evenly along the range, cut so that they do not run into each other.

    Args:
        letters: how many fit beside each other.
    """
    fitting = max(letters // len(ticks), 2)
    words = [plain(wrapped(tick, fitting, 1)) for tick in ticks]
    panel.set_xticks(np.linspace(0, 1, len(ticks)), labels=words)
    if len(ticks) != 3 or max(map(len, ticks)) > 3:  # within the panel's own width
        panel.get_xticklabels()[0].set_horizontalalignment("left")
        panel.get_xticklabels()[-1].set_horizontalalignment("right")


def _shapes(rules: Sequence[Rule], features: Sequence[int]) -> dict[int, dict[str, _Shape]]:
    """The distinct conditions on some features, by feature and words, from low to high."""
    found: dict[int, dict[str, _Shape]] = {f: {} for f in features}
    for rule in rules:
        for condition in rule.conditions:
            own = found.get(condition.feature)
            if own is not None and condition.words not in own:
                own[condition.words] = _sample([condition])
    return {
        f: dict(sorted(own.items(), key=lambda item: (np.isnan(item[1].centre), item[1].centre)))
        for f, own in found.items()
    }


def _draw_boxes(panel: Axes, shapes: dict[str, _Shape], colours: ListedColormap) -> None:
    """Crisp conditions, from low at the top to high at the bottom."""
    if not shapes:  # no rule uses the feature
        panel.text(0.5, 0.5, "no condition", fontsize=_SMALL, **CENTRED)
    step = 1 / max(len(shapes), 1)
    thick = min(0.55 * step, 0.09)  # keeps the histogram visible
    for k, (words, shape) in enumerate(shapes.items()):
        middle = 1 - (k + 0.5) * step
        stretches = [(start, end - start) for start, end in shape.stretches]
        colour = colours(shape.centre)
        # The edge makes very narrow ones visible.
        bar = middle - thick / 2, thick
        panel.broken_barh(stretches, bar, color=colour, linewidth=0.5, label=words)


def draw_rules(
    rules: Sequence[Rule], sources: NDArray[np.int64], names: Sequence[str], most: int = 40
) -> Figure:
    """Draw R rules as a heat map: a row for each rule, the weightiest first, a column a feature.

    The colour says where the rule's condition on the feature points: to the centre of the region
    of [0, 1] where it holds best. No colour: no condition. A cross: it holds nowhere in [0, 1].
    To the right the rule's weight and the number of clients that it comes from, `sources` (R,). Of
    more than 60 features, the 60 that most of these rules use are drawn.
    """
    order = sorted(range(len(rules)), key=lambda j: -rules[j].weight)[:most]
    shown = [rules[j] for j in order]
    features = _most_used(shown, len(names), MOST_COLUMNS)
    centres, nowhere, apart = _centres(shown, features)
    cell = float(np.clip(6 / len(features), 0.19, 0.36))
    wide, high, gap, bars = cell * len(features), _ROW * len(shown), 0.15, 1.3

    figure = new_figure(wide + gap + bars, high)
    heat = place(figure, 0, 0, wide, high)
    x_edges, y_edges = np.arange(len(features) + 1) - 0.5, np.arange(len(shown) + 1) - 0.5
    cells = np.ma.masked_invalid(centres)
    grid: dict[str, Any] = {"edgecolors": "white", "linewidth": 0.8, "zorder": 2}
    mesh = heat.pcolormesh(x_edges, y_edges, cells, cmap=_colours(), vmin=0, vmax=1, **grid)
    heat.plot(*np.nonzero(nowhere)[::-1], "x", color="0.3", markersize=4, zorder=3)
    heat.hlines(range(len(shown)), x_edges[0], x_edges[-1], color="0.9", linewidth=0.6, zorder=1)
    short = [wrapped(names[f], 40, 1) for f in features]
    labels = [plain(name) for name in short]
    level = max(map(len, short)) * 0.08 < cell
    heat.set_xticks(range(len(features)), labels=labels, rotation=0 if level else 90)
    heat.set_yticks(range(len(shown)), labels=[str(j + 1) for j in order])
    heat.set_ylabel("rule", fontsize=_FONT)
    heat.set(xlim=(x_edges[0], x_edges[-1]), ylim=(y_edges[-1], y_edges[0]))
    heat.tick_params(labelsize=_SMALL, length=0, labeltop=True, labelbottom=False)
    heat.spines[:].set_color("0.6")

    weight = place(figure, wide + gap, 0, bars, high)
    weights = [rule.weight for rule in shown]
    drawn = weight.barh(range(len(shown)), weights, 0.65, color=_SOLID)
    texts = [f"{w:,.0f}" if abs(w) >= 1000 else f"{w:.3g}" for w in weights]
    weight.bar_label(drawn, texts, padding=2, fontsize=_SMALL - 1)
    # Leaves room for the longest bar's number.
    least, greatest = min(*weights, 0), max(*weights, 0)
    weight.set(xlim=(1.7 * least, 1.7 * greatest) if least < greatest else (0, 1), xticks=())
    weight.axvline(0, color="black", linewidth=0.8)
    weight.set_yticks(range(len(shown)), labels=[str(sources[j]) for j in order])
    weight.tick_params(labelsize=_SMALL, length=0, labelleft=False, labelright=True)
    weight.set_ylim(heat.get_ylim())
    weight.spines[:].set_visible(False)
    units = "axes fraction", "offset points"
    weight.annotate("weight", (0, 1), (0, 4), *units, fontsize=_FONT)
    weight.annotate("clients", (1, 1), (4, 4), *units, fontsize=_FONT)

    bar = place(figure, 0, high + 0.2, 1.8, 0.12)
    figure.colorbar(mesh, cax=bar, orientation="horizontal")
    bar.set_xticks((0, 0.5, 1), labels=("low (0)", "0.5", "high (1)"))
    bar.tick_params(labelsize=_SMALL, length=2.5)
    notes = [
        "The weightiest rules first.",
        "Colour: centre of the region where the condition holds best; blank: no condition.",
    ]
    if apart.any():
        for j, f in np.argwhere(apart):
            heat.text(f, j, "≠", fontsize=_SMALL, color="0.3", **CENTRED)
        notes.append("≠: the condition excludes values in the middle.")
    if nowhere.any():
        notes.append("Cross: the condition holds nowhere in [0, 1].")
    if lighter := len(rules) - len(shown):
        notes.append(f"Left out: {_many(lighter, 'lighter rule')} of {len(rules)}.")
    if left_out := len(names) - len(features):
        notes.append(f"Left out: {_many(left_out, 'feature')} that the fewest rules use.")
    _note(figure, notes, max(wide + gap + bars + 0.4, 3.6), 0.62)
    return figure


def _centres(
    rules: Sequence[Rule], features: Sequence[int]
) -> tuple[Array, NDArray[np.bool_], NDArray[np.bool_]]:
    """(R, features) centres of conditions; which hold nowhere in [0, 1]; which hold best apart.

    A centre is NaN where there is no condition, or no single region where it holds best.

    Several conditions of a rule on one feature are combined by the minimum of their memberships.
    """
    column = {f: k for k, f in enumerate(features)}
    centres = np.full((len(rules), len(features)), np.nan)
    nowhere, apart = np.zeros((2, *centres.shape), np.bool_)
    known: dict[tuple[int, tuple[str, ...]], _Shape] = {}
    for j, rule in enumerate(rules):
        on: dict[int, list[Condition]] = {}
        for condition in rule.conditions:
            on.setdefault(condition.feature, []).append(condition)
        for f in on.keys() & column.keys():
            key = f, tuple(condition.words for condition in on[f])
            if key not in known:
                known[key] = _sample(on[f])
            shape, at = known[key], (j, column[f])
            nowhere[at], apart[at] = not len(shape.stretches), len(shape.stretches) > 1
            if not apart[at]:
                centres[at] = shape.centre
    return centres, nowhere, apart


def draw_activations(found: Prediction) -> Figure:
    """Draw how often each rule fires and decides, and how many rules are active per example."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    fired = found.firing > 0
    n, R = fired.shape
    examples = np.arange(n)
    fires = fired.sum(axis=0) / max(n, 1)
    held = fired[examples, found.deciding]
    decides = np.bincount(found.deciding[held], minlength=R) / max(n, 1)
    by_default = np.bincount(found.deciding[~held], minlength=R) / max(n, 1)
    active = fired.sum(axis=1)
    shares = np.bincount(active, minlength=1) / max(n, 1)

    wide = float(np.clip(0.2 * R + 1, 1.6, 8.4))
    figure = new_figure(wide, 5)
    above = place(figure, 0, 0, wide, 2.3)
    numbers = np.arange(1, R + 1)
    above.bar(numbers, fires, 0.86, color=_PALE, label="fires")
    above.bar(numbers, decides, 0.45, color=_SOLID, label="decides")
    if by_default.any():
        above.bar(numbers, by_default, 0.45, decides, color=_NONE, label="decides without firing")
    above.set_xlim(0.4, R + 0.6)
    step = next((s for s in (1, 2, 5, 10, 20, 50) if s * wide / R > 0.19 + 0.15 * (s > 1)), 100)
    above.set_xticks(sorted({1, *range(step, R + 1, step)}))
    above.set_xlabel("rule", fontsize=_FONT)
    style = {**LEGEND, "borderaxespad": 0.2, "ncols": 3, "fontsize": _FONT}
    above.legend(bbox_to_anchor=(0, 1), **style)

    slots = max(len(shares), min(R + 1, 8))
    below = place(figure, 0, 3.1, min(max(0.4 * slots, 1.6), 8.4), 1.9)
    below.bar(0, shares[0], 0.86, color=_NONE)
    below.bar(np.arange(1, len(shares)), shares[1:], 0.86, color=_SOLID)
    below.set_xlim(-0.6, slots - 0.4)
    below.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    below.set_xlabel("rules that fire for an example", fontsize=_FONT)
    none = int((active == 0).sum())
    words = f"For each of the {_many(n, 'example')} a rule fires."
    if none:
        words = f"No rule fires for {100 * none / n:.3g}% of the examples ({none:,} of {n:,})."
    below.set_title(words, fontsize=_FONT, loc="left")
    for panel in (above, below):
        panel.set_ylabel("examples", fontsize=_FONT)
        panel.set_ylim(bottom=0)
        panel.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.4g}%"))
        panel.tick_params(labelsize=_SMALL)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _most_used(rules: Sequence[Rule], count: int, most: int) -> list[int]:
    """The features used by most rules, in their order; ties by index."""
    used = np.zeros(count, np.int64)
    for rule in rules:
        used[list({condition.feature for condition in rule.conditions})] += 1
    return sorted(np.argsort(-used, kind="stable")[:most].tolist())


def _terms(
    rules: Sequence[Rule], shapes: dict[int, dict[str, _Shape]], features: Sequence[int]
) -> dict[str, float]:
    """Terms that features share, with their centres, from low to high; none if too many."""
    used = {c.term: (c.feature, c.words) for rule in rules for c in rule.conditions}
    terms = {t: shapes[f][words].centre for t, (f, words) in used.items() if f in features}
    if len(terms) > MOST_TERMS:
        return {}
    return dict(sorted(terms.items(), key=lambda item: item[1]))


def _colours() -> ListedColormap:
    """Colours from low to high: darker to lighter, but visible on white."""
    import matplotlib as mpl
    from matplotlib.colors import ListedColormap

    return ListedColormap(mpl.colormaps["plasma"](np.linspace(0, 0.85, 256)))


def _note(figure: Figure, sentences: Sequence[str], width: float, below: float) -> None:
    lines = [line for text in sentences for line in textwrap.wrap(text, int(width / 0.067))]
    y = -below / figure.get_size_inches()[1]
    figure.text(0, y, "\n".join(lines), fontsize=_SMALL, va="top", color="0.25")


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def draw_bars(
    relevance: Array,
    names: Sequence[str],
    titles: Sequence[str],
    path: Path,
    most: int = 12,
    title: str = "",
    xlabel: str = "relevance",
    compared: Array | None = None,
    signs: tuple[str, str] = ("for it", "against it"),
) -> None:
    """Draw the relevance (n, F) of features, a panel for each prediction, with the values.

    Red bars speak for the prediction, blue ones against it; `signs` says so. All panels have the
    same scale and the same order of features: by the largest relevance in any of them, or in
    `compared` (m, F).
    """
    from matplotlib.patches import Patch

    shown = min(most, len(names))
    if shown < len(names):
        xlabel = f"{xlabel}, the {shown} most relevant of {len(names)} features"
    silent = [silence(row, "features") for row in relevance]
    captions = [
        wrapped(f"{text}; {why}, so this says nothing" if why else text, 62, 4)
        for text, why in zip(titles, silent, strict=True)
    ]
    scale = relevance if compared is None or not len(compared) else compared
    scale = np.where(np.isfinite(scale), scale, 0)
    order = np.argsort(-np.abs(scale).max(axis=0), kind="stable")[:shown][::-1]
    low, top = min(scale.min(), 0), max(scale.max(), 0)
    letters = 1 + max(len(f"{value:+.3g}") for value in scale[:, order].ravel())
    share = max(0.16, letters / (75 - 2 * letters))  # of the 75 letters that fit
    margin = share * (top - low) or 1.0  # for the values
    high, gap = 0.16 * shown + 0.1, 0.14 + 0.14 * max(text.count("\n") + 1 for text in captions)
    figure = new_figure(6.0, len(relevance) * (high + gap))
    for k, (row, caption, why) in enumerate(zip(relevance, captions, silent, strict=True)):
        axes = place(figure, 1.6, k * (high + gap) + gap, 4.2, high)
        colours = [FOR if row[i] > 0 else AGAINST for i in order]
        if not why:
            bars = axes.barh(range(shown), row[order], color=colours)
            texts = [f"{row[i]:+.3g}".replace("-", "−") for i in order]
            axes.bar_label(bars, texts, padding=2, fontsize=_SMALL - 2)
        axes.set_yticks(range(shown), [plain(names[i]) for i in order], fontsize=_SMALL - 1)
        axes.set(xlim=(low - margin, top + margin), ylim=(-0.7, shown - 0.3))
        axes.tick_params(axis="x", labelsize=_SMALL - 1, labelbottom=k == len(relevance) - 1)
        axes.grid(axis="x", color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.axvline(0, color="black", linewidth=0.6)
        axes.set_title(plain(caption), fontsize=_FONT, loc="left", pad=3)
    axes.set_xlabel(xlabel, fontsize=_FONT)
    if low < 0:
        pairs = zip((FOR, AGAINST), signs, strict=True)
        handles = [Patch(color=colour, label=label) for colour, label in pairs]
        style = {**LEGEND, "loc": "lower right", "ncols": 2, "fontsize": _SMALL, "borderpad": 0.1}
        figure.legend(handles=handles, bbox_to_anchor=(5.8 / 6, 1), **style)
    save(figure, path, title)
