"""Clients that learn one task after another: what methods see, and what is put on record."""

from __future__ import annotations

import copy
from collections import OrderedDict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments import (
    MECHANISMS,
    NEEDS,
    NETWORK_METHODS,
    Finish,
    by_day,
    examples,
    federation,
    interrupted,
    small_experiment,
    with_method,
)
from fedsim import Run, resume, run
from fedsim.data import Dataset, TaskSequence
from fedsim.data.task_sequence import task_row
from fedsim.errors import ClientError, ExperimentError
from fedsim.federation import Client, Federation, PerClient, Update
from fedsim.launch.prepare import prepare
from fedsim.methods import State, centralised, methods
from fedsim.methods.fedavg import FedAvg
from fedsim.methods.fedweit.method import task_test
from fedsim.methods.local import Local
from fedsim.models import Classifier
from fedsim.results.records import hashes
from fedsim.training import FlatModel

CPU = torch.device("cpu")

# Four clients, two tasks each, some of them alike, one with three classes and one with a single.
OWN = [
    [["0", "1"], ["2", "3"]],
    [["3", "2"], ["0", "1", "4"]],
    [["5", "6"], ["7"]],
    [["0", "6"], ["8", "9"]],
]
STREAM: dict[str, Any] = {"kind": "own_tasks", "tasks": OWN}
TABLE = {"name": "synthetic", "samples": 600, "test_samples": 700, "shape": [6]}
SMALL: dict[str, Any] = {
    "partition": STREAM,
    "data": TABLE,
    "model": {"name": "mlp", "hidden": [8]},
}


def streams(**sections: Any) -> Any:
    train = {"rounds": 4, **sections.pop("train", {})}
    return small_experiment(**{**SMALL, **sections, "train": train})


def stream(splits: Any) -> TaskSequence:
    assert splits.sequence is not None
    return splits.sequence


class Watches(FedAvg):
    """Clients send all that they see."""

    name: str = f"{__name__}:Watches"

    def watch(self, client: Client) -> dict[str, Any]:
        sequence, data, aside = client.splits.sequence, client.data, client.validation
        assert sequence is not None
        tests = [task_test(client, i) for i in range(sequence.num_tasks)]
        return {
            **{"task": client.splits.task, "samples": client.num_samples},
            **{"rows": data.table[0], "x": data.x, "y": data.y},
            **{"aside": aside.x, "aside_y": aside.y, "unlabelled": client.unlabelled},
            "labels": [list(of_task) for of_task in sequence.labels[client.id]],
            **{"tests": [test.x for test in tests], "tests_y": [test.y for test in tests]},
            "test": client.test.x,
            "answers": client.model.module(client.central_test.x).argmax(dim=1),
        }

    def spoil(self, client: Client) -> None:
        """Lets the network answer as it likes, as no method would."""
        client.model.restrict_classes(None)


@pytest.mark.parametrize("t", [1, 2, 3, 4])
def test_clients_see_the_task_under_way_and_no_other(t: int) -> None:
    experiment = streams(method={"name": f"{__name__}:Watches"})
    data, splits, _ = prepare(experiment)
    of, now = stream(splits), (t - 1) // 2
    fed = federation(experiment)
    fed.runner.begin(t)
    assert fed.server.splits.task == now
    fed.each(experiment.method.spoil, range(4))  # which is undone for the next call
    sent = fed.gather(experiment.method.watch, range(4))
    assert list(sent) == [0, 1, 2, 3]
    for k, seen in sent.items():
        rows, aside = of.train[2 * k + now], of.validation[2 * k + now]
        labels = [sorted(int(name) for name in names) for names in OWN[k]]
        among = [np.isin(data.test_y, own) for own in labels]
        expected = {
            **{"task": now, "samples": len(rows), "labels": labels},
            **{"rows": data.x[rows], "x": data.x[rows], "y": data.y[rows]},
            **{"aside": data.x[aside], "aside_y": data.y[aside]},
            "tests": [data.test_x[own] for own in among],
            "tests_y": [data.test_y[own] for own in among],
            "test": data.test_x[among[now]],
        }
        np.testing.assert_equal({name: seen[name] for name in expected}, expected)
        assert fed.server.num_samples[k] == len(rows)
        assert sorted(set(seen["y"].tolist())) == labels[now]
        assert len(seen["unlabelled"]) == 0
        assert set(seen["answers"].tolist()) <= set(labels[now])


# answers among some classes


def network(kind: str = "classifier", seed: int = 0, scale: float = 1.0) -> FlatModel:
    """A network with a head, one without, or one whose inputs go into what is called so."""
    torch.manual_seed(seed)
    first, last = nn.Linear(4, 5), nn.Linear(5, 6)
    built = {
        "classifier": Classifier(nn.Sequential(first, nn.ReLU()), last),
        "plain": nn.Sequential(first, nn.ReLU(), last),
        "head first": nn.Sequential(OrderedDict(head=first, relu=nn.ReLU(), last=last)),
    }[kind]
    model = FlatModel(built, CPU)
    model.load(model.vector * scale)
    return model


@pytest.mark.parametrize("kind", ["classifier", "plain"])
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1.0, 30.0]),
)
@examples(25)
def test_only_some_classes_are_answered_and_learnt(
    kind: str, labels: list[int], seed: int, scale: float
) -> None:
    model = network(kind, seed, scale)
    x = torch.randn(9, 4)
    y = torch.tensor(labels)[torch.randint(len(labels), (9,))]
    free, start = model.module(x).detach(), model.weights()
    place = torch.tensor([labels.index(label) for label in y.tolist()])
    expected = model.gradient(cross_entropy(model.module(x)[:, labels], place)).clone()
    model.restrict_classes(None)  # which they are not yet
    assert torch.equal(model.module(x), free)

    model.restrict_classes(labels)
    among = model.module(x)
    assert torch.equal(among[:, labels], free[:, labels])
    p = among.softmax(dim=1)
    others = [label for label in range(6) if label not in labels]
    assert not p[:, others].any()
    assert torch.isfinite(among).all()
    assert torch.allclose(p[:, labels], free[:, labels].softmax(dim=1))
    assert set(among.argmax(dim=1).tolist()) <= set(labels)
    gradient = model.gradient(cross_entropy(among, y))
    assert torch.allclose(gradient, expected, atol=1e-6 * scale)
    *_, weight, bias = model.named(gradient).values()
    assert not weight[others].any()
    assert not bias[others].any()

    model.restrict_classes(None)
    assert torch.equal(model.module(x), free)
    assert np.array_equal(model.weights(), start)


@pytest.mark.parametrize("kind", ["classifier", "head first"])
def test_it_is_what_a_network_or_its_copy_returns_that_is_lowered(kind: str) -> None:
    model = network(kind)
    model.restrict_classes([1, 4])
    twin = copy.deepcopy(model.module)
    model.restrict_classes([0, 5])
    for module in (model.module, twin):
        assert set(module(torch.randn(50, 4)).argmax(dim=1).tolist()) <= {0, 5}


# evaluation


def written_out(network: nn.Module, data: Dataset, labels: tuple[int, ...]) -> tuple[float, float]:
    """Mean cross-entropy and accuracy on the test examples of these classes, among them."""
    own = np.isin(data.test_y, labels)
    y = torch.tensor(np.searchsorted(labels, data.test_y[own]))
    with torch.no_grad():
        logits = network.eval()(torch.tensor(data.test_x[own]))[:, list(labels)]
    return float(cross_entropy(logits, y)), float((logits.argmax(dim=1) == y).double().mean())


def check_seen(done: Run) -> None:
    """The scores of a round are the mean over the tasks seen, of all clients."""
    seen = done.tasks[done.tasks["seen"]].groupby("round")
    for name in ("accuracy", "loss"):
        assert list(done.rounds[name]) == pytest.approx(list(seen[name].mean()))


TESTED = {"evaluate": {"clients": True}}


@pytest.fixture(scope="module")
def of_stream(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(streams(**TESTED), tmp_path_factory.mktemp("stream"))


def test_a_global_model_is_tested_on_each_task_as_written_out(of_stream: Run) -> None:
    data, splits, spec = prepare(of_stream.experiment)
    plain = spec.build_model()
    plain.load_state_dict(of_stream.weights())
    tasks = of_stream.tasks.set_index(["round", "client", "task"])
    assert len(tasks.loc[4]) == 8
    for k, own in enumerate(stream(splits).labels):
        for i, labels in enumerate(own):
            loss, accuracy = written_out(plain, data, labels)
            row = tasks.loc[4, k, i]
            assert row["accuracy"] == pytest.approx(accuracy)
            assert row["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
            assert row["classes"] == len(labels)
    check_seen(of_stream)
    assert of_stream.rounds["accuracy"].iloc[-1] > 0.6
    for row in of_stream.clients.to_dict("records"):  # who test the task under way
        of = tasks.loc[row["round"], row["client"], (row["round"] - 1) // 2]
        assert row["test_accuracy"] == pytest.approx(of["accuracy"])
        assert row["test_loss"] == pytest.approx(of["loss"], rel=1e-5)
    assert "client_accuracy" in of_stream.rounds


def test_the_table_of_tasks(finish: Finish, of_stream: Run) -> None:
    tasks = finish(**SMALL, train={"rounds": 4}, evaluate={"every": 3}).tasks
    columns = ["round", "client", "task", "seen", "classes", "loss", "accuracy"]
    assert list(tasks.columns) == columns
    assert tasks["seen"].dtype == bool
    expected = [(t, k, i) for t in (3, 4) for k in range(4) for i in range(2)]
    assert list(tasks[["round", "client", "task"]].itertuples(index=False, name=None)) == expected
    assert tasks["seen"].all()  # the second task is under way in round 3
    first = of_stream.tasks
    assert list(first[~first["seen"]]["round"].unique()) == [1, 2]
    assert set(first[~first["seen"]]["task"]) == {1}
    assert finish(train={"rounds": 1}).tasks.empty
    assert pd.read_parquet(of_stream.path / "tasks.parquet").equals(first)


def test_local_scores_each_clients_own_model() -> None:
    experiment = streams(method={"name": "local"}, train={"participation": 0.5})
    data, splits, spec = prepare(experiment)
    fed, method = federation(experiment), experiment.method
    assert isinstance(method, Local)
    plain = FlatModel(spec.build_model(), CPU)
    state = method.init(fed)
    for t in (1, 2, 3):
        fed.runner.begin(t)
        state = method.round(fed, state, t)
        method.evaluate(fed, state)
        record, tables = fed.runner.records()
        trained = sorted(fed.runner.states())
        assert [row["client"] for row in tables["tasks"]] == [k for k in trained for _ in range(2)]
        if t == 2:
            continue
        for row in tables["tasks"]:
            kept = fed.runner.fetch(fed.runner.states()[row["client"]])
            plain.load(torch.tensor(kept["weights"]))
            of = stream(splits).labels[row["client"]][row["task"]]
            loss, accuracy = written_out(plain.module, data, of)
            assert row["accuracy"] == pytest.approx(accuracy)
            assert row["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
        seen = [row["accuracy"] for row in tables["tasks"] if row["seen"]]
        assert record["accuracy"] == pytest.approx(np.mean(seen))


def test_centralised_learns_all_tasks_at_once(
    finish: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt, train = [], centralised.train  # type: ignore[attr-defined]

    def spy(model: Any, task: Any, *rest: Any) -> Any:
        learnt.append((task.x.numpy().copy(), task.y.numpy().copy()))
        return train(model, task, *rest)

    monkeypatch.setattr(centralised, "train", spy)
    sections = {**SMALL, "method": {"name": "centralised"}, "train": {"rounds": 4}}
    done = finish(**sections)
    data, splits, _ = prepare(small_experiment(**sections))
    rows = np.sort(stream(splits).train.values)
    assert len(np.unique(rows)) == len(rows)
    assert len(learnt) == 4
    for x, y in learnt:
        assert np.array_equal(x, data.x[rows])
        assert np.array_equal(y, data.y[rows])
    check_seen(done)
    assert done.rounds["accuracy"].iloc[-1] > 0.8


# any method

# What makes those work on a stream that hold unlabelled examples otherwise.
AUXILIARY = {"name": "synthetic", "samples": 30, "test_samples": 10, "shape": [1, 8, 8]}
WITHOUT_SHARES: dict[str, dict[str, Any]] = {
    "fedbuff": {"buffer": 1},  # of two clients
    "feddf": {"auxiliary": AUXILIARY},
    "xpfl": {"lam": 0, "psi": 0.0},
}
WITH_SHARES = [name for name in NETWORK_METHODS if "partition" in NEEDS.get(name, {})]
RUNNING = [
    name for name in NETWORK_METHODS if dict(methods.items())[name].learns.task_sequences != "no"
]
TWO = [[["0", "1"], ["2", "3"]], [["4", "5"], ["0", "6"]]]


def of_images(name: str) -> dict[str, Any]:
    """A small experiment with that method on a stream, in as few rounds as it takes."""
    sections = with_method(name)
    sections.pop("partition", None)
    if name in WITHOUT_SHARES:
        sections["method"] = {"name": name, **WITHOUT_SHARES[name]}
    rounds = {"train": {**sections.pop("train", {}), "rounds": 2}}
    digits = {"name": "digits"}
    return {**sections, **rounds, "data": digits, "partition": {"kind": "own_tasks", "tasks": TWO}}


# Clients train on classes of others (a pool, a generator), are asked for something once, or
# explain a class by how it stands out from all; or the server compares their models.
REFUSED = [
    *("fedaux", "feddisco", "fedfed", "fedgen", "fedxds", "semifl", "sse_agg"),
    "xfedalign",
]


def test_every_method_runs_or_is_refused() -> None:
    assert {*RUNNING, *REFUSED} == set(NETWORK_METHODS)


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_cannot_are_refused(name: str) -> None:
    sections = {**of_images(name), "method": {"name": name}, "train": {"rounds": 20}}
    message = f"method.name={name} cannot learn sequences of tasks; methods that can: .*fedseit"
    with pytest.raises(ExperimentError, match=message):
        prepare(small_experiment(**sections))


@pytest.mark.parametrize("name", by_day(RUNNING, [*MECHANISMS, "fedavg", "moon", "ditto"]))
def test_any_method_learns_a_stream(tmp_path: Path, name: str) -> None:
    found = run(small_experiment(**of_images(name), evaluate={"clients": True}), tmp_path)
    T, R = 2, len(found.rounds)
    assert len(found.tasks) == R * 2 * T
    rows = product(range(1, R + 1), range(2), range(T))
    assert list(found.tasks["seen"]) == [t > R // 2 or i == 0 for t, _, i in rows]
    assert found.tasks["accuracy"].between(0, 1).all()
    assert np.isfinite(found.tasks["loss"]).all()
    check_seen(found)
    assert found.rounds["accuracy"].max() > 0.5  # more than guessing between two
    assert found.clients["test_accuracy"].notna().all()
    losses = found.rounds["train_loss"].dropna()  # among the classes of each task
    assert len(losses)
    assert losses.max() < 100


@pytest.mark.parametrize("name", [name for name in WITH_SHARES if name not in REFUSED])
def test_methods_whose_clients_hold_unlabelled_examples_are_refused(name: str) -> None:
    plain = small_experiment(**{**of_images(name), "method": {"name": name}})
    with pytest.raises(ExperimentError, match=f"method.name={name}.*partition[.].*_fraction"):
        prepare(plain)


# stacks, hashes, checkpoints


def test_clients_of_a_stream_are_trained_one_by_one(tmp_path: Path, of_stream: Run) -> None:
    said: list[Any] = []
    engine = {"kind": "local", "clients_per_step": 2}
    stacked = run(streams(**TESTED, engine=engine), tmp_path, said.append)
    assert "clients are trained one by one: clients learn different tasks" in said
    assert stacked.manifest["clients_per_step"] == 1
    assert stacked.result_hash == of_stream.result_hash


def hash_of(**partition: Any) -> dict[str, str]:
    experiment = streams(partition={**STREAM, **partition})
    data, splits, _ = prepare(experiment)
    return hashes(data, splits, experiment)


def test_the_hash_of_a_partition_is_that_of_its_stream(tmp_path: Path, of_stream: Run) -> None:
    first = hash_of()
    assert hash_of() == first
    others = [
        hash_of(tasks=[own[::-1] for own in OWN]),
        hash_of(tasks=OWN[::-1]),
        hash_of(tasks=[[OWN[0][0][::-1], OWN[0][1]], *OWN[1:]]),  # classes in another order
        hash_of(validation_fraction=0.2),
    ]
    for other in others:
        assert other["data_hash"] == first["data_hash"]
        assert other["partition_hash"] != first["partition_hash"]
    swapped = {**STREAM, "tasks": [own[::-1] for own in OWN]}
    other_order = run(streams(**TESTED, partition=swapped), tmp_path)
    assert other_order.result_hash != of_stream.result_hash


# At the end of a task, and within one.
@pytest.mark.parametrize(("method", "stop"), [("fedavg", 2), ("local", 3)])
def test_a_stream_goes_on_after_an_interruption(tmp_path: Path, method: str, stop: int) -> None:
    sections: dict[str, Any] = {"method": {"name": method}, "checkpoint": {"every": 1}}
    whole = run(streams(**sections), tmp_path / "whole")
    continued = resume(interrupted(streams(**sections), tmp_path / "cut", stop))
    assert continued.result_hash == whole.result_hash
    assert continued.tasks.equals(whole.tasks)


# reports of a method's own


class Reports(FedAvg):
    """Puts scores of its own on record, or what is filled anyway."""

    name: str = f"{__name__}:Reports"
    column: str = "cosine"

    def round(self, fed: Federation, state: State, t: int) -> State:
        fed.each(self.tell, [2, 0])
        return super().round(fed, state, t)

    def evaluate(self, fed: Federation, state: State) -> None:
        pass

    def tell(self, client: Client) -> None:
        sequence, now = client.splits.sequence, client.splits.task
        assert sequence is not None
        scores = {self.column: 0.5 + client.id}
        client.record("tasks", **task_row(sequence, client.id, 1, now, scores))


def test_a_method_reports_of_tasks_what_it_likes(finish: Finish) -> None:
    done = finish(**SMALL, method={"name": f"{__name__}:Reports"}, train={"rounds": 4})
    expected = [(t, k, 1, t > 2, len(OWN[k][1]), 0.5 + k) for t, k in product(range(1, 5), (0, 2))]
    columns = ["round", "client", "task", "seen", "classes", "cosine"]
    assert list(done.tasks[columns].itertuples(index=False, name=None)) == expected
    for column in ("seen", "classes", "round"):  # which are filled anyway
        method = {"name": f"{__name__}:Reports", "column": column}
        with pytest.raises(ClientError, match=f"'{column}' is a built-in column"):
            finish(**SMALL, method=method, train={"rounds": 2})


# what is each client's own


def part(k: int) -> dict[str, Any]:
    """4·(k + 1) bytes of numbers, and a byte of bits."""
    return {"numbers": np.full(k + 1, k, dtype=np.float32), "bits": [np.ones(3, dtype=bool), k]}


class Hands(FedAvg):
    """Sends each client something of its own, and client 3 nothing; in each of the three ways."""

    name: str = f"{__name__}:Hands"

    def round(self, fed: Federation, state: State, t: int) -> State:
        parts = {k: part(k) for k in range(fed.num_clients) if k != 3}
        if t == 1:
            taken = fed.gather(self.take, range(10), own=PerClient(parts), common=np.zeros(5))
            assert [found["length"] for found in taken.values()] == [1, 2, 3, 0, *range(5, 11)]
            assert all(found["own"] == k for k, found in taken.items() if k != 3)
        if t == 2:
            more = PerClient({k: np.zeros(2, np.float32) for k in (0, 3)})
            fed.each(self.keep, range(10), own=PerClient(parts), more=more)
        assert all(np.array_equal(parts[k]["numbers"], part(k)["numbers"]) for k in parts)
        cohort = [1, 3, 7] if t == 3 else []
        if cohort:
            mean = fed.mean(self.add, cohort, own=PerClient(parts), weights=state.weights)
            assert mean.count == 3
            assert mean.weights == pytest.approx(state.weights + 8 / 3, abs=1e-5)
        return state

    def keep(self, client: Client, own: Any, more: Tensor | None) -> None:
        assert (own is None) == (client.id == 3)
        assert (more is None) == (client.id not in (0, 3))

    def take(self, client: Client, own: Any, common: Tensor) -> dict[str, Any]:
        if own is None:
            return {"length": 0, "own": None}
        assert own["numbers"].tolist() == [client.id] * (client.id + 1)
        assert own["bits"][0].dtype == torch.bool
        own["numbers"].add_(100)  # a copy of its own
        own["numbers"].data.add_(100)
        return {"length": len(own["numbers"]), "own": own["bits"][1]}

    def add(self, client: Client, own: Any, weights: Tensor) -> Update:
        return Update(weights=weights + (0 if own is None else own["bits"][1]))


def test_each_client_is_sent_its_own_part(finish: Finish) -> None:
    done = finish(method={"name": f"{__name__}:Hands"}, train={"rounds": 3})
    down = done.clients.pivot(index="round", columns="client", values="bytes_down")
    own = np.array([0 if k == 3 else 4 * (k + 1) + 1 for k in range(10)])
    assert down.loc[1].tolist() == (own + 5 * 8).tolist()
    second: NDArray[np.int64] = own.copy()
    second[[0, 3]] += 8
    assert down.loc[2].tolist() == second.tolist()
    size = sum(tensor.numel() for tensor in done.weights().values())
    third = down.loc[3].dropna()
    assert third.to_dict() == {k: 4 * size + own[k] for k in (1, 3, 7)}
    assert list(done.rounds["bytes_down"]) == down.sum(axis=1).tolist()
