"""Explanations of a report: scores by round, relevance maps and rules."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fedsim.explain.pictures import maps as map_figures
from fedsim.explain.scores.randomisation import ALIKE
from fedsim.explain.section import SIMILARITIES
from fedsim.objectives import Metric
from fedsim.results.maps import agreement_matrix, relevance_maps
from fedsim.results.report.comparison import ReportData, label
from fedsim.results.report.curves import Plot, draw
from fedsim.results.report.page import PageTable, Picture, capital, distinct, listed, plain
from fedsim.results.run import Run

_EXPLAINED = 12  # settings whose maps and rules are shown
_ROWS_EXPLAINED = 8  # rows of such a table
_INPUTS = 4  # whose maps are shown
_ROUNDS = 6  # of which maps and scores are shown


def curves(compared: ReportData) -> list[Plot]:
    """Scores of explanations by round: a figure for each score, a panel for each explainer."""
    metrics: dict[str, Metric] = {}
    columns: dict[str, dict[str, str]] = {}
    shown = {metric.column for metric in compared.metrics}
    for entry in compared.entries:
        for metric in entry.run.explained if entry.run is not None else ():
            explainer, _, score = metric.column.partition("/")
            if metric.column in shown:
                metrics.setdefault(score, metric)
                columns.setdefault(score, {})[explainer] = metric.column
    drawn = (draw(compared, metrics[score], columns=own) for score, own in columns.items())
    return [plot for plot in drawn if plot is not None]


def explanations(compared: ReportData) -> list[tuple[str, list[PageTable], list[Picture]]]:
    """The pictures of each run; the maps and rules of one seed of each setting, up to a number."""
    first = [cell.entries[0] for cell in compared.cells][:_EXPLAINED]
    found = []
    for entry in compared.entries:
        if entry.run is None:
            continue
        files = sorted((entry.run.path / "explanations").glob("*"))
        shown = {f.stem: f for f in files if f.suffix.lower() in (".png", ".svg")}  # SVG over PNG
        pictures = [Picture.read(f) for f in shown.values()]
        tables = []
        if entry in first:
            tables = list(_rules(entry.run))
            if not entry.run.maps.empty:
                pictures = [*_maps(entry.run), *pictures]
        if pictures or tables:
            found.append(
                (f"{label(entry.cell, compared.labels)}, seed {entry.seed}", tables, pictures)
            )
    return found


def about(compared: ReportData) -> str:
    count, words = len(compared.cells), []
    few = f"the first {_EXPLAINED} of {count} settings" if count > _EXPLAINED else "each setting"
    runs = [entry.run for entry in compared.entries if entry.run is not None]
    if len(compared.entries) > 1:
        if any(not one.maps.empty or not one.own_explanations.empty for one in runs):
            words.append(f"Maps and rules are of the first seed of {few}.")
        words.append("The scores are over all seeds.")
    tables = [run.explanations for run in runs]
    silent = {n for t in tables if "uninformative" in t for n in t.explainer[t.uninformative > 0]}
    if silent:
        words.append(
            f"For some inputs the explanations by {listed(sorted(silent))} say nothing "
            "(`uninformative`): where all parts are equally relevant, they score what chance "
            "does, and where relevances are not finite, nothing."
        )
    told = [t for t in tables if "randomisation" in t]
    fixed = {name for t in told for name in t.explainer[t.randomisation > ALIKE]}
    if fixed:
        words.append(
            f"Maps by {listed(sorted(fixed))} do not depend on the network's weights: they agree "
            f"with those of random weights (`randomisation` above {ALIKE:g})."
        )
    if any(metric.chance is not None for run in runs for metric in run.explained):
        words.append(
            "Dotted lines: what maps score on average that know nothing; where there is none, the "
            "explainer `random` tells."
        )
    return " ".join(words)


def _rules(run: Run) -> Iterator[PageTable]:
    rows = run.own_explanations
    if rows.empty:
        return
    last = rows[rows["round"] == rows["round"].max()].drop(columns=["round", "explainer"])
    if run.manifest.get("client_names") and "client" in last:
        last["client"] = last["client"].map(lambda k: run.client_name(int(k)), na_action="ignore")
    words = f"; the first {_ROWS_EXPLAINED} of {len(last)}" if len(last) > _ROWS_EXPLAINED else ""
    caption = f"{listed(distinct(rows['explainer']))}, after the last round{words}"
    yield plain(capital(caption), last.head(_ROWS_EXPLAINED))


def _maps(run: Run) -> Iterator[Picture]:
    rows = run.maps
    last = rows[rows["round"] == rows["round"].max()]
    of_global = last[last["model"] == "global"]
    removal = {
        name: {
            str(explainer): curves
            for explainer, own in of_global.groupby("explainer", sort=False)
            if len(curves := _defined(np.stack(own[name].to_list())))
        }
        for name in ("deletion", "insertion")
        if name in of_global and of_global[name].notna().all()
    }
    if any(removal.values()):
        png = map_figures.draw_removal(removal, "value of the decision")
        yield _picture("Deletion and insertion, global model: median and middle half", png)
    for explainer in distinct(rows["explainer"]):
        matrix = agreement_matrix(run, explainer)
        if len(matrix) > 1:
            values = matrix.to_numpy(dtype=float)
            png = map_figures.draw_agreement([*map(str, matrix)], values, SIMILARITIES["rank"])
            yield _picture(f"Agreement of explanations by {explainer}, last round", png)
        shape: list[int] = run.manifest.get("map_shape") or []
        own = rows[(rows["explainer"] == explainer) & (rows["model"] == "global")]
        if len(shape) == 2 and len(own) and (own["relevance"].map(len) == math.prod(shape)).all():
            rounds = np.unique(own["round"])
            few = np.linspace(0, len(rounds) - 1, min(_ROUNDS, len(rounds))).round().astype(int)
            at = rounds[few].tolist()
            maps = {t: relevance_maps(run, explainer, t)["global"] for t in at}
            inputs = sorted(set.intersection(*map(set, maps.values())))[:_INPUTS]
            drawn = {t: [of[i].reshape(shape) for i in inputs] for t, of in maps.items()}
            png = map_figures.draw_drift(drawn, [f"row {i}" for i in inputs])
            n, shown = own["input"].nunique(), len(rounds)
            some = f"; the first {_INPUTS} of {n} inputs" if n > _INPUTS else ""
            some += f"; {_ROUNDS} of {shown} rounds" if shown > _ROUNDS else ""
            yield _picture(f"Global model, {explainer}, by round{some}", png)


def _defined(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    return rows[~np.isnan(rows).any(axis=1)]


def _picture(words: str, png: bytes) -> Picture:
    return Picture(words, f"data:image/png;base64,{base64.b64encode(png).decode()}")
