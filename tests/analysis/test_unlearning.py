"""Unlearning methods: their formulas, what they cost, and how they are scored."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from by_hand import ByHand
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn.functional import cross_entropy

import fedsim
from experiments import (
    FEW,
    FOUR,
    KINDS,
    NETWORK_METHODS,
    NUMBERS,
    TABLE,
    WITHOUT_GLOBAL,
    Say,
    by_day,
    ran,
    refusal,
    small_experiment,
    with_method,
)
from fedsim import Run, run
from fedsim.analysis.replay import ModelSnapshot, client_models, replay
from fedsim.analysis.unlearning import unlearning
from fedsim.analysis.unlearning.fed_quit import lowered
from fedsim.analysis.unlearning.forgetting import Forgetting
from fedsim.analysis.unlearning.scores import Judge, auc
from fedsim.errors import RunError

# Batches of all examples, so that the order of the examples does not matter.
BATCHES: dict[str, Any] = {
    "data": {"name": "digits", "subset": 0.2},
    "partition": {"kind": "dirichlet", "clients": 4, "alpha": 1.0},
    "model": {"name": "mlp", "hidden": [8]},
    "train": {"rounds": 3, "local_epochs": 2, "batch_size": 10_000, "optimizer": {"lr": 0.2}},
}
# Images so few that many runs take little time.
LITTLE: dict[str, Any] = {
    **{"data": {**TABLE, "shape": [1, 8, 8]}, "partition": FOUR},
    **{"model": {"name": "mlp", "hidden": [4]}, "train": {"rounds": 3, "batch_size": 30}},
}
LR, FORGOTTEN, OTHERS = 0.2, 3, (0, 1, 2)
METHODS = [name for name, _ in unlearning.items()]
Loss = Callable[[Tensor, Tensor], Tensor]  # of logits and labels


def finished(**sections: Any) -> Run:
    return ran(**{**BATCHES, **sections})


@pytest.fixture(scope="module")
def done() -> Run:
    return finished()


def unlearn(done: Run, method: str, clients: Any = FORGOTTEN, **settings: Any) -> fedsim.Unlearned:
    how = {"name": method, **settings}
    return fedsim.unlearn(done, clients, how, explainer="gradient", progress=False)  # the cheapest


def flat(found: fedsim.Unlearned | Run) -> NDArray[Any]:
    """(size,) weights, in the order of the network's layers."""
    return np.concatenate([layer.numpy().ravel() for layer in found.weights().values()])


# -- formulas, written out ------------------------------------------------------------------------


class Hand(ByHand):
    """Clients whose steps are on all of their examples."""

    @torch.no_grad()
    def logits(self, w: NDArray[Any], x: Tensor) -> Tensor:
        return self.network(w)(x.double())

    def step(self, w: NDArray[Any], k: int, loss: Loss) -> NDArray[np.float64]:
        x, y = self.data(k)
        network = self.network(w)
        gradients = torch.autograd.grad(loss(network(x), y), [*network.parameters()])
        return w - LR * torch.cat([gradient.flatten() for gradient in gradients]).numpy()

    def learnt(self, w: NDArray[Any], k: int, epochs: int) -> NDArray[np.float64]:
        for _ in range(epochs):
            w = self.step(w, k, cross_entropy)
        return w

    def average(self, models: Mapping[int, NDArray[Any]]) -> NDArray[np.float64]:
        return np.average([*models.values()], axis=0, weights=self.n[[*models]])


@pytest.fixture(scope="module")
def by_hand(done: Run) -> Hand:
    hand = Hand(done.experiment)
    models, _ = client_models(done, [*OTHERS, FORGOTTEN], after=2)
    start = replay(done, 1).state.weights.astype(np.float64)
    for k, own in models.items():  # the oracle itself trains as the run did
        assert np.allclose(hand.learnt(start, k, 2), own.numpy(), atol=1e-5)
    return hand


def sent(done: Run, t: int) -> dict[int, NDArray[np.float64]]:
    models, _ = client_models(done, OTHERS, after=t)
    return {k: own.double().numpy() for k, own in models.items()}


def test_fed_eraser_by_hand(done: Run, by_hand: Hand) -> None:
    w = by_hand.average(sent(done, 1))
    for t in (2, 3):
        before = replay(done, t - 1).state.weights
        calibrated = {}
        for k, own in sent(done, t).items():
            change = by_hand.learnt(w, k, 1) - w
            calibrated[k] = w + np.linalg.norm(own - before) * change / np.linalg.norm(change)
        w = by_hand.average(calibrated)
    found = unlearn(done, "fed_eraser", every=1, epochs=1)
    assert np.allclose(flat(found), w, atol=1e-5)
    assert found.scores.loc["fed_eraser", "rounds"] == 2  # the first is the server's alone
    assert found.scores.loc["fed_eraser", "stored"] == 3 * 4 * 4 * len(w)
    half = unlearn(done, "fed_eraser", every=1)
    assert np.array_equal(flat(half), flat(found))  # half of two epochs
    seldom = unlearn(done, "fed_eraser", every=5)
    assert np.allclose(flat(seldom), by_hand.average(sent(done, 1)), atol=1e-6)
    assert seldom.scores.loc["fed_eraser", ["rounds", "bytes_up"]].tolist() == [0, 0]


def test_gradient_ascent_by_hand(done: Run, by_hand: Hand) -> None:
    reference = by_hand.average(sent(done, 3))
    for radius in (0.5, 1e6):
        w = reference
        for epochs in (1, 2):
            w = by_hand.step(w, FORGOTTEN, lambda z, y: -cross_entropy(z, y))
            away = w - reference
            w = reference + away * min(1, radius / np.linalg.norm(away))
            found = unlearn(done, "gradient_ascent", epochs=epochs, radius=radius, rounds=0)
            assert np.allclose(flat(found), w, atol=1e-5)
    none = unlearn(done, "gradient_ascent", epochs=0, rounds=0)
    assert np.allclose(flat(none), reference)
    free = unlearn(done, "gradient_ascent", epochs=30, rounds=0)
    wide = unlearn(done, "gradient_ascent", epochs=30, rounds=0, radius=1e6)
    distance = [np.linalg.norm(flat(each) - reference) for each in (free, wide)]
    assert 1 < distance[0] < distance[1]


def test_fed_quit_by_hand(done: Run, by_hand: Hand) -> None:
    x, y = by_hand.data(FORGOTTEN)
    z = by_hand.logits(flat(done), x)
    z[torch.arange(len(y)), y] = z.min(dim=1).values
    p = z.softmax(dim=1)

    def loss(student: Tensor, _: Tensor) -> Tensor:
        q = student.log_softmax(dim=1)
        return (p * (p.log() - q)).sum(dim=1).mean()

    w = flat(done).astype(np.float64)
    for _ in range(2):
        w = by_hand.step(w, FORGOTTEN, loss)
    found = unlearn(done, "fed_quit", epochs=2, rounds=0)
    assert np.allclose(flat(found), w, atol=1e-5)


def test_fine_tuning_is_what_the_others_do_alone(done: Run, by_hand: Hand) -> None:
    w = flat(done).astype(np.float64)
    for _ in range(2):
        w = by_hand.average({k: by_hand.learnt(w, k, 2) for k in OTHERS})
    found = unlearn(done, "fine_tune", rounds=2)
    assert np.allclose(flat(found), w, atol=1e-5)
    row = found.scores.loc["fine_tune"]
    assert row["rounds"] == 2
    assert row["bytes_up"] == row["bytes_down"] == 2 * 3 * 4 * len(w)


def test_several_clients(done: Run, by_hand: Hand) -> None:
    found = unlearn(done, "fed_quit", [FORGOTTEN, 1], rounds=0)
    alone = {k: flat(unlearn(done, "fed_quit", k, rounds=0)) for k in (1, FORGOTTEN)}
    assert np.allclose(flat(found), by_hand.average(alone), atol=1e-6)
    assert found.path.name == "fed_quit-1-3"
    assert found.clients == (1, FORGOTTEN)


# -- properties ----------------------------------------------------------------------------------


def test_retraining_is_the_truth(done: Run) -> None:
    found = unlearn(done, "retrain")
    truth = fedsim.without(done, FORGOTTEN, progress=False)
    assert found.retrained.result_hash == truth.result_hash
    assert all(torch.equal(w, truth.weights()[name]) for name, w in found.weights().items())
    own, retrained = found.scores.loc["retrain"], found.scores.loc["retrained"]
    assert own.equals(retrained.rename("retrain"))
    exact = ["weights", "disagreement", "kl", "disagreement_forgotten", "kl_forgotten"]
    assert (own[exact] == 0).all()
    assert own["explanations_cosine"] == pytest.approx(1)
    assert own["rounds"] == 3
    assert own["bytes_up"] == truth.rounds["bytes_up"].sum()
    assert own["accuracy"] == truth.rounds["accuracy"].iloc[-1]


def test_without_rounds_fine_tuning_leaves_the_model(done: Run) -> None:
    found = unlearn(done, "fine_tune", rounds=0)
    assert all(torch.equal(w, done.weights()[name]) for name, w in found.weights().items())
    own, original = found.scores.loc["fine_tune"], found.scores.loc["original"]
    assert own.equals(original.rename("fine_tune"))
    assert own["accuracy"] == done.rounds["accuracy"].iloc[-1]


def test_scores_by_hand(done: Run, by_hand: Hand) -> None:
    found = unlearn(done, "fed_quit", rounds=0)
    truth, own = (flat(each).astype(np.float64) for each in (found.retrained, found))
    row = found.scores.loc["fed_quit"]
    assert row["weights"] == pytest.approx(np.linalg.norm(own - truth) / np.linalg.norm(truth))
    test = by_hand.fed.server.test_data
    for name, x in (("", test.x), ("_forgotten", by_hand.data(FORGOTTEN)[0])):
        p, q = (by_hand.logits(w, x).log_softmax(dim=1) for w in (truth, own))
        kl = (p.exp() * (p - q)).sum(dim=1).mean()
        assert row[f"kl{name}"] == pytest.approx(float(kl), abs=1e-5)
        differ = (p.argmax(dim=1) != q.argmax(dim=1)).double().mean()
        assert row[f"disagreement{name}"] == pytest.approx(float(differ))
    x, y = by_hand.data(FORGOTTEN)

    def surprise(x: Tensor, y: Tensor) -> NDArray[Any]:
        z = by_hand.logits(own, x)
        return z.log_softmax(dim=1)[torch.arange(len(y)), y].numpy()

    inside, outside = surprise(x, y), surprise(test.x, test.y)
    members = np.repeat([1, 0], [len(inside), len(outside)])
    expected = roc_auc_score(members, np.concatenate([inside, outside]))
    assert row["mia"] == pytest.approx(expected, abs=1e-3)
    right = by_hand.logits(own, x).argmax(dim=1) == y
    assert row["accuracy_forgotten"] == pytest.approx(float(right.double().mean()))


def test_what_is_written(done: Run) -> None:
    found = unlearn(done, "fine_tune", rounds=1)
    assert found.path == done.path / "unlearned" / "fine_tune-3"
    content = json.loads((found.path / "scores.json").read_text())
    assert content["method"] == {"name": "fine_tune", "rounds": 1}
    assert content["clients"] == [FORGOTTEN]
    assert content["run"] == done.result_hash
    assert content["without"] == found.retrained.result_hash
    kept = content["scores"]["fine_tune"]
    assert kept == pytest.approx(found.scores.loc["fine_tune"].to_dict())
    assert fedsim.load(done.path).status == "finished"  # with runs and weights below it
    assert "nan" not in found.text()


@pytest.mark.night  # trains 16 models; by day its formula
def test_lira_tells_what_the_loss_does_not() -> None:
    """Shadow models know which examples are easy for whoever has not met them."""
    train = {"rounds": 12, "local_epochs": 4, "batch_size": 8, "optimizer": {"lr": 0.2}}
    model = {"name": "mlp", "hidden": [64]}
    whole = finished(train=train, model=model)
    found = fedsim.unlearn(whole, 1, "retrain", shadows=16, progress=False).scores
    assert found.loc["original", "lira"] > found.loc["retrained", "lira"] + 0.1
    assert found.loc["original", "lira"] > found.loc["original", "mia"]
    assert abs(found.loc["retrained", "lira"] - 0.5) < 0.1
    plain = fedsim.unlearn(whole, 1, "retrain", progress=False).scores.drop(columns="seconds")
    assert plain.equals(found[plain.columns])


def test_lira_by_hand(done: Run, by_hand: Hand) -> None:
    lines = list[str]()
    found = fedsim.unlearn(done, FORGOTTEN, "retrain", shadows=2, progress=lines.append)
    assert lines[-2:] == [f"[{s}/2] shadow models, 6 passes each" for s in (1, 2)]
    again = replay(done)
    judge = Judge(again, (FORGOTTEN,), flat(found.retrained), None, shadows=2)
    both, values, inside = judge._of_shadows
    n = len(again.splits.train[FORGOTTEN])
    assert values.shape == inside.shape == (2, 2 * n)
    assert (inside.sum(axis=0) == 1).all()
    x, y = torch.cat([e.x for e in both]), torch.cat([e.y for e in both])
    p = by_hand.logits(flat(done), x).softmax(dim=1)
    own = (p / (1 - p)).log()[torch.arange(len(y)), y].numpy()
    one = np.where(inside[0], values[0], values[1])  # that has trained on an example
    other = np.where(inside[0], values[1], values[0])
    likelier = np.square((own - other) / values[~inside].std()) / 2
    likelier -= np.square((own - one) / values[inside].std()) / 2
    expected = roc_auc_score(np.arange(2 * n) < n, likelier)
    assert found.scores.loc["original", "lira"] == pytest.approx(expected, abs=1e-3)
    assert (found.scores["lira_low"] <= found.scores["lira"]).all()
    assert (found.scores["lira"] <= found.scores["lira_high"]).all()
    (line,) = [line for line in found.text().splitlines() if line.split()[:1] == ["lira"]]
    assert line.count("[") == 3


def test_intervals_cover_the_truth() -> None:
    rng, covered = np.random.default_rng(0), 0
    truth = 0.5 * math.erfc(-0.5)  # P(N(1, 1) > N(0, 1))
    for _ in range(400):
        value, low, high = auc(rng.normal(1, 1, 40), rng.normal(0, 1, 80))
        assert 0 <= low <= value <= high <= 1
        covered += low <= truth <= high
    assert 0.92 < covered / 400 < 0.98
    assert auc(np.array([1.0]), np.array([0.0, 0.5]))[0] == 1
    assert math.isnan(auc(np.array([1.0]), np.array([0.0, 0.5]))[1])
    assert auc(np.zeros(5), np.zeros(7)) == (0.5, 0.5, 0.5)


@pytest.mark.usefixtures("own_ray", "driver_here")
@pytest.mark.parametrize("method", ["fed_eraser", *by_day(["gradient_ascent"], [])])
def test_the_same_bits_on_actors(method: str) -> None:
    found = []
    for engine in ({"kind": "local"}, {"kind": "ray", "actors": 3}):
        whole = finished(engine=engine, train={"rounds": 3, "participation": 0.75})
        k = int(whole.clients["client"].iloc[0])
        settings = {"every": 1} if method == "fed_eraser" else {"rounds": 1}
        found.append(unlearn(whole, method, k, **settings))
    here, there = found
    assert np.array_equal(flat(here), flat(there))
    assert here.scores.drop(columns="seconds").equals(there.scores.drop(columns="seconds"))


# -- with whatever a run may have ----------------------------------------------------------------

# Why methods are refused, besides those without a global model.
NOT_FOR = {
    "centralised": dict.fromkeys(METHODS, "clients send no models"),
    "fedbuff": dict.fromkeys(METHODS[:-1], "updates may still be on their way"),
    "fedfed": dict.fromkeys(METHODS[:-1], "others hold what clients have shared"),
    "fedxds": dict.fromkeys(METHODS[:-1], "others hold what clients have shared"),
    **dict.fromkeys(
        ("fedbabu", "fedex_lora", "flora"),
        dict.fromkeys(
            ("fed_eraser", "fed_quit", "gradient_ascent"), "train and send parts of the model"
        ),
    ),
}
SHORT = {"fine_tune": {"rounds": 1}, "gradient_ascent": {"epochs": 1, "rounds": 1}}


@pytest.mark.parametrize(
    "method", by_day(NETWORK_METHODS, ("scaffold", "fedaux", "fedbuff", "fedfed", "ifca"))
)
@pytest.mark.filterwarnings("ignore")
def test_every_method(method: str) -> None:
    data = {**FEW, "test_fraction": 0.05}
    whole = ran(**with_method(method, train={"rounds": 4}, data=data))
    k = 0 if whole.clients.empty else int(whole.clients["client"].iloc[0])
    for how in METHODS:
        why = NOT_FOR.get(method, {}).get(how)
        if method in WITHOUT_GLOBAL:
            why = "has no global model that could forget"
        if why is None:
            found = unlearn(whole, how, k, **SHORT.get(how, {}))
            assert np.isfinite(found.scores.to_numpy()).all(), found.scores.T
            continue
        told = refusal(lambda how=how: unlearn(whole, how, k))
        assert re.search(f"method.name={method}.*{why}", told)


SECTIONS: dict[str, dict[str, Any]] = {
    "participation": {"train": {"rounds": 4, "participation": 0.5}},
    "local steps": {"train": {"rounds": 3, "local_epochs": 1, "local_steps": 2, "batch_size": 8}},
    "schedule": {"train": {"rounds": 3, "schedule": {"name": "cosine"}, "batch_size": 8}},
    "adam": {"train": {"rounds": 3, "optimizer": {"name": "adam", "lr": 0.01}}},
    "statistics": {"model": {"name": "networks:normalised"}, "train": {"rounds": 2}},
    "stacks": {"model": {"name": "cnn"}, "engine": {"clients_per_step": 2}},
    "devices": {"devices": {"speed": {"median": 60, "sigma": 1}}},
    "median": {"aggregation": {"name": "median"}},
    "sign flip": {"adversaries": {"share": 0.25, "attack": {"name": "sign_flip"}}},
    "backdoor": {"adversaries": {"share": 0.25, "attack": {"name": "backdoor"}}},
    "uplink": {"uplink": {"name": "topk", "fraction": 0.1}},
    "downlink": {"downlink": {"name": "int8"}},
    "explain": {"explain": {"of": ["cohort", "global"], "inputs": 2}},
    "validation": {"evaluate": {"validation": 0.1, "early_stopping": {"patience": 1}}},
    "evaluate": {
        "evaluate": {"metrics": ["macro_f1"], "clients": True},
        "partition": {**FOUR, "test_fraction": 0.2},
    },
    "numbers": NUMBERS,
    "without": {"without": [0]},
    "secure_aggregation": {"secure_aggregation": {}},
}
# With rounds left out, with running statistics, and with scores and refusals of their own.
BY_DAY = ("participation", "statistics", "backdoor", "numbers", "secure_aggregation")


@pytest.mark.parametrize("name", by_day(SECTIONS, BY_DAY))
def test_sections(name: str) -> None:
    sections = SECTIONS[name]
    whole = ran(**{**LITTLE, **sections})
    k = int(whole.clients["client"].iloc[-1])
    for how in METHODS:
        if "secure_aggregation" in sections and how not in ("fine_tune", "retrain"):
            continue  # refused, see below
        if how == "fed_quit" and whole.label_axis == "target":
            told = refusal(lambda how=how: unlearn(whole, how, k))
            assert "there is no logit of a true class" in told
            continue
        scores = unlearn(whole, how, k, **SHORT.get(how, {})).scores
        assert np.isfinite(scores.to_numpy()).all(), scores.T
        if "backdoor_success" in whole.rounds:
            success = scores.loc["original", "backdoor_success"]
            assert success == whole.rounds["backdoor_success"].iloc[-1]


BY_CONCEPTS: dict[str, Any] = {
    "data": {"name": "shapes", "samples": 120, "test_samples": 40},
    "partition": {"kind": "iid", "clients": 4},
    "model": {"name": "concept_bottleneck"},
    "train": {"rounds": 2, "optimizer": {"lr": 0.01}},
}


@pytest.mark.parametrize("learning", by_day(["joint", "independent"], ["joint"]))
def test_concept_bottlenecks_have_classes(learning: str) -> None:
    model = {"name": "concept_bottleneck", "learning": learning}
    whole = finished(**BY_CONCEPTS | {"model": model})
    for how in METHODS:
        given = {"name": how, **SHORT.get(how, {})}
        found = fedsim.unlearn(whole, 1, given, shadows=2, progress=False)
        assert np.isfinite(found.scores.to_numpy()).all(), found.scores.T
        assert "difference" not in found.scores
    again, network = replay(whole), ModelSnapshot.of(whole).network()
    both = again.runner.context.examples(again.splits.train[1]), again.fed.server.test_data
    with torch.no_grad():
        loss = again.spec.objective.loss
        losses = [loss(network, own.x, own.y, own.facts).numpy() for own in both]
    row = found.scores.loc["original"]
    members = np.repeat([1, 0], list(map(len, losses)))
    assert row["mia"] == pytest.approx(roc_auc_score(members, -np.concatenate(losses)))
    assert row["accuracy"] == whole.rounds["accuracy"].iloc[-1]


def test_fed_quit_of_concept_bottlenecks_by_hand() -> None:
    train = {"rounds": 2, "batch_size": 10_000, "optimizer": {"lr": LR}}
    whole = finished(**BY_CONCEPTS | {"train": train})
    again = replay(whole)
    own = again.runner.context.examples(again.splits.train[1])
    start = again.fed.server.tensor(again.state.weights)
    network = ModelSnapshot(start, again, client=None).network()
    with torch.no_grad():
        z = lowered(network(own.x), own.y).softmax(dim=1)
    divergence = (z * (z.log() - network(own.x).log_softmax(dim=1))).sum(dim=1).mean()
    divergence.backward()
    found = unlearn(whole, "fed_quit", 1, epochs=1, rounds=0).weights()
    for name, parameter in network.named_parameters():
        assert torch.allclose(found[name], parameter - LR * parameter.grad, atol=1e-5), name


@pytest.mark.parametrize("fit", ["federated", "client"])
def test_scales_of_the_clients_stay(tmp_path: Path, fit: str) -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(3, 2, (200, 3)), columns=["dose", "age", "site"])
    table["ill"], table["site"] = rng.integers(0, 2, 200), np.arange(200) % 4
    table.loc[table["site"] == FORGOTTEN, "dose"] *= 100  # would change a common scale
    table.to_csv(tmp_path / "table.csv", index=False)
    data = {"name": "table", "path": str(tmp_path / "table.csv"), "label": "ill"}
    data |= {"client_column": "site", "fit": fit, "scale": "standard"}
    whole = finished(data=data, partition={"kind": "natural"})
    truth = fedsim.without(whole, FORGOTTEN, progress=False)
    found = unlearn(whole, "retrain")
    assert np.array_equal(flat(found), flat(truth))
    assert (found.scores.loc["retrain", ["weights", "kl", "kl_forgotten"]] == 0).all()


@pytest.mark.parametrize(
    ("sections", "method", "said"),
    [
        ({"privacy": {"clip": 1.0, "noise_multiplier": 0.1}}, "fine_tune", "privacy: further"),
        ({"secure_aggregation": {}}, "fed_eraser", "secure_aggregation: hides clients' messages"),
        ({"secure_aggregation": {}}, "fed_quit", "secure_aggregation: hides clients' messages"),
        ({**KINDS["rules"], "train": {"rounds": 1}}, "retrain", "only networks unlearn here"),
        (
            {"partition": {"kind": "own_tasks", "tasks": [[["0", "1"], ["2", "3"]]] * 2}},
            "fine_tune",
            "learns a sequence of tasks",
        ),
        (
            {"aggregation": {"name": "krum", "adversaries": 0.2}, "partition": {"clients": 5}},
            "retrain",
            "aggregation.name=krum",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_the_run_must_not_have(sections: dict[str, Any], method: str, said: str) -> None:
    whole = finished(**{"train": {"rounds": 2}, **sections})
    assert said in refusal(lambda: unlearn(whole, method, 0))
    assert not (whole.path / "without").exists()
    assert not (whole.path / "unlearned").exists()


def test_what_the_command_line_cannot_say(done: Run) -> None:
    """For the rest see tests/refusals.yaml."""
    told = refusal(lambda: fedsim.unlearn(done, [], progress=False))
    assert told == "clients: name one or several"
    told = refusal(lambda: fedsim.unlearn(done, 3, {}, progress=False))
    assert told.startswith("method: name: missing; known: fed_eraser, fed_quit, fine_tune")


def test_lira_needs_classes() -> None:
    whole = finished(**NUMBERS)
    told = refusal(lambda: fedsim.unlearn(whole, 1, shadows=2, progress=False))
    assert re.search(r"shadows=2: LiRA .* objective.name=regression has", told)
    assert not (whole.path / "without").exists()


def test_who_never_took_part_and_who_is_left_out() -> None:
    whole = finished(train={"rounds": 2, "participation": 0.25}, without=[0])
    never = min({1, 2, 3} - set(whole.clients["client"]))
    for k, said in ((never, "never took part: nothing is to"), (0, "is left out (`without`)")):
        assert f"client {k} {said}" in refusal(lambda k=k: unlearn(whole, "fine_tune", k))


def test_lost_checkpoints(tmp_path: Path) -> None:
    whole = run(small_experiment(**BATCHES), tmp_path, progress=False)
    for file in (whole.path / "weights").glob("round*"):
        file.unlink()
    told = refusal(lambda: unlearn(fedsim.load(whole.path), "fed_eraser", 2))
    assert "is missing; only whole runs can be made to" in told


def test_a_client_that_does_not_answer() -> None:
    whole = finished(devices={"speed": {"median": 60, "sigma": 1}, "deadline": 5.0})
    rows = whole.clients
    late = rows[rows["dropped"].notna()]
    assert not late.empty
    told = refusal(lambda: unlearn(whole, "fed_quit", int(late["client"].iloc[0])))
    assert "never took part: nothing is to forget" in told
    on_time = int(rows["client"][rows["dropped"].isna()].iloc[0])
    with pytest.raises(RunError, match=f"round 4: client {on_time} did not answer"):
        unlearn(whole, "fed_quit", on_time, epochs=200)


@pytest.mark.parametrize("devices", [{"dropout": 0.6}, {"packet_error": 0.6}])
def test_what_the_server_never_received(devices: dict[str, Any]) -> None:
    whole = finished(devices=devices, train={"rounds": 6})
    rows = whole.clients
    missing = rows["dropped" if "dropout" in devices else "lost"].notna()
    assert missing.any()
    there = {t: {*rows["client"][~missing & (rows["round"] == t)]} for t in range(1, 7)}
    (k, *_), *_ = (own for own in there.values() if own)
    task = Forgetting(whole, (int(k),), replay(whole))
    assert task.first == min(t for t, own in there.items() if k in own)
    assert task.others_last == max(t for t, own in there.items() if own - {k})
    for t, _, models in task.history(1):
        assert models.keys() == there[t] - {k}
    task.store(task.first)
    assert task.cost.stored == len(there[task.first]) * task.weights.nbytes


def test_the_command(say: Say, done: Run) -> None:
    words = ["unlearn", str(done.path), "--client", "3", "--method", "fine_tune"]
    assert "lira" in say(*words, "--set", "rounds=1", "--shadows", "2")[1]
    lines = say.printed(*words, "--set", "rounds=1").splitlines()
    assert lines[0].split() == ["original", "retrained", "fine_tune"]
    assert [line.split()[0] for line in lines[1:3]] == ["weights", "disagreement"]
    assert re.fullmatch("written: .*unlearned/fine_tune-3", lines[-1])
    assert say("unlearn", str(done.path))[0] == 2  # no client
