"""Prediction sets and intervals: by their formulas, with the coverage that they promise."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrix import MODELS
from numpy.typing import NDArray
from scipy.special import softmax

from experiments import (
    LATE,
    NETWORK_METHODS,
    TREE_METHODS,
    Finish,
    by_day,
    with_method,
)
from fedsim import Dataset, predictions, replay
from fedsim.errors import ExperimentError
from fedsim.objectives.conformal import (
    Conformal,
    intervals,
    quantile,
    rank,
    sets,
)
from fedsim.support.rng import keyed_rng

LEVELS = st.integers(1, 99).map(lambda percent: percent / 100)


@given(st.integers(1, 400), st.integers(1, 999))
def test_the_rank_is_of_the_level_as_written(n: int, thousandths: int) -> None:
    assert rank(n, thousandths / 1000) == -(-(n + 1) * thousandths // 1000)


@given(st.lists(st.integers(0, 12), min_size=2, max_size=40), LEVELS)
def test_of_any_scores_enough_are_covered(values: list[int], level: float) -> None:
    """With each of n + 1 scores as the test example in turn, ⌈(n + 1)·level⌉ or more are covered,
    and if all are different, exactly as many: that is marginal coverage of exchangeable scores."""
    scores, n = np.array(values, dtype=float), len(values) - 1
    covered = sum(scores[i] <= quantile(np.delete(scores, i), level) for i in range(n + 1))
    expected = rank(n, level)
    assert covered >= expected
    if len(set(values)) == n + 1:
        assert covered == expected


def drawn(seed: int, n: int, C: int = 5) -> tuple[NDArray[Any], NDArray[Any]]:
    """Logits that know something of the labels, and are too certain of it."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, C, size=n)
    logits = 3 * (rng.standard_normal((n, C)) + np.eye(C)[y])
    return logits.astype(np.float32), y


def by_hand(
    level: float, kind: str, seed: int, outputs: Any, y: Any, held_out: Any
) -> tuple[float, float]:
    """Coverage and size of sets, as the papers have them."""

    def scores(logits: Any, which: str) -> NDArray[Any]:
        """(n, C) the least q at which an example's set has the class."""
        p = softmax(logits.astype(float), axis=1)
        u = keyed_rng(seed, f"conformal/{which}").random(len(p))[:, None]
        more = np.where(p[:, None] > p[:, :, None], p[:, None], 0).sum(axis=2)
        return 1 - p if kind == "split" else more + u * p

    logits, labels = held_out
    n = len(labels)
    own = np.sort(scores(logits, "validation")[np.arange(n), labels])
    found = scores(outputs, "test") <= own[math.ceil((n + 1) * Fraction(str(level))) - 1]
    return found[np.arange(len(y)), y].mean(), found.sum(axis=1).mean()


@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("kind", ["split", "adaptive"])
def test_sets_are_those_of_the_papers(kind: str, level: float) -> None:
    held_out, (outputs, y) = drawn(1, 60), drawn(2, 90)
    found = sets(level, kind, 7, outputs, y, held_out)
    assert found == pytest.approx(by_hand(level, kind, 7, outputs, y, held_out), abs=1e-12)


def test_intervals_by_hand() -> None:
    y = np.arange(9.0)
    held_out = (y + np.array([1, -2, 3, -4, 5, -6, 7, -8, 9.0]))[:, None], y
    outputs, targets = np.zeros((4, 1), np.float32), np.array([-5.0, 5.1, 0, 9])
    assert intervals(0.5, outputs, targets, held_out) == (0.5, 10)
    assert intervals(0.9, outputs, targets, held_out) == (1, 18)


EVALUATE: dict[str, Any] = {"validation": 0.3, "clients": True, "conformal": {"level": 0.7}}
COLUMNS = {"coverage", "set_size"}
OF_CLIENTS = {f"{who}_{name}" for who in ("client", "worst_client") for name in COLUMNS}


def test_a_run_records_what_its_predictions_say(finish: Finish) -> None:
    partition = {"kind": "dirichlet", "alpha": 0.3, "clients": 5, "test_fraction": 0.3}
    done = finish(evaluate=EVALUATE, partition=partition, train={"rounds": 3})
    last, again = done.rounds.iloc[-1], replay(done)
    server, weights = again.fed.server, again.fed.server.tensor(again.state.weights)
    server.model.load(weights)
    network, held_out = server.model.module.eval(), server.validation_data

    def outputs(examples: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        return network(examples.x).detach().numpy(), examples.y.numpy()

    calibration = outputs(held_out)
    found = sets(0.7, "split", 0, *outputs(server.test_data), calibration)
    assert (last["coverage"], last["set_size"]) == pytest.approx(found)
    p = predictions(done).filter(like="probability/").to_numpy()
    assert found[1] <= p.shape[1]
    rows = done.clients[done.clients["round"] == 3].set_index("client")
    for k in range(5):
        mine = again.splits.test[k]
        examples = server.prepare(again.dataset.x[mine], again.dataset.y[mine])
        own = sets(0.7, "split", 0, *outputs(examples), calibration)
        assert tuple(rows.loc[k, ["test_coverage", "test_set_size"]]) == pytest.approx(own)
    assert last["client_coverage"] == pytest.approx(rows["test_coverage"].mean())
    assert last["worst_client_coverage"] == rows["test_coverage"].min()
    assert last["worst_client_set_size"] == rows["test_set_size"].max()
    assert not any(column.startswith("validation_coverage") for column in done.rounds)
    assert {"coverage", "set_size"} < {metric.column for metric in done.metrics}
    assert "coverage of prediction sets, last round" in repr(done._repr_html_())


ADAPTIVE = {**EVALUATE, "conformal": {"level": 0.7, "kind": "adaptive"}}


@pytest.mark.parametrize("name", by_day([*NETWORK_METHODS, *TREE_METHODS]))
def test_every_method_has_them(finish: Finish, name: str) -> None:
    common = {
        "data": {"name": "digits", "subset": 0.4, "test_subset": 0.5},
        "partition": {"kind": "dirichlet", "alpha": 2, "clients": 6, "test_fraction": 0.3},
        "train": {"rounds": 4 if name in LATE else 2},
    }
    done = finish(**with_method(name, **common, evaluate=ADAPTIVE))
    last = done.rounds.iloc[-1]
    assert set(done.rounds) > COLUMNS | OF_CLIENTS
    assert last["coverage"] == pytest.approx(0.7, abs=0.12)
    assert 0 <= last["worst_client_coverage"] <= last["client_coverage"] <= 1
    assert 0 < last["set_size"] <= 10


@pytest.mark.parametrize("model", by_day(["text", "rationale", "batch norm"], ["batch norm"]))
def test_models_of_other_kinds_have_them(finish: Finish, model: str) -> None:
    method = "fedrnl" if model == "rationale" else "fedavg"
    sections = {**MODELS[model], "method": {"name": method}}
    done = finish(**sections, evaluate={"validation": 0.3, "conformal": {"level": 0.7}})
    assert 0.4 < done.rounds["coverage"].iloc[-1] <= 1


FRIEDMAN = {"name": "friedman", "samples": 400, "test_samples": 200}


@pytest.mark.parametrize("method", ["fedavg", "openfl_xai", "local_rules", "centralised_rules"])
def test_regressions_have_intervals(finish: Finish, method: str) -> None:
    sections: dict[str, Any] = {"model": {"name": "tsk"}, "train": {"rounds": 1}}
    if method == "fedavg":
        sections = {"train": {"rounds": 2, "optimizer": {"lr": 0.01}}}
    done = finish(
        **sections,
        data=FRIEDMAN,
        partition={"kind": "iid", "clients": 3, "test_fraction": 0.2},
        method={"name": method},
        evaluate=EVALUATE,
    )
    last = done.rounds.iloc[-1]
    assert last["interval_coverage"] == pytest.approx(0.7, abs=0.15)
    assert last["interval_width"] > 0
    assert 0 <= last["worst_client_interval_coverage"] <= last["client_interval_coverage"] <= 1
    if method != "fedavg":
        assert "coverage" in done.rounds  # of the rule base


def test_outputs_are_of_the_classes_or_a_number() -> None:
    for classes, outputs in ((3, 4), (0, 2)):
        y = np.zeros(9, np.int64 if classes else np.float64)
        data = Dataset(y, y, y, y, tuple(map(str, range(classes))))
        Conformal().check(data, classes or 1, 9)
        with pytest.raises(ExperimentError, match=r"^evaluate.conformal needs an output for each"):
            Conformal().check(data, outputs, 9)
