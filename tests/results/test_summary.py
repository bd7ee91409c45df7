"""What papers report of many runs, against the same figures worked out by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from fedsim import Grid, Run
from fedsim.errors import BadInput
from fedsim.objectives import Metric
from fedsim.results.significance import holm, stars
from fedsim.results.summary import (
    aligned,
    cell_label,
    chosen,
    compared_by,
    digits,
    further,
    further_scores,
    in_words,
    mean_std,
    of_run,
    of_score,
    on_record,
    pairing,
    score_facts,
    score_rows,
    summarise_cells,
)

ACCURACY = Metric("accuracy", "accuracy", primary=True)
R2 = Metric("r2", "R²", primary=True)
ERROR = Metric("hamming", "Hamming loss", best="min", primary=True)

Runs = list[tuple[dict[str, Any], int, Run]]


def rounds(accuracy: list[float], bytes_each: int = 10) -> pd.DataFrame:
    sent = [bytes_each * t for t in range(1, len(accuracy) + 1)]
    return pd.DataFrame(
        {
            "round": range(1, len(accuracy) + 1),
            "accuracy": accuracy,
            "total_bytes_up": sent,
            "total_bytes_down": sent,
        }
    )


def regression(r2: list[float]) -> pd.DataFrame:
    """The same of a regression."""
    return rounds(r2).rename(columns={"accuracy": "r2"}).assign(loss=2.0, rmse=1.4, mae=1.0)


def a_run(
    rounds: pd.DataFrame,
    metric: Metric,
    others: Sequence[Metric] = (),
    explained: Sequence[Metric] = (),
) -> Run:
    """What is summarised of a run."""
    facts = {"primary_metric": metric, "metrics": (metric, *others), "explained": (*explained,)}
    return cast(Run, SimpleNamespace(rounds=rounds, status="finished", **facts))


def table(runs: dict[tuple[str, float, int], list[float]]) -> Runs:
    return [
        ({"method": method, "alpha": alpha}, seed, a_run(rounds(accuracy), ACCURACY))
        for (method, alpha, seed), accuracy in runs.items()
    ]


class TestOneRun:
    def test_its_figures(self) -> None:
        found = of_run(rounds([0.1, 0.9, 0.2, 0.3, 0.4, 0.5, 0.6]), ACCURACY, target=0.5)
        assert found == {
            "last": 0.6,
            "best": 0.9,
            "last5": pytest.approx(0.4),
            "total_bytes": 140,
            "rounds_to_target": 2,
            "bytes_to_target": 40,  # twenty up and twenty down after the second round
        }

    def test_a_grid_documents_them(self) -> None:
        for figure in of_run(rounds([0.1]), ACCURACY, target=0.5):
            assert f"`{figure}`" in Grid.cells.__doc__

    def test_rounds_that_were_not_evaluated_are_passed_over(self) -> None:
        nan = math.nan
        found = of_run(rounds([nan, 0.2, nan, 0.4, nan]), ACCURACY, target=0.3)
        assert found["last"] == 0.4
        assert found["last5"] == pytest.approx(0.3)
        assert (found["total_bytes"], found["bytes_to_target"]) == (100, 80)

    def test_a_target_that_is_not_reached_costs_no_bytes(self) -> None:
        assert math.isnan(of_run(rounds([0.1, 0.2]), ACCURACY, target=0.5)["bytes_to_target"])

    def test_a_run_without_accuracy_has_bytes_only(self) -> None:
        found = of_run(rounds([0.1, 0.2]).drop(columns="accuracy"), ACCURACY, target=0.1)
        assert found["total_bytes"] == 40
        assert all(math.isnan(found[k]) for k in ("last", "best", "last5", "bytes_to_target"))


class TestRegression:
    """R² stands where accuracy does, and may be far below 0, or NaN."""

    def test_figures_of_a_run(self) -> None:
        found = of_run(regression([-40.0, math.nan, -1.0, 0.2, 0.6]), R2, target=0.5)
        assert (found["last"], found["best"]) == (0.6, 0.6)
        assert found["last5"] == pytest.approx(-40.2 / 4)
        assert found["bytes_to_target"] == 100

    def test_constant_targets_leave_no_score(self) -> None:
        found = of_run(regression([math.nan, math.nan]), R2, target=0.5)
        assert all(math.isnan(found[k]) for k in ("last", "best", "last5", "bytes_to_target"))

    def test_cells_are_compared_by_it(self) -> None:
        runs = {"fedavg": ([-9.0, -7.0], [-8.0, -6.0]), "fedprox": ([0.1, 0.3], [0.1, 0.5])}
        table: Runs = [
            ({"method": method}, seed, a_run(regression(r2), R2))
            for method, seeds in runs.items()
            for seed, r2 in enumerate(seeds)
        ]
        found = summarise_cells(table, ["method"], {"method": "fedavg"}, target=0.4)
        assert list(found["last_mean"]) == [-6.5, 0.4]
        assert list(found["reached"]) == [0, 1]
        assert found["p_value"][1] < 0.1  # two seeds are a single degree of freedom

    def test_runs_of_both_kinds_keep_their_own(self) -> None:
        both: Runs = [
            ({"data": "a"}, 0, a_run(rounds([0.5, 0.7]), ACCURACY)),
            ({"data": "b"}, 0, a_run(regression([-2, 0.1]), R2)),
        ]
        assert in_words([ACCURACY, R2]) == "accuracy or R²"
        assert list(summarise_cells(both, ["data"])["last_mean"]) == [0.7, 0.1]
        tested = summarise_cells(both * 2, ["data"], {"data": "a"})
        assert tested["p_value"].isna().all()  # which of them is better nobody can say

    @given(st.lists(st.floats(-1e9, 1), min_size=1, max_size=30))
    def test_the_best_is_the_highest(self, r2: list[float]) -> None:
        found = of_run(regression(r2), R2, target=0.5)
        assert found["best"] == max(r2)
        assert (found["best"] >= 0.5) == (not math.isnan(found["bytes_to_target"]))


def errors(values: list[float]) -> pd.DataFrame:
    """The same of an objective whose primary metric is the better the lower."""
    return rounds(values).rename(columns={"accuracy": "hamming"})


class TestLessIsBetter:
    def test_figures_of_a_run(self) -> None:
        found = of_run(errors([0.9, 0.2, math.nan, 0.1, 0.3]), ERROR, target=0.2)
        assert (found["last"], found["best"]) == (0.3, 0.1)
        assert found["bytes_to_target"] == 40
        assert math.isnan(of_run(errors([0.9, 0.3]), ERROR, 0.2)["bytes_to_target"])

    def test_lower_than_the_baseline_is_better(self) -> None:
        runs = {"fedavg": (0.5, 0.6, 0.55), "fedprox": (0.1, 0.21, 0.16)}
        table: Runs = [
            ({"method": method}, seed, a_run(errors([value]), ERROR))
            for method, values in runs.items()
            for seed, value in enumerate(values)
        ]
        for method, other in (("fedavg", 1), ("fedprox", 0)):
            found = summarise_cells(table, ["method"], {"method": method}).iloc[other]
            assert found["p_value"] < 0.001
            assert (found["difference_high"] < 0) == (method == "fedavg")

    @given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.floats(0, 1))
    def test_a_target_is_reached_exactly_if_the_best_round_reaches_it(
        self, values: list[float], target: float
    ) -> None:
        found = of_run(errors(values), ERROR, target)
        assert found["best"] == min(values)
        assert (found["best"] <= target) == (not math.isnan(found["bytes_to_target"]))


@pytest.mark.parametrize(
    ("score", "text"),
    [(0.98765, "0.9877"), (-12.5, "-12.5000"), (-1.5e12, "-1.5e+12"), (math.nan, "nan")],
)
def test_digits(score: float, text: str) -> None:
    assert digits(score) == text


class TestCells:
    RUNS: ClassVar[dict[tuple[str, float, int], list[float]]] = {
        ("fedavg", 0.1, 0): [0.50, 0.60],
        ("fedavg", 0.1, 1): [0.54, 0.66],
        ("fedavg", 0.1, 2): [0.52, 0.64],
        ("fedprox", 0.1, 0): [0.70, 0.80],
        ("fedprox", 0.1, 1): [0.78, 0.80],
        ("fedprox", 0.1, 2): [0.60, 0.82],
        ("fedavg", 1.0, 0): [0.9, 0.9],
        ("fedprox", 1.0, 0): [0.8, 0.9],
    }

    def test_means_and_deviations_over_seeds(self) -> None:
        found = summarise_cells(table(self.RUNS), ["method", "alpha"], target=0.65)
        assert list(found["method"]) == ["fedavg", "fedprox", "fedavg", "fedprox"]
        first = found.iloc[0]
        assert first["seeds"] == 3
        assert first["last_mean"] == pytest.approx((0.60 + 0.66 + 0.64) / 3)
        assert first["last_std"] == pytest.approx(np.std([0.60, 0.66, 0.64], ddof=1))
        assert first["last5_mean"] == pytest.approx((0.55 + 0.60 + 0.58) / 3)
        assert (first["reached"], first["bytes_to_target_mean"]) == (1, 40)
        assert math.isnan(found.iloc[2]["last_std"])  # of a single seed

    def test_a_cell_is_tested_against_the_baseline_that_is_otherwise_equal(self) -> None:
        found = summarise_cells(table(self.RUNS), ["method", "alpha"], {"method": "fedavg"})
        found = found.set_index(["method", "alpha"])
        assert math.isnan(found["p_value"]["fedavg", 0.1])
        assert math.isnan(found["p_value"]["fedprox", 1.0])  # one seed has no variance
        assert found["pairs"].tolist() == [0, 3, 0, 1]
        expected = ttest_rel([0.80, 0.80, 0.82], [0.60, 0.66, 0.64])
        of_cell = found.loc["fedprox", 0.1]
        assert of_cell["p_value"] == pytest.approx(expected.pvalue)
        interval = of_cell["difference_low"], of_cell["difference_high"]
        assert interval == pytest.approx(tuple(expected.confidence_interval(0.95)))

    def test_a_cell_that_is_worse_is_told_from_one_that_is_equal(self) -> None:
        found = summarise_cells(table(self.RUNS), ["method", "alpha"], {"method": "fedprox"})
        of_cell = found.set_index(["method", "alpha"]).loc["fedavg", 0.1]
        assert of_cell["p_value"] < 0.05
        assert of_cell["difference_high"] < 0

    @pytest.mark.parametrize(("evaluated", "by"), [(4, "last"), (5, "last5")])
    def test_a_mean_of_the_last_five_takes_five_rounds(self, evaluated: int, by: str) -> None:
        short = a_run(rounds([math.nan, *(0.1 * t for t in range(evaluated))]), ACCURACY)
        long = a_run(rounds([0.5] * 9), ACCURACY)
        assert compared_by([long, short]) == by
        table: Runs = [({"method": "a"}, 0, long), ({"method": "b"}, 0, short)]
        found = summarise_cells(table, ["method"], {"method": "a"}).iloc[1]
        assert found["difference_mean"] == pytest.approx(found[f"{by}_mean"] - 0.5)

    def test_unfinished_runs_do_not_decide_what_is_compared(self) -> None:
        short = SimpleNamespace(**{**vars(a_run(rounds([0.1]), ACCURACY)), "status": "failed"})
        assert compared_by([cast(Run, short), a_run(rounds([0.5] * 5), ACCURACY)]) == "last5"
        assert compared_by([cast(Run, short)]) == "last"

    def test_nothing_finished_is_an_empty_table(self) -> None:
        assert summarise_cells([], ["method"]).empty


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.floats(0.01, 1))
def test_a_target_is_reached_exactly_if_the_best_round_reaches_it(
    accuracy: list[float], target: float
) -> None:
    found = of_run(rounds(accuracy), ACCURACY, target)
    assert (found["best"] >= target) == (not math.isnan(found["bytes_to_target"]))
    assert min(accuracy) - 1e-9 <= found["last5"] <= found["best"] + 1e-9
    assert found["last"] <= found["best"]


@pytest.mark.parametrize(
    ("cell", "label"),
    [
        ({"method": "FedAvg", "partition.alpha": 0.1}, "FedAvg, partition.alpha=0.1"),
        ({"method.name": "fedavg"}, "fedavg"),
        ({}, ""),
    ],
)
def test_labels(cell: dict[str, Any], label: str) -> None:
    assert cell_label(cell) == label


@pytest.mark.parametrize(
    ("mean", "std", "text"),
    [
        (0.50611, 0.06360, "0.506 ± 0.064"),
        (0.63667, 0.11407, "0.64 ± 0.11"),
        (0.78148, 0.00274, "0.7815 ± 0.0027"),
        (0.81234, 0.00001, "0.8123 ± <0.0001"),
        (0.5, 0.0, "0.5000 ± <0.0001"),
        (12345.6, 321.0, "12346 ± 321"),
        (-2e38, 1e38, "-2e+38 ± 1e+38"),
        (0.5, math.nan, "0.5000"),
    ],
)
def test_means_are_rounded_by_their_deviations(mean: float, std: float, text: str) -> None:
    assert mean_std([mean], [std]) == [text]


def test_a_column_has_the_same_decimals() -> None:
    stds = [0.1307, 0.0941, math.nan, 0.2]
    texts = ["0.466 ± 0.131", "0.387 ± 0.094", "0.900", "0.500 ± 0.200"]
    assert mean_std([0.46643, 0.38667, 0.9, 0.5], stds) == texts


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.225, 0.22222, 0.9], ["0.2250", "0.2222", "0.9000"]),
        ([0.5, 0.25, math.nan], ["0.50", "0.25", "nan"]),
        ([1995.678, 2.0], ["1995.7", "2.0"]),
        ([0.0005123, 0.1], ["0.0005123", "0.1"]),  # too far apart
        ([0.0, 0.0], ["0", "0"]),
        ([123456, 7], ["123456", "7"]),
        (["relu", True], ["relu", "True"]),
        ([], []),
    ],
)
def test_so_have_numbers_of_a_table(values: list[Any], texts: list[str]) -> None:
    assert aligned(values) == texts


def test_differences_are_paired_by_seed_and_p_is_corrected_for_all() -> None:
    scores = {
        "fedavg": {0: 0.50, 1: 0.60, 2: 0.70},
        "fedprox": {0: 0.52, 1: 0.63, 2: 0.71, 3: 0.1},  # of seed 3 there is no pair
        "good": {0: 0.90, 1: 0.91, 2: 0.92},
        "better": {0: 0.93, 1: 0.94, 2: 0.95},
    }
    runs: Runs = [
        ({"method": method}, seed, a_run(rounds([score]), ACCURACY))
        for method, seeds in scores.items()
        for seed, score in seeds.items()
    ]
    found = summarise_cells(runs, ["method"], {"method": "fedavg"}).set_index("method")
    assert found["difference_mean"]["fedprox"] == pytest.approx(0.02)
    assert found["difference_std"]["fedprox"] == pytest.approx(0.01)
    assert found.loc["fedavg", ["difference_mean", "p_value", "p_holm"]].isna().all()
    p, corrected = found["p_value"], found["p_holm"]
    assert corrected.tolist() == pytest.approx(holm(p), nan_ok=True)
    assert (corrected.dropna() >= p.dropna()).all()


def test_equal_differences_have_no_interval() -> None:
    runs: Runs = [
        ({"method": method}, seed, a_run(rounds([first + seed / 100]), ACCURACY))
        for method, first in {"fedavg": 0.90, "ours": 0.91}.items()
        for seed in range(3)
    ]
    ours = summarise_cells(runs, ["method"], {"method": "fedavg"}).set_index("method").loc["ours"]
    assert ours["pairs"] == 3
    assert (ours["difference_mean"], ours["difference_std"]) == pytest.approx((0.01, 0))
    tested = ["difference_low", "difference_high", "p_value", "p_holm"]
    assert ours[tested].isna().all()


@pytest.mark.parametrize("count", [3, 6])
@pytest.mark.parametrize("shared", [True, False])
def test_stars_stand_beside_the_figure_that_was_tested(count: int, shared: bool) -> None:
    f1 = Metric("f1", "macro F1")
    runs: Runs = []
    for method, score in {"fedavg": 0.5, "ours": 0.8}.items():
        for seed in range(3):
            table = rounds([0.1 * k + score + seed**2 / 1000 * score for k in range(count)])
            table["f1"] = [*[np.nan] * (count - 3), *table["accuracy"][-3:]]
            apart = 0 if shared or method == "ours" else 10
            runs.append(({"method": method}, seed + apart, a_run(table, ACCURACY, [f1])))
    found = summarise_cells(runs, ["method"], {"method": "fedavg"})
    by = "last" if count == 3 else "last5"
    further = further_scores(found, [run for _, _, run in runs])
    assert further == {"f1/last": "macro F1, last round"}
    for figure in (by, *further):
        p = "p_holm" if figure == by else "f1/p_holm"
        texts = mean_std(found[f"{figure}_mean"], found[f"{figure}_std"])
        marked = [["fedavg", texts[0]], ["ours", f"{texts[1]}{stars(found[p][1])}"]]
        assert score_rows(found, ["method"], [figure]) == marked
        assert marked[1][1].endswith("*")
    assert [row[1].count("*") for row in score_rows(found, ["method"], ["best"])] == [0, 0]
    assert pairing(found) == "paired by seed" + " (Welch's where no seed is shared)" * (not shared)


class TestFurtherScores:
    """Whatever stands beside the primary metric: own metrics, slices, clients, explanations."""

    OWN = Metric("own", "own", best="min")
    SEVERAL = Metric("several", "several")
    MAP = Metric("gradient/client_deletion", "deletion, models of clients", best="min")
    COLUMNS: ClassVar[dict[str, str]] = {
        "own": "own",
        "several/a": "several/a",
        "several/b": "several/b",
        "accuracy/night": "accuracy/night",
        "client_accuracy": "accuracy, mean over clients",
        "worst_client_accuracy": "accuracy of the worst client",
        "gradient/client_deletion": "deletion, models of clients, by gradient",
    }
    OTHERS = ("validation_accuracy", "class_accuracy/3", "train_loss")  # not in every table

    def run(self, scores: list[float]) -> Run:
        made = rounds(scores)
        for k, column in enumerate((*self.COLUMNS, *self.OTHERS)):
            made[column] = made["accuracy"] * (k + 2)
        made.loc[0, "gradient/client_deletion"] = math.nan  # explained every other round
        return a_run(made, ACCURACY, [self.OWN, self.SEVERAL], [self.MAP])

    def summary(self, metrics: Sequence[Metric] = ()) -> pd.DataFrame:
        scores = {"fedavg": (0.2, 0.3, 0.1), "own": (0.4, 0.45, 0.37)}
        runs: Runs = [
            ({"method": method}, seed, self.run([score, score / 2]))
            for method, of_seeds in scores.items()
            for seed, score in enumerate(of_seeds)
        ]
        return summarise_cells(runs, ["method"], {"method": "fedavg"}, metrics=metrics)

    def test_all_are_on_record_by_their_names(self) -> None:
        assert {m.column: m.label for m in further(self.run([0.1]))} == self.COLUMNS
        found = on_record(self.run([0.1]))
        assert next(iter(found)) == "accuracy"
        assert set(found) == {"accuracy", *self.COLUMNS, *self.OTHERS[:2]}
        assert found["class_accuracy/3"].label == "class accuracy/3"
        best = {column: metric.best for column, metric in found.items()}
        assert [c for c in best if best[c] == "min"] == ["own", "gradient/client_deletion"]
        assert score_facts(self.run([0.1]))["own, last round"] == "0.2000"

    def test_each_has_all_that_the_primary_has(self) -> None:
        found = self.summary()
        plain = of_score(found, ["method"], "own")
        for column in self.COLUMNS:
            of = of_score(found, ["method"], column)
            assert list(of) == list(plain)
            assert {"last_mean", "last5_std", "p_holm", "difference_low", "pairs"} <= set(of)
            assert of["p_value"][1] == pytest.approx(found["p_value"][1])  # a multiple of it
        assert plain["best_mean"][0] == pytest.approx(0.2)  # the lowest
        deletion = of_score(found, ["method"], "gradient/client_deletion")
        assert deletion["last5_mean"][0] == pytest.approx(deletion["last_mean"][0])
        assert not [c for c in found if c.startswith(self.OTHERS)]

    def test_chosen_ones_take_their_place(self) -> None:
        names = ["own", "validation_accuracy", "class_accuracy/3"]
        metrics = chosen([self.run([0.1])], names)
        found = self.summary(metrics)
        everything = self.summary()
        for column in ("last_mean", "last_std", "difference_mean", "p_holm"):
            expected = everything[f"own/{column}"]
            pd.testing.assert_series_equal(found[column], expected, check_names=False)
        further = {c.rpartition("/")[0] for c in found if "/" in c}
        assert further == set(names[1:])

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (["owm"], "metric: no score 'owm' is on record; did you mean 'own'?"),
            (["several"], "metric: no score 'several' is on record; did you mean 'several/"),
            (["train_loss"], "metric: no score 'train_loss' is on record; known: "),
            (["own", "own"], "metric: 'own' is named twice"),
        ],
    )
    def test_those_that_there_are_not(self, names: list[str], message: str) -> None:
        with pytest.raises(BadInput, match=re.escape(message)):
            chosen([self.run([0.1])], names)

    def test_a_run_that_lacks_one_has_none(self) -> None:
        runs: Runs = [
            ({"method": "a"}, 0, self.run([0.5])),
            ({"method": "b"}, 0, a_run(rounds([0.4]), ACCURACY)),
        ]
        found = of_score(summarise_cells(runs, ["method"]), ["method"], "own")
        assert found["last_mean"].isna().tolist() == [False, True]
