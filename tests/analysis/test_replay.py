"""Models of finished runs, re-made after any round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trained import Trained, arrays_of, assert_same, watch

from experiments import KINDS, Finish, by_day, refusal, with_method
from fedsim import Run, replay
from fedsim.analysis.replay import ClientModel, ModelSnapshot, Replay, client_models
from fedsim.explain.explainers.mimic import Mimicked, TreeExplainer
from fedsim.federation import Client

Seen = dict[tuple[int, int], dict[str, Any]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What each client trains in each round from now on, by client and round."""
    found = Trained()
    watch(monkeypatch, found)
    return found.seen


def client_model(run: Run, k: int, after: int | None = None) -> tuple[ClientModel, Replay]:
    models, again = client_models(run, [k], after, of="cohort")
    return models[k], again


@pytest.mark.parametrize("name", ["openfl_xai", "local_rules"])
def test_clients_with_rules(finish: Finish, seen: Seen, name: str) -> None:
    """Of methods that learn networks see tests/methods/test_every_method.py."""
    done = finish(**{**KINDS["rules"], "method": {"name": name}, "train": {"rounds": 1}})
    before = dict(seen)
    assert len(before) == 4
    models, again = client_models(done, range(4), 1, of="cohort")
    assert again.after == 1
    for k in range(4):
        assert_same(models[k], before[k, 1])


def test_another_result_is_noticed(finish: Finish, monkeypatch: pytest.MonkeyPatch) -> None:
    done = finish(train={"rounds": 3})
    train = Client.train

    def a_bit_off(self: Client, *arguments: Any, **more: Any) -> Tensor:
        trained = train(self, *arguments, **more)
        return trained + 1e-4 if self.round == 2 else trained

    monkeypatch.setattr(Client, "train", a_bit_off)  # as on another machine
    replay(done, 1)
    assert ": round 2 has a different result here: " in refusal(lambda: replay(done, 2))
    monkeypatch.setattr(Client, "train", train)
    replay(done, 2)
    done.rounds["further"] = 1.0
    told = refusal(lambda: replay(done, 1))
    assert "further in rounds.parquet is None, and was 1.0" in told


def test_clients_that_sat_out_and_what_there_is_not(finish: Finish) -> None:
    done = finish(train={"participation": 0.2, "rounds": 6})
    took: dict[int, list[int]] = done.clients.groupby("client")["round"].agg(list).to_dict()
    k = next(k for k in took if len(took[k]) > 1)
    _, again = client_model(done, k)
    assert again.after == took[k][-1]
    out = next(t for t in range(1, 7) if t not in took[k])
    other = next(i for i in took if not {*took[i]} & {*took[k]})
    those = ", ".join(map(str, took[k]))
    for ask, message in [
        (lambda: client_model(done, k, out), f"was not trained in round {out}; it did in {those}"),
        (lambda: replay(done, 7), f"{done.path}: there is no round 7; it has 6"),
        (lambda: replay(done).next_round(), f"{done.path}: there is no round 7; it has 6"),
        (lambda: client_models(done, [k], 0), f"{done.path}: there is no round 0; it has 6"),
        (lambda: client_models(done, [10]), "there is no client 10; there are 10, counted from 0"),
        (
            lambda: client_models(done, [k, other]),
            f"there is no round in which all of these clients were trained: {k}, {other}",
        ),
    ]:
        assert refusal(ask).removeprefix(f"client {k} ") == message


def test_several_clients_at_once(finish: Finish, seen: Seen) -> None:
    done = finish(train={"participation": 0.6, "rounds": 4})
    before = dict(seen)
    cohort = sorted(k for k, t in before if t == 3)
    models, again = client_models(done, cohort, 3)
    assert sorted(models) == cohort
    again.next_round()  # what follows changes no model
    for k in cohort:
        assert_same(models[k], before[k, 3])
    subjects = ModelSnapshot.of_clients(done, cohort, 3)
    for k, network in zip(cohort, [subject.network() for subject in subjects], strict=True):
        weights = torch.cat([w.flatten() for w in network.parameters()])
        np.testing.assert_array_equal(weights.detach(), arrays_of(before[k, 3])["weights"])
    common = [t for t in range(1, 5) if {(0, t), (1, t)} <= set(before)]
    _, again = client_models(done, [0, 1])
    assert again.after == common[-1]


IN_TURN = {"kind": "own_tasks", "tasks": [[["negative"], ["positive"]]] * 3}
ADAM = {"name": "adam", "lr": 0.01}


@pytest.mark.filterwarnings("ignore:.*words get random vectors")
@pytest.mark.parametrize(
    "name",
    by_day(["fedweit", "fedrnl", "fedseit", "fedprox"], ["fedweit", "fedrnl"]),
)
def test_documents_and_tasks(finish: Finish, seen: Seen, name: str) -> None:
    reading = {**KINDS["documents"], "partition": IN_TURN, "method": {"name": name}}
    sections = KINDS["rationales"] if name == "fedrnl" else reading
    done = finish(**sections, train={"rounds": 4, "optimizer": ADAM})
    before = dict(seen)
    for t in (2, 3):
        models, _ = client_models(done, [0, 2], t, of="cohort")
        for k, own in models.items():
            assert_same(own, before[k, t])


def test_a_client_chooses_among_its_own_tasks_classes(finish: Finish) -> None:
    done = finish(
        partition={"kind": "own_tasks", "tasks": [[["0", "1"], ["2", "3"]]]}, train={"rounds": 4}
    )
    for after, title, classes in [(2, "task 0 (0, 1)", {0, 1}), (4, "task 1 (2, 3)", {2, 3})]:
        subject = ModelSnapshot.of(done, client=0, after=after)
        assert subject.title == f"client 0's model after round {after}, for its {title}"
        data, fed = subject.dataset, subject.again.fed
        x = fed.server.prepare(data.test_x, data.test_y).x
        assert set(subject.network()(x).argmax(dim=1).tolist()) <= classes
        mimicked = subject.explain(TreeExplainer(images=100, iterations=300))
        assert isinstance(mimicked, Mimicked)
        assert set(mimicked.mimic.predicted.tolist()) <= classes


def test_a_personal_model_is_asked_for_out_of_its_rounds(finish: Finish) -> None:
    done = finish(**with_method("local", train={"rounds": 4, "participation": 0.1}))
    k, t = 5, 2  # the only one in round 2, and in no other
    for after in (0, 5):
        told = refusal(lambda after=after: client_models(done, [k], after))
        assert f"there is no round {after}; it has 4" in told
    told = refusal(lambda: client_models(done, [k], 1, of="cohort"))
    assert f"client {k} was not trained in round 1; it did" in told
    then, _ = client_models(done, [k], t)
    at_the_end, _ = client_models(done, [k])
    assert_same(then[k], at_the_end[k])  # kept as it was
