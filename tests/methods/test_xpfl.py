"""XPFL: teachers, distillation, weights of the mean, personal models."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import ByHand, close
from torch import nn

from experiments import (
    LITTLE_TEACHER,
    QUARTER,
    WHOLE,
    Finish,
    federation,
    server_states,
    small_experiment,
)
from fedsim import Client, Experiment, NotCounted
from fedsim.launch.prepare import prepare
from fedsim.methods.xpfl import XPFL, Student, Teacher

SEMI = {"labelled_fraction": 0.3}
TRAIN = {"rounds": 3, "local_epochs": 1, "batch_size": 16, "optimizer": {"lr": 0.1}}
CNN = {"name": "cnn", "channels": [4, 4]}


def experiment(partition: dict[str, Any] | None = None, **sections: Any) -> Experiment:
    method = {"name": "xpfl", "teacher": LITTLE_TEACHER, **sections.pop("method", {})}
    train = {**TRAIN, **sections.pop("train", {})}
    return small_experiment(
        method=method, partition={**SEMI, **(partition or {})}, train=train, **sections
    )


# fedavg as a special case


@pytest.mark.parametrize("model", [CNN, {"name": "resnet8", "width": 2}])
def test_distillation_that_weighs_nothing_is_plain_training(model: dict[str, Any]) -> None:
    """The classifier is put beside P_k and taken out again, statistics of batch norm and all."""
    # In small batches batch norm makes much of how a step is rounded.
    train = {"rounds": 1, "batch_size": 128}
    usual: dict[str, Any] = {"data": WHOLE, "model": model, "train": train}
    one, other = (
        server_states(experiment(method={"lam": lam}, **usual))[1].weights for lam in (1e-30, 0.0)
    )
    np.testing.assert_allclose(one, other, atol=1e-6)


# the teacher and the student


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p * (p.log() - q.log())).sum(dim=1)


@pytest.mark.parametrize("loss_u", [2.0, 0.5, 0.1, 0.01, 0.0])
def test_how_the_distillation_is_weighed(loss_u: float) -> None:
    torch.manual_seed(0)
    teacher = Teacher(**LITTLE_TEACHER).build((1, 8, 8))
    classifier = prepare(experiment(model=CNN))[2].build_model()
    student = Student(classifier, nn.Linear(16, 8))  # type: ignore[arg-type]
    x, y = torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 2, 3, 4])
    features = student.classifier.features(x)
    ce = nn.functional.cross_entropy(student.classifier.head(features), y, reduction="none")
    a, b = teacher.features(x), student.projection(features)

    found = XPFL(lam=1.5, tau=2.0).loss(teacher, loss_u)(student, x, y, {})
    expected = ce + 1.5 * 4 / max(loss_u, 0.05) * kl((a / 2).softmax(1), (b / 2).softmax(1))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    # The released code: 1000 times the mean over images and (here 8) features.
    found = XPFL(lam=1000 / 8, tau=3.0, weigh="code").loss(teacher, loss_u)(student, x, y, {})
    scale = max(loss_u, 1e-6) / 3
    p, q = (a * scale).softmax(dim=1), (b * scale).softmax(dim=1)
    torch.testing.assert_close(found, ce + 1000 / 8 * kl(p, q), rtol=1e-5, atol=1e-4)
    mean = (p * (p.log() - q.log())).mean()
    torch.testing.assert_close(found.mean(), ce.mean() + 1000 * mean, rtol=1e-5, atol=1e-4)


def test_teachers_learn_and_stay_with_their_clients(finish: Finish) -> None:
    method = {"name": "xpfl", "teacher": LITTLE_TEACHER | {"batch_size": 16}}
    done = finish(data=QUARTER, method=method, partition=SEMI, train={**TRAIN, "rounds": 8})
    losses = done.clients.pivot(index="round", columns="client", values="teacher_loss")
    assert (losses.loc[8] < 0.7 * losses.loc[1]).mean() > 0.8


def test_teachers_and_projections_are_each_clients_own() -> None:
    _, _, _, states = next(ByHand(experiment()).rounds())
    for name in ("teacher", "projection", "weights"):
        vectors = [state[name] for state in states.values()]
        assert all((vectors[0] != other).any() for other in vectors[1:])
    assert set(states[0]) == {"weights", "teacher", "projection"}


# the mean


@pytest.mark.parametrize(
    ("partition", "all_unlabelled"),
    [({}, True), ({"alpha": 0.05, "labelled_fraction": 0.99}, False)],
)
def test_what_a_client_counts(partition: dict[str, Any], all_unlabelled: bool) -> None:
    """|D^L|, over the share of unlabelled images if everybody has some."""
    made = experiment(partition, method={"lam": 0, "psi": 0}, train={"rounds": 1})
    hand = ByHand(made)
    ((_, _, state, _),) = hand.rounds()
    n, u = hand.n, hand.splits.unlabelled.lengths
    assert (u > 0).all() == all_unlabelled
    counts = n / u * (n + u) if all_unlabelled else n
    close(state.weights, hand.mean([hand.trained(hand.initial, 1, k) for k in range(10)], counts))


SEEN: list[torch.Tensor] = []
LABELS: list[torch.Tensor] = []
TEACHERS: list[torch.Tensor] = []


class Spied(XPFL):
    """Notes what the student and the teacher learn from."""

    name: str = "test_xpfl:Spied"

    def learn_images(self, client: Client, x: torch.Tensor) -> float:
        TEACHERS.append(x.clone())
        return super().learn_images(client, x)

    def loss(self, teacher: nn.Module, teacher_loss: float) -> Any:
        inner = super().loss(teacher, teacher_loss)

        def loss(network: nn.Module, x: torch.Tensor, y: torch.Tensor, *rest: Any) -> Any:
            SEEN.append(x.clone())
            LABELS.append(y.clone())
            return inner(network, x, y, *rest)

        return loss


@pytest.fixture
def leaking(monkeypatch: pytest.MonkeyPatch) -> type[XPFL]:
    """XPFL as its experiment has it, with the fault of the released code."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "experiments" / "xpfl")
    found: type[XPFL] = importlib.import_module("leaking").Leaking
    return found


def spied(rounds: Iterable[int]) -> Iterator[None]:
    """Client 3 trains in these rounds, and what it learns from is noted."""
    made = experiment(method={"name": "test_xpfl:Spied"})
    method, fed = made.method, federation(made)
    assert isinstance(method, XPFL)
    state = method.init(fed)
    for t in rounds:
        for noted in (SEEN, LABELS, TEACHERS):
            noted.clear()
        fed.runner.begin(t)
        fresh = NotCounted(method.fresh(fed, state))
        fed.mean(method.local_update, [3], fresh=fresh, all_unlabelled=True)
        yield


def test_a_clients_labelled_examples_are_the_same_in_every_round() -> None:
    dataset, splits, _ = prepare(experiment())
    labelled = np.unique(dataset.x[splits.train[3]].reshape(-1, 64), axis=0)
    for _ in spied((1, 2, 30)):
        np.testing.assert_array_equal(np.unique(torch.cat(SEEN).flatten(1), axis=0), labelled)


def test_leaked_labels_are_those_of_other_examples_in_each_round(
    leaking: type[XPFL], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spied, "examples", leaking.examples)
    dataset, splits, _ = prepare(experiment())
    labelled, hidden = splits.train[3], splits.unlabelled[3]
    held = np.concatenate([labelled, hidden])
    label = {dataset.x[i].tobytes(): int(dataset.y[i]) for i in held}
    assert len(label) == len(held)  # no image twice
    drawn, ever = [], set[bytes]()
    for _ in spied(range(1, 11)):
        x, y = torch.cat(SEEN).numpy(), torch.cat(LABELS).tolist()
        students = [row.tobytes() for row in x]
        teachers = {row.tobytes() for row in TEACHERS[0].numpy()}
        assert [label[row] for row in students] == y
        assert len(set(students)) == len(students) == len(labelled)
        assert len(teachers) == len(hidden)
        assert teachers <= set(label)
        assert teachers & set(students)  # drawn separately
        drawn.append(frozenset(students))
        ever |= drawn[-1]
    assert len(set(drawn)) == 10
    assert len(ever) > 0.9 * len(held) > 2 * len(labelled)


@pytest.mark.usefixtures("leaking")
def test_without_teachers_labels_leak_as_well() -> None:
    plain, leaking = (
        server_states(experiment(method={"name": name, "lam": 0, "psi": 0}))
        for name in ("xpfl", "leaking:Leaking")
    )
    assert (plain[-1].weights != leaking[-1].weights).any()


def test_lost_uploads_change_nothing() -> None:
    states = server_states(experiment(method={"lam": 0}, devices={"packet_error": 0.999}))
    for state in states[1:]:
        np.testing.assert_array_equal(state.weights, states[0].weights)


# personal models


FUSED: list[tuple[Any, ...]] = []


class Noted(XPFL):
    """Notes what is fused, and from what."""

    name: str = "test_xpfl:Noted"

    def fused(
        self, client: Client, weights: torch.Tensor, previous: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, float]:
        found, psi = super().fused(client, weights, previous)
        given = (client.state["weights"], weights, previous, found)
        FUSED.append((client.round, client.id, *(None if v is None else v.numpy() for v in given)))
        return found, psi


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-16))


@pytest.mark.parametrize("psi_on", ["weights", "tensors", "updates"])
def test_what_psi_is_computed_from(finish: Finish, psi_on: str) -> None:
    FUSED.clear()
    sections: dict[str, Any] = {
        "method": {"name": "test_xpfl:Noted", "lam": 0, "psi_on": psi_on},
        "model": {"name": "resnet8", "width": 1},
        "train": {"rounds": 2, "local_steps": 1, "batch_size": 16, "optimizer": {"lr": 0.1}},
        "partition": SEMI,
    }
    if psi_on == "updates":  # explanations fuse as well
        few = {"every": 1, "clients": 1, "images": 20, "perplexity": 5, "iterations": 300}
        sections["method"]["xfed"] = few
    done = finish(**sections)
    noted = FUSED.copy()
    states = server_states(small_experiment(**sections))
    network = prepare(small_experiment(**sections))[2].build_model()
    trained = sum(p.numel() for p in network.parameters())
    buffers = [b for b in network.buffers() if b.is_floating_point()]
    sizes = [tensor.numel() for tensor in (*network.parameters(), *buffers)]
    reported = done.clients.set_index(["round", "client"])["psi"]
    assert len(reported) == 20 == len(noted) - 2 * (psi_on == "updates")
    for t, k, own, w_g, previous, found in noted:
        np.testing.assert_array_equal(w_g, states[t].weights)
        if psi_on == "tensors":
            cuts = np.cumsum(sizes)[:-1]
            pairs = zip(np.split(own, cuts), np.split(w_g, cuts), strict=True)
            psi: Any = np.repeat([cosine(a, b) for a, b in pairs], sizes)
        elif psi_on == "updates":
            w = states[t - 1].weights
            np.testing.assert_array_equal(previous, w)
            psi = (1 + cosine((own - w)[:trained], (w_g - w)[:trained])) / 2
        else:
            psi = (1 + cosine(own[:trained], w_g[:trained])) / 2
        np.testing.assert_allclose(found, psi * own + (1 - psi) * w_g, atol=1e-5)
        assert found.dtype == np.float32
        assert reported[t, k] == pytest.approx(np.mean(psi), abs=1e-5)
    model = 4 * sum(sizes)
    assert (done.clients["bytes_down"] == model).all()


def test_psi_of_updates_is_a_half_if_the_global_model_has_not_moved() -> None:
    made: Any = experiment(method={"lam": 0, "psi_on": "updates"})
    hand = ByHand(made)
    fed, (_, _, state, before) = hand.fed, next(hand.rounds())
    w = state.weights
    fed.runner.begin(2)
    fed.each(made.method.fuse, range(10), weights=w, previous=NotCounted(w))
    for k, handle in fed.runner.states().items():
        half = (before[k]["weights"] + w) / 2
        np.testing.assert_allclose(fed.runner.fetch(handle)["weights"], half, atol=1e-7)


def test_personal_and_global_models_are_scored_on_each_clients_own_test(finish: Finish) -> None:
    done = finish(
        method={"name": "xpfl", "lam": 0},
        partition={**SEMI, "alpha": 0.1, "test_fraction": 0.2},
        train={**TRAIN, "rounds": 8},
        evaluate={"clients": True},
    )
    last = done.clients[done.clients["round"] == 8]
    assert last["test_accuracy"].notna().all()
    assert last["test_accuracy"].mean() > last["global_accuracy"].mean()
    assert (last["psi"] > 0.5).all()


# what explains them


def test_personal_models_are_explained(finish: Finish) -> None:
    xfed = {"every": 2, "clients": 3, "images": 60, "perplexity": 5, "iterations": 300, "chi": 2}
    done = finish(
        method={"name": "xpfl", "lam": 0, "xfed": xfed},
        partition=SEMI,
        train={**TRAIN, "rounds": 3},
    )
    found = done.explanations
    assert found["round"].tolist() == [1] * 3 + [2] * 3 + [3] * 3
    assert found["client"].tolist() == [0, 1, 2] * 3
    assert (found["fidelity"] > 0.9).all()
    assert found["held_out_fidelity"].between(0.1, 1).all()
    _, splits, _ = prepare(done.experiment)
    held = splits.train.lengths + splits.unlabelled.lengths
    size = 64 * 32 + 32 + 32 * 10 + 10
    qox = found["fidelity"] * held[found["client"]] / size
    np.testing.assert_allclose(found["qox_tree"], qox)
    fallen = found["divergence_before"] - found["divergence_after"]
    np.testing.assert_allclose(found["qox_tsne"], 2 * fallen * 60 / size)
    assert (found["divergence_before"] < 10).all()
    assert (fallen != 0).all()
    assert (done.clients["bytes_up"] == 4 * size).all()  # explanations travel no wire


def test_a_psi_of_one_leaves_the_embedding_as_it_was(finish: Finish) -> None:
    xfed = {"every": 1, "clients": 1, "images": 40, "perplexity": 5, "iterations": 300}
    done = finish(
        method={"name": "xpfl", "lam": 0, "psi": 1.0, "xfed": xfed},
        partition=SEMI,
        train={**TRAIN, "rounds": 1},
    )
    (row,) = done.explanations.to_dict("records")
    assert 0 < row["divergence_before"] == row["divergence_after"] < 10


# what cannot be


ONE_CLASS = {"kind": "pathological", "clients": 10, "classes_per_client": 1, **SEMI}


@pytest.mark.parametrize(
    ("partition", "some"), [({"alpha": 0.05, "labelled_fraction": 0.99}, True), (ONE_CLASS, False)]
)
def test_who_has_no_unlabelled_images_learns_without_a_teacher(
    finish: Finish, partition: dict[str, Any], some: bool
) -> None:
    """And clients of one class learn."""
    method = {"name": "xpfl", "teacher": LITTLE_TEACHER}
    done = finish(method=method, partition=partition, train=TRAIN)
    _, splits, _ = prepare(done.experiment)
    without = splits.unlabelled.lengths == 0
    assert (0 < without.sum() < len(without)) == some
    taught = done.clients.groupby("client")["teacher_loss"].count()
    assert ((taught == 0) == without).all()
    assert np.isfinite(done.rounds["loss"]).all()
