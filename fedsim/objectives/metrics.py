"""Further metrics by name, for the experiment's `evaluate.metrics`.

A metric is a function of all outputs of a network and their targets. It is computed once, from the
outputs of the whole test set, so that the score does not depend on how the set was divided.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedsim.config.registry import import_object, unfit, unknown_name
from fedsim.data import Dataset
from fedsim.data.dataset import frozen
from fedsim.errors import ExperimentError, MethodError, in_own_code
from fedsim.objectives.objective import FurtherMetric, Metric, ScoreFunction

Outputs = NDArray[Any]
Labels = NDArray[np.int64]

ECE_BINS = 15  # Guo et al. 2017
CONFUSION = "confusion"
CLASS_ACCURACY = "class_accuracy"  # and its columns, class_accuracy/<class>

_TOP_K = re.compile(r"top([1-9][0-9]*)_accuracy")


def probabilities(logits: Outputs) -> NDArray[np.float64]:
    """(n, C) softmax of logits (n, C), in double precision."""
    e = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def confusion(outputs: Outputs, targets: Labels) -> NDArray[np.int64]:
    """(C, C) confusion matrix: examples by true class (row) and predicted class (column)."""
    C = outputs.shape[1]
    return np.bincount(targets * C + outputs.argmax(axis=1), minlength=C * C).reshape(C, C)


def macro_f1(outputs: Outputs, targets: Labels) -> float:
    """The mean F1 score over classes that occur or are predicted."""
    counts = confusion(outputs, targets)
    right, occur = np.diag(counts), counts.sum(axis=0) + counts.sum(axis=1)
    return float((2 * right[occur > 0] / occur[occur > 0]).mean())


def class_accuracy(outputs: Outputs, targets: Labels) -> NDArray[np.float64]:
    """(C,) the accuracy of each class (its recall); NaN for classes without examples."""
    counts = confusion(outputs, targets)
    with np.errstate(invalid="ignore"):
        shares: NDArray[np.float64] = np.diag(counts) / counts.sum(axis=1)
    return shares


def balanced_accuracy(outputs: Outputs, targets: Labels) -> float:
    """The mean of the accuracies of the classes that occur."""
    return float(np.nanmean(class_accuracy(outputs, targets)))


def accuracy_by_class(
    classes: Sequence[str], outputs: Outputs, targets: Labels
) -> dict[str, float]:
    found = zip(classes, class_accuracy(outputs, targets).tolist(), strict=True)
    return {name: share for name, share in found if share == share}


def top_k_accuracy(k: int, outputs: Outputs, targets: Labels) -> float:
    """The share of examples whose class is among the k most probable; of ties, the first win."""
    best = np.argsort(-outputs, axis=1, kind="stable")[:, :k]
    return float((best == targets[:, None]).any(axis=1).mean())


def auroc(outputs: Outputs, targets: Labels) -> float:
    """Area under the ROC curve, one-vs-rest, averaged over the classes that occur.

    NaN if all examples are of one class.
    """
    from sklearn.metrics import roc_auc_score  # scikit-learn is slow to import

    p, present = probabilities(outputs), np.unique(targets)
    if len(present) < 2:
        return float("nan")
    return float(np.mean([roc_auc_score(targets == c, p[:, c]) for c in present]))


def ece(outputs: Outputs, targets: Labels) -> float:
    """Expected calibration error: the mean difference of confidence and accuracy over bins.

    Σ_b (n_b/n)·|accuracy of b − mean confidence of b|, over 15 bins of equal width, ]0, 1/15] to
    ]14/15, 1], of the probability of the predicted class.

    Source: Guo, Pleiss, Sun and Weinberger, On Calibration of Modern Neural Networks, ICML 2017,
    Eq. 3.
    """
    p = probabilities(outputs)
    confidence, right = p.max(axis=1), p.argmax(axis=1) == targets
    bins = np.clip(np.ceil(confidence * ECE_BINS).astype(int) - 1, 0, ECE_BINS - 1)
    gaps = np.bincount(bins, weights=right - confidence, minlength=ECE_BINS)
    return float(np.abs(gaps).sum() / len(targets))


def pearson(outputs: Outputs, targets: NDArray[np.float64]) -> float:
    """Pearson correlation of predictions and targets; NaN if either is constant."""
    x, y = outputs.reshape(-1).astype(np.float64), targets.astype(np.float64)
    constant = np.ptp(x) == 0 or np.ptp(y) == 0  # or differing from the mean by rounding
    x, y = x - x.mean(), y - y.mean()
    spread = np.sqrt((x @ x) * (y @ y))
    return float(np.clip(x @ y / spread, -1, 1)) if spread and not constant else float("nan")


def spearman(outputs: Outputs, targets: NDArray[np.float64]) -> float:
    """Spearman rank correlation of predictions and targets, with mean ranks for ties."""
    from scipy.stats import rankdata  # slow to import

    return pearson(rankdata(outputs.reshape(-1)), rankdata(targets))


_OF_CLASSES: dict[str, tuple[str, Literal["max", "min"], ScoreFunction]] = {
    "auroc": ("area under the ROC curve, mean of classes", "max", auroc),
    "balanced_accuracy": ("balanced accuracy", "max", balanced_accuracy),
    "ece": ("expected calibration error", "min", ece),
    "macro_f1": ("macro F1", "max", macro_f1),
}
_OF_NUMBERS: dict[str, tuple[str, Literal["max", "min"], ScoreFunction]] = {
    "pearson": ("correlation (Pearson)", "max", pearson),
    "spearman": ("rank correlation (Spearman)", "max", spearman),
}
# Descriptions for lists.
KNOWN_METRICS: dict[str, str] = {
    **{name: label for name, (label, _, _) in {**_OF_CLASSES, **_OF_NUMBERS}.items()},
    CLASS_ACCURACY: "accuracy of each class, in columns class_accuracy/<class>",
    CONFUSION: "counts of true and predicted classes, in the table confusion",
    "top5_accuracy": "accuracy of the five most probable classes; or of top<k>_accuracy, of k",
}


def check_name(name: str) -> None:
    """Reject a name that is neither a metric nor `package.module:function`."""
    if ":" in name:
        _own_function(name)
    elif name not in KNOWN_METRICS and not _TOP_K.fullmatch(name):
        raise unknown_name("metric", name, KNOWN_METRICS)


def further_metrics(
    names: Sequence[str], data: Dataset, outputs: int
) -> tuple[FurtherMetric, ...]:
    return tuple(_further_metric(name, data, outputs) for name in names)


def _further_metric(name: str, data: Dataset, outputs: int) -> FurtherMetric:
    where, C = f"evaluate.metrics: {name}", len(data.classes)
    if ":" in name:
        function = _own_function(name)
        column = name.partition(":")[2]
        best: Any = getattr(function, "best", "max")
        if best not in ("max", "min"):
            raise ExperimentError(f"{where}.best must be 'max' or 'min', not {best!r}")
        shown = Metric(column, column.replace("_", " "), best)
        return FurtherMetric(column, partial(_own_scores, name, function), shown)
    if name in _OF_NUMBERS:
        if C or data.y.ndim > 1:
            what = f"{C} classes" if C else f"{data.y.shape[1]} targets"
            raise ExperimentError(f"{where} needs a numeric target, and the data has {what}")
        if outputs != 1:
            raise ExperimentError(f"{where} needs one output, and the objective has {outputs}")
        label, best, score = _OF_NUMBERS[name]
        return FurtherMetric(name, score, Metric(name, label, best))
    if not C:
        raise ExperimentError(f"{where} needs classes, and the target here is a number")
    if outputs != C:
        raise ExperimentError(
            f"{where} needs an output for each of the {C} classes, and the objective has {outputs}"
        )
    if name == CONFUSION:
        return FurtherMetric(name, partial(_confusion_rows, data.classes), is_table=True)
    if name == CLASS_ACCURACY:
        return FurtherMetric(name, partial(accuracy_by_class, data.classes))
    if top := _TOP_K.fullmatch(name):
        k = int(top[1])
        if k >= C:
            raise ExperimentError(f"{where} is 1 for any model: the data has {C} classes")
        score = partial(top_k_accuracy, k)
        return FurtherMetric(name, score, Metric(name, f"top-{k} accuracy"))
    label, best, score = _OF_CLASSES[name]
    return FurtherMetric(name, score, Metric(name, label, best))


def _confusion_rows(
    classes: Sequence[str], outputs: Outputs, targets: Labels
) -> list[Mapping[str, Any]]:
    counts = confusion(outputs, targets)
    return [
        {"target": classes[i], "prediction": classes[j], "count": int(counts[i, j])}
        for i, j in np.argwhere(counts).tolist()
    ]


def _own_scores(
    name: str, function: ScoreFunction, outputs: Outputs, targets: NDArray[Any]
) -> float | dict[str, float]:
    """The result of a user's metric function, which gets read-only copies."""
    try:
        found = function(frozen(outputs.copy()), frozen(targets.copy()))
    except Exception as error:
        raise MethodError(f"metric {name}: {in_own_code(error)}") from error
    for score in found.values() if isinstance(found, Mapping) else (found,):
        one = isinstance(score, Tensor) and score.numel() == 1
        if not one and not isinstance(score, int | float | np.number):
            shape = getattr(score, "shape", None)
            what = repr(score) if shape is None else f"an array of shape {tuple(shape)}"
            raise MethodError(
                f"metric {name} must return a number or a dict of numbers, not {what}"
            )
    return found


def _own_function(name: str) -> Callable[..., Any]:
    found = import_object(name, "metric")
    if not callable(found) or isinstance(found, type):
        raise unfit(f"metric '{name}' is not a function of (outputs, targets)")
    return found
