"""Metrics that `evaluate.metrics` names: as scikit-learn has them, the same bits everywhere."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import own_metrics
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from scipy import stats
from sklearn import metrics as theirs

from experiments import KINDS, Finish, Say, small_experiment
from experiments import examples as few
from fedsim import Run, predictions, run
from fedsim.cli import runs
from fedsim.data import Dataset
from fedsim.errors import ExperimentError, MethodError
from fedsim.explain.groups import explained_variance
from fedsim.objectives import Batch, Classification, Rationales, Regression, merged, scores_of
from fedsim.objectives import metrics as ours
from fedsim.objectives.objective import totals_of
from fedsim.simulate import Progress

C = 7
OF_CLASSES = ["macro_f1", "balanced_accuracy", "top3_accuracy", "auroc", "ece", "class_accuracy"]


def examples(seed: int, n: int = 200, present: int = C) -> tuple[NDArray[Any], NDArray[Any]]:
    """Logits that know something of the labels; the last classes may not occur."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, present, size=n)
    outputs = rng.standard_normal((n, C)) + 1.5 * np.eye(C)[targets]
    return outputs.astype(np.float32), targets


def data_of(classes: int) -> Dataset:
    x, y = np.zeros((4, 2), np.float32), np.zeros(4, np.int64 if classes else np.float64)
    return Dataset(x, y, x, y, tuple(f"c{c}" for c in range(classes)))


# Few different values, so that ties, constants and repeated rows are common.
VALUES = st.sampled_from([0.1, 0.3, -0.7, 1 / 3, 1e-9, 1e6, 3e7 + 0.1])
PAIRS = st.integers(2, 9).flatmap(
    lambda n: st.tuples(arrays(float, n, elements=VALUES), arrays(float, n, elements=VALUES))
)
CLASSES = st.integers(1, 9).flatmap(
    lambda n: st.tuples(
        arrays(np.float32, (n, 3), elements=st.floats(-99, 99, width=32)),
        arrays(np.int64, n, elements=st.integers(0, 2)),
    )
)


@pytest.mark.filterwarnings("ignore")  # of classes that are predicted and do not occur
@given(CLASSES)
@few(40)
def test_scores_of_decisions_are_those_of_scikit_learn(pair: Any) -> None:
    outputs, y = pair
    predicted, labels = outputs.argmax(axis=1), range(3)
    assert ours.macro_f1(outputs, y) == pytest.approx(
        theirs.f1_score(y, predicted, average="macro"), abs=1e-12
    )
    assert ours.balanced_accuracy(outputs, y) == pytest.approx(
        theirs.balanced_accuracy_score(y, predicted), abs=1e-12
    )
    recalls = theirs.recall_score(y, predicted, labels=labels, average=None, zero_division=0)
    recalls[np.bincount(y, minlength=3) == 0] = np.nan
    np.testing.assert_allclose(ours.class_accuracy(outputs, y), recalls, atol=1e-12)
    matrix = theirs.confusion_matrix(y, predicted, labels=labels)
    np.testing.assert_array_equal(ours.confusion(outputs, y), matrix)
    assert 0 <= ours.ece(outputs, y) <= 1
    assert 0 <= ours.auroc(outputs, y) <= 1 or len(np.unique(y)) == 1


@pytest.mark.parametrize("present", [C, 4, 2])
def test_scores_of_probabilities(present: int) -> None:
    outputs, y = examples(present, present=present)
    p = torch.tensor(outputs).double().softmax(dim=1).numpy()
    for k in (1, 3):
        expected = theirs.top_k_accuracy_score(y, outputs, k=k, labels=range(C))
        assert ours.top_k_accuracy(k, outputs, y) == pytest.approx(expected, abs=1e-12)
    one_against_all = np.eye(C)[y][:, :present]
    expected = theirs.roc_auc_score(one_against_all, p[:, :present], average="macro")
    assert ours.auroc(outputs, y) == pytest.approx(expected, abs=1e-12)
    confidence = p.max(axis=1)
    gaps = np.bincount(np.ceil(15 * confidence).astype(int), (p.argmax(axis=1) == y) - confidence)
    assert ours.ece(outputs, y) == pytest.approx(np.abs(gaps).sum() / len(y), abs=1e-12)


def test_ties_and_a_single_class() -> None:
    tied = np.zeros((3, C), np.float32)
    assert ours.top_k_accuracy(2, tied, np.array([0, 1, 2])) == pytest.approx(2 / 3)
    assert np.isnan(ours.auroc(tied, np.array([1, 1, 1])))
    certain = np.float32([[1000, 0], [-1000, 0]])
    assert ours.ece(certain, np.array([0, 0])) == 0.5


def test_correlations_are_those_of_scipy() -> None:
    rng = np.random.default_rng(0)
    y = np.round(rng.standard_normal(50), 1)  # with ties
    outputs = (y[:, None] + rng.standard_normal((50, 1))).astype(np.float32)
    x = outputs[:, 0].astype(np.float64)
    assert ours.pearson(outputs, y) == pytest.approx(stats.pearsonr(x, y)[0], abs=1e-12)
    assert ours.spearman(outputs, y) == pytest.approx(stats.spearmanr(x, y)[0], abs=1e-12)


@given(PAIRS)
def test_scores_of_numbers_stay_in_their_ranges(pair: Any) -> None:
    x, y = pair
    for score in (ours.pearson, ours.spearman):
        constant = np.ptp(x) == 0 or np.ptp(y) == 0
        assert math.isnan(score(x, y)) if constant else -1 <= score(x, y) <= 1
        assert -1 <= score(x, x + 0) <= 1 or np.ptp(x) == 0
    found = Regression().scores_of(x, y)
    explained = explained_variance((x > y)[:, None], y[:, None], np.ones((1, 1)))
    for share in (found["r2"], explained[0]):
        assert math.isnan(share) if np.ptp(y) == 0 else share <= 1
    assert min(found["rmse"], found["mae"]) >= 0


def test_any_cut_gives_the_same_bits() -> None:
    objective = Classification().with_further(ours.further_metrics(OF_CLASSES, data_of(C), C))
    outputs, y = (torch.tensor(a) for a in examples(0))
    found = []
    for size in (200, 37, 1):
        parts = (slice(i, i + size) for i in range(0, 200, size))
        totals = merged(totals_of(objective, outputs[p], Batch(outputs[p], y[p])) for p in parts)
        scores = scores_of(objective, totals)
        found.append({name: scores[name] for name in scores.keys() - {"loss", "accuracy"}})
    assert found[0] == found[1] == found[2]
    assert {"macro_f1", "class_accuracy/c6", "ece"} < found[0].keys()


def test_of_some_classes_the_others_have_no_part() -> None:
    objective = Classification().with_further(
        ours.further_metrics(["ece", "class_accuracy"], data_of(C), C)
    )
    outputs, y = examples(0)
    rows = np.isin(y, [2, 5])
    few, own = torch.tensor(outputs[rows]), torch.tensor(y[rows])
    found = scores_of(objective, totals_of(objective, few, Batch(few, own, labels=(2, 5))))
    assert {name for name in found if "/" in name} == {"class_accuracy/c2", "class_accuracy/c5"}
    assert found["ece"] == ours.ece(outputs[rows][:, [2, 5]], (y[rows] == 5).astype(int))


class TestRuns:
    NAMES = ("macro_f1", "class_accuracy", "top5_accuracy", "auroc", "ece", "confusion")
    COMMON: ClassVar[dict[str, Any]] = {
        "train": {"rounds": 3},
        "partition": {"kind": "iid", "clients": 4, "test_fraction": 0.2},
    }

    @pytest.fixture(scope="class")
    def done(self, tmp_path_factory: pytest.TempPathFactory) -> Run:
        return run(self.experiment(), tmp_path_factory.mktemp("runs"))

    def experiment(self, **sections: Any) -> Any:
        own = ["own_metrics:f2", "own_metrics:extremes", "own_metrics:error_rate"]
        evaluate = {"metrics": [*self.NAMES, *own], "clients": True}
        return small_experiment(**{**self.COMMON, "evaluate": evaluate, **sections})

    def test_rounds_have_what_the_predictions_say(self, done: Run) -> None:
        found, last = predictions(done), done.rounds.iloc[-1]
        y, predicted = found["target"], found["prediction"]
        p = found.filter(like="probability/").to_numpy()
        assert (y == predicted).mean() == last["accuracy"]
        expected = {
            "macro_f1": theirs.f1_score(y, predicted, average="macro"),
            "top5_accuracy": theirs.top_k_accuracy_score(y, p, k=5),
            "auroc": theirs.roc_auc_score(y, p, multi_class="ovr"),
            "class_accuracy/3": theirs.recall_score(y, predicted, labels=["3"], average=None)[0],
            "f2": theirs.fbeta_score(y, predicted, beta=2, average="macro"),
            "error_rate": 1 - last["accuracy"],
        }
        for name, score in expected.items():
            assert last[name] == pytest.approx(score, abs=1e-9), name
        assert last["extremes/least"] < last["extremes/greatest"]

    def test_confusion_is_a_table(self, done: Run) -> None:
        found = predictions(done)
        table = done.confusion
        assert set(table["round"]) == {1, 2, 3}
        assert table["client"].isna().all()
        last = table[table["round"] == 3]
        matrix = last.pivot(index="target", columns="prediction", values="count").fillna(0)
        expected = theirs.confusion_matrix(found["target"], found["prediction"])
        whole = matrix.reindex(index=list("0123456789"), columns=list("0123456789"), fill_value=0)
        np.testing.assert_array_equal(whole, expected)

    def test_clients_are_scored_by_them_too(self, done: Run) -> None:
        last = done.clients[done.clients["round"] == 3]
        assert last["test_macro_f1"].between(0, 1).all()
        assert {"test_ece", "test_f2", "test_class_accuracy/0"} < set(last)

    @pytest.mark.night
    def test_reports_show_them(self, done: Run, say: Say) -> None:
        named = {metric.column: metric for metric in done.metrics}
        assert named["error_rate"].best == named["ece"].best == "min"
        assert done.primary_metric.column == "accuracy"
        say.printed("report", str(done.path), "--out", "page.html")
        page = Path("page.html").read_text()
        for label in ("macro F1", "top-5 accuracy", "expected calibration error", "error rate"):
            assert label in page

    def test_summaries_show_the_last_scores(
        self, done: Run, capsys: pytest.CaptureFixture[str]
    ) -> None:
        runs._summary(done)
        text, last = capsys.readouterr().out, done.rounds.iloc[-1]
        labels = {"f2": "f2", "macro_f1": "macro F1", "extremes/least": "extremes/least"}
        for column, label in labels.items():
            assert re.search(rf"^{label}, last round +{last[column]:.4f} *$", text, re.M), column
            assert f"{label}, last round" in done._repr_html_()
        assert "class_accuracy" not in text
        named = {metric.column: metric for metric in done.metrics}
        assert named["error_rate"].best == named["ece"].best == "min"
        assert done.primary_metric.column == "accuracy"

    def test_nothing_else_changes(self, done: Run, finish: Finish) -> None:
        plain = finish(**self.COMMON, evaluate={"clients": True})
        assert plain.confusion.empty
        kept = [column for column in plain.rounds if column != "seconds"]
        assert done.rounds[kept].equals(plain.rounds[kept])
        for name, weights in plain.weights().items():
            assert torch.equal(done.weights()[name], weights)

    def test_models_of_clients_have_tables_of_their_own(self, tmp_path: Path) -> None:
        done = run(self.experiment(method={"name": "local"}, train={"rounds": 1}), tmp_path)
        counts = done.confusion.groupby("client")["count"].sum()
        assert counts.to_dict() == dict.fromkeys(range(4), 360)
        own = predictions(done, client=2)
        right = int((own["target"] == own["prediction"]).sum())
        table = done.confusion[done.confusion["client"] == 2]
        assert table.loc[table["target"] == table["prediction"], "count"].sum() == right


def test_rules_are_scored_by_them(finish: Finish) -> None:
    evaluate = {"metrics": ["pearson", "spearman"]}
    done = finish(**KINDS["rules"], train={"rounds": 1}, evaluate=evaluate)
    found = predictions(done)
    x, y = found["prediction"], found["target"]
    assert done.rounds["pearson"].iloc[0] == pytest.approx(stats.pearsonr(x, y)[0])
    assert done.rounds["spearman"].iloc[0] == pytest.approx(stats.spearmanr(x, y)[0])


def test_documents_are_scored_by_the_words_chosen() -> None:
    outputs = (*(torch.full((2, 3), float(k)) for k in range(3)), torch.ones(2, 4))
    assert torch.equal(Rationales().predictions(outputs), torch.ones(2, 3))


@pytest.mark.parametrize("name", [*ours.KNOWN_METRICS, "top3_accuracy"])
def test_metrics_need_outputs_of_their_kind(name: str) -> None:
    """Own objectives may have others: the only one of three outputs has no class, nor a number."""
    of_classes = name not in ("pearson", "spearman")
    with pytest.raises(ExperimentError) as refusal:
        ours.further_metrics([name], data_of(10 if of_classes else 0), 3)
    what = "an output for each of the 10 classes" if of_classes else "one output"
    expected = f"evaluate.metrics: {name} needs {what}, and the objective has 3"
    assert str(refusal.value) == expected


def test_a_function_that_fails_is_named(finish: Finish) -> None:
    metrics = {"fails": r"IndexError: .* \(own_metrics.py, line \d+\)"}
    must = "must return a number or a dict of numbers, not"
    metrics |= {"word": f"{must} 'good'", "vector": rf"{must} an array of shape \(\d+,\)"}
    for name, message in metrics.items():
        with pytest.raises(MethodError, match=rf"^metric own_metrics:{name}:? {message}$"):
            finish(evaluate={"metrics": [f"own_metrics:{name}"]})


def test_a_score_that_is_nan_is_told_once(tmp_path: Path) -> None:
    lines: list[Progress] = []
    evaluate = {"metrics": ["own_metrics:undefined"]}
    experiment = small_experiment(train={"rounds": 2}, evaluate=evaluate)
    run(experiment, tmp_path, progress=lines.append)
    told = [line for line in lines if isinstance(line, str) and "NaN" in line]
    assert told == ["warning: undefined is NaN"]


def test_regressions_know_nothing_of_them_unless_asked() -> None:
    y = np.array([1.0, 2.0, 4.0])
    assert "pearson" not in Regression().scores_of(y, y)
    asked = Regression().with_further(ours.further_metrics(["pearson"], data_of(0), 1))
    assert asked.scores_of(y, y)["pearson"] == pytest.approx(1)


@pytest.mark.parametrize("name", own_metrics.RESERVED)
def test_names_of_columns_are_reserved(finish: Finish, name: str) -> None:
    told = rf"^evaluate.metrics: own_metrics:{name}: the column name '{name}' is reserved; rename"
    with pytest.raises(ExperimentError, match=told):
        finish(evaluate={"metrics": [f"own_metrics:{name}"]})
