"""Federated rules: the published model through the whole simulator, and its baselines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from experiments import (
    NEEDS,
    NETWORK_METHODS,
    Finish,
    by_day,
    interrupted,
    small_experiment,
)
from fedsim import Run, load, resume, run
from fedsim.errors import BadInput, DataError, RunError
from fedsim.federation import draw_cohort
from fedsim.launch.prepare import prepare
from fedsim.methods import methods
from fedsim.models import RuleModel, Rules, models
from fedsim.models.rules import Array, Prediction, Rule
from fedsim.models.tsk import FILES, Tsk, read_published
from fedsim.objectives import Objective, Regression
from fedsim.support.rng import keyed_rng

ROOT = Path(os.environ.get("FEDSIM_DATA", "/nowhere"))
real = pytest.mark.skipif(
    not (ROOT / "openfl_xai").is_dir(), reason="OpenFL-XAI's files are not at hand"
)
NAMES = [name for name, method in methods.items() if method.learns.models == "rule model"]
# With the published fuzziness, clusters of evenly spread examples all lie in the middle.
KINDS = {
    name: {"name": name, **({"rules": 6, "fuzziness": 1.2} if name == "tsk" else {})}
    for name, model in models.items()
    if issubclass(model, RuleModel)
}
SMALL: dict[str, Any] = {
    "data": {"name": "friedman", "samples": 300, "test_samples": 100, "features": 5},
    "partition": {"kind": "iid", "clients": 5},
    "model": {"name": "tsk"},
    "method": {"name": "openfl_xai"},
    "train": {"rounds": 1},
}
PUBLISHED: dict[str, Any] = {
    **SMALL,
    "data": {"name": "openfl_xai"},
    "partition": {"kind": "natural", "column": "collaborator"},
}


class Constant(RuleModel):
    """A rule model of a user's own: always the mean."""

    name: str = "test_openfl_xai:Constant"

    def train(self, x: Array, y: Array, rng: np.random.Generator) -> Rules:
        return {"means": np.array([y.mean()]), "weights": np.array([float(len(y))])}

    def merge(self, bases: Sequence[Rules]) -> tuple[Rules, NDArray[np.int64]]:
        means, weights = (np.concatenate([b[n] for b in bases]) for n in ("means", "weights"))
        merged = {"means": np.array([np.average(means, weights=weights)]), "weights": weights[:1]}
        return merged, np.array([len(bases)])

    def predict(self, rules: Rules, x: Array) -> Prediction:
        values = np.full(len(x), float(rules["means"][0]))
        ones = np.ones((len(x), 1))
        return Prediction(values, np.zeros(len(x), np.int64), ones, values[:, None])

    def explain(self, rules: Rules, names: Sequence[str]) -> list[Rule]:
        consequent = np.zeros(len(names) + 1)
        consequent[0] = rules["means"][0]
        return [Rule((), consequent, float(rules["weights"][0]))]


@pytest.fixture
def finish(tmp_path: Path) -> Finish:
    def finish(**sections: Any) -> Run:
        return run(small_experiment(**{**SMALL, **sections}), tmp_path / "runs")

    return finish


# the published model


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Of which clustering takes a second."""
    return run(small_experiment(**PUBLISHED), tmp_path_factory.mktemp("published"))


@real
class TestThePublishedFederation:
    def test_comes_to_the_published_rules(self, published: Run) -> None:
        expected = read_published(ROOT / "openfl_xai" / "global_models" / "tsk")
        found = {name: array.numpy() for name, array in published.weights().items()}
        assert found.keys() == expected.keys() == FILES.keys()
        np.testing.assert_array_equal(found["antecedents"], expected["antecedents"])
        np.testing.assert_allclose(found["weights"], expected["weights"], rtol=0, atol=2e-9)
        np.testing.assert_allclose(found["consequents"], expected["consequents"], atol=1e-4)

    def test_sends_what_the_published_program_sends(self, published: Run) -> None:
        clients = published.clients
        assert clients["rules"].tolist() == [7, 15, 10, 12, 16]
        assert clients["bytes_up"].tolist() == [896, 1920, 1280, 1536, 2048]
        assert (clients["bytes_down"] == 3200).all()  # 25 rules of 32 floats
        (row,) = published.rounds.to_dict("records")
        assert (row["clients"], row["rules"], row["shared_rules"]) == (5, 25, 14)
        assert (row["rule_length"], row["sources"]) == (15, 60 / 25)
        assert (row["loss"], row["r2"]) == pytest.approx((0.145387, 0.210178), abs=3e-6)

    def test_every_rule_is_on_record(self, published: Run) -> None:
        rules = published.explanations
        assert len(rules) == 25
        assert set(rules["explainer"]) == {"rules"}
        assert sorted(rules["rule"]) == list(range(1, 26))
        assert rules["weight"].is_monotonic_decreasing
        assert rules["decides"].sum() == pytest.approx(1)
        first = rules.iloc[0]
        assert (first["rule"], first["sources"], first["conditions"]) == (1, 5, 15)
        assert first["text"].startswith("IF x1 is LOW AND x2 is LOW AND ")
        assert " AND x15 is MEDIUM THEN y = -0.003715" in first["text"]


# every method of rules, with every kind of rules


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
class TestEveryRuleMethod:
    def test_learns(self, finish: Finish, name: str, kind: str) -> None:
        done = finish(
            data={"name": "friedman", "samples": 2000, "noise": 0.0, "features": 5},
            model=KINDS[kind],
            method={"name": name},
        )
        (row,) = done.rounds.to_dict("records")
        assert row["r2"] > 0.3
        assert row["rmse"] == pytest.approx(row["loss"] ** 0.5, rel=0.05)
        assert row["rules"] >= 2
        assert 0 < row["coverage"] <= 1

    def test_each_clients_own_tests_and_the_same_again(
        self, finish: Finish, tmp_path: Path, name: str, kind: str
    ) -> None:
        """Also where it was interrupted."""
        sections: dict[str, Any] = {
            **SMALL,
            "model": KINDS[kind],
            "method": {"name": name},
            "partition": {"kind": "iid", "clients": 5, "test_fraction": 0.2},
            "evaluate": {"clients": True},
        }
        done = finish(**sections)
        tested = done.clients["test_r2"]
        assert len(tested) == 5
        assert done.rounds["client_r2"][0] == pytest.approx(tested.mean())
        assert done.rounds["worst_client_r2"][0] == tested.min()
        folder = interrupted(small_experiment(**sections), tmp_path / "again", after=1)
        again = resume(folder, progress=False)
        assert again.result_hash == done.result_hash
        assert again.explanations.equals(done.explanations)
        if name != "centralised_rules":  # whom the partition does not matter
            assert finish(**sections, seed=1).result_hash != done.result_hash


def scores(rules: Rules, dataset: Any) -> dict[str, float]:
    return Regression().scores_of(Tsk().predict(rules, dataset.test_x).values, dataset.test_y)


def test_what_a_cohort_learns_is_merged_as_written_out(finish: Finish) -> None:
    done = finish(train={"rounds": 1, "participation": 0.6})
    experiment = done.experiment
    dataset, splits, _ = prepare(experiment)
    cohort = draw_cohort(experiment.seed, 0.6, len(splits), 1)
    assert len(cohort) == len(done.clients) == 3
    bases = []
    for k in cohort:
        rows = splits.train[k]
        rng = keyed_rng(experiment.seed, "local_rules/rules", 1, int(k))
        base = Tsk().train(dataset.x[rows], dataset.y[rows], rng)
        bases.append({name: array.astype(np.float32) for name, array in base.items()})
    merged, _ = Tsk().merge(bases)
    found = done.weights()
    for name, array in merged.items():
        assert found[name].numpy().tobytes() == array.tobytes()
    assert done.rounds["r2"][0] == scores(merged, dataset)["r2"]


def test_rules_that_nobody_sends(finish: Finish) -> None:
    """Of all examples, and of each client's alone, which are scored one by one."""
    together, alone = (finish(method={"name": n}) for n in ("centralised_rules", "local_rules"))
    dataset, splits, _ = prepare(alone.experiment)
    rules = Tsk().train(dataset.x, dataset.y, np.random.default_rng(0))
    for name, array in together.weights().items():
        np.testing.assert_array_equal(array.numpy(), rules[name])
    own = [
        Tsk().train(dataset.x[rows], dataset.y[rows], np.random.default_rng(0))
        for rows in splits.train
    ]
    found = [scores(rules, dataset)["r2"] for rules in own]
    np.testing.assert_allclose(alone.clients["r2"], found)
    assert alone.rounds["r2"][0] == pytest.approx(np.mean(found))
    for done in (together, alone):
        assert done.rounds["total_bytes_up"][0] == done.rounds["total_bytes_down"][0] == 0


def test_a_rule_model_of_ones_own(finish: Finish) -> None:
    done = finish(model={"name": "test_openfl_xai:Constant"})
    mean = done.experiment.data.load().y.mean()
    assert done.weights()["means"].item() == pytest.approx(mean)
    assert done.explanations["text"].tolist() == [f"y = {mean:.4g}"]
    assert done.explanations["sources"].tolist() == [5]
    assert done.rounds["rule_length"][0] == 0


@pytest.mark.parametrize("clients", [60, 300])
def test_a_client_may_have_a_single_example(finish: Finish, clients: int) -> None:
    done = finish(partition={"kind": "iid", "clients": clients})
    assert done.clients["samples"].min() == 300 // clients
    assert np.isfinite(done.rounds["r2"][0])


# what cannot be


UNIT = {"name": "friedman", "samples": 60, "test_samples": 20}


def test_clients_that_drift_within_the_unit_interval_are_learnt_from(tmp_path: Path) -> None:
    drift = {"name": "drift", "round": 1, "of": UNIT}
    shuffled = small_experiment(**{**SMALL, "data": {**drift, "kind": "shuffle"}})
    done = run(shuffled, tmp_path)
    with pytest.raises(BadInput, match=r"input 'x\d+' of drifting clients leaves .* stays within"):
        prepare(small_experiment(**{**SMALL, "data": drift}))
    assert len(done.rounds) == 1


def test_a_scaled_table_is_learnt_from(
    finish: Finish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).uniform(10, 30, (200, 2))
    rows = [f"{a},{b},{a * b}" for a, b in x]
    Path("wide.csv").write_text("\n".join(["height,width,area", *rows]))
    table = {"name": "table", "path": "wide.csv", "target": "area"}
    with pytest.raises(BadInput, match=r"'height' is \S+ in example \d+; rules .* in .0, 1."):
        finish(data=table)
    done = finish(data={**table, "scale": "minmax"})
    assert done.rounds["r2"][0] > 0.9
    assert done.explanations["text"].str.contains("IF height is ").all()
    assert done.explanations["text"].str.contains(" THEN area = ").all()


class Failing(Tsk):
    """Rules that clients with a low first target cannot learn."""

    name: str = "test_openfl_xai:Failing"
    least: float = 0.5

    def train(self, x: Array, y: Array, rng: np.random.Generator) -> Rules:
        if y[0] < self.least:
            raise DataError("too low")
        return super().train(x, y, rng)


@pytest.mark.parametrize("name", ["openfl_xai", "local_rules"])
def test_clients_that_fail_are_skipped(finish: Finish, name: str) -> None:
    sections = {
        "model": {"name": "test_openfl_xai:Failing"},
        "method": {"name": name},
        "train": {"rounds": 1, "on_client_error": "skip"},
    }
    done = finish(**sections)
    failed = done.clients["error"].notna()
    assert 0 < failed.sum() < 5
    assert done.clients["error"][failed].str.contains("too low").all()
    assert done.rounds["clients"][0] == 5 - failed.sum()
    sections["model"]["least"] = 9  # type: ignore[assignment]
    with pytest.raises(RunError, match=r"round 1: .*(all were|every client .* was) skipped"):
        finish(**sections)


# networks on the same data


@pytest.mark.parametrize(
    "name",
    by_day(
        n for n, m in methods.items() if n in NETWORK_METHODS and Objective in m.learns.objectives
    ),
)
def test_networks_learn_numbers_too(finish: Finish, name: str) -> None:
    rounds = 25 if name in ("fedavgm", "mime_lite") else 12  # momentum overshoots at first
    done = finish(
        model=NEEDS.get(name, {}).get("model", {"name": "mlp", "hidden": [32]}),
        method={"name": name, **({"buffer": 4} if name == "fedbuff" else {})},
        **{key: NEEDS.get(name, {}).get(key) for key in ("adapters", "devices")},
        partition={**SMALL["partition"], **NEEDS.get(name, {}).get("partition", {})},
        train={"rounds": rounds, "local_epochs": 2, "optimizer": {"lr": 0.2}},
    )
    assert done.rounds["r2"].iloc[-1] > 0.4
    assert load(done.path).rounds["r2"].equals(done.rounds["r2"])
