"""Detectors of drift: who is found, when and why, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrix import TASKS
from scipy.stats import ks_2samp

from experiments import KINDS, READER, Say, by_day, examples, ran, refusal
from fedsim import Drifts, Run, drifts
from fedsim.analysis.drifts import LEVEL, Adwin
from fedsim.support.rng import keyed_rng

TABLE = {"name": "synthetic", "samples": 1500, "test_samples": 100, "shape": [6], "classes": 3}
FRIEDMAN = {"name": "friedman", "samples": 1500, "test_samples": 50}
QUICK = {"rounds": 6, "batch_size": 16, "optimizer": {"lr": 0.05}}
SIX = {"kind": "iid", "clients": 6}
ADDED: dict[str, Any] = {"clients": 0.34, "round": 4, "features": ["x1"]}


def drifting(of: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"name": "drift", "of": of, **ADDED, **fields}


def done(**sections: Any) -> Run:
    return ran(**{"partition": SIX, "train": QUICK, **sections})


@pytest.fixture(scope="module")
def shifted() -> Run:
    return done(data=drifting(TABLE, kind="shift", strength=2))


@pytest.fixture(scope="module")
def watched(shifted: Run) -> Drifts:
    return drifts(shifted, "gradient_x_input", progress=False)


def slow_adwin(values: list[float], delta: float) -> list[int]:
    """Where the mean has risen: the paper's pseudo-code, item by item, cut by cut."""
    window, alarms = np.zeros(0), set()
    for at, value in enumerate(values):
        window, cutting = np.append(window, value), True
        while cutting and (n := len(window)) > 1:
            n0, sums = np.arange(1, n), window.cumsum()
            m = 1 / (1 / n0 + 1 / (n - n0))
            log = math.log(2 * math.log(n) / delta)
            epsilon = np.sqrt(2 / m * window.var() * log) + 2 / (3 * m) * log
            apart = (sums[-1] - sums[:-1]) / (n - n0) - sums[:-1] / n0
            best = (abs(apart) - epsilon).argmax()
            cutting = abs(apart[best]) > epsilon[best]
            if cutting:
                window = window[1:]
                alarms |= {at} if apart[best] > 0 else set()
    return sorted(alarms)


def stream(seed: int, low: float, high: float, n: int = 60) -> list[float]:
    values = np.random.default_rng(seed).beta(2, 2, size=2 * n) * 0.4
    return (values + np.repeat([low, high], n)).tolist()


@examples(20)
@given(st.integers(0, 10**6), st.sampled_from([(0, 0.6), (0.6, 0), (0.1, 0.1), (0, 0.3)]))
def test_adwin_does_what_the_paper_says(seed: int, levels: tuple[float, float]) -> None:
    values, adwin = stream(seed, *levels), Adwin(0.01)
    found = [at for at, value in enumerate(values) if adwin.add(np.array([value]))]
    assert found == slow_adwin(values, 0.01)
    if levels == (0, 0.6):
        assert found
        assert 60 <= found[0] < 84  # of 10,521 streams 99.7 % by 79, all by 80
    else:
        assert not found or levels == (0, 0.3)


def test_adwin_cuts_between_batches() -> None:
    adwin = Adwin(0.01)
    rng = np.random.default_rng(0)
    assert not any(adwin.add((rng.random(50) < 0.2).astype(float)) for _ in range(10))
    assert any(adwin.add((rng.random(50) < 0.7).astype(float)) for _ in range(3))
    assert len(adwin.window) < 10


class TestPlanted:
    def test_who_drifts_is_found_when_and_why(self, watched: Drifts, shifted: Run) -> None:
        truth = shifted.experiment.data.drifting(6, shifted.experiment.seed)
        assert watched.planted == dict.fromkeys(truth, 4)
        for detector in ("ks", "attributed_loss"):
            score = watched.scores.loc[detector]
            assert score["found"] == score["precision"] * 2 == score["recall"] * 2 == 2
            assert score["f1"] == 1
            assert score["named"] == 1
            assert score["delay"] <= 1
        assert f"client {truth[0]} in round 4 (at once): x1" in watched.text()

    def test_chances_by_hand(self, watched: Drifts, shifted: Run) -> None:
        from fedsim.analysis.replay import replay

        again = replay(shifted, 0)
        for t, k in ((3, 0), (5, min(watched.planted))):
            before, now = again.splits.train[k], again.splits.held(t).train[k]
            order = keyed_rng(0, "drifts", t, k).permutation(len(now))
            x = again.dataset.x
            first, second = x[before[order[:100]]], x[now[order[100:200]]]
            p = [ks_2samp(first[:, f], second[:, f]).pvalue for f in range(6)]
            rows = watched.watched
            row = rows[(rows["round"] == t) & (rows["client"] == k) & (rows["detector"] == "ks")]
            assert row["value"].item() == pytest.approx(min(1, min(p) * 6 * 5))
            assert row["alarm"].item() == (min(p) * 6 * 5 < LEVEL)

    def test_the_same_again(self, watched: Drifts, shifted: Run) -> None:
        again = drifts(shifted.path, "gradient_x_input", progress=False)
        pd.testing.assert_frame_equal(again.watched, watched.watched)

    def test_a_shuffled_column_has_the_same_values(self) -> None:
        data = drifting(TABLE, kind="shuffle")
        found = drifts(done(data=data), "gradient_x_input", progress=False)
        assert found.scores.loc["ks", "found"] == 0
        told = found.scores.loc["attributed_loss"]
        assert told["found"] > 0
        assert (told["false_alarms"], told["named"]) == (0, 1)

    def test_what_raises_the_loss_of_numbers(self) -> None:
        data = drifting(FRIEDMAN, kind="shuffle", features=["x4"], round=6)
        train = {"rounds": 9, "batch_size": 8, "optimizer": {"name": "adam", "lr": 0.01}}
        made = done(data=data, train=train)
        found = drifts(made, "gradient_x_input", progress=False)
        assert found.scores.loc["ks", "found"] == 0
        told = found.scores.loc["attributed_loss"]
        assert (told["false_alarms"], told["found"], told["named"]) == (0, 2, 1)
        assert found.scores.loc["adwin", "found"] > 0

    def test_an_alarm_before_the_change_is_false(self, watched: Drifts) -> None:
        rows = watched.watched.copy()
        early = (rows["client"] == min(watched.planted)) & (rows["round"] == 2)
        rows.loc[early & (rows["detector"] == "ks"), "alarm"] = True
        score = Drifts(watched.run, "", rows).scores.loc["ks"]
        assert (score["found"], score["false_alarms"], score["missed"]) == (1, 1, 1)
        assert score["f1"] == 2 / 4

    def test_the_command(self, shifted: Run, tmp_path: Path, say: Say) -> None:
        asked = ("--explainer", "gradient", "--inputs", "30", "--out", "there")
        said = say.printed("drifts", str(shifted.path), *asked)
        assert "clients watched over rounds 2 to 6 by the global model, gradient" in said
        assert (tmp_path / "there" / "drifts-gradient.png").stat().st_size > 1000


def test_without_a_drift_all_alarms_are_false() -> None:
    found = drifts(done(data=TABLE), "gradient", progress=False)
    assert found.planted == {}
    assert found.scores["f1"].isna().all()
    assert "no inputs change in this run: all alarms are false, F1 is undefined" in found.text()
    assert found.scores["false_alarms"].sum() <= 1


def test_clients_are_watched_where_they_train() -> None:
    made = done(data=drifting(TABLE), train={**QUICK, "participation": 0.5})
    found = drifts(made, "gradient", progress=False)
    trained = made.clients[made.clients["steps"].notna() & (made.clients["round"] > 1)]
    both, keys = found.watched[found.watched["detector"] == "ks"], ["round", "client"]
    np.testing.assert_array_equal(both[keys], trained.sort_values(keys)[keys])


DRIFTING = {"data": drifting(TABLE)}
NO_FEATURES = "documents have no features to be compared one by one"
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "documents": (KINDS["documents"], f"ks: {NO_FEATURES}"),
    "images": (
        {"data": {"name": "drift", "of": {"name": "digits"}, "round": 3, "kind": "invert"}},
        "part ",
    ),
    "personal models": ({**DRIFTING, "method": {"name": "local"}}, "by their personal models"),
    "clusters of clients": ({**DRIFTING, "method": {"name": "ifca"}}, "by their personal models"),
    "trees": ({**KINDS["trees"], **DRIFTING, "train": {"rounds": 4}}, "global model, tree_shap"),
    "few examples": (
        {"data": {**TABLE, "samples": 90}, "partition": {"kind": "iid", "clients": 30}},
        "too few examples for any alarm of ks: client 0, client 1",
    ),
}


@pytest.mark.parametrize("kind", by_day(OTHERS, ("documents", "personal models", "trees")))
def test_other_data_and_models(kind: str) -> None:
    sections, told = OTHERS[kind]
    made = done(**{"train": {**QUICK, "rounds": 4}, **sections})
    found = drifts(made, inputs=20, progress=False)
    assert found.detectors == ["adwin", *(["ks", "attributed_loss"] * (kind != "documents"))]
    assert told in found.text()
    (path,) = found.save()
    assert path.parent == found.run.path / "explanations"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "changed from the start": (
        {"data": drifting(TABLE, round=1)},
        "data.round=1: there is no round before with which another is compared",
    ),
    "no clients": (
        {"method": {"name": "centralised"}},
        "method.name=centralised: no client trains a model after the first round, so none is "
        "watched",
    ),
    "tasks": (
        {**TASKS, "model": READER, "train": {"rounds": 2, "optimizer": {"name": "adam"}}},
        "partition.kind=own_tasks: clients learn tasks in turn, so that their data change by "
        "design",
    ),
    "documents": (KINDS["documents"], f"explainer occlusion: {NO_FEATURES}"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_in_one_line(kind: str) -> None:
    sections, line = REFUSED[kind]
    made = done(**{"data": TABLE, "train": {**QUICK, "rounds": 2}, **sections})
    by = "occlusion" if kind == "documents" else None
    assert refusal(lambda: drifts(made, by, progress=False)) == line
