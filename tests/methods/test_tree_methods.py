"""Histogram trees, and XGBoost by bagging and by turns."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from experiments import (
    FEW,
    TREE_METHODS,
    Finish,
    Say,
    by_day,
    federation,
    server_states,
    small_experiment,
    with_method,
)
from fedsim import Dataset, predictions
from fedsim.errors import DataError, ExperimentError, FedsimWarning
from fedsim.federation import Client
from fedsim.launch.prepare import prepare
from fedsim.methods.hist_trees import HistState
from fedsim.methods.shared import trees as shared
from fedsim.methods.xgb_cyclic import XgbCyclic
from fedsim.models.bins import encode
from fedsim.models.boosted_trees import (
    TREES,
    Arrays,
    Gradients,
    appended,
    raw_scores,
    rows_of,
    unit_of,
)
from fedsim.testing import check_method

Sections = dict[str, Any]

DIGITS: Sections = {}
NUMBERS: Sections = {"data": {"name": "friedman", "samples": 200, "test_samples": 60}}
TWO: Sections = {"data": {"name": "synthetic", "samples": 300, "shape": [10], "classes": 2}}
KINDS = {"ten classes": DIGITS, "two classes": TWO, "a number": NUMBERS}


def trees(name: str, clients: int = 4, rounds: int = 3, **sections: Any) -> Sections:
    usual: Sections = {
        "partition": {"kind": "iid", "clients": clients},
        "train": {"rounds": rounds},
    }
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
    assert state.units == ((1, 1) if classes else (unit_of(float(np.abs(y).max())), 1))
    codes, of = encode(x, state.cuts), Gradients(y, classes, None, state.units)
    model: Any = spec.model
    found = model.empty(classes, state.trees["base"])
    for _ in range(experiment.train.rounds):
        found = appended(found, model.boost(*of(raw_scores(found, x)), codes, state.cuts))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_the_same_over_any_number_of_clients_and_pooled(kind: str) -> None:
    made = [small_experiment(**trees("hist_trees", K, **KINDS[kind])) for K in (1, 3, 10)]
    one, three, ten = (server_states(experiment)[-1] for experiment in made)
    for other in (three, ten):
        assert one.units == other.units
        same(one.cuts, other.cuts)
        same(one.trees, other.trees)
    same(one.trees, pooled(made[0], one))
    assert (one.trees["feature"] >= 0).sum() > 10


@pytest.mark.parametrize("kind", by_day(KINDS, ["two classes", "a number"]))
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
    ensemble = sum(weights[name][:1].nbytes for name in TREES)
    ensemble += weights["base"].nbytes + weights["classes"].nbytes
    cuts = sum(array.nbytes for array in state.cuts.values())
    levels = 1 + sum(bool((feature[2**k - 1 : 2 ** (k + 1) - 1] >= 0).any()) for k in range(2))
    trees_sent = 2 * weights["feature"][:1].nbytes * levels
    assert set(rows["bytes_down"]) == {ensemble + cuts + trees_sent + 16 * asked}
    first = done.clients.query("round == 1")
    assert (first["one_off_up"] > 0).all()
    assert done.rounds["one_off_up"].iloc[1:].sum() == 0


@pytest.fixture
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where data sets that are given as objects are kept."""
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path))


def regression(scale: float) -> Dataset:
    """A hundred and fifty points on a curved surface, and forty to test."""
    x = np.random.default_rng(0).normal(size=(190, 3)).astype(np.float32)
    y = ((x[:, 0] * x[:, 1] + x[:, 2]) * scale).astype(np.float32)
    return Dataset(x[:150], y[:150], x[150:], y[150:], ())


@pytest.mark.usefixtures("own_data")
@pytest.mark.filterwarnings("ignore:data. scales")
@pytest.mark.parametrize("exponent", [40, -60])
@pytest.mark.parametrize("name", TREE_METHODS)
def test_the_unit_of_a_target_does_not_matter(name: str, exponent: int) -> None:
    """Times a power of two it gives the same trees, times as much."""
    scale = 2.0**exponent
    one, other = (
        server_states(small_experiment(**trees(name, 3), data=regression(s)))[-1].trees
        for s in (1.0, scale)
    )
    for of in ("feature", "threshold", "cover"):
        np.testing.assert_array_equal(one[of], other[of])
    np.testing.assert_array_equal(one["value"] * np.float32(scale), other["value"])
    np.testing.assert_allclose(one["base"] * scale, other["base"], rtol=1e-12)
    assert (one["feature"] >= 0).sum() > 10


@pytest.mark.usefixtures("own_data")
@pytest.mark.filterwarnings("ignore:data. scales")
@pytest.mark.parametrize("name", TREE_METHODS)
def test_a_target_far_from_0_is_learnt(name: str, finish: Finish) -> None:
    data = regression(10)
    far = replace(data, y=data.y + np.float32(1e7), test_y=data.test_y + np.float32(1e7))
    done = finish(**trees(name, 2, rounds=12), data=far)
    assert done.rounds["r2"].iloc[-1] > 0.2


@pytest.mark.usefixtures("own_data")
def test_known_bounds_have_to_fit() -> None:
    def prepared(low: float, high: float, data: Any) -> None:
        made = trees("hist_trees", 3, method={"range": [low, high]})
        prepare(small_experiment(**made, data=data))

    for low, high in ((5, 6), (-3e38, 3e38), (0, 0.1)):
        line = rf"method.range=\[{low:g}.* does not fit x1, x2, .*x10: more than a tenth"
        with pytest.warns(FedsimWarning, match=line.replace("+", r"\+")):
            prepared(low, high, TWO["data"])
    with pytest.warns(FedsimWarning, match="does not fit input 1, input 2, .* more: more than a"):
        prepared(2, 3, FEW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared(-4, 4, TWO["data"])
        prepared(-4, 4, regression(1))
    for scale in (1e4, 1e-4):
        with pytest.raises(DataError, match=r"method.range=\[-4, 4\]: .* scale the target"):
            prepared(-4, 4, regression(scale))


DEVICES = {"speed": 100, "deadline": 0.79}


def test_a_deadline_ends_a_tree_and_not_what_was_agreed_on(finish: Finish) -> None:
    """75 examples take 0.75 s: in the first round, no time is left after it; later for a level."""
    made = trees("hist_trees", 4, rounds=4, **TWO, devices=DEVICES)
    with pytest.warns(FedsimWarning, match="finishes before the deadline: no tree is grown"):
        done = finish(**made)
    assert done.rounds["trees"].tolist() == [0, 1, 2, 3]
    assert (done.rounds["one_off_up"] > 0).tolist() == [True, False, False, False]
    feature = done.weights()["feature"][:, 0]
    assert (feature[:, 0] >= 0).all()
    assert (feature[:, 1:] < 0).all()
    assert done.rounds["accuracy"].iloc[-1] > 0.6
    hurry = {**DEVICES, "deadline": 0.7501, "download": 1e-3, "upload": 1e3}
    with pytest.warns(FedsimWarning, match="and bins have to be agreed on again"):
        finish(**{**made, "train": {"rounds": 1}, "devices": hurry})


def test_a_level_takes_the_time_of_the_rows_that_it_adds_up(finish: Finish) -> None:
    done = finish(**trees("hist_trees", 1, rounds=2, **TWO, devices={"speed": 100}))
    rows = done.clients.query("round == 2").iloc[0]
    moved = (rows["bytes_down"] / 20e6 + rows["bytes_up"] / 5e6) * 8
    assert 3 < rows["simulated_seconds"] - moved <= 3 * (1 + 2 / 2)


def test_what_clients_keep_tells_ensembles_apart() -> None:
    made = small_experiment(**trees("hist_trees", 1, rounds=3, **TWO))
    context = federation(made).runner.context
    _, _, two, three = (state.trees for state in server_states(made))
    empty = {**two, **{name: two[name][:0] for name in TREES}}
    other = {**two, "value": two["value"] * 2}
    for ensemble in (empty, empty, two, three, other, two):
        client: Any = Client(context, 0, 1, "", {}, None, {})  # type: ignore[arg-type]
        expected = raw_scores(ensemble, shared.rows(client))
        np.testing.assert_array_equal(shared.own_scores(client, ensemble), expected)


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
    same({n: second.trees[n][:3] for n in TREES}, {n: first.trees[n] for n in TREES})


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


# -- all three


@pytest.mark.parametrize("name", TREE_METHODS)
@pytest.mark.parametrize("kind", by_day(KINDS, ["two classes", "a number"]))
class TestTrees:
    def test_keeps_the_contract(self, name: str, kind: str) -> None:
        if kind == "ten classes":
            pytest.skip("test_every_method.py asks for it")
        made = with_method(name, **KINDS[kind], train={"rounds": 3})
        check_method(made.pop("method"), **made, partition={"kind": "iid", "clients": 4})

    def test_learns_and_predicts_what_was_scored(
        self, name: str, kind: str, finish: Finish
    ) -> None:
        K = {"hist_trees": 4, "xgb_bagging": 4, "xgb_cyclic": 2}[name]
        done = finish(**trees(name, K, rounds=12, **KINDS[kind]))
        score, least = ("r2", 0.4) if kind == "a number" else ("accuracy", 0.6)
        assert done.rounds[score].iloc[-1] > least
        if name == "xgb_cyclic":
            assert done.clients["client"].tolist() == 6 * [0, 1]
        found = predictions(done)
        if kind == "a number":
            mse = float(((found["target"] - found["prediction"]) ** 2).mean())
            assert mse == pytest.approx(done.rounds["loss"].iloc[-1], rel=1e-5)
        else:
            right = float((found["target"] == found["prediction"]).mean())
            assert right == done.rounds["accuracy"].iloc[-1]


@pytest.mark.parametrize("name", TREE_METHODS)
def test_poisoned_data(name: str, finish: Finish) -> None:
    """Trees are asked for the triggers, too."""
    for attack in ({"name": "backdoor", "target": "3"}, {"name": "label_flip"}):
        made = trees(name, 4, data=FEW, adversaries={"share": 0.5, "attack": attack})
        done = finish(**made)
        assert ("backdoor_success" in done.rounds) == (attack["name"] == "backdoor")


@pytest.mark.parametrize("name", TREE_METHODS)
def test_class_weights_weigh_the_score_with_which_sums_begin(name: str) -> None:
    def of(*weights: float) -> tuple[float, float]:
        objective = {"name": "classification", "class_weights": weights}
        made = small_experiment(**trees(name, 1, rounds=1, **TWO, objective=objective))
        state = server_states(made)[-1]
        return float(state.trees["base"][0]), float(state.trees["cover"][0, 0, 0])

    base, cover = of(1, 1)
    assert of(2, 2)[0] == pytest.approx(base)
    assert of(2, 2)[1] == pytest.approx(2 * cover, rel=1e-6)
    assert of(2, 6)[0] == pytest.approx(base + np.log(3), abs=0.02)
    assert of(1e9, 1e9)[1] == pytest.approx(1e9 * cover, rel=1e-6)
    assert of(0, 1)[0] > 3


def test_histograms_have_to_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1e6))
    model: Sections = {"model": {"name": "boosted_trees", "depth": 6}}
    with pytest.raises(DataError, match=r"64 features for 10 classes take about 0.0 GB"):
        prepare(small_experiment(**trees("hist_trees", **DIGITS, **model)))
    prepare(small_experiment(**trees("hist_trees", **TWO)))


def test_from_the_command_line(say: Say, finish: Finish) -> None:
    done = finish(**trees("hist_trees", **TWO))
    text = say.printed("explain", str(done.path), "--explainer", "leaves", "--most", "1")
    assert "\ntree 1, for " in text
    assert "… and 2 more; --most shows more" in text
    error = say.refused("attack", str(done.path))
    assert error.endswith(
        ": model.name=boosted_trees is a tree ensemble; attacks need a network\n"
    )
