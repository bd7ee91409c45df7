"""Confusion matrices and class accuracies of a report."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd

from fedsim.objectives.metrics import CLASS_ACCURACY
from fedsim.results.figures import charts
from fedsim.results.figures.look import Drawing
from fedsim.results.figures.plots import last_confusion
from fedsim.results.report.comparison import ComparedCell, ReportData
from fedsim.results.report.curves import Plot
from fedsim.results.report.page import distinct
from fedsim.results.run import Run

_MATRICES = 12  # that are drawn
_CLASSES = 30  # whose accuracies are drawn


def figures(compared: ReportData) -> list[Plot]:
    return [*_confusion(compared), *_accuracy(compared)]


def _confusion(compared: ReportData) -> list[Plot]:
    by_cell = [(cell, confusion_of(cell)) for cell in compared.cells]
    found = [(cell, matrix) for cell, matrix in by_cell if len(matrix)]
    if not found:
        return []
    heading = "Confusion matrix"
    if len(found) > _MATRICES:
        heading += f" (the first {_MATRICES} of {len(found)} settings)"
    panels = []
    for cell, matrix in found[:_MATRICES]:
        names = matrix.columns.tolist()
        draw = partial(charts.draw_confusion, matrix=matrix.to_numpy(), classes=names)
        words = f"Confusion matrix of {cell.label}: {_in_words(matrix)}."
        panels.append((cell.label, Drawing(words, charts.confusion_height(names), draw)))
    if len(panels) == 1:  # which has no caption of its own
        label, drawing = panels[0]
        heading = f"{heading}: {label}" if len(compared.cells) > 1 else heading
        panels = [("", drawing)]
    return [Plot(heading, panels)]


def confusion_of(cell: ComparedCell) -> pd.DataFrame:
    """(C, C) examples by true and predicted class, of all seeds together."""
    matrices = [m for m in (last_confusion(run) for _, _, run in cell.runs) if len(m)]
    classes = distinct(name for matrix in matrices for name in matrix)
    total = pd.DataFrame(0, index=classes, columns=classes)
    for matrix in matrices:
        total += matrix.reindex(index=classes, columns=classes, fill_value=0)
    return total


def _in_words(matrix: pd.DataFrame) -> str:
    counts = matrix.to_numpy()
    right, wrong = int(np.trace(counts)), counts - np.diag(np.diag(counts))
    words = f"{right} of {counts.sum()} test examples are right"
    if not wrong.any():
        return words
    target, prediction = np.unravel_index(wrong.argmax(), wrong.shape)
    often = f"{matrix.index[target]} is taken for {matrix.columns[prediction]}"
    return f"{words}; most often {often}, {wrong.max()} times"


def _accuracy(compared: ReportData) -> list[Plot]:
    """A panel for each that the cells are drawn in: the mean over seeds, cells side by side."""
    by_panel: dict[str, dict[str, tuple[int | None, pd.Series[float]]]] = {}
    for cell in compared.cells:
        means = accuracy_of(cell)
        if len(means) and cell.style is not None:
            by_panel.setdefault(cell.panel, {})[cell.line] = (cell.style, means)
    heading = "Accuracy of each class"
    panels = []
    for panel, cells in by_panel.items():
        table = pd.DataFrame({line: means for line, (_, means) in cells.items()})
        table = table.reindex(
            distinct(name for _, means in cells.values() for name in means.index)
        )
        if len(table) > _CLASSES:
            heading = f"Accuracy of each class (the {_CLASSES} lowest)"
            table = table.loc[table.mean(axis=1).nsmallest(_CLASSES).index]
        words = [
            f"{line}: " + ", ".join(f"{name} {share:.3f}" for name, share in of_line.items())
            for line, of_line in table.items()
        ]
        draw = partial(
            charts.draw_bars,
            names=charts.short_names([str(name) for name in table.index]),
            series={line: (style, table[line].to_numpy()) for line, (style, _) in cells.items()},
            xlabel="accuracy",
        )
        height = charts.bars_height(len(table), len(cells))
        panels.append((panel, Drawing(f"{heading}. {'; '.join(words)}.", height, draw)))
    return [Plot(heading, panels)] if panels else []


def accuracy_of(cell: ComparedCell) -> pd.Series[float]:
    found = [a for a in (last_class_accuracy(run) for _, _, run in cell.runs) if len(a)]
    means = pd.DataFrame(dict(enumerate(found))).mean(axis=1)
    return means.reindex(distinct(name for one in found for name in one.index))


def last_class_accuracy(run: Run) -> pd.Series[float]:
    """The accuracy of each class on the central test set, in the last round that has it.

    It is that of the metric `class_accuracy`, or else follows from the confusion matrix. Classes
    without test examples have none.
    """
    columns = [c for c in run.rounds if str(c).startswith(f"{CLASS_ACCURACY}/")]
    if len(scored := run.rounds[columns].dropna(how="all")):
        last = scored.iloc[-1].dropna().astype(float)
        return last.rename(lambda column: column.partition("/")[2])
    matrix = last_confusion(run)
    sizes = matrix.sum(axis=1)
    right = pd.Series(np.diag(matrix), matrix.index, dtype=float)
    return (right / sizes)[sizes > 0]
