"""Conditions of one's own: from outside the package, with methods, tables and the report."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

from experiments import federation, server_states, small_experiment, with_method
from fedsim import Run
from fedsim.errors import BadInput, FedsimError
from fedsim.federation import Condition, Round
from fedsim.results.report import report

Finish = Callable[..., Run]
LOSSY = {"name": "own_channel:Lossy", "share": 0.3}


@pytest.mark.parametrize("name", ["fedavg", "fednova", "scaffold"])
def test_a_channel_that_loses_entries(finish: Finish, name: str) -> None:
    """In the manifest, the tables and the report; less arrives, and each round differs."""
    sections = with_method(name, train={"rounds": 3})
    done = finish(**sections, conditions=[LOSSY])
    assert [c.model_dump() for c in done.experiment.conditions] == [LOSSY]
    trained = done.clients.dropna(subset="loss")
    size = federation(small_experiment(**sections)).model.size
    vectors = {"fednova": size + 1, "scaffold": 2 * size}.get(name, size)
    assert np.allclose(trained["entries_lost"] / vectors, 0.3, atol=0.05)
    by_round = trained.groupby("round")["entries_lost"].sum()
    assert done.rounds["entries_lost"].to_list() == by_round.to_list()
    page = report(done.path).read_text()
    assert "own_channel:Lossy" in page
    without = finish(**sections)
    assert without.result_hash != done.result_hash
    assert done.result_hash == finish(**sections, conditions=[LOSSY]).result_hash


def test_what_is_lost_does_not_change_the_mean() -> None:
    """Of FedAvg: each entry is w plus the weighted mean of the changes that arrive."""
    made = small_experiment(train={"rounds": 1})
    fed = federation(made)
    fed.begin_round(1)
    w = fed.initial_weights()
    alone = [fed.mean(made.method.local_update, [k], weights=w).weights for k in range(10)]
    lossy = small_experiment(train={"rounds": 1}, conditions=[{**LOSSY, "share": 0.5}])
    ours = federation(lossy)
    ours.begin_round(1)
    arrived = [ours.mean(lossy.method.local_update, [k], weights=w).weights for k in range(10)]
    for plain, one in zip(alone, arrived, strict=True):
        assert np.all((one == w) | (one == plain))
    n = fed.num_samples
    expected = w + np.average(np.array(arrived) - w, axis=0, weights=n)
    np.testing.assert_allclose(server_states(lossy)[1].weights, expected, atol=1e-6)


@pytest.mark.parametrize(
    "further",
    [
        {"aggregation": {"name": "median"}},
        {"uplink": {"name": "topk", "fraction": 0.1}},
        {"downlink": {"name": "float16"}},
        {"secure_aggregation": {}},
        {"privacy": {"clip": 1.0, "noise_multiplier": 0.1}},
        {"devices": {"packet_error": 0.2}},
        {"explain": {"explainers": ["gradient"], "inputs": 2, "every": 1}},
    ],
    ids=lambda further: next(iter(further)),
)
def test_beside_other_conditions(finish: Finish, further: dict[str, Any]) -> None:
    done = finish(train={"rounds": 2}, conditions=[LOSSY], **further)
    assert (done.rounds["entries_lost"] > 0).all()


class Taken(Condition):
    """Has a column that is there already."""

    name: str = "test_condition:Taken"
    columns: ClassVar[tuple[str, ...]] = ("accuracy",)


class Untold(Condition):
    """Returns a column that it does not name."""

    name: str = "test_condition:Untold"

    def close(self, round: Round, ledger: dict[str, Any]) -> dict[str, float]:
        return {"surprise": 1.0}


class Idle(Condition):
    """Never changes anything, and says so."""

    name: str = "test_condition:Idle"
    idle: ClassVar[str] = "nothing is sent by pigeon"


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (Taken, "conditions: test_condition:Taken: there is a column 'accuracy' already"),
        (Untold, "round 1: test_condition:Untold: the column 'surprise' is not among its `col"),
        (Idle, "round 1: nothing is sent by pigeon, which are all that `test_condition:Idle` is"),
    ],
)
def test_what_a_condition_may_not_do(
    finish: Finish, condition: type[Condition], message: str
) -> None:
    with pytest.raises(FedsimError, match=re.escape(message)):
        finish(conditions=[condition], train={"rounds": 1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"name": "own_channel:Lossless"}], "own_channel has no 'Lossless'"),
        ([{"name": "lossy"}], "conditions.0.name: unknown condition 'lossy'"),
        ([{**LOSSY, "shares": 0.1}], "conditions.0.shares: unknown key"),
        ([{**LOSSY, "share": 2}], "conditions.0.share: must be less than 1"),
        ([LOSSY, LOSSY], "conditions: 'own_channel:Lossy' is named twice"),
        ("own_channel:Lossy", "conditions: must be a list"),
    ],
)
def test_bad_input(given: Any, message: str) -> None:
    with pytest.raises(BadInput) as refused:
        small_experiment(conditions=given)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
