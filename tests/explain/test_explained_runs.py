"""Runs whose models are explained as they go on, from start to end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matrix import MODELS

from experiments import KINDS, Finish, ran, refusal
from fedsim import Run
from fedsim.analysis.replay import replay
from fedsim.conditions import explaining
from fedsim.config.file import RawConfig
from fedsim.explain.scores.measure import measure
from fedsim.launch.prepare import prepare
from fedsim.results.records import chained
from fedsim.sweep.search import SearchSweep
from fedsim.sweep.trials import _judged

pytestmark = pytest.mark.filterwarnings("ignore:.*words get random vectors")

Sections = dict[str, Any]
TABLE: Sections = {
    "data": {"name": "synthetic", "shape": [4], "classes": 3, "samples": 80, "test_samples": 20},
    "partition": {"kind": "iid", "clients": 5},
    "model": {"name": "mlp", "hidden": [4]},
    "train": {"rounds": 4, "batch_size": 8, "optimizer": {"lr": 0.1}},
}
IMAGES: Sections = {
    "partition": {"kind": "iid", "clients": 4},
    "model": {"name": "networks:regularised"},
    "train": {"rounds": 2, "batch_size": 64},
}
# Without curves, for which models are asked most often.
SCORES = ["sufficiency", "sparseness", "agreement", "global_agreement", "drift"]
EXPLAIN: Sections = {
    **{"explainers": ["gradient", "occlusion"], "scores": SCORES},
    **{"inputs": 3, "every": 2},
}
ONCE: Sections = {**EXPLAIN, "scores": [score for score in SCORES if score != "drift"]}
XFED = {"images": 20, "perplexity": 3, "iterations": 300}
LOCALISATIONS = ["relevance_mass", "relevance_rank", "pointing_game"]
TIMES = ["seconds", "explain_seconds"]
# Of two clients, three in turn.
TASKS = [[["a", "b"], ["c", "d"], ["a", "b", "c"]], [["c", "d"], ["a", "d"], ["b", "c"]]]


def stream(method: str, rounds: int = 3) -> Sections:
    """Two clients that learn tasks in turn."""
    train = {"rounds": rounds, "batch_size": 8, "optimizer": {"name": "adam", "lr": 0.01}}
    learner = {"method": {"name": method}, "train": train}
    return {**MODELS["tasks"], "partition": {"kind": "own_tasks", "tasks": TASKS}, **learner}


def assert_same(one: pd.DataFrame, other: pd.DataFrame) -> None:
    frames = (frame.drop(columns=TIMES, errors="ignore") for frame in (one, other))
    pd.testing.assert_frame_equal(*frames)


def whose(done: Run, t: int, model: str) -> list[int]:
    rows = done.explanations.query("round == @t and model == @model")
    return sorted(rows["client"].dropna().unique().astype(int).tolist())


def maps(done: Run, t: int, model: str, client: int | None = None) -> pd.DataFrame:
    found = done.maps.query("round == @t and model == @model")
    return found[found["client"].isna() if client is None else found["client"] == client]


def stacked(frame: pd.DataFrame) -> Any:
    return np.stack(frame["relevance"].tolist())


class TestBesideTheRun:
    @pytest.mark.parametrize(
        "name",
        [
            *("scaffold", "misbehaving_methods:DrawsFromTorch", "misbehaving_methods:TrainsTwice"),
            *("dropout", "fedavg in turn", "fedseit in turn"),
        ],
    )
    def test_nothing_else_changes(self, name: str) -> None:
        method, _, in_turn = name.partition(" ")
        explain: Sections = {**EXPLAIN, "every": 1}
        if in_turn:
            sections, explain["explainers"] = stream(method), ["occlusion"]
            if method == "fedseit":  # every task has a network of its own
                explain["scores"] = ["sufficiency", "agreement", "drift"]
        else:
            sections = IMAGES if name == "dropout" else {**TABLE, "method": {"name": method}}
            sections = {**sections, "train": {**sections["train"], "participation": 0.5}}
        if name == "scaffold":
            sections["engine"] = {"clients_per_step": 2}
        plain, done = ran(**sections), ran(**sections, explain=explain)
        added = [name for name in done.rounds if name not in plain.rounds]
        assert added
        assert all(name == "explain_seconds" or "/" in name for name in added)
        assert_same(done.rounds.drop(columns=added), plain.rounds)
        assert_same(done.clients, plain.clients)
        assert_same(done.tasks, plain.tasks)
        assert plain.explanations.empty or method == "fedseit"
        assert done.result_hash != plain.result_hash
        if not in_turn:
            final, expected = done.weights(), plain.weights()
            assert final.keys() == expected.keys()
            assert all(torch.equal(final[name], expected[name]) for name in expected)

    def test_its_time_is_told_apart(self, finish: Finish) -> None:
        one, other = ran(**TABLE, explain=EXPLAIN), finish(**TABLE, explain=EXPLAIN)
        assert one.rounds["explain_seconds"].notna().tolist() == [False, True, False, True]
        assert (one.rounds["explain_seconds"].dropna() > 0).all()
        assert not one.rounds["explain_seconds"].equals(other.rounds["explain_seconds"])
        assert one.result_hash == other.result_hash
        rows = [[{"round": 1, "explain_seconds": seconds}] for seconds in (1.0, 2.0)]
        assert chained("", rows[0]) == chained("", rows[1])

    def test_is_part_of_the_hash(self) -> None:
        hashes = {
            ran(**{**TABLE, "train": {"rounds": 1}}, explain={**ONCE, **more}).result_hash
            for more in ({}, {"maps": True}, {"inputs": 4})
        }
        assert len(hashes) == 3

    def test_models_stay_apart_in_stacks(self) -> None:
        explain = {**EXPLAIN, "maps": True}
        alone, together = (
            ran(**TABLE, explain=explain, engine={"clients_per_step": V}).maps for V in (1, 3)
        )
        keys = ["round", "explainer", "model", "client", "input"]
        pd.testing.assert_frame_equal(alone[keys], together[keys])
        np.testing.assert_allclose(stacked(alone), stacked(together), atol=1e-4)


def test_a_replay_sees_other_relevances(finish: Finish) -> None:
    done = finish(**TABLE, explain={**EXPLAIN, "maps": True})
    done.maps.at[0, "relevance"] = done.maps.at[0, "relevance"] + 1
    told = refusal(replay(done, 1).next_round)
    assert "round 2 has a different result here: relevance in maps.parquet is array" in told


class TestWhose:
    def test_the_same_inputs_and_clients_in_each_round(self) -> None:
        train = {**TABLE["train"], "participation": 0.6}
        explain = {**EXPLAIN, "every": 1, "clients": 2, "maps": True}
        done = ran(**{**TABLE, "train": train}, explain=explain)
        for _, frame in done.maps.groupby(["round", "explainer", "model", "client"], dropna=False):
            assert frame["input"].tolist() == done.maps["input"][:3].tolist()
        for t in range(1, 5):
            cohort = done.clients.query("round == @t")["client"].tolist()
            assert len(cohort) == 3
            assert whose(done, t, "cohort") == done.experiment.explain.choose(cohort, 5, 0)

    @pytest.mark.parametrize("fraction", [0.0, 0.3])
    def test_on_a_clients_own(self, fraction: float) -> None:
        partition = {**TABLE["partition"], "test_fraction": fraction}
        # More than there are in the central test set, or with anybody.
        explain = {**EXPLAIN, "explainers": ["gradient"], "inputs_from": "own", "inputs": 50}
        explain |= {"scores": ["sufficiency", "drift"], "maps": True}
        done = ran(**{**TABLE, "partition": partition}, explain=explain)
        _, splits, _ = prepare(done.experiment)
        held = splits.test if fraction else splits.train
        for k in range(5):
            assert sorted(maps(done, 4, "cohort", k)["input"]) == sorted(held[k])
        assert set(done.explanations["model"]) == {"cohort"}
        assert done.explanations.query("round == 4")["drift_cosine"].notna().all()

    @pytest.mark.parametrize("method", ["xpfl", "fedseit"])
    def test_each_model_once(
        self, finish: Finish, monkeypatch: pytest.MonkeyPatch, method: str
    ) -> None:
        """After its training, not after whatever else a client does in the round."""
        seen: list[tuple[int, int | None]] = []

        def noted(section: Any, explainer: Any, model: Any, *about: Any) -> Any:
            seen.append((model.round, model.client))
            return measure(section, explainer, model, *about)

        monkeypatch.setattr(explaining, "measure", noted)
        sections = stream(method)
        if method == "xpfl":
            xpfl = {"name": "xpfl", "lam": 0, "xfed": XFED}
            sections = {**IMAGES, "method": xpfl, "train": {"rounds": 1, "batch_size": 64}}
        explain = {"explainers": ["random"], "inputs": 2, "every": 1, "of": ["cohort"]}
        done = finish(**sections, explain=explain)
        rows = done.explanations.query("explainer == 'random'")
        assert sorted(seen) == sorted(zip(rows["round"], rows["client"], strict=True))

    @pytest.mark.parametrize("V", [1, 2])
    def test_clients_that_fail_have_no_row(self, V: int) -> None:
        done = ran(
            **{
                **TABLE,
                "partition": {"kind": "iid", "clients": 8},
                "train": {**TABLE["train"], "on_client_error": "skip"},
            },
            method={"name": "misbehaving_methods:FailsNowAndThen"},
            explain={**EXPLAIN, "explainers": ["gradient"], "every": 1, "clients": 8},
            engine={"clients_per_step": V},
        )
        assert done.rounds["failed"].tolist() == [0, 0, 2, 0]
        assert whose(done, 2, "cohort") == list(range(8))
        assert whose(done, 3, "cohort") == [0, 1, 2, 3, 5, 6]
        after = done.explanations.query("round == 4 and model == 'cohort'").set_index("client")
        assert sorted(after.index[after["drift_rank"].isna()]) == [4, 7]

    def test_with_privacy(self) -> None:
        sections = {**TABLE, "train": {"rounds": 1}, "explain": {**ONCE, "maps": True}}
        plain = ran(**sections)
        private = ran(**sections, privacy={"clip": 0.1, "noise_multiplier": 1})
        assert "epsilon" in private.rounds
        # What clients train in the first round is the same; what becomes of it is not.
        assert_same(maps(private, 1, "cohort", 2), maps(plain, 1, "cohort", 2))
        assert not np.array_equal(
            stacked(maps(private, 1, "global")), stacked(maps(plain, 1, "global"))
        )


def test_models_of_local_training_are_what_was_trained() -> None:
    explain = {**EXPLAIN, "of": ["cohort", "personal"], "every": 1, "maps": True}
    explain["scores"] = ["sufficiency", "agreement"]
    train = {**TABLE["train"], "participation": 0.4}
    done = ran(**{**TABLE, "train": train}, method={"name": "local"}, explain=explain)
    kept: set[int] = set()
    for t in range(1, 5):
        cohort = done.clients.query("round == @t").dropna(subset="steps")["client"].tolist()
        kept |= set(cohort)
        assert whose(done, t, "cohort") == sorted(cohort)
        assert whose(done, t, "personal") == sorted(kept)
        for k in cohort:
            one, other = (maps(done, t, model, k) for model in ("cohort", "personal"))
            np.testing.assert_array_equal(stacked(one), stacked(other))
    assert len(kept) > 2


@pytest.mark.parametrize("method", ["openfl_xai", "local_rules"])
def test_rules_are_explained(method: str) -> None:
    """For their relevances see scores/test_measure.py."""
    own = method == "local_rules"
    names, whose = ["rules", "occlusion", "random"], "personal" if own else "global"
    explain = {"explainers": names, "inputs": 4, "of": ["cohort", whose]}
    sections: Sections = {**KINDS["rules"], "method": {"name": method}, "train": {"rounds": 1}}
    made = ran(**sections, explain=explain).explanations.dropna(subset="model")
    assert set(made["model"]) == {"cohort", whose}
    assert len(made) == len(names) * (8 if own else 5)
    if own:  # clients keep what they have learnt
        told = made[made["explainer"] != "random"].set_index("model").sort_values("client")
        assert (
            told.loc["cohort"]
            .reset_index(drop=True)
            .equals(told.loc["personal"].reset_index(drop=True))
        )


class TestDocuments:
    def test_where_the_truth_is(self) -> None:
        explain = {"explainers": ["rationale", "occlusion"], "inputs": 4, "slice": "aroma"}
        explain |= {"scores": LOCALISATIONS, "maps": True}
        done = ran(**KINDS["rationales"], train={"rounds": 1}, explain=explain)
        dataset, _, _ = prepare(done.experiment)
        assert set(dataset.test_columns["aspect"][done.maps["input"]]) == {"aroma"}
        assert len(done.explanations) == 2 * 5
        assert done.explanations[[f"{name}_signal" for name in LOCALISATIONS]].notna().all(None)
        for i, relevance, by in done.maps[["input", "relevance", "explainer"]].to_numpy():
            assert len(relevance) == (dataset.test_x[i] != 0).sum()
            assert by != "rationale" or set(relevance) <= {0, 1}

    @pytest.mark.parametrize("method", ["fedweit", "fedseit"])
    def test_of_tasks_in_turn(self, method: str) -> None:
        explain = {"explainers": ["occlusion"], "inputs": 4, "every": 1, "maps": True}
        done = ran(**stream(method), explain={**explain, "of": ["cohort", "personal"]})
        for t in (1, 2, 3):
            for model in ("cohort", "personal"):
                assert whose(done, t, model) == [0, 1]
                for k in (0, 1):
                    one, other = (maps(done, t, m, k) for m in ("cohort", "personal"))
                    for a, b in zip(one["relevance"], other["relevance"], strict=True):
                        np.testing.assert_array_equal(a, b)  # of documents of any length
        found = done.explanations.dropna(subset="model")
        assert np.isfinite(np.concatenate(done.maps["relevance"].to_list())).all()
        assert found[["deletion", "insertion"]].to_numpy().min() >= 0
        assert found.query("round > 1")["drift_top_k"].notna().all()

    def test_of_classes_that_a_task_does_not_know(self) -> None:
        """Their probability is 0, with and without any word; what has no number is left out."""
        explain = {"explainers": ["occlusion"], "inputs": 8, "every": 1, "target": "label"}
        done = ran(**stream("fedweit"), explain={**explain, "maps": True})
        found = done.explanations.dropna(subset="model")
        assert found[["deletion", "sparseness"]].notna().all(axis=None)
        dataset, splits, _ = prepare(done.experiment)
        for t, k in np.ndindex(3, 2):
            labels = splits.at(t + 1, 3).labels
            for row in maps(done, t + 1, "cohort", k).itertuples():
                known = dataset.test_y[row.input] in labels[k]
                assert known or np.isnan(row.deletion).all()
                assert np.isfinite(row.relevance).all() == known

    def test_own_inputs_are_of_the_task(self) -> None:
        """Drift is told within a task, of which the inputs are the same."""
        explain = {"explainers": ["occlusion"], "inputs": 40, "every": 1, "inputs_from": "own"}
        sections = stream("fedavg", rounds=6)
        done = ran(**sections, explain={**explain, "maps": True})
        dataset, splits, _ = prepare(done.experiment)
        for t, k in np.ndindex(6, 2):
            labels = splits.at(t + 1, 6).labels
            of_task = np.flatnonzero(np.isin(dataset.test_y, labels[k]))
            assert sorted(maps(done, t + 1, "cohort", k)["input"]) == of_task.tolist()
        drift = done.explanations.groupby("round")["drift_top_k"].count()
        assert drift.tolist() == [0, 2, 0, 2, 0, 2]


def test_searches_take_scores_as_objectives() -> None:
    """In rounds in which they are told, and no others."""
    explain = {**EXPLAIN, "every": 2, "scores": ["deletion", "drift"]}
    done = ran(**TABLE, explain=explain)
    content = done.experiment.model_dump(mode="json")
    search = {
        "space": {"train.optimizer.lr": [0.1, 0.2]},
        "objectives": {"accuracy": "max", "occlusion/client_deletion": "min"},
    }
    assert len(SearchSweep(RawConfig({**content, "search": search})).probe_trials) == 2
    rows = done.rounds.to_dict("records")
    for objectives, told in [
        (["accuracy"], [1, 2, 3, 4]),
        (["accuracy", "occlusion/client_deletion"], [2, 4]),
        (["gradient/drift_rank"], [4]),  # of which there is none the first time
    ]:
        assert [row["round"] for row in rows if _judged(row, done.path, objectives)] == told
    # Of what there is not, the first round tells.
    assert _judged(rows[0], done.path, ["occlusion/deletoin"])
