"""Conditions of one's own: from outside the package, with methods, tables and the report."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from experiments import federation, server_states, small_experiment, with_method
from fedsim import Run
from fedsim.errors import BadInput, ClientError, FedsimError
from fedsim.federation import Client, Condition, Exchange, Round, Sent, Update
from fedsim.methods.fedavg import FedAvg
from fedsim.results.report import report
from fedsim.training import TrainingJob

Finish = Callable[..., Run]
LOSSY = {"name": "own_channel:Lossy", "share": 0.3}


@pytest.mark.parametrize("name", ["fedavg", "fednova", "scaffold"])
def test_a_channel_that_loses_entries(finish: Finish, name: str) -> None:
    """In the manifest, the tables and the report; less arrives, and each round differs."""
    sections = with_method(name, train={"rounds": 3})
    done = finish(**sections, conditions=[LOSSY])
    assert [c.model_dump() for c in done.experiment.conditions] == [LOSSY]
    trained = done.clients.dropna(subset="loss")
    size = federation(small_experiment(**sections)).server.model.size
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
    fed.runner.begin(1)
    w = fed.initial_weights()
    alone = [fed.mean(made.method.local_update, [k], weights=w).weights for k in range(10)]
    lossy = small_experiment(train={"rounds": 1}, conditions=[{**LOSSY, "share": 0.5}])
    ours = federation(lossy)
    ours.runner.begin(1)
    arrived = [ours.mean(lossy.method.local_update, [k], weights=w).weights for k in range(10)]
    for plain, one in zip(alone, arrived, strict=True):
        assert np.all((one == w) | (one == plain))
    n = fed.server.num_samples
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


class Narrow(Condition):
    """Changes the cohort."""

    name: str = "test_condition:Narrow"

    def outgoing(self, round: Round, exchange: Exchange) -> Exchange:
        return replace(exchange, cohort=exchange.cohort[:1])


class Breaks(Condition):
    """Raises where a client trains."""

    name: str = "test_condition:Breaks"

    def training(self, client: Any, job: Any) -> Any:
        raise ValueError(f"client {client.id} has {client.num_samples > 0} examples")


class Secretive(Condition):
    """Hides what clients send beside their vectors."""

    name: str = "test_condition:Secretive"

    @property
    def hides(self) -> frozenset[str]:
        return frozenset({"messages"})


class Says(FedAvg):
    """Does not declare that clients send messages."""

    name: str = "test_condition:Says"

    def local_update(self, client: Client, weights: Any) -> Update:
        return Update(weights=client.train(weights), message=client.num_samples)


class Remembers(Condition):
    """Keeps a tensor at each client, and counts rounds in a ledger of its own."""

    name: str = "test_condition:Remembers"
    columns: ClassVar[tuple[str, ...]] = ("rounds_seen",)

    def sent(self, client: Client, sent: Sent) -> Sent:
        before = sent.memory.get("seen", np.zeros(2000))
        client.report(seen=float(before[1500]))
        return replace(sent, memory={"seen": torch.as_tensor(before) + 1})

    def close(self, round: Round, ledger: dict[str, Any]) -> dict[str, float]:
        ledger["steps"] = ledger.get("steps", 0) + 1
        return {"rounds_seen": ledger["steps"]}


class Slower(Condition):
    """Client 3 trains at a tenth of the rate."""

    name: str = "test_condition:Slower"

    def training(self, client: Client, job: TrainingJob) -> TrainingJob:
        return replace(job, lr=job.lr / 10) if client.id == 3 else job


def test_what_is_kept_is_each_clients_own(finish: Finish) -> None:
    privacy = {"clip": 1.0, "noise_multiplier": 0.5}
    train = {"rounds": 3}
    done = finish(conditions=[Remembers], privacy=privacy, train=train, checkpoint={"every": 1})
    trained = done.clients.dropna(subset="loss")
    assert (trained["seen"] == trained["round"] - 1).all()
    assert done.rounds["rounds_seen"].to_list() == [1, 2, 3]
    plain = finish(privacy=privacy, train=train)
    assert done.rounds["epsilon"].equals(plain.rounds["epsilon"])


def test_training_is_that_of_each_client_alone_or_in_a_stack(finish: Finish) -> None:
    sections: dict[str, Any] = {"conditions": [Slower], "train": {"rounds": 2}}
    alone = finish(**sections, engine={"kind": "local"})
    together = finish(**sections, engine={"kind": "local", "clients_per_step": 5})
    plain = finish(train={"rounds": 2})
    for layer, w in alone.weights().items():
        np.testing.assert_allclose(w, together.weights()[layer], atol=1e-5)
    assert not all(np.allclose(w, plain.weights()[n]) for n, w in alone.weights().items())


def test_clients_that_send_nothing_pass_no_condition(finish: Finish) -> None:
    partition = {"test_fraction": 0.2}
    made = {"partition": partition, "evaluate": {"clients": True}, "train": {"rounds": 1}}
    assert len(finish(**made, conditions=[LOSSY]).rounds) == 1


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (Narrow, "test_condition:Narrow: outgoing must leave the cohort and the function"),
        (Breaks, "conditions: test_condition:Breaks: training: ValueError: client 0 has True"),
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


def test_a_message_that_is_hidden(finish: Finish) -> None:
    with pytest.raises(ClientError, match=r"sends a message .* `test_condition:Secretive` hides"):
        finish(method=Says, conditions=[Secretive], train={"rounds": 1})


def test_a_method_may_begin_without_a_mean(finish: Finish) -> None:
    sections = with_method("fedxds", train={"rounds": 3}, aggregation={"name": "median"})
    sections["method"] = {**sections["method"], "warmup_rounds": 0}
    assert len(finish(**sections).rounds) == 3


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
