"""Confusion matrix and class accuracies of the global model of a run."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedsim.objectives.metrics import CLASS_ACCURACY
from fedsim.results.run import Run


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
