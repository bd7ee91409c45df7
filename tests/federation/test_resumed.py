"""Runs under each condition keep the contract, also interrupted and resumed, and in stacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments import FEW, Finish, with_method
from fedsim import testing

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
        **with_method("fedrep", data=FEW, partition={"clients": 20}),
        "devices": DEVICES,
    },
    "your own": {"conditions": [{"name": "test_condition:Remembers"}]},
}


@pytest.mark.parametrize("condition", CONDITIONS)
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
