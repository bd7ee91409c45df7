"""The statistics of the experiments: what decides claims, and how methods are tuned."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t as student
from snippets import ROOT

from fedsim import Experiment
from fedsim.config.file import RawConfig


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "experiments")


def imported(name: str) -> Any:
    return importlib.import_module(name)


def pair(mean: float, sem: float) -> Any:
    return imported("tables").Difference(mean, sem, 4, 5)


def verdicts(claims: list[Any], sizes: Any = None, room: bool = True) -> list[str]:
    """What becomes of the claims of a paper, each with means and standard errors by test."""
    script, found = imported("claims"), {}
    for k, tests in enumerate(claims):
        differences = {name: pair(*each) for name, each in tests.items()}
        found[f"Z{k}"] = script.Evidence(differences, "", sizes or 0.0)
    corrected = script.corrected(found).values()
    return [script.verdict(tests.values(), room=room) for tests in corrected]


class TestVerdict:
    ABOVE, BELOW, OPEN = (0.05, 0.005), (-0.05, 0.005), (0.01, 0.01)

    @pytest.mark.parametrize(
        ("differences", "sizes", "expected"),
        [
            ([ABOVE, ABOVE], {}, "held"),
            ([ABOVE, OPEN], {}, "not decidable"),
            ([ABOVE, BELOW], {}, "not held"),
            ([OPEN], {"0": 0.03}, "not decidable"),
            ([OPEN], {"0": 0.04}, "not held"),  # as large a difference is ruled out
            ([OPEN, OPEN], {"0": 0.04, "1": 0.03}, "not decidable"),  # but not by two tests
            ([ABOVE], {"0": 0.1}, "held"),  # smaller than in the paper, but there
            ([ABOVE, OPEN], {"0": 0.1}, "not decidable"),
            ([ABOVE, OPEN], {"1": 0.06}, "not held"),
        ],
    )
    def test_of_significant_differences(
        self,
        differences: list[tuple[float, float]],
        sizes: dict[str, float],
        expected: str,
    ) -> None:
        tests = {str(k): each for k, each in enumerate(differences)}
        assert verdicts([tests], dict.fromkeys(tests, 0.0) | sizes) == [expected]

    def test_without_room_nothing_is_decided(self) -> None:
        for each in (self.ABOVE, self.BELOW):
            assert verdicts([{"a": each}], room=False) == ["not decidable"]

    def test_more_tests_of_a_paper_need_more(self) -> None:
        first, second = {"a": (0.032, 0.01)}, {"a": (0.031, 0.01)}
        assert verdicts([first]) == ["held"]
        assert verdicts([first, second]) == ["not decidable"] * 2

    def test_a_claim_without_tests_is_held(self) -> None:
        assert verdicts([{}, {"a": (1, 0.1)}]) == ["held"] * 2


@pytest.mark.night  # all results are read for it
def test_only_the_published_rule_base_is_decided_by_a_test_of_fedsims_own() -> None:
    assert [e.id for e in imported("claims").CLAIMS if not e.gather().tests] == ["F1"]


def test_a_difference_is_printed_without_a_negative_zero() -> None:
    assert str(imported("tables").Difference(-0.0001, 0.0001, 4, 5)) == "+0.000 (+0.000 to +0.000)"
    assert str(imported("tables").Difference(-0.1, 0.01, 4, 5)) == "−0.100 (−0.128 to −0.072)"


def test_a_section_has_what_was_tested_and_what_was_not() -> None:
    claims = imported("claims")
    found = claims.Evidence({"a": pair(0.01, 0.01)}, "Five seeds.", 0.04, {"b": pair(0.1, 0.01)})
    each = claims.Claim("Z1", "xpfl", "Fig. 1", "is better", lambda: found)
    tests = claims.corrected({"Z1": found})["Z1"]
    text = claims.section(each, found, tests, claims.verdict(tests.values(), found.room))
    first, second = text.splitlines()[-2:]
    assert "is better. **Not held.** Five seeds." in text
    assert first == "| a | +0.010 (−0.018 to +0.038) | 0.3739 | 0.040 | 0.0399 | 0.038 |"
    assert second == "| b | +0.100 (+0.072 to +0.128) |  |  |  |  |"
    assert claims.outcome(tests.values()) == "0 of 1 above 0, 1 too small"


def test_the_detectable_difference_is_detected_four_times_in_five() -> None:
    tables = imported("tables")
    rng = np.random.default_rng(0)
    first = rng.normal(size=7)
    detectable = tables.paired(pd.Series(first), pd.Series(np.zeros(7))).detectable
    sem = first.std(ddof=1) / np.sqrt(7)
    drawn = rng.normal(detectable / sem / np.sqrt(7), 1, size=(40_000, 7))
    ratios = drawn.mean(1) / (drawn.std(1, ddof=1) / np.sqrt(7))
    assert (ratios > student.ppf(0.975, 6)).mean() == pytest.approx(0.8, abs=0.01)


def test_the_best_trial_is_that_with_the_best_mean_over_all_seeds() -> None:
    table = pd.DataFrame(
        [
            ("A", "A 0", 100, 0.9),  # diverges with another seed
            ("A", "A 0", 101, 0.0),
            ("A", "A 0", 102, 0.9),
            ("A", "A 1", 100, 0.7),
            ("A", "A 1", 101, 0.7),
            ("A", "A 1", 102, 0.7),
            ("A", "A 2", 100, 0.8),  # was not run again
        ],
        columns=["method", "trial", "seed", "score"],
    )
    assert set(imported("tuning").best(table, "score")["trial"]) == {"A 1"}


def test_a_trial_is_scored_by_its_last_evaluated_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = imported("tuning")
    cells = [
        {"cell": {"trial": "A 0"}, "seed": 100, "status": "finished", "folder": "a"},
        {"cell": {"trial": "A 1"}, "seed": 100, "status": "failed", "error": "training diverged"},
    ]
    grid = SimpleNamespace(path=Path("grid"), manifest={"cells": cells})
    rounds = pd.DataFrame({"accuracy": [0.9, None, 0.5, None, 0.7]})
    runs = {Path("grid/a"): SimpleNamespace(rounds=rounds, result_hash="f00")}
    monkeypatch.setattr(tuning.fedsim, "load", runs.__getitem__)
    found = tuning.scores(grid, "accuracy", last=2)
    assert found["accuracy"].tolist() == [pytest.approx(0.6), 0.0]
    assert found["result_hash"].isna().tolist() == [False, True]


def test_an_axis_of_several_keys_changes_them_together() -> None:
    axes = {"lr": (1, 2), "a,b": ((3, 4), (5, 6))}
    found = list(imported("tuning").trials(({"name": "x"}, axes)))
    assert found == [
        {"name": "x", "lr": lr, "a": a, "b": b} for lr in (1, 2) for a, b in ((3, 4), (5, 6))
    ]


OF_LABELS: dict[str, str | None] = {"XPFL": "XPFL 0.2"} | {  # XPFL 0.1 is explained as well
    name: f"{name} 0.1" for name in ("FedAvg", "FedAvgM", "FedProx", "SCAFFOLD", "SemiFL")
}

OF_SELECTION = dict.fromkeys(("FedWeIT", "FedWeIT + dense", "DLS")) | {"FedSeIT": "all"}


@pytest.mark.parametrize(
    ("folder", "file", "trials", "names"),
    [
        ("fedxds", "heterogeneity", 8, {}),
        ("fedrnl", "methods", 8, {}),
        ("xpfl", "labels", 12, OF_LABELS),
        ("xpfl", "skew", 12, {"SemiFL": None}),
        ("fedseit", "transfer", 10, {}),
        ("fedseit", "selection", 10, OF_SELECTION),
    ],
)
def test_the_best_trials_are_in_the_grid(
    folder: str, file: str, trials: int, names: dict[str, str | None]
) -> None:
    """Under the names of their methods, or these; a method without a name is not in the grid."""
    table = pd.read_csv(ROOT / "experiments" / folder / "results" / "tuning.csv")
    metric = table.columns[-2]
    path = ROOT / "experiments" / folder / "small" / f"{file}.yaml"
    grid, sheet = RawConfig.read(path).take("grid")
    best = imported("tuning").best(table, metric).drop_duplicates("trial")
    assert set(best["method"]) == set(table["method"])
    assert (table.groupby("method")["trial"].nunique() == trials).all()
    for method, changes in zip(best["method"], best["changes"], strict=True):
        if (name := names.get(method, method)) is None:
            continue
        cell, trial = (
            sheet.changed(changes, "a test").build(Experiment)
            for changes in (grid["axes"]["method"][name], json.loads(changes))
        )
        found = (cell.method, cell.model, cell.train)
        assert found == (trial.method, trial.model, trial.train), method


@pytest.mark.parametrize(
    ("method", "psi_on", "weigh"),
    [("as described", "weights", "loss"), ("the code's weight and ψ", "tensors", "code")],
)
def test_xpfl_is_explained_with_the_best_trial_of_either_kind(
    method: str, psi_on: str, weigh: str
) -> None:
    folder = ROOT / "experiments" / "xpfl"
    table = pd.read_csv(folder / "results" / "tuning.csv")
    grid, sheet = RawConfig.read(folder / "small" / "fusion.yaml").take("grid")
    trials = table[(table["method"] == "XPFL") & (table["seed"] == 100)].sort_values(
        table.columns[-2], ascending=False
    )
    tried = (sheet.changed(json.loads(c), "a test").build(Experiment) for c in trials["changes"])
    best = next(t for t in tried if (t.method.psi_on, t.method.weigh) == (psi_on, weigh))
    settings = grid["axes"]["method"][method]["method"]
    unexplained = {"method": {k: v for k, v in settings.items() if k != "xfed"}}
    cell = sheet.changed(unexplained, "a test").build(Experiment)
    assert cell.method == best.method
    assert cell.train.optimizer == best.train.optimizer
