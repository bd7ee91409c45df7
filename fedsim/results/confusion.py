"""What the global model of a run takes each class for, as a matrix and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from numpy.typing import NDArray

from fedsim.objectives.metrics import CLASS_ACCURACY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from fedsim.results.run import Run

COUNTED = 12  # classes up to which counts are written into the matrix
_NAMED, _NAME = 30, 14  # labels that are named, and the letters of their names
_LEVELS = 20  # of shades
_DARKEST = 0.65  # where counts are to be read on it
_LETTER = 0.6  # width of a letter, in its height


def last_confusion(run: Run) -> pd.DataFrame:
    """The confusion matrix of the global model in the last round that has one.

    Returns:
        (C, C) examples by true class (row) and predicted class (column), in the order of the
        classes; empty if there is no such matrix on record.
    """
    rows = run.confusion
    if len(rows):
        rows = rows[rows["client"].isna()]
    if rows.empty:
        return pd.DataFrame()
    rows = rows[rows["round"] == rows["round"].max()]
    found = {*rows["target"], *rows["prediction"]}
    known = list(run.labels["label"].cat.categories) if len(run.labels) else []
    classes = known if found <= set(known) else sorted(found)
    matrix = rows.pivot_table("count", "target", "prediction", aggfunc="sum")
    whole: pd.DataFrame = matrix.reindex(index=classes, columns=classes).fillna(0).astype(np.int64)
    return whole


def last_class_accuracy(run: Run) -> pd.Series[float]:
    """The accuracy of each class on the central test set, in the last round that has it.

    It is that of the metric `class_accuracy`, or else follows from the confusion matrix. Classes
    without test examples have none.
    """
    columns = [c for c in run.rounds if str(c).startswith(f"{CLASS_ACCURACY}/")]
    scored = run.rounds[columns].dropna(how="all")
    if len(scored):
        last = scored.iloc[-1].dropna().astype(float)
        return last.rename(lambda column: column.partition("/")[2])
    matrix = last_confusion(run)
    sizes = matrix.sum(axis=1)
    right = pd.Series(np.diag(matrix), matrix.index, dtype=float)
    return (right / sizes)[sizes > 0]


def plot_confusion(
    axes: Axes, matrix: NDArray[np.int64], classes: Sequence[str], colour: str, size: float
) -> None:
    """Draw a confusion matrix: the darker a square, the larger its share of its row.

    Up to `COUNTED` classes the counts are written into it.

    Args:
        matrix: (C, C) examples by true class (row) and predicted class (column).
        colour: of the squares.
        size: of the type, in points.
    """
    C = len(classes)
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    darkest = _DARKEST if C <= COUNTED else 1
    shade(axes, np.round(shares * _LEVELS).astype(int), _LEVELS, colour, darkest)
    square = min(axes.bbox.width, axes.bbox.height) * 72 / axes.figure.dpi / C
    if C <= COUNTED:
        fitting = square / (_LETTER * len(str(matrix.max())) + 0.6)
        for row, column in np.argwhere(matrix).tolist():
            axes.text(column, row, str(matrix[row, column]), ha="center", va="center",
                      fontsize=min(size, fitting))  # fmt: skip
    if C <= _NAMED:
        names, size = short_names(classes), min(size, 0.85 * square)
        upright = max(map(len, names)) * _LETTER * size > square
        axes.set_xticks(range(C), labels=names, parse_math=False, fontsize=size,
                        rotation=90 if upright else 0)  # fmt: skip
        axes.set_yticks(range(C), labels=names, parse_math=False, fontsize=size)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    axes.tick_params(length=0)
    axes.set_xlim(-0.5, C - 0.5)
    axes.set_ylim(C - 0.5, -0.5)
    axes.set_aspect("equal")
    axes.spines[:].set_visible(True)
    axes.grid(False)


def shade(
    axes: Axes, levels: NDArray[np.int64], most: int, colour: str, darkest: float = 1
) -> None:
    """Fill squares, the more the darker.

    Args:
        levels: (rows, columns) shades from 0, which is left blank, to `most`.
        darkest: opacity of `most`.
    """
    corners = np.array(((0, 0), (1, 0), (1, 1), (0, 1), (0, 0))) - 0.5
    for level in range(1, most + 1):
        held = np.argwhere(levels == level)[:, ::-1]
        if len(held):
            vertices = (held[:, None, :] + corners).reshape(-1, 2)
            codes = [Path.MOVETO, *(Path.LINETO,) * 3, Path.CLOSEPOLY] * len(held)
            axes.add_patch(PathPatch(Path(vertices, codes), color=colour,
                                     alpha=darkest * level / most, linewidth=0))  # fmt: skip


def short_names(names: Sequence[str]) -> list[str]:
    """Names that fit beside a figure."""
    return [name if len(name) <= _NAME else f"{name[: _NAME - 1]}…" for name in names]
