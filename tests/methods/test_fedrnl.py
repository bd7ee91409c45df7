"""FedRNL, and what rationalisation is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments import federation, server_states, small_experiment
from fedsim import Experiment, run, testing
from fedsim.analysis.replay import ModelSnapshot
from fedsim.launch.prepare import prepare
from fedsim.models.rationale import RationaleClassifier, encoder_distance
from fedsim.objectives import Rationales

pytestmark = pytest.mark.filterwarnings("ignore:.*words get random vectors")

SHORT = {"reviews": 20, "test_reviews": 5, "fillers": 3, "length": 10, "dimension": 8}


def experiment(method: dict[str, Any] | None = None, **model: Any) -> Experiment:
    return small_experiment(
        data={"name": "planted_reviews", **SHORT},
        partition={"kind": "iid", "clients": 4},
        model={"name": "rationale", "hidden": 6, **model},
        method=method or {"name": "fedrnl"},
        train={"rounds": 3, "optimizer": {"name": "adam", "lr": 0.01}},
    )


def test_equal_encoders_are_a_shared_one() -> None:
    """They decide alike, λ's term is nothing, and both gradients add up to that of FR's."""
    one = prepare(experiment({"name": "fedavg"}, shared=True))[2].build_model()
    two: Any = prepare(experiment())[2].build_model()
    assert isinstance(one, RationaleClassifier)
    two.load_state_dict(one.state_dict(), strict=False)
    two.features.predictor.load_state_dict(one.features.generator.state_dict())
    assert float(encoder_distance(*two.encoders(), "l2").detach()) == 0
    x, y = torch.randint(1, 9, (5, 7)).int(), torch.tensor([0, 1, 1, 0, 1])
    for network in (one, two):
        torch.manual_seed(0)
        Rationales().forward(network, x, y).losses.mean().backward()
    for w, g, p in zip(one.encoders()[0], *two.encoders(), strict=True):
        assert w.grad is not None
        assert g.grad is not None
        assert p.grad is not None
        torch.testing.assert_close(w.grad, g.grad + p.grad)
    torch.testing.assert_close(two.eval()(x), one.eval()(x))


def hotel(folder: Path, files: dict[str, list[str]], **further: Any) -> Experiment:
    """On reviews of hotels, by the aspect that they are about: its rows of label and text."""
    for aspect, rows in files.items():
        for ending in ("train", "dev"):
            text = "\n".join(["task\tlabel\ttext", *(f"x\t{row}" for row in rows)])
            (folder / f"hotel_{aspect}.{ending}").write_text(text)
    aspects = [aspect.lower() for aspect in files]
    data = {"name": "hotel", "root": str(folder), "test": "heldout", "balance": False}
    return small_experiment(
        data={**data, "aspects": aspects, "dimension": 4, "length": 12},
        partition={"kind": "aspects", "clients": 4, "subsets": 4 // len(aspects)},
        model={"name": "rationale", "hidden": 3},
        method={"name": "fedrnl"},
        train={"rounds": 2, "optimizer": {"name": "adam", "lr": 0.01}, **further},
    )


def test_an_aspect_of_one_class_alone(tmp_path: Path) -> None:
    rows = [f"{k % 2}\tgood view {k % 3}" for k in range(12)]
    only = [f"1\tkind staff {k % 3}" for k in range(12)]
    last = run(hotel(tmp_path, {"Location": rows, "Service": only}), tmp_path).rounds.iloc[-1]
    assert 0 <= last["accuracy/service"] == last["balanced_accuracy/service"] <= 1
    assert np.isfinite(last["loss"])


def test_reviews_without_words_of_one_and_too_long(tmp_path: Path) -> None:
    texts = ["", "good", "good view " * 40, "bad", "", "bad view"]
    rows = [f"{int(k % 6 < 3)}\t{texts[k % 6]}" for k in range(24)]
    done = run(hotel(tmp_path, {"Location": rows}, batch_size=1), tmp_path)
    assert all(torch.isfinite(weights).all() for weights in done.weights().values())
    scores = ["loss", "train_loss", "accuracy", "chosen", "comprehensiveness", "sufficiency"]
    assert np.isfinite(done.rounds[scores]).all(axis=None)


def test_the_loss_is_the_models_and_the_term() -> None:
    made = experiment({"name": "fedrnl", "lam": 3.0, "encoder_loss": "l1"})
    network = prepare(made)[2].build_model()
    assert isinstance(network, RationaleClassifier)
    x, y = torch.randint(1, 9, (5, 7)).int(), torch.tensor([0, 1, 1, 0, 1])
    torch.manual_seed(0)
    found = made.method.loss(Rationales(), network, x, y, {})
    torch.manual_seed(0)
    plain = Rationales().loss(network, x, y, {})
    g, p = network.encoders()
    apart = sum(float((a - b).abs().sum().detach()) for a, b in zip(g, p, strict=True))
    torch.testing.assert_close(found, plain + 3.0 * apart)
    names = [n for n, _ in network.features.generator.named_parameters()]
    assert {n.split(".")[0] for n in names} == {"gru", "norm"}


def test_without_their_term_they_are_fedavg_to_the_bit() -> None:
    plain = server_states(experiment({"name": "fedavg"}))
    moon = server_states(experiment({"name": "moon", "mu": 5}))
    for method in ({"name": "fedrnl", "lam": 0}, {"name": "fedprox", "mu": 0}):
        for one, other in zip(plain, server_states(experiment(method)), strict=True):
            np.testing.assert_array_equal(one.weights, other.weights)
    np.testing.assert_array_equal(plain[1].weights, moon[1].weights)  # no earlier model yet
    assert not np.array_equal(plain[2].weights, moon[2].weights)


def test_fedbabus_head_is_that_of_the_predictor() -> None:
    made = experiment({"name": "fedbabu"})
    shapes, states = federation(made).server.model, server_states(made)
    before, after = (shapes.named_arrays(states[k].weights) for k in (0, -1))
    kept = {name for name in before if np.array_equal(before[name], after[name])}
    assert kept == {"head.weight", "head.bias"}  # the chooser is learnt


def test_fedbabu_with_both_heads_fixed(tmp_path: Path) -> None:
    """The generator's last layer is no part of what is trained or sent, and the same for all."""
    made = experiment({"name": "fedbabu"}, fixed_chooser=True)
    plain = prepare(made)[2].build_model()
    free = prepare(experiment({"name": "fedbabu"}))[2].build_model()
    done = run(made, tmp_path)
    weights = done.weights()
    fixed = {name for name in weights if "chooser" in name}
    assert fixed
    for network in (plain, ModelSnapshot.of(done).network()):
        for name, tensor in free.named_parameters():
            if "chooser" in name:
                assert torch.equal(dict(network.named_parameters())[name], tensor)
    moved = {n for n, w in weights.items() if not np.array_equal(w, plain.state_dict()[n])}
    assert moved == weights.keys() - fixed - {"head.weight", "head.bias"}
    assert federation(made).server.model.size == sum(
        weights[name].numel() for name in weights.keys() - fixed
    )
    dataset = prepare(made)[0]
    x = torch.tensor(np.asarray(dataset.test_x))
    right = ModelSnapshot.of(done).network().eval()(x).argmax(1).numpy() == dataset.test_y
    assert done.rounds["accuracy"].iloc[-1] == pytest.approx(right.mean())


def test_keeps_the_contract(tmp_path: Path) -> None:
    done = run(experiment(), tmp_path / "undisturbed")
    testing._check_run(done, tmp_path)
    # Word vectors are not sent.
    gru = 2 * (3 * 6 * 8 + 3 * 6 * 6 + 2 * 3 * 6)
    size = 2 * (gru + 2 * 12 + 2 * 12 + 2)
    assert (done.clients[["bytes_up", "bytes_down"]] == 4 * size).all(axis=None)
