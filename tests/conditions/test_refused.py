"""What conditions refuse in a round; before a run starts, see refusals.yaml."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import Tensor

from experiments import Finish, federation, small_experiment
from fedsim import Client, Federation, State, Update
from fedsim.errors import FedsimError, RunError
from fedsim.methods.fedavg import FedAvg

PRIVACY: dict[str, Any] = {"privacy": {"clip": 1.0, "noise_multiplier": 1.0}}
SECURE: dict[str, Any] = {"secure_aggregation": {}}


class Gathers(FedAvg):
    """Says nothing of what it gathers."""

    name: str = "test_refused:Gathers"

    def round(self, fed: Federation, state: State, t: int) -> State:
        fed.gather(self.count, fed.sample(t))
        return state

    def count(self, client: Client) -> dict[str, Any]:
        return {"samples": np.array([client.num_samples])}


class Silent(Gathers):
    """Clients train, and send nothing."""

    name: str = "test_refused:Silent"

    def round(self, fed: Federation, state: State, t: int) -> State:
        fed.each(self.train, fed.sample(t), weights=state.weights)
        return state

    def train(self, client: Client, weights: Tensor) -> None:
        client.train(weights)


class OneByOne(FedAvg):
    name: str = "test_refused:OneByOne"

    def round(self, fed: Federation, state: State, t: int) -> State:
        return State(weights=fed.mean(self.local_update, [0], weights=state.weights).weights)


class Counts(FedAvg):
    name: str = "test_refused:Counts"

    def round(self, fed: Federation, state: State, t: int) -> State:
        fed.log(largest=int(fed.server.num_samples.max()))
        return state


class Reads(FedAvg):
    name: str = "test_refused:Reads"

    def round(self, fed: Federation, state: State, t: int) -> State:
        len(fed.server.labelled_data)
        return state


class SendsNothing(FedAvg):
    name: str = "test_refused:SendsNothing"

    def local_update(self, client: Client, weights: Tensor) -> Update:
        return Update()


GATHERS = r"the method gathers each client's message \(count\), which `{}` hides"


@pytest.mark.parametrize(
    ("method", "sections", "message"),
    [
        (Gathers, SECURE, GATHERS.format("secure_aggregation")),
        (OneByOne, SECURE, "round 1: a cohort of 1, and secure_aggregation hides a cli"),
        (
            FedAvg,
            {"secure_aggregation": {"dropout": 0.5, "threshold": 1}},
            r"round 1: \d of 10 clients are left to unmask the sum, and .*=1 takes 10",
        ),
        (Gathers, PRIVACY, GATHERS.format("privacy")),
        (Counts, PRIVACY, "the method reads each client's number of examples"),
        (Reads, PRIVACY, "the method reads the clients' examples"),
        (SendsNothing, PRIVACY, "round 1: no client of the cohort sent anything to add noise to"),
        *(
            (own, {"uplink": {"name": "int8"}}, "round 1: clients send no updates.* leave it out")
            for own in (Silent, Gathers)
        ),
        (Gathers, {"downlink": {"name": "int8"}}, "round 1: the server sends.* leave it out"),
        (
            FedAvg,
            {"aggregation": {"name": "own_robust:Short"}},
            r"name=own_robust:Short: must return an array of shape \(2410,\), not \(3,\)",
        ),
        (
            FedAvg,
            {"aggregation": {"name": "own_robust:Undefined"}},
            "name=own_robust:Undefined: returns numbers that are NaN or infinite",
        ),
        (
            FedAvg,
            {"adversaries": {"share": 0.2, "attack": {"name": "gaussian", "std": 1e12}}},
            "name=gaussian forges values up to .*'weights'",
        ),
    ],
)
def test_in_a_round(
    finish: Finish, method: type[FedAvg], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(FedsimError, match=message):
        finish(method=method, train={"rounds": 1}, **sections)


def test_a_mean_of_nobody_has_no_noise_to_hide_in() -> None:
    fed = federation(small_experiment(**PRIVACY))
    fed.runner.begin(1)
    with pytest.raises(RunError, match="round 1: a mean of no clients"):
        fed.mean(FedAvg().local_update, [], weights=fed.initial_weights())
