"""Histogram trees, and XGBoost by bagging and by turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from experiments import (
    FEW,
    TREE_METHODS,
    Say,
    federation,
    server_states,
    small_experiment,
    with_method,
)
from fedsim import Run, predictions
from fedsim.errors import BadInput, ExperimentError
from fedsim.launch.prepare import prepare
from fedsim.methods.hist_trees import HistState
from fedsim.methods.xgb_cyclic import XgbCyclic
from fedsim.models.bins import encode
from fedsim.models.boosted_trees import (
    TREES as ARRAYS,
)
from fedsim.models.boosted_trees import (
    Arrays,
    Gradients,
    appended,
    raw_scores,
    rows_of,
    step_of,
)
from fedsim.testing import check_method

Finish = Callable[..., Run]
Sections = dict[str, Any]

DIGITS: Sections = {"data": FEW}
NUMBERS: Sections = {"data": {"name": "friedman", "samples": 200, "test_samples": 60}}
TWO: Sections = {"data": {"name": "synthetic", "samples": 300, "shape": [10], "classes": 2}}
KINDS = {"ten classes": DIGITS, "two classes": TWO, "a number": NUMBERS}


def trees(name: str, clients: int = 4, rounds: int = 3, **sections: Any) -> Sections:
    usual = {"partition": {"kind": "iid", "clients": clients}, "train": {"rounds": rounds}}
    return with_method(name, **{**usual, **sections})


def same(one: Arrays, other: Arrays) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def pooled(experiment: Any, state: HistState) -> Arrays:
    """The ensemble of all training examples in one place, on the bins of a run."""
    dataset, _, spec = prepare(experiment)
    context = federation(experiment).runner.context
    held = context.examples(np.sort(context.splits.train.values))
    x, classes = rows_of(held.x.numpy()), len(dataset.classes)
    y: NDArray[Any] = held.y.numpy() if classes else held.y.double().numpy()
    assert state.step == (2.0**-26 if classes else step_of(float(y.min()), float(y.max())))
    codes, of = encode(x, state.cuts), Gradients(y, classes, None, state.step)
    model: Any = spec.model
    found = model.empty(classes, state.trees["base"])
    for _ in range(experiment.train.rounds):
        found = appended(found, model.boost(raw_scores(found, x), x, codes, state.cuts, of))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_the_same_over_any_number_of_clients_and_pooled(kind: str) -> None:
    made = [small_experiment(**trees("hist_trees", K, **KINDS[kind])) for K in (1, 3, 10)]
    one, three, ten = (server_states(experiment)[-1] for experiment in made)
    for other in (three, ten):
        assert one.step == other.step
        same(one.cuts, other.cuts)
        same(one.trees, other.trees)
    same(one.trees, pooled(made[0], one))
    assert (one.trees["feature"] >= 0).sum() > 10


@pytest.mark.parametrize("kind", KINDS)
def test_masks_and_blocks_change_nothing(kind: str, finish: Finish) -> None:
    made = trees("hist_trees", 20, **KINDS[kind])
    plain, masked = finish(**made), finish(**made, secure_aggregation={"graph": 4})
    assert plain.result_hash == masked.result_hash
    assert (masked.rounds["protocol_rounds"].iloc[1:] <= 4 * 2 * 3).all()


def test_clients_that_drop_out_of_a_sum_take_nothing_with_them(finish: Finish) -> None:
    """The children of a node are asked for both if others answer than for the node."""
    made = trees("hist_trees", 8, rounds=4, **TWO)
    some = finish(**made, secure_aggregation={"dropout": 0.2, "threshold": 0.3})
    arrays = some.weights()
    inner = arrays["feature"] >= 0
    assert (arrays["cover"][inner] > 0).all()
    assert some.rounds["protocol_dropped"].sum() > 0
    assert some.rounds["accuracy"].iloc[-1] > 0.7


def test_a_part_of_the_clients_is_enough(finish: Finish) -> None:
    made = trees("hist_trees", 6, rounds=4, **TWO)
    made["train"]["participation"] = 0.5
    made["partition"]["test_fraction"] = 0.3
    done = finish(**made, evaluate={"clients": True, "metrics": ["auroc"]})
    assert done.clients["test_accuracy"].mean() > 0.8
    assert done.rounds["auroc"].iloc[-1] > 0.8
    assert (done.rounds["clients"] == 3).all()


def test_noise_needs_known_bounds(finish: Finish) -> None:
    privacy = {"clip": 40.0, "noise_multiplier": 0.01}
    made = trees("hist_trees", 6, **TWO)
    with pytest.raises(ExperimentError, match=r"privacy makes counts too noisy .*method\.range"):
        small_experiment(**made, privacy=privacy)
    made["method"] = {"name": "hist_trees", "range": [-4, 4]}
    done = finish(**made, privacy=privacy)
    assert done.rounds["accuracy"].iloc[-1] > 0.7
    assert (done.rounds["epsilon"].diff().dropna() > 0).all()
    assert "one_off_up" not in done.rounds or not done.rounds["one_off_up"].any()


def test_bytes_are_those_of_the_sums(finish: Finish) -> None:
    done = finish(**trees("hist_trees", 3, rounds=2, **TWO))
    weights = done.weights()
    (state,) = server_states(small_experiment(**trees("hist_trees", 3, rounds=2, **TWO)))[-1:]
    B = int(state.cuts["starts"][-1])
    feature = weights["feature"][1, 0]
    # The root, then the smaller child of each node that was split, but for the last level's.
    asked = 1 + int((feature[:3] >= 0).sum())
    rows = done.clients.query("round == 2")
    assert set(rows["bytes_up"]) == {16 * B * asked}
    ensemble = sum(weights[name][:1].nbytes for name in ARRAYS)
    ensemble += weights["base"].nbytes + weights["classes"].nbytes
    cuts = sum(array.nbytes for array in state.cuts.values())
    levels = 1 + sum(bool((feature[2**k - 1 : 2 ** (k + 1) - 1] >= 0).any()) for k in range(2))
    trees_sent = 2 * weights["feature"][:1].nbytes * levels
    assert set(rows["bytes_down"]) == {ensemble + cuts + trees_sent + 16 * asked}
    first = done.clients.query("round == 1")
    assert (first["one_off_up"] > 0).all()
    assert done.rounds["one_off_up"].iloc[1:].sum() == 0


# -- bagging, and by turns


@pytest.mark.parametrize("kind", KINDS)
def test_bagging_appends_what_each_client_has_grown(kind: str) -> None:
    made = small_experiment(**trees("xgb_bagging", 3, **KINDS[kind]))
    _, first, second, _ = server_states(made)
    fed = federation(made)
    fed.runner.begin(2)
    method: Any = made.method
    own = fed.gather(method.boost, range(3), trees=first.trees)
    assert len(second.trees["value"]) == 6
    for k in range(3):
        np.testing.assert_array_equal(second.trees["feature"][3 + k], own[k]["feature"][0])
        np.testing.assert_array_equal(
            second.trees["value"][3 + k], own[k]["value"][0] * np.float32(1 / 3)
        )
    same({n: second.trees[n][:3] for n in ARRAYS}, {n: first.trees[n] for n in ARRAYS})


@pytest.mark.parametrize("kind", KINDS)
def test_one_client_by_itself_is_boosting(kind: str) -> None:
    """Bagging and turns of one client are the same, also with several rounds at once."""
    many = trees("xgb_cyclic", 1, rounds=4, **KINDS[kind])
    few = trees("xgb_bagging", 1, rounds=2, **KINDS[kind])
    few["method"] = {"name": "xgb_bagging", "local_rounds": 2}
    one, other = (server_states(small_experiment(**made))[-1] for made in (many, few))
    same(one.trees, other.trees)


def test_turns() -> None:
    everybody = np.arange(4)
    by_number = XgbCyclic(name="xgb_cyclic")
    assert [by_number.turn(everybody, t, 4, 0) for t in range(1, 7)] == [0, 1, 2, 3, 0, 1]
    assert by_number.turn(np.array([0, 3]), 2, 4, 0) == 3
    assert by_number.turn(np.array([0, 1]), 3, 4, 0) == 0
    shuffled = XgbCyclic(name="xgb_cyclic", order="shuffled")
    turns = [shuffled.turn(everybody, t, 4, 0) for t in range(1, 41)]
    cycles = [turns[c : c + 4] for c in range(0, 40, 4)]
    assert all(sorted(cycle) == [0, 1, 2, 3] for cycle in cycles)
    assert len({tuple(cycle) for cycle in cycles}) > 3


def test_by_turns_one_client_works(finish: Finish) -> None:
    done = finish(**trees("xgb_cyclic", 3, rounds=5, **TWO))
    assert done.clients["client"].tolist() == [0, 1, 2, 0, 1]
    assert done.rounds["accuracy"].iloc[-1] > 0.8


# -- all three


@pytest.mark.parametrize("name", TREE_METHODS)
@pytest.mark.parametrize("kind", KINDS)
class TestTrees:
    def test_keeps_the_contract(self, name: str, kind: str) -> None:
        made = with_method(name, **KINDS[kind], train={"rounds": 3})
        check_method(made.pop("method"), **made, partition={"kind": "iid", "clients": 4})

    def test_learns(self, name: str, kind: str, finish: Finish) -> None:
        K = {"hist_trees": 4, "xgb_bagging": 4, "xgb_cyclic": 2}[name]
        done = finish(**trees(name, K, rounds=12, **KINDS[kind]))
        score, least = ("r2", 0.4) if kind == "a number" else ("accuracy", 0.6)
        assert done.rounds[score].iloc[-1] > least

    def test_predictions_are_those_that_were_scored(
        self, name: str, kind: str, finish: Finish
    ) -> None:
        done = finish(**trees(name, **KINDS[kind]))
        found = predictions(done)
        if kind == "a number":
            mse = float(((found["target"] - found["prediction"]) ** 2).mean())
            assert mse == pytest.approx(done.rounds["loss"].iloc[-1], rel=1e-5)
        else:
            right = float((found["target"] == found["prediction"]).mean())
            assert right == done.rounds["accuracy"].iloc[-1]


def test_class_weights_weigh_gradients() -> None:
    balanced = {"objective": {"name": "classification", "class_weights": [1.0, 3.0]}}
    plain, weighted = (
        server_states(small_experiment(**trees("hist_trees", rounds=1, **TWO, **more)))[-1]
        for more in ({}, balanced)
    )
    cover = [float(s.trees["cover"][0, 0, 0]) for s in (plain, weighted)]
    assert 1.5 * cover[0] < cover[1] < 3 * cover[0]


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"model": {"name": "mlp"}}, "learns tree ensembles, and model.name=mlp is a network"),
        ({"method": {"name": "fedavg"}}, "is a tree ensemble; methods that can: hist_trees, xgb_"),
        ({"model": {"name": "boosted_trees", "depth": 0}}, "model.depth: must be greater than or"),
        ({"model": {"name": "boosted_trees", "bins": 300}}, "model.bins: must be less than or eq"),
        ({"method": {"name": "xgb_bagging", "local_rounds": 0}}, "method.local_rounds: must be g"),
        (
            {"method": {"name": "xgb_cyclic", "order": "any"}},
            "method.order: must be 'numbered'",
        ),
        (
            {"method": {"name": "hist_trees", "range": [1, 1]}},
            "method.range=[1.0, 1.0]: the",
        ),
        (
            {"method": {"name": "xgb_bagging"}, "secure_aggregation": {}},
            "asks for what each",
        ),
        ({"uplink": {"name": "int8"}}, "sends no weights of models"),
        ({"train": {"participation": 0.01}}, "participation"),
        ({"privacy": {"level": "example", "clip": 1.0, "noise_multiplier": 1.0}}, "DP-SGD covers"),
        (
            {
                "data": {"name": "planted_reviews", "reviews": 60, "test_reviews": 20},
                "partition": {"kind": "aspects", "clients": 4},
            },
            "model.name=boosted_trees takes numbers, and the data are documents",
        ),
        (
            {"explain": {"explainers": ["gradient"]}},
            "attribution gradient explains networks; model.name=boosted_trees is a tree ensemble",
        ),
        ({"explain": {"explainers": ["rules"]}}, "is a tree ensemble, and has no rules"),
        ({"explain": {"of": ["cohort"]}}, "clients of this method do not train models"),
    ],
)
def test_what_is_refused(sections: Sections, line: str) -> None:
    with pytest.raises(BadInput) as refused:
        prepare(small_experiment(**{**trees("hist_trees"), **sections}))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_from_the_command_line(say: Say, finish: Finish) -> None:
    done = finish(**trees("hist_trees", **TWO))
    code, text, _ = say("explain", str(done.path), "--explainer", "occlusion", "--row", "0")
    assert code == 0
    assert text.startswith("the global model after round 3, occlusion:\n(baseline: zero")
    code, text, _ = say("explain", str(done.path), "--explainer", "leaves", "--most", "1")
    assert code == 0
    assert "\ntree 1, for " in text
    assert "… and 2 more; --most shows more" in text
