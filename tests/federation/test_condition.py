"""Conditions of one's own: from outside the package, with methods, tables and the report."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from experiments import Finish, federation, small_experiment, with_method
from fedsim.errors import BadInput, ExperimentError, FedsimError
from fedsim.federation import (
    Client,
    Cohort,
    Condition,
    Exchange,
    Federation,
    Rehearsed,
    Round,
    Sent,
    Update,
    Withdrawn,
)
from fedsim.launch.prepare import prepare
from fedsim.methods import State
from fedsim.methods.fedavg import FedAvg
from fedsim.methods.learns import Learns
from fedsim.objectives import Metric
from fedsim.results.report import report
from fedsim.training import TrainingJob

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
    assert finish(**sections).result_hash != done.result_hash
    if name == "fedavg":
        assert "own_channel:Lossy" in report(done.path).read_text()


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
        # Clients that are tested send nothing, which passes no condition.
        {"evaluate": {"clients": True}, "partition": {"test_fraction": 0.2}},
    ],
    ids=lambda further: next(iter(further)),
)
def test_beside_other_sections(finish: Finish, further: dict[str, Any]) -> None:
    done = finish(train={"rounds": 2}, conditions=[LOSSY], **further)
    assert (done.rounds["entries_lost"] > 0).all()


def test_a_method_may_begin_without_a_mean(finish: Finish) -> None:
    sections = with_method("fedxds", train={"rounds": 3}, aggregation={"name": "median"})
    sections["method"] = {**sections["method"], "warmup_rounds": 0}
    assert len(finish(**sections).rounds) == 3


class Shortens(Condition):
    """Half of each vector arrives, as zeros beyond; its messages are half as long."""

    name: str = "test_condition:Shortens"

    def sent(self, client: Client, sent: Sent) -> Sent:
        if not isinstance(sent.message, Update):
            return sent
        halved = {
            n: v * (torch.arange(len(v)) < len(v) / 2) for n, v in sent.message.vectors.items()
        }
        return replace(sent, message=sent.message.with_vectors(halved), size=sent.size // 2)


class Misbehaves(Condition):
    """Does what a condition may not do."""

    name: str = "test_condition:Misbehaves"
    how: str

    @property
    def columns(self) -> tuple[str, ...]:
        return ("accuracy",) if self.how == "takes a column" else ()

    @property
    def client_columns(self) -> tuple[str, ...]:
        return ("samples",) if self.how == "takes a column of clients" else ()

    @property
    def idle(self) -> str:
        return "nothing is sent by pigeon" if self.how == "is idle" else ""

    @property
    def hides(self) -> frozenset[str]:
        return frozenset({"messages"} if self.how == "hides messages" else ())

    def check(self, spec: Any, splits: Any, network: Any) -> None:
        if self.how == "fails in check":
            raise ValueError(f"{len(splits)} clients")
        if self.how == "refuses":
            raise ExperimentError(f"conditions: {self.name}: not for {spec.functions.name}")

    def outgoing(self, round: Round, exchange: Exchange) -> Exchange:
        if self.how == "changes the cohort":
            return replace(exchange, cohort=exchange.cohort[:1])
        return exchange

    def training(self, client: Any, job: Any) -> Any:
        if self.how == "fails in training":
            raise ValueError(f"client {client.id} has {client.num_samples > 0} examples")
        return job

    def sent(self, client: Client, sent: Sent) -> Sent:
        if self.how == "keeps in place":
            sent.memory["seen"] = 1  # type: ignore[index]
        return sent

    def close(self, round: Round, ledger: dict[str, Any]) -> dict[str, float]:
        if self.how == "fails in close":
            return {"columns": ledger["never written"]}
        return {"surprise": 1.0} if self.how == "does not name a column" else {}


def of(kind: type[Condition], **fields: Any) -> dict[str, Any]:
    return {"conditions": [{"name": f"test_condition:{kind.__name__}", **fields}]}


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


def test_training_is_that_of_each_client_alone_or_in_a_stack(finish: Finish) -> None:
    sections: dict[str, Any] = {"conditions": [Slower], "train": {"rounds": 2}}
    alone = finish(**sections, engine={"kind": "local"})
    together = finish(**sections, engine={"kind": "local", "clients_per_step": 5})
    plain = finish(train={"rounds": 2})
    for layer, w in alone.weights().items():
        np.testing.assert_allclose(w, together.weights()[layer], atol=1e-5)
    assert not all(np.allclose(w, plain.weights()[n]) for n, w in alone.weights().items())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("changes the cohort", "outgoing must leave the cohort and the function"),
        ("fails in training", "conditions: NAME: training: ValueError: client 0 has True"),
        ("fails in check", "conditions: NAME: check: ValueError: 10 clients ("),
        ("fails in close", "round 1, records: KeyError: 'never written' (test_condition.py, line"),
        ("refuses", "conditions: NAME: not for fedavg"),
        ("takes a column", "conditions: NAME: there is a column 'accuracy' already"),
        ("does not name a column", "NAME: the column 'surprise' is not among its `col"),
        ("keeps in place", "does not support item assignment (test_condition.py"),
        ("takes a column of clients", "NAME: there is a column 'samples' already"),
        ("is idle", "round 1: nothing is sent by pigeon, which are all that `NAME` is"),
        ("hides messages", "sends a message beside its update, which `NAME` hides"),
    ],
)
def test_what_a_condition_may_not_do(finish: Finish, how: str, message: str) -> None:
    message = re.escape(message.replace("NAME", "test_condition:Misbehaves"))
    method = Says if how == "hides messages" else FedAvg
    with pytest.raises(FedsimError, match=message):
        finish(method=method, train={"rounds": 1}, **of(Misbehaves, how=how))


class Chooses(Condition):
    """The same clients in every round, in any order; nobody in the second."""

    name: str = "test_condition:Chooses"
    loses_clients: ClassVar[bool] = True

    def sample(self, round: Round) -> Cohort:
        return np.array([7, 2, 2, 5] if round.t != 2 else [])


class Withdraws(Condition):
    """Every second client leaves the round when it has trained; in the second round all do."""

    name: str = "test_condition:Withdraws"
    order: ClassVar[int] = 95

    def outgoing(self, round: Round, exchange: Exchange) -> Exchange:
        gone = {k: True for k in exchange.cohort.tolist() if k % 2 or round.t == 2}
        return exchange.tell(self.name, gone) if round.running else exchange

    def answered(self, client: Client, size: int) -> int:
        if client.told.get(self.name):
            raise Withdrawn("withdrew", client.examples)
        return size


class Scores(Condition):
    """A score of the global model: the length of its outputs."""

    name: str = "test_condition:Scores"
    column: str = "output_length"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (Metric(self.column, "length of outputs"),)

    def totals(self, context: Any, network: nn.Module, part: slice) -> dict[str, Any]:
        with torch.no_grad():
            outputs = network(context.test_batch(part).x)
        return {"length": float(outputs.norm(dim=1).sum()), "count": len(outputs)}

    def scores(self, totals: dict[str, Any]) -> dict[str, float]:
        return {self.column: totals["length"] / totals["count"]}


class Rehearses(Condition):
    """What a client would do is seen before it does it."""

    name: str = "test_condition:Rehearses"
    columns: ClassVar[tuple[str, ...]] = ("announced",)

    def outgoing(self, round: Round, exchange: Exchange) -> Exchange:
        return exchange.tell(self.name, dict.fromkeys(exchange.cohort.tolist(), 0))

    def begin(self, id: int, told: Any, rehearse: Callable[[], Rehearsed]) -> Any:
        return rehearse().trained

    def answered(self, client: Client, size: int) -> int:
        if self.name in client.told:
            client.notes[self.name] = client.told[self.name] - client.examples
        return size

    def close(self, round: Round, ledger: dict[str, Any]) -> dict[str, float]:
        return {"announced": sum(abs(left) for _, left in round.notes.get(self.name, ()))}


@pytest.mark.parametrize("name", ["fedavg", "feddyn", "ditto"])
def test_who_takes_part_may_be_chosen(finish: Finish, name: str) -> None:
    """A round of nobody changes nothing."""
    done = finish(**with_method(name, train={"rounds": 3}), **of(Chooses))
    worked = done.clients.dropna(subset="loss").groupby("round")["client"].apply(list)
    assert worked.to_dict() == {1: [2, 5, 7], 3: [2, 5, 7]}


@pytest.mark.parametrize(
    ("sections", "section"),
    [
        (with_method("fedbuff", method={"buffer": 2}, devices={}), "devices"),
        ({"privacy": {"clip": 1.0, "noise_multiplier": 1.0}}, "privacy"),
    ],
)
def test_others_may_choose_them_already(sections: dict[str, Any], section: str) -> None:
    message = f"Chooses chooses the clients of a round, and `{section}` does so"
    with pytest.raises(BadInput, match=message):
        prepare(small_experiment(**sections, **of(Chooses)))


def test_who_withdraws_is_on_record_and_takes_no_further_part(finish: Finish) -> None:
    sections = {"method": {"name": "scaffold"}, "train": {"rounds": 3}, **of(Withdraws)}
    done = finish(**sections)
    gone = done.clients[done.clients["dropped"] == "withdrew"].groupby("round")["client"]
    odd = list(range(1, 10, 2))
    assert gone.apply(list).to_dict() == {1: odd, 2: list(range(10)), 3: odd}
    assert (done.clients.loc[done.clients["dropped"].notna(), "bytes_up"] == 0).all()
    assert done.rounds["bytes_down"].nunique() == 1
    timed = finish(**sections, devices={"deadline": 1e6})
    assert (timed.clients["dropped"].dropna() == "withdrew").all()
    assert (timed.rounds["simulated_seconds"] < 1e6).all()
    assert timed.rounds["accuracy"].to_list() == done.rounds["accuracy"].to_list()
    assert (timed.clients.loc[timed.clients["dropped"].notna(), "energy_joules"] > 0).all()
    for one in (done, timed):
        assert "round 2 changes nothing: no client is left" in (one.path / "log.txt").read_text()


class OneByOne(FedAvg):
    """Asks its clients one after another, and averages those that answer."""

    name: str = "test_condition:OneByOne"
    learns: ClassVar[Learns] = Learns(asks=frozenset({"messages"}))

    def round(self, fed: Federation, state: State, t: int) -> State:
        found = [fed.gather(self.sent, [k], weights=state.weights) for k in fed.sample(t)]
        return State(np.mean([w for one in found for w in one.values()], axis=0))

    def sent(self, client: Client, weights: torch.Tensor) -> torch.Tensor:
        return client.train(weights)


def test_the_round_goes_on_while_anybody_is_left(finish: Finish) -> None:
    done = finish(method=OneByOne, train={"rounds": 3}, **of(Withdraws))
    answers = done.clients.dropna(subset="loss").groupby("round")["client"].apply(list)
    assert answers.to_dict() == {1: [0, 2, 4, 6, 8], 3: [0, 2, 4, 6, 8]}


def test_a_deadline_that_only_shorter_messages_meet(finish: Finish) -> None:
    """What an own condition makes of messages is not known before the start."""
    devices = {"speed": 1e9, "download": 1e6, "upload": 1.0, "deadline": 0.05}
    with pytest.raises(BadInput, match=r"devices\.deadline=0\.05: no client meets it"):
        finish(train={"rounds": 1}, devices=devices)
    done = finish(train={"rounds": 1}, devices=devices, **of(Shortens))
    assert done.rounds["clients"].gt(0).all()


class Logs(FedAvg):
    """Records a column of its own."""

    name: str = "test_condition:Logs"
    column: str = "epsilon"
    where: str = "server"

    def round(self, fed: Federation, state: State, t: int) -> State:
        if self.where == "server":
            fed.log(**{self.column: 1.0})
        return super().round(fed, state, t)

    def local_update(self, client: Client, weights: torch.Tensor) -> Update:
        if self.where == "client":
            client.report(**{self.column: 1.0})
        return super().local_update(client, weights)


@pytest.mark.parametrize(
    ("where", "column", "sections", "owner"),
    [
        ("server", "epsilon", {"privacy": {"clip": 1, "noise_multiplier": 1}}, "privacy"),
        ("server", "entries_lost", {"conditions": [LOSSY]}, "own_channel:Lossy"),
        ("client", "entries_lost", {"conditions": [LOSSY]}, "own_channel:Lossy"),
        ("client", "energy_joules", {"devices": {}}, "devices"),
        (
            "client",
            "adversary",
            {"adversaries": {"share": 0.3, "attack": {"name": "sign_flip"}}},
            "adversaries/records",
        ),
    ],
)
def test_methods_record_no_column_of_a_condition(
    finish: Finish, where: str, column: str, sections: dict[str, Any], owner: str
) -> None:
    """Nor one of a section that is not used."""
    method = {"name": Logs().name, "where": where, "column": column}
    taken = f"'{column}' is a column of `"
    with pytest.raises(FedsimError, match=f"{taken}{owner}`; choose another"):
        finish(method=method, train={"rounds": 1}, **sections)
    with nullcontext() if "conditions" in sections else pytest.raises(FedsimError, match=taken):
        finish(method=method, train={"rounds": 1})


def test_scores_of_ones_own(finish: Finish) -> None:
    done = finish(train={"rounds": 2}, **of(Scores))
    assert (done.rounds["output_length"] > 0).all()
    with pytest.raises(BadInput, match="there is a column 'accuracy' already"):
        finish(train={"rounds": 2}, **of(Scores, column="accuracy"))


@pytest.mark.parametrize(
    "further",
    [
        {},
        {"devices": {"deadline": 0.5, "partial_work": True, "speed": 100.0}},
        {"explain": {"explainers": ["gradient"], "inputs": 2, "every": 1}},
        {"privacy": {"level": "example", "clip": 1.0, "noise_multiplier": 1.0}},
    ],
    ids=lambda further: next(iter(further), "alone"),
)
def test_a_rehearsal_is_of_the_client_itself(finish: Finish, further: dict[str, Any]) -> None:
    """It announces what the client then does, unless its device is too slow for that."""
    done = finish(train={"rounds": 2}, **further, **of(Rehearses))
    assert (done.rounds["announced"] == 0).all() == ("devices" not in further)
    assert done.rounds["clients"].eq(10).all()
    without = finish(train={"rounds": 2}, **further)
    for column in without.rounds.columns.drop(["seconds", "explain_seconds"], errors="ignore"):
        assert done.rounds[column].equals(without.rounds[column]), column
