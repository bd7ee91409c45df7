"""Confusion matrices and the accuracy of each class, as reports show them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.metrics import confusion_matrix, recall_score

from experiments import change_manifest, ran
from fedsim import Run, predictions
from fedsim.errors import BadInput
from fedsim.results.figures.charts import draw_confusion
from fedsim.results.figures.look import PAGE, PAPER, Drawing
from fedsim.results.figures.plots import last_confusion
from fedsim.results.report.classes import figures, last_class_accuracy
from fedsim.results.report.comparison import ReportData
from fedsim.results.report.curves import Plot

DIGITS = [str(k) for k in range(10)]
METRICS = ("confusion", "class_accuracy")


def finished(method: str, seed: int, metrics: Sequence[str] = METRICS) -> Run:
    return ran(
        seed=seed,
        method={"name": method},
        partition={"kind": "iid", "clients": 4},
        train={"rounds": 2},
        evaluate={"metrics": metrics},
    )


@pytest.fixture(scope="module")
def runs() -> dict[tuple[str, int], Run]:
    """Runs of two methods with a global model, and of one without."""
    names = [("fedavg", 0), ("fedavg", 1), ("feddyn", 0), ("feddyn", 1), ("local", 0)]
    return {(method, seed): finished(method, seed) for method, seed in names}


def shown(runs: Mapping[tuple[str, int], Run], *methods: str) -> list[Plot]:
    return figures(ReportData([done.path for (m, _), done in runs.items() if m in methods]))


def counts_of(axes: Axes, C: int) -> NDArray[np.int64]:
    """The numbers in a matrix as drawn."""
    counts = np.zeros((C, C), dtype=np.int64)
    for text in axes.texts:
        column, row = text.get_position()
        counts[int(row), int(column)] = int(text.get_text())
    return counts


def bars_of(drawing: Drawing) -> dict[str, list[float]]:
    """The lengths of bars as drawn, by the class of their line."""
    (axes,) = drawing.figure(PAGE).axes
    found: dict[str, list[float]] = {}
    for bar in axes.patches:
        found.setdefault(str(bar.get_gid()), []).append(bar.get_width())  # type: ignore[attr-defined]
    return found


def test_a_matrix_is_the_sum_over_seeds(runs: dict[tuple[str, int], Run]) -> None:
    matrices, _ = shown(runs, "fedavg", "feddyn")
    assert [panel for panel, _ in matrices.panels] == ["fedavg", "feddyn"]
    for method, drawing in matrices.panels:
        found = [predictions(runs[method, seed]) for seed in (0, 1)]
        expected = sum(
            confusion_matrix(f["target"], f["prediction"], labels=DIGITS) for f in found
        )
        (axes,) = drawing.figure(PAGE).axes
        np.testing.assert_array_equal(counts_of(axes, 10), expected)
        assert [label.get_text() for label in axes.get_yticklabels()] == DIGITS
        wrong = expected - np.diag(np.diag(expected))
        words = f"{np.trace(expected)} of {expected.sum()} test examples are right; most often"
        assert f"Confusion matrix of {method}: {words}" in drawing.title
        assert drawing.title.endswith(f", {wrong.max()} times.")


def test_bars_are_means_over_seeds(runs: dict[tuple[str, int], Run]) -> None:
    _, accuracies = shown(runs, "fedavg", "feddyn")
    ((_, drawing),) = accuracies.panels
    bars = bars_of(drawing)
    for method, line in (("fedavg", "line-1"), ("feddyn", "line-2")):
        found = [predictions(runs[method, seed]) for seed in (0, 1)]
        shares = [recall_score(f["target"], f["prediction"], average=None) for f in found]
        assert bars[line] == pytest.approx(np.mean(shares, axis=0).tolist())
    assert drawing.svg().count('class="line-1"') == 2 * 10  # so that the legend hides them
    with_legend = drawing.figure(PAPER).legends[0].get_texts()
    assert [text.get_text() for text in with_legend] == ["fedavg", "feddyn"]


def test_each_follows_from_what_is_on_record(runs: dict[tuple[str, int], Run]) -> None:
    whole = runs["fedavg", 0]
    from_matrix = finished("fedavg", 0, ["confusion"])
    pd.testing.assert_series_equal(
        last_class_accuracy(from_matrix), last_class_accuracy(whole), check_names=False
    )
    alone = finished("fedavg", 0, ["class_accuracy"])
    (accuracies,) = figures(ReportData([alone.path]))
    assert accuracies.heading == "Accuracy of each class"
    assert bars_of(accuracies.panels[0][1])["line-1"] == last_class_accuracy(whole).tolist()
    neither = finished("fedavg", 0, [])
    assert figures(ReportData([neither.path])) == []


def test_without_a_global_model_there_is_no_matrix(runs: dict[tuple[str, int], Run]) -> None:
    assert last_confusion(runs["local", 0]).empty
    matrices, accuracies = shown(runs, "fedavg", "local")
    assert matrices.heading == "Confusion matrix: fedavg"
    assert [name for name, _ in matrices.files()] == ["confusion-matrix"]
    assert bars_of(accuracies.panels[0][1]).keys() == {"line-1", "line-2"}


def test_shades_are_shares_of_the_row() -> None:
    axes = Figure().subplots()
    draw_confusion(axes, PAGE, np.array([[150, 49, 1], [0, 0, 0], [0, 0, 7]]), list("abc"))
    squares = {
        tuple(corner): patch.get_alpha()
        for patch in axes.patches
        for corner in patch.get_path().vertices[::5].tolist()  # type: ignore[attr-defined]
    }
    assert squares == pytest.approx(
        {(-0.5, -0.5): 0.65 * 0.75, (0.5, -0.5): 0.65 * 0.25, (1.5, 1.5): 0.65}
    )
    assert counts_of(axes, 3).tolist() == [[150, 49, 1], [0, 0, 0], [0, 0, 7]]
    assert axes.get_xlabel() == "predicted class"


def test_of_many_classes_there_are_no_numbers() -> None:
    for C, numbers, names in ((12, 12, 12), (13, 0, 13), (31, 0, 0)):
        axes = Figure().subplots()
        draw_confusion(axes, PAGE, np.eye(C, dtype=np.int64), [f"class {k}" for k in range(C)])
        assert len(axes.texts) == numbers
        assert sum("class" in label.get_text() for label in axes.get_yticklabels()) == names


def test_of_many_classes_the_lowest_accuracies_are_shown(
    runs: dict[tuple[str, int], Run], tmp_path: Path
) -> None:
    path = shutil.copytree(runs["fedavg", 0].path, tmp_path / "run")
    change_manifest(path, "files")
    shares = {f"class_accuracy/{k}": 1 - k / 40 for k in range(40)}
    rounds = runs["fedavg", 0].rounds.drop(columns=[f"class_accuracy/{k}" for k in DIGITS])
    rounds.assign(**shares).to_parquet(path / "rounds.parquet")
    _, accuracies = figures(ReportData([path]))
    assert accuracies.heading == "Accuracy of each class (the 30 lowest)"
    lowest = sorted(shares.values())[:30]
    assert bars_of(accuracies.panels[0][1])["line-1"] == pytest.approx(lowest)


def test_a_run_plots_its_matrix(runs: dict[tuple[str, int], Run]) -> None:
    axes = runs["fedavg", 0].plot("confusion")
    found = predictions(runs["fedavg", 0])
    expected = confusion_matrix(found["target"], found["prediction"], labels=DIGITS)
    np.testing.assert_array_equal(counts_of(axes, 10), expected)
    with pytest.raises(BadInput, match=r"no confusion matrix of the global model is on record; it "
                       r"takes evaluate\.metrics=\[confusion\]$"):  # fmt: skip
        runs["local", 0].plot("confusion")
