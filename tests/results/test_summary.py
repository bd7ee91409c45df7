"""What papers report of many runs, against the same figures worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from experiments import refusal
from fedsim import Grid, Run
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
nan = math.nan
ERROR = Metric("hamming", "Hamming loss", best="min", primary=True)

Runs = list[tuple[dict[str, Any], int, Run]]


def rounds(scores: Sequence[float], column: str = "accuracy") -> pd.DataFrame:
    t = np.arange(1, len(scores) + 1)
    return pd.DataFrame(
        {"round": t, column: scores, "total_bytes_up": 10 * t, "total_bytes_down": 10 * t}
    )


def a_run(
    rounds: pd.DataFrame,
    metric: Metric,
    others: Sequence[Metric] = (),
    explained: Sequence[Metric] = (),
) -> Run:
    """What is summarised of a run."""
    facts = {"primary_metric": metric, "metrics": (metric, *others), "explained": (*explained,)}
    return cast(Run, SimpleNamespace(rounds=rounds, status="finished", **facts))


def table(scores: Mapping[str, Sequence[float]], metric: Metric = ACCURACY) -> Runs:
    """Runs of methods, of one round and as many seeds as there are scores."""
    return [
        ({"method": method}, seed, a_run(rounds([score], metric.column), metric))
        for method, of_seeds in scores.items()
        for seed, score in enumerate(of_seeds)
    ]


@pytest.mark.parametrize(
    ("metric", "scores", "target", "expected"),
    [
        (
            ACCURACY,
            [0.1, 0.9, 0.2, 0.3, 0.4, 0.5, 0.6],
            0.5,
            {
                **{"last": 0.6, "best": 0.9, "last5": 0.4, "total_bytes": 140},
                **{"rounds_to_target": 2, "bytes_to_target": 40},  # up and down
            },
        ),
        # Rounds that were not evaluated are passed over.
        (
            ACCURACY,
            [nan, 0.2, nan, 0.4, nan],
            0.3,
            {"last": 0.4, "last5": 0.3, "total_bytes": 100, "bytes_to_target": 80},
        ),
        (ACCURACY, [0.1, 0.2], 0.5, {"bytes_to_target": nan, "rounds_to_target": nan}),
        (
            R2,  # of constant targets
            [nan, nan],
            0.5,
            {"last": nan, "best": nan, "last5": nan, "bytes_to_target": nan, "total_bytes": 40},
        ),
        (ERROR, [0.9, 0.2, nan, 0.3], 0.2, {"last": 0.3, "best": 0.2, "bytes_to_target": 40}),
    ],
)
def test_figures_of_a_run(
    metric: Metric, scores: list[float], target: float, expected: dict[str, float]
) -> None:
    found = of_run(rounds(scores, metric.column), metric, target)
    assert {key: found[key] for key in expected} == pytest.approx(expected, nan_ok=True)
    assert all(f"`{figure}`" in Grid.cells.__doc__ for figure in found)


def test_a_run_without_its_metric_has_bytes_only() -> None:
    found = of_run(rounds([0.1, 0.2], "loss"), ACCURACY, target=0.1)
    assert found.pop("total_bytes") == 40
    assert all(map(math.isnan, found.values()))


@given(
    st.lists(st.floats(-1e9, 1), min_size=1, max_size=30),
    st.floats(-1, 1),
    st.sampled_from([ACCURACY, R2, ERROR]),
)
def test_a_target_is_reached_exactly_if_the_best_round_reaches_it(
    scores: list[float], target: float, metric: Metric
) -> None:
    found = of_run(rounds(scores, metric.column), metric, target)
    best = max(scores) if metric.best == "max" else min(scores)
    reached = best >= target if metric.best == "max" else best <= target
    assert found["best"] == best
    assert found["last"] == scores[-1]
    assert found["last5"] == pytest.approx(np.mean(scores[-5:]))
    assert reached == (not math.isnan(found["bytes_to_target"]))


def test_digits() -> None:
    shown = {0.98765: "0.9877", -12.5: "-12.5000", -1.5e12: "-1.5e+12", nan: "nan"}
    assert [*map(digits, shown)] == [*shown.values()]


class TestCells:
    SCORES: ClassVar[dict[tuple[str, float], list[list[float]]]] = {
        ("fedavg", 0.1): [[0.50, 0.60], [0.54, 0.66], [0.52, 0.64]],
        ("fedprox", 0.1): [[0.70, 0.80], [0.78, 0.80], [0.60, 0.82]],
        ("fedavg", 1.0): [[0.9, 0.9]],
        ("fedprox", 1.0): [[0.8, 0.9]],
    }
    RUNS: ClassVar[Runs] = [
        ({"method": method, "alpha": alpha}, seed, a_run(rounds(scores), ACCURACY))
        for (method, alpha), of_seeds in SCORES.items()
        for seed, scores in enumerate(of_seeds)
    ]

    def test_means_and_deviations_over_seeds(self) -> None:
        found = summarise_cells(self.RUNS, ["method", "alpha"], target=0.65)
        assert list(found["method"]) == ["fedavg", "fedprox", "fedavg", "fedprox"]
        first = found.iloc[0]
        assert first["seeds"] == 3
        assert first["last_mean"] == pytest.approx((0.60 + 0.66 + 0.64) / 3)
        assert first["last_std"] == pytest.approx(np.std([0.60, 0.66, 0.64], ddof=1))
        assert first["last5_mean"] == pytest.approx((0.55 + 0.60 + 0.58) / 3)
        assert (first["reached"], first["bytes_to_target_mean"]) == (1, 40)
        assert math.isnan(found.iloc[2]["last_std"])  # of a single seed
        assert summarise_cells([], ["method"]).empty

    @pytest.mark.parametrize(("baseline", "other"), [("fedavg", "fedprox"), ("fedprox", "fedavg")])
    def test_a_cell_is_tested_against_the_baseline_that_is_otherwise_equal(
        self, baseline: str, other: str
    ) -> None:
        found = summarise_cells(self.RUNS, ["method", "alpha"], {"method": baseline})
        found = found.set_index(["method", "alpha"])
        assert math.isnan(found["p_value"][baseline, 0.1])
        assert math.isnan(found["p_value"][other, 1.0])  # one seed has no variance
        assert found["pairs"][[(baseline, 0.1), (other, 0.1), (other, 1.0)]].tolist() == [0, 3, 1]
        ours, theirs = (np.array(self.SCORES[m, 0.1])[:, 1] for m in (other, baseline))
        expected = ttest_rel(ours, theirs)
        of_cell = found.loc[other, 0.1]
        assert of_cell["p_value"] == pytest.approx(expected.pvalue)
        interval = of_cell["difference_low"], of_cell["difference_high"]
        assert interval == pytest.approx(tuple(expected.confidence_interval(0.95)))
        assert (of_cell["difference_high"] < 0) == (baseline == "fedprox")  # which is better

    @pytest.mark.parametrize(("evaluated", "by"), [(4, "last"), (5, "last5")])
    def test_a_mean_of_the_last_five_takes_five_rounds(self, evaluated: int, by: str) -> None:
        short = a_run(rounds([nan, *(0.1 * t for t in range(evaluated))]), ACCURACY)
        long = a_run(rounds([0.5] * 9), ACCURACY)
        assert compared_by([long, short]) == by
        table: Runs = [({"method": "a"}, 0, long), ({"method": "b"}, 0, short)]
        found = summarise_cells(table, ["method"], {"method": "a"}).iloc[1]
        assert found["difference_mean"] == pytest.approx(found[f"{by}_mean"] - 0.5)

        # Those that did not finish do not decide.
        failed = cast(Run, SimpleNamespace(**{**vars(short), "status": "failed"}))
        assert compared_by([failed, long]) == "last5"

    def test_runs_of_both_kinds_keep_their_own(self) -> None:
        both: Runs = [
            ({"data": "a"}, 0, a_run(rounds([0.5, 0.7]), ACCURACY)),
            ({"data": "b"}, 0, a_run(rounds([-2, 0.1], "r2"), R2)),
        ]
        assert in_words([ACCURACY, R2]) == "accuracy or R²"
        assert list(summarise_cells(both, ["data"])["last_mean"]) == [0.7, 0.1]
        tested = summarise_cells(both * 2, ["data"], {"data": "a"})
        assert tested["p_value"].isna().all()  # which of them is better nobody can say

    @pytest.mark.parametrize("metric", [ACCURACY, ERROR])
    def test_differences_are_paired_by_seed_and_p_is_corrected_for_all(
        self, metric: Metric
    ) -> None:
        scores = {
            "fedavg": [0.50, 0.60, 0.70],
            "fedprox": [0.52, 0.63, 0.71, 0.1],  # of the last seed there is no pair
            "good": [0.90, 0.91, 0.92],
            "better": [0.93, 0.94, 0.95],
            "shifted": [0.75, 0.85, 0.95],
        }
        runs = table(scores, metric)
        found = summarise_cells(runs, ["method"], {"method": "fedavg"}).set_index("method")
        assert found["difference_mean"]["fedprox"] == pytest.approx(0.02)
        assert found["difference_std"]["fedprox"] == pytest.approx(0.01)
        assert found.loc["fedavg", ["difference_mean", "p_value", "p_holm"]].isna().all()
        p, corrected = found["p_value"], found["p_holm"]
        assert corrected.tolist() == pytest.approx(holm(p), nan_ok=True)
        assert (corrected.dropna() >= p.dropna()).all()
        # Equal differences have no interval.
        shifted = found.loc["shifted"]
        assert (shifted["difference_mean"], shifted["difference_std"]) == pytest.approx((0.25, 0))
        tested = ["difference_low", "difference_high", "p_value", "p_holm"]
        assert shifted[tested].isna().all()


def test_labels() -> None:
    assert cell_label({"method": "FedAvg", "partition.alpha": 1}) == "FedAvg, partition.alpha=1"
    assert cell_label({"method.name": "fedavg"}) == "fedavg"
    assert cell_label({}) == ""


@pytest.mark.parametrize(
    ("means", "stds", "texts"),
    [
        ([0.50611], [0.06360], ["0.506 ± 0.064"]),
        ([0.63667], [0.11407], ["0.64 ± 0.11"]),
        ([0.78148], [0.00274], ["0.7815 ± 0.0027"]),
        ([0.81234], [0.00001], ["0.8123 ± <0.0001"]),
        ([0.5], [0.0], ["0.5000 ± <0.0001"]),
        ([12345.6], [321.0], ["12346 ± 321"]),
        ([-2e38], [1e38], ["-2e+38 ± 1e+38"]),
        ([0.5], [nan], ["0.5000"]),
        # A column has the same decimals.
        ([0.4664, 0.9], [0.1307, nan], ["0.47 ± 0.13", "0.90"]),
        ([0.4664, 0.3867], [0.1307, 0.0941], ["0.466 ± 0.131", "0.387 ± 0.094"]),
    ],
)
def test_means_are_rounded_by_their_deviations(
    means: list[float], stds: list[float], texts: list[str]
) -> None:
    assert mean_std(means, stds) == texts


def test_so_have_numbers_of_a_table() -> None:
    columns: list[tuple[list[Any], list[str]]] = [
        ([0.225, 0.22222, 0.9], ["0.2250", "0.2222", "0.9000"]),
        ([0.5, 0.25, nan], ["0.50", "0.25", "nan"]),
        ([1995.678, 2.0], ["1995.7", "2.0"]),
        ([0.0005123, 0.1], ["0.0005123", "0.1"]),  # too far apart
        ([0.0, 0.0], ["0", "0"]),
        ([123456, 7], ["123456", "7"]),
        (["relu", True], ["relu", "True"]),
        ([], []),
    ]
    assert [aligned(values) for values, _ in columns] == [texts for _, texts in columns]


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
        **{name: name for name in ("own", "several/a", "several/b", "accuracy/night")},
        "client_accuracy": "accuracy, mean over clients",
        "worst_client_accuracy": "accuracy of the worst client",
        "gradient/client_deletion": "deletion, models of clients, by gradient",
    }
    OTHERS = ("validation_accuracy", "class_accuracy/3", "train_loss")  # not in every table

    def run(self, scores: list[float]) -> Run:
        made = rounds(scores)
        for k, column in enumerate((*self.COLUMNS, *self.OTHERS)):
            made[column] = made["accuracy"] * (k + 2)
        made.loc[0, "gradient/client_deletion"] = nan  # explained every other round
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

    def test_those_that_there_are_not(self) -> None:
        for names, message in (
            (["owm"], "metric: no score 'owm' is on record; did you mean 'own'?"),
            (["several"], "metric: no score 'several' is on record; did you mean 'several/"),
            (["train_loss"], "metric: no score 'train_loss' is on record; known: "),
            (["own", "own"], "metric: 'own' is named twice"),
        ):
            told = refusal(lambda names=names: chosen([self.run([0.1])], names))
            assert told.startswith(message)

    def test_a_run_that_lacks_one_has_none(self) -> None:
        lacks = a_run(rounds([0.4]), ACCURACY)
        runs: Runs = [({"method": "a"}, 0, self.run([0.5])), ({"method": "b"}, 0, lacks)]
        found = of_score(summarise_cells(runs, ["method"]), ["method"], "own")
        assert found["last_mean"].isna().tolist() == [False, True]
