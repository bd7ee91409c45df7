"""What a method may rely on, the same on both engines and under each condition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import Finish, by_day, federation, small_experiment, with_method
from fedsim import testing
from fedsim.errors import ClientError, FedsimError


def test_nested_state_and_failures_are_what_they_should_be(finish: Finish) -> None:
    failing = finish(
        method={"name": "misbehaving_methods:FailsNowAndThen"},
        train={"rounds": 8, "on_client_error": "skip"},
    )
    remembered = failing.clients.groupby("round")["remembered"]
    assert list(remembered.max()) == list(range(1, 9))
    assert list(failing.rounds["failed"]) == [0, 0, 2, 0, 0, 2, 0, 0]
    # What a client kept before it failed is what it has afterwards.
    kept = failing.clients[failing.clients["client"] == 4].set_index("round")["remembered"]
    assert list(kept.dropna()) == [1, 2, 3, 4, 5, 6]


def test_who_has_nothing_to_send_is_left_out_of_the_mean(finish: Finish) -> None:
    done = finish(method={"name": "misbehaving_methods:LeftOut"}, train={"rounds": 4})
    assert list(done.rounds["contributions"]) == [10, 5, 0, 5]
    sent = done.clients["bytes_up"] > 0
    assert list(sent.groupby(done.clients["round"]).sum()) == [10, 5, 0, 5]


@pytest.mark.parametrize("on_client_error", ["stop", "skip"])
@pytest.mark.parametrize("how", ["in place", "not counted", "data", "array", "nest", "NaN"])
def test_what_all_clients_share_must_not_be_changed(
    finish: Finish, how: str, on_client_error: str
) -> None:
    with pytest.raises(FedsimError) as refused:
        finish(
            method={"name": "misbehaving_methods:Spoils", "how": how},
            train={"on_client_error": on_client_error},
        )
    if how in ("in place", "not counted", "nest"):
        who = "client 1, round 1, spoil: "
    else:  # seen once a block is done; client 3 sends NaN, and those after it fail
        who = f"round 1, spoil: one of clients [{3 if how == 'NaN' else 1}] "
    told = "changes an argument, which all clients share; copy it first"
    assert str(refused.value) == who + told


def test_messages_cost_what_they_are(finish: Finish) -> None:
    done = finish(method={"name": "misbehaving_methods:Gathers"}, train={"rounds": 2})
    size = sum(tensor.numel() for tensor in done.weights().values())
    # Up: the weights, and a byte a label. Down: the weights; the hint would not be sent.
    assert (done.clients["bytes_up"] == 4 * size + done.clients["samples"]).all()
    assert (done.clients["bytes_down"] == 4 * size).all()


@pytest.mark.parametrize("name", ["error", "samples", "seconds", "bytes_up"])
def test_columns_that_are_filled_anyway_cannot_be_reported(finish: Finish, name: str) -> None:
    method = {"name": "misbehaving_methods:Reports", "column": name}
    with pytest.raises(ClientError, match=f"'{name}' is a built-in column"):
        finish(method=method)


def test_scalars_of_a_round_become_plain_numbers() -> None:
    fed = federation(small_experiment())
    fed.runner.begin(1)
    fed.log(norm=np.float32(0.5), phase="train")
    record, tables = fed.runner.records()
    assert record == {"norm": 0.5, "phase": "train"}
    assert type(record["norm"]) is float
    assert not any(tables.values())
    with pytest.raises(ValueError, match="'bytes_up' is a built-in column"):
        fed.log(bytes_up=3)
    with pytest.raises(ValueError, match="'histogram' is a ndarray; only numbers and"):
        fed.log(histogram=np.arange(3))  # type: ignore[arg-type]


def test_a_cohort_without_repetition_and_perhaps_empty() -> None:
    experiment = small_experiment()
    fed, method = federation(experiment), experiment.method
    fed.runner.begin(1)
    with pytest.raises(ValueError, match="a client occurs twice in the cohort"):
        fed.each(method.local_test, [0, 3, 0])
    fed.each(method.local_test, [])
    assert fed.runner.records()[1]["clients"] == []


# under each condition

DEVICES = {
    "speed": {"median": 200, "sigma": 1.2},
    "upload": {"median": 5, "sigma": 1},
    **{"deadline": 0.5, "over_selection": 1.5, "dropout": 0.1, "packet_error": 0.2},
}
CONDITIONS: dict[str, dict[str, Any]] = {
    "privacy": {"privacy": {"clip": 1, "noise_multiplier": 1}},
    "secure_aggregation": {"secure_aggregation": {}},
    "aggregation": {
        "method": {"name": "scaffold"},
        "aggregation": {"name": "multi_krum"},
        "adversaries": {"share": 0.2, "attack": {"name": "gaussian", "std": 0.1}},
    },
    "compression": {  # what is not sent is kept, and sent later
        "method": {"name": "scaffold"},
        "uplink": {"name": "topk", "fraction": 0.1},
        "downlink": {"name": "qsgd", "levels": 127},
    },
    "devices": {  # which learn how much a method computes and sends
        **with_method("fedrep", partition={"clients": 20}),
        "devices": DEVICES,
    },
    "your own": {"conditions": [{"name": "test_condition:Remembers"}]},
}


# By day those that keep something from round to round.
KEEPING = {"privacy", "compression", "devices", "your own"}


@pytest.mark.parametrize("condition", by_day(CONDITIONS, KEEPING))
def test_a_run_keeps_the_contract(finish: Finish, tmp_path: Path, condition: str) -> None:
    sections = CONDITIONS[condition]
    train = {"rounds": 4, "participation": 0.7}
    done = finish(**sections, train=train, checkpoint={"every": 1})
    testing._check_run(done, tmp_path)
    if condition == "devices":
        assert (done.clients["dropped"] == "deadline").any()
    if condition == "your own":
        trained = done.clients.dropna(subset="loss")
        before = trained.groupby("client").cumcount()
        assert trained["seen"].tolist() == before.tolist()
        assert done.rounds["rounds_seen"].to_list() == [1, 2, 3, 4]
