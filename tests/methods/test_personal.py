"""Methods with personal models: their formulas, written out client by client, and equivalences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from by_hand import EVEN, LITTLE, Batch, ByHand, close
from torch import Tensor, nn

from experiments import Finish, server_states, small_experiment
from fedsim.errors import ExperimentError
from fedsim.launch.prepare import prepare
from fedsim.methods.shared.personal import entries_of

TRAIN = {"rounds": 3, "participation": 0.4, "local_epochs": 2}
NORMALISED = {"name": "networks:normalised"}


def by_hand(method: dict[str, Any], **sections: Any) -> ByHand:
    return ByHand(small_experiment(**{**LITTLE, "train": TRAIN, **sections}, method=method))


@pytest.mark.parametrize(
    ("name", "key", "given"),
    [
        ("fedprox", "mu", {}),
        ("ditto", "lam", {}),
        ("pfedme", "lam", {}),
        ("feddyn", "alpha", {"scale": "none"}),
        ("feddyn", "alpha", {}),
    ],
)
def test_pulls_on_which_steps_diverge(name: str, key: str, given: dict[str, Any]) -> None:
    def prepared(strength: float) -> np.ndarray:
        method = {"name": name, key: strength, **given}
        partition = {"kind": "dirichlet", "alpha": 0.5, "clients": 5}
        return prepare(small_experiment(method=method, partition=partition))[1].train.lengths

    optimizer, n = small_experiment().train.optimizer, prepared(1e-3)
    most = optimizer.stable / optimizer.lr
    scaled = name == "feddyn" and not given
    factor = n.mean() / n.min() if scaled else 1
    assert n.mean() / n.min() > 1.2
    prepared(0.99 * most / factor)
    strongest = r" for the smallest client, with" if scaled else f"method.{key}=[0-9.]+ with"
    with pytest.raises(ExperimentError, match=rf"{strongest} train.optimizer.lr=.* diverge"):
        prepared(1.01 * most / factor)


class TestSharedParts:
    @pytest.mark.parametrize("name", ["fedper", "lg_fedavg", "fedrep"])
    def test_as_written_out(self, name: str) -> None:
        hand = by_hand({"name": name, **({"head_epochs": 3} if name == "fedrep" else {})})
        shared = hand.head if name == "lg_fedavg" else ~hand.head
        body = (~hand.head).double()
        w, own = hand.initial, {}
        for t, cohort, state, kept in hand.rounds():
            trained, sizes = [], []
            for k in cohort:
                v = torch.where(shared, w, own.get(k, hand.initial))
                if name == "fedrep":
                    v = hand.sgd(v, hand.batches(t, k, epochs=3), lambda g, _: g * (1 - body))
                    v = hand.sgd(v, hand.batches(t, k, "batches/2"), lambda g, _: g * body)
                else:
                    v = hand.sgd(v, hand.batches(t, k))
                own[k] = v
                trained.append(v)
                sizes.append(1 if name == "fedrep" else hand.n[k])
                close(kept[k]["weights"], v)
            w = torch.where(shared, hand.mean(trained, sizes), w)
            close(state.weights, w)
            np.testing.assert_array_equal(state.weights[~shared], hand.initial[~shared])
            assert sorted(kept) == sorted(own)

    def test_fedbn_keeps_batch_norm_with_its_clients(self) -> None:
        """The rest is what FedAvg makes of the same local models."""
        common: dict[str, Any] = {**EVEN, "model": NORMALISED, "train": {"rounds": 2}}
        hand = ByHand(small_experiment(**common, method={"name": "fedbn"}))
        model, before = hand.fed.server.model, hand.fed.initial_weights()
        own = entries_of(model, ["features.2"])
        assert own.sum() == 4 * 32  # γ, β, and the statistics
        (_, _, first, _), (_, _, second, kept) = hand.rounds()
        np.testing.assert_array_equal(second.weights[own], before[own])
        mean = np.mean([state["weights"] for state in kept.values()], axis=0)
        close(second.weights[~own], mean[~own])
        for a in kept.values():
            assert (a["weights"][own] != before[own]).mean() > 0.9
        plain = server_states(small_experiment(**common))
        # In the first round all batch norms are the same.
        close(first.weights[~own], plain[1].weights[~own])
        assert not np.allclose(second.weights[~own], plain[2].weights[~own], atol=1e-4)

    def test_layers_are_chosen_by_name(self) -> None:
        """FedPer and LG-FedAvg are each other's mirror images."""
        model = {"name": "mlp", "hidden": [8, 6]}
        common: dict[str, Any] = {**LITTLE, "model": model, "train": {"rounds": 2}}
        layers = ("features.1", "features.3", "head")
        for personal, shared in ((layers[1:], layers[:1]), (layers[2:], layers[:2])):
            per = {"name": "fedper", "personal": personal}
            lg = {"name": "lg_fedavg", "shared": shared}
            one, other = (
                server_states(small_experiment(**common, method=method)) for method in (per, lg)
            )
            np.testing.assert_array_equal(one[2].weights, other[2].weights)

    def test_scores_are_of_the_shared_part_now_and_ones_own(self, finish: Finish) -> None:
        """And of the initial one, of clients that have not been trained."""
        sections: dict[str, Any] = {
            "method": {"name": "fedper"},
            "partition": {"test_fraction": 0.1, "alpha": 0.3, "min_samples": 6},
            "train": {"rounds": 2, "participation": 0.3},
            "evaluate": {"clients": True},
        }
        hand = ByHand(small_experiment(**sections))
        *_, (_, _, state, kept) = hand.rounds()
        assert (3 <= len(kept) < 10, 1 in hand.splits.test.lengths) == (True, True)
        done = finish(**sections)
        last = done.clients[done.clients["round"] == 2].set_index("client")
        central = []
        for k in range(10):
            own = kept[k]["weights"] if k in kept else hand.initial
            network = hand.network(np.where(hand.head, own, state.weights))
            rows = hand.splits.test[k]
            found, whole = (
                network(torch.tensor(x).double()).argmax(dim=1).numpy()
                for x in (hand.dataset.x[rows], hand.dataset.test_x)
            )
            right = (found == hand.dataset.y[rows]).mean()
            assert last.loc[k, "test_accuracy"] == pytest.approx(right)
            if k in kept:
                central.append((whole == hand.dataset.test_y).mean())
        assert done.rounds["accuracy"].iloc[-1] == pytest.approx(np.mean(central))
        assert done.rounds["client_accuracy"].iloc[-1] == pytest.approx(last.test_accuracy.mean())


def test_ditto() -> None:
    hand = by_hand({"name": "ditto", "lam": 0.7})
    w, own = hand.initial, {}
    for t, cohort, state, kept in hand.rounds():
        for k in cohort:
            v = own.get(k, hand.initial)
            batches = hand.batches(t, k, "batches/2")
            own[k] = hand.sgd(v, batches, lambda g, v, w=w: g + 0.7 * (v - w))
        w = hand.fedavg(w, t, cohort)
        close(state.weights, w)
        assert sorted(kept) == sorted(own)
        for k, v in own.items():
            close(kept[k]["weights"], v)


class TestAPFL:
    @pytest.mark.parametrize("adaptive", [False, True])
    def test_as_written_out(self, adaptive: bool) -> None:
        hand = by_hand({"name": "apfl", "alpha": 0.6, "adaptive": adaptive})
        w, local, alphas = hand.initial, {}, {}
        for t, cohort, state, kept in hand.rounds():
            trained = []
            for k in cohort:
                own, v, a = w, local.get(k, hand.initial), alphas.get(k, 0.6)
                mine = hand.batches(t, k)
                if adaptive:
                    slope = (v - own) @ hand.gradient(a * v + (1 - a) * own, mine[0])
                    a = min(max(a - hand.lr * float(slope), 0.0), 1.0)
                    mine = hand.batches(t, k, "batches/2")
                for batch in mine:
                    at_mixed = hand.gradient(a * v + (1 - a) * own, batch)
                    own = own - hand.lr * hand.gradient(own, batch)
                    v = v - hand.lr * a * at_mixed
                local[k], alphas[k] = v, a
                trained.append(own)
                close(kept[k]["local"], v)
                close(kept[k]["weights"], a * v + (1 - a) * own)
                assert kept[k]["alpha"] == pytest.approx(a, abs=1e-5)
            w = hand.mean(trained)
            close(state.weights, w)
        assert adaptive == (len(set(alphas.values())) > 1)

    def test_alpha_is_on_record_and_stays_between_0_and_1(self, finish: Finish) -> None:
        train = {"rounds": 4, "optimizer": {"lr": 0.5}}
        done = finish(method={"name": "apfl", "alpha": 0.95}, train=train)
        alpha = done.clients["alpha"]
        assert (alpha[done.clients["round"] == 1] == 0.95).all()  # v_k = w: no slope yet
        assert alpha.between(0, 1).all()
        assert alpha.nunique() > 5


def test_pfedme() -> None:
    hand = by_hand({"name": "pfedme", "lam": 2.0, "eta": 0.3, "steps": 3, "beta": 1.5})
    w = hand.initial
    for t, cohort, state, kept in hand.rounds():
        trained = []
        for k in cohort:
            own = theta = w
            for batch in hand.batches(t, k):
                for _ in range(3):
                    g = hand.gradient(theta, batch) + 2.0 * (theta - own)
                    theta = theta - hand.lr * g
                own = own - 0.3 * 2.0 * (own - theta)
            trained.append(own)
            close(kept[k]["weights"], theta)
        w = (1 - 1.5) * w + 1.5 * hand.mean(trained)
        close(state.weights, w)


class TestPerFedAvg:
    @pytest.mark.parametrize("variant", ["fo", "hf"])
    def test_as_written_out(self, variant: str) -> None:
        method = {"name": "perfedavg", "alpha": 0.3, "variant": variant, "delta": 0.01}
        hand = by_hand(method, model={"name": "mlp", "hidden": []})
        w = hand.initial
        for t, cohort, state, _ in hand.rounds():
            trained = []
            for k in cohort:
                own, batches = w, hand.batches(t, k)
                for b in range(len(batches)):
                    outer, inner, third = (batches[(b + i) % len(batches)] for i in range(3))
                    g = hand.gradient(own - 0.3 * hand.gradient(own, inner), outer)
                    if variant == "hf":
                        g = g - 0.3 * self.hessian_product(hand, own, g, third)
                    own = own - hand.lr * g
                trained.append(own)
            w = hand.mean(trained)
            close(state.weights, w, 2e-5)

    def hessian_product(self, hand: ByHand, w: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """∇²f(w; batch)·v, by autograd."""
        network = hand.network(w)
        parameters = list(network.parameters())
        loss = nn.functional.cross_entropy(network(batch[0]), batch[1])
        parts = torch.autograd.grad(loss, parameters, create_graph=True)
        along = torch.cat([part.reshape(-1) for part in parts]) @ v
        return torch.cat([p.reshape(-1) for p in torch.autograd.grad(along, parameters)])


@pytest.mark.parametrize(
    "method",
    [
        {"name": "perfedavg", "alpha": 0.2},
        *(
            {"name": name, "fine_tune": part, "fine_tune_epochs": 2}
            for name in ("fedavg_ft", "fedbabu")
            for part in ("head", "all")
        ),
    ],
    ids=lambda method: "-".join(map(str, method.values())),
)
def test_clients_are_tested_with_what_they_make_of_the_global_model(
    finish: Finish, method: dict[str, Any]
) -> None:
    """By one step, or by fine-tuning, which is no training of the federation's."""
    sections: dict[str, Any] = {"method": method, "train": {"rounds": 1}}
    sections |= {"partition": {"test_fraction": 0.3}, "evaluate": {"clients": True}}
    hand = ByHand(small_experiment(**sections))
    ((_, _, state, _),) = hand.rounds()
    done = finish(**sections)
    assert done.rounds["clients"].tolist() == [10]
    tested = done.clients.set_index("client")["test_loss"]
    w = torch.tensor(state.weights).double()
    tuned = hand.head if method.get("fine_tune") == "head" else torch.ones_like(hand.head)
    for k in range(10):
        if "alpha" in method:
            own = w - 0.2 * hand.gradient(w, hand.data(k))
        else:
            batches = hand.batches(1, k, epochs=2, function="local_test")
            own = hand.sgd(w, batches, lambda g, _: g * tuned)
        rows = hand.splits.test[k]
        logits = hand.network(own)(torch.tensor(hand.dataset.x[rows]).double())
        expected = nn.functional.cross_entropy(logits, torch.tensor(hand.dataset.y[rows]))
        assert tested[k] == pytest.approx(float(expected.detach()), rel=1e-4)


PFEDME = {"name": "pfedme", "lam": 2, "eta": 0.5, "steps": 1}  # one step of θ is one of plain SGD
PERFEDAVG = {"name": "perfedavg", "alpha": 0, "variant": "hf"}
MOMENTUM = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}


@pytest.mark.parametrize(
    ("method", "train"),
    [  # 30 samples are a batch and a part
        (PFEDME, {"local_epochs": 2}),
        (PFEDME, {"local_steps": 3}),
        (PFEDME, {"sampler": "balanced", "accumulate": 2}),
        (PERFEDAVG, {"clip_norm": 1.0, "optimizer": MOMENTUM}),
        (PERFEDAVG, {"clip_norm": 1.0, "optimizer": {"lr": 0.01, "name": "adam"}}),
    ],
)
def test_own_loops_go_by_the_settings(method: dict[str, Any], train: dict[str, Any]) -> None:
    """Where they come to the same, as FedAvg does."""
    common: dict[str, Any] = {**EVEN, "train": {"rounds": 2, **train}}
    methods = ({"name": "fedavg"}, method)
    states = (server_states(small_experiment(**common, method=m)) for m in methods)
    for a, b in zip(*states, strict=True):
        close(a.weights, b.weights, 2e-5)


def test_ifca() -> None:
    hand = by_hand({"name": "ifca", "clusters": 3})
    ifca: Any = hand.experiment.method
    models = torch.tensor(ifca.init(hand.fed).models).double()
    assert len(models) == 3
    np.testing.assert_array_equal(models[0], hand.initial)
    assert (models[1] != models[2]).any()
    assert (models[1] != models[0]).any()
    idle = 0
    for t, cohort, state, kept in hand.rounds():
        assert kept == {}
        chosen = {k: int(np.argmin([hand.loss(w, k) for w in models])) for k in cohort}
        rows = hand.fed.runner.records()[1]["clients"]
        assert {row["client"]: row["cluster"] for row in rows} == chosen
        before, models = models, models.clone()
        for j in range(3):
            members = [k for k, own in chosen.items() if own == j]
            idle += not members
            if members:
                models[j] = hand.mean([hand.trained(before[j], t, k) for k in members])
        close(state.models, models)
        close(state.weights, models.mean(dim=0))
    assert 0 < idle < 9
