"""A validation set: held out of the training examples, scored beside the test set, chosen by."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch

from experiments import (
    KINDS,
    NUMBERS,
    WHOLE,
    Finish,
    Say,
    federation,
    interrupted,
    small_experiment,
)
from fedsim import Run, replay, resume, run
from fedsim.config.file import RawConfig
from fedsim.experiment import EarlyStopping
from fedsim.federation.context import TEST_SHARD
from fedsim.launch.prepare import prepare
from fedsim.objectives import Metric
from fedsim.results.records import new_ledger, stopped_early, watch_score
from fedsim.results.summary import best_round, of_run
from fedsim.sweep.search import SearchSweep

SHARE = 0.2
EVALUATE = {"validation": SHARE, "metrics": ["macro_f1"]}


class TestHeldOut:
    def test_drawn_by_the_seed(self) -> None:
        first, again, other = (
            prepare(small_experiment(evaluate=EVALUATE, seed=seed))[1].held_out
            for seed in (0, 0, 1)
        )
        np.testing.assert_array_equal(first, again)
        assert not np.array_equal(first, other)

    @pytest.mark.parametrize(
        "partition",
        [
            {},
            {"kind": "iid", "clients": 5, "train_fraction": 0.5},
            {"kind": "pathological", "clients": 5, "server_fraction": 0.2},
            {"kind": "quantity", "clients": 5, "test_fraction": 0.2, "labelled_fraction": 0.5},
        ],
    )
    def test_by_class_and_no_part_has_any_of_it(self, partition: dict[str, Any]) -> None:
        data, splits, _ = prepare(small_experiment(evaluate=EVALUATE, partition=partition))
        held_out = splits.held_out
        assert len(held_out) == round(SHARE * len(data.y))
        assert (np.abs(np.bincount(data.y[held_out]) - SHARE * np.bincount(data.y)) < 1).all()
        parts = [part.values for part in (splits.train, splits.unlabelled, splits.test)]
        dealt = np.concatenate([*parts, splits.server])
        assert len(dealt) > 100
        assert not np.isin(held_out, dealt).any()
        if not partition:
            assert sorted([*dealt, *held_out]) == list(range(len(data.y)))

    def test_clients_that_drift_have_none_of_it(self) -> None:
        drifting = {"name": "drift", "of": {"name": "digits"}, "round": 2}
        data, splits, _ = prepare(small_experiment(data=drifting, evaluate=EVALUATE))
        later = splits.held(2)
        assert not np.isin(later.held_out, later.train.values).any()
        assert later.held_out.max() < data.num_loaded


class TestRuns:
    @pytest.fixture(scope="class")
    def done(self, tmp_path_factory: pytest.TempPathFactory) -> Run:
        data = {"name": "synthetic", "samples": 4000, "shape": [6]}
        made = small_experiment(
            evaluate=EVALUATE, data=data, train={"rounds": 4}, checkpoint={"every": 2}
        )
        return run(made, tmp_path_factory.mktemp("runs"))

    def test_scores_are_those_of_the_examples_held_out(self, done: Run) -> None:
        again = replay(done)
        held_out = again.fed.server.validation_data
        assert len(held_out) == 800 > TEST_SHARD
        again.fed.server.model.load(again.fed.server.tensor(again.state.weights))
        with torch.no_grad():
            logits = again.fed.server.model.module.eval()(held_out.x)
        last = done.rounds.iloc[-1]
        right = (logits.argmax(dim=1) == held_out.y).double().mean()
        assert last["validation_accuracy"] == float(right)
        loss = torch.nn.functional.cross_entropy(logits.double(), held_out.y)
        assert last["validation_loss"] == pytest.approx(float(loss), abs=1e-5)
        assert {"validation_macro_f1", "macro_f1"} < set(done.rounds)

    def test_the_best_round_is_chosen_by_it(self, done: Run) -> None:
        rounds = done.rounds
        best = rounds["validation_accuracy"].idxmax()
        found = of_run(rounds, done.primary_metric)
        assert found["best"] == rounds["accuracy"][best]

    def test_rounds_can_be_carried_out_once_more(self, done: Run) -> None:
        assert replay(done, after=3).after == 3  # compared with the record

    def test_reports_show_it(self, done: Run, say: Say) -> None:
        code, _, err = say("report", str(done.path), "--out", "page.html")
        assert code == 0, err
        page = Path("page.html").read_text()
        assert "best by validation" in page
        assert "Validation accuracy" in page

    def test_the_summary_of_a_run_says_so(self, say: Say) -> None:
        made = small_experiment(data=WHOLE, evaluate=EVALUATE, train={"rounds": 3})
        Path("small.yaml").write_text(made.to_yaml())
        code, text, _ = say("run", "small.yaml")
        assert code == 0
        assert re.search(r"accuracy, best by validation +0\.\d{4} \(round \d\)", text)
        code, text, _ = say("data", "small.yaml")
        assert "287 are held out for validation" in text

    @pytest.mark.parametrize("method", ["local", "fedbabu"])
    def test_other_methods(self, finish: Finish, method: str) -> None:
        done = finish(method={"name": method}, evaluate=EVALUATE, train={"rounds": 1})
        assert done.rounds["validation_accuracy"].between(0, 1).all()

    @pytest.mark.parametrize("method", ["openfl_xai", "local_rules"])
    def test_rules(self, finish: Finish, method: str) -> None:
        done = finish(
            **{**KINDS["rules"], "method": {"name": method}},
            train={"rounds": 1},
            evaluate={"validation": 0.1},
        )
        row = done.rounds.iloc[0]
        assert row["validation_r2"] < 1
        assert row["validation_r2"] != row["r2"]


class TestEarlyStopping:
    SECTIONS: ClassVar[dict[str, Any]] = {
        "evaluate": {"validation": 0.1, "early_stopping": {"patience": 2, "metric": "loss"}},
        "train": {"rounds": 12, "optimizer": {"lr": 1.0}},
    }

    @staticmethod
    def expected(losses: pd.Series[float], patience: int) -> int:
        """The round in which a loop over all of a run's losses would stop."""
        best, since = math.inf, 0
        for t, loss in enumerate(losses, 1):
            if loss < best:
                best, since = loss, t
            if t - since == patience:
                return t
        return len(losses)

    def test_ends_when_the_score_no_longer_improves(self, finish: Finish, tmp_path: Path) -> None:
        whole = {**self.SECTIONS, "evaluate": {"validation": 0.1}}
        losses = finish(**whole).rounds["validation_loss"]
        last = self.expected(losses, 2)
        assert 3 < last < 12
        said: list[str] = []
        made = small_experiment(**self.SECTIONS)
        done = run(made, tmp_path / "early", lambda e: said.append(e) if isinstance(e, str) else 0)
        assert done.last_round == len(done.rounds) == last
        assert done.status == "finished"
        pd.testing.assert_series_equal(done.rounds["validation_loss"], losses[:last])
        since = last - 2
        told = f"stopped early after round {last}: no better loss on the validation set since "
        assert f"{told}round {since}" in said
        assert replay(done).after == last
        folder = interrupted(made, tmp_path / "cut", last - 1)
        assert resume(folder).result_hash == done.result_hash

    def test_of_what_counts_as_better(self) -> None:
        stopping = EarlyStopping(patience=2, min_delta=0.1)
        shown, ledger = (Metric("accuracy", "accuracy", primary=True),), new_ledger()
        for t, score in enumerate((0.5, 0.55, 0.65, math.nan, 0.7), 1):
            watch_score(stopping, shown, {"round": t, "validation_accuracy": score}, ledger)
        assert ledger["best"] == {"score": 0.65, "round": 3, "last": 5}
        assert stopped_early(stopping, shown, ledger) is not None


def test_without_it_nothing_is_held_out() -> None:
    made = small_experiment()
    _, splits, _ = prepare(made)
    assert len(splits.held_out) == 0
    fed = federation(made)
    assert not any(name.startswith("validation") for name in fed.evaluate(fed.initial_weights()))
    assert len(fed.server.validation_data) == 0


@pytest.mark.parametrize(
    ("column", "best", "expected"),
    [("validation_s", "max", 2), ("validation_s", "min", 0), ("other", "max", 3)],
)
def test_the_best_round(column: str, best: Any, expected: int) -> None:
    scores = pd.DataFrame({"s": [0.1, np.nan, 0.2, 0.4], column: [0.2, np.nan, 0.9, 0.3]})
    assert best_round(scores, Metric("s", "s", best)) == (0 if best == "min" else expected)
    assert best_round(scores, Metric("t", "t")) is None


class TestSearches:
    def sweep(self, **sections: Any) -> SearchSweep:
        content = small_experiment(**sections).model_dump(mode="json")
        content["search"] = {"space": {"train.optimizer.lr": [0.1, 0.2]}}
        return SearchSweep(RawConfig(content))

    @pytest.mark.parametrize(
        ("sections", "objectives"),
        [
            ({}, {"accuracy": "max"}),
            ({"evaluate": EVALUATE}, {"validation_accuracy": "max"}),
            ({**NUMBERS, "evaluate": EVALUATE}, {"validation_r2": "max"}),
        ],
    )
    def test_look_at_it_by_themselves(self, sections: Any, objectives: Any) -> None:
        sweep = self.sweep(**sections)
        assert sweep.settings.objectives == sweep.facts()["objectives"] == objectives
        assert list(sweep.plan(Path("none")).objectives) == list(objectives)
