"""Methods with personal models: their formulas, written out client by client, and equivalences."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments import federation, server_states, small_experiment
from fedsim import Experiment, Federation, Run
from fedsim.errors import BadInput, Diverged, ExperimentError
from fedsim.launch.prepare import prepare
from fedsim.methods.ditto import Ditto
from fedsim.methods.shared.personal import entries_of
from fedsim.simulate import evaluate_round, one_round
from fedsim.support.rng import keyed_rng

Finish = Callable[..., Run]
Batch = tuple[Tensor, Tensor]
Change = Callable[[Tensor, Tensor], Tensor]  # (gradient, weights) -> the step's direction

TRAIN = {"rounds": 3, "participation": 0.4, "local_epochs": 2}
# Clients with equally many samples, so that equal weights are FedAvg's.
EVEN: dict[str, Any] = {
    "data": {"name": "synthetic", "samples": 200, "test_samples": 20},
    "partition": {"kind": "iid", "clients": 10},
}
NORMALISED = {"name": "networks:normalised"}


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


class ByHand:
    """Local training of an experiment's clients in plain PyTorch."""

    def __init__(self, **sections: Any) -> None:
        self.experiment = small_experiment(**{"train": TRAIN, **sections})
        self.dataset, self.splits, spec = prepare(self.experiment)
        self.network = spec.build_model()
        self.fed = federation(self.experiment)
        self.lr = self.experiment.train.optimizer.lr
        self.initial = torch.tensor(self.fed.initial_weights())
        P = self.fed.server.model.num_parameters
        self.head = torch.zeros(P, dtype=torch.bool)
        self.head[self.fed.server.model.part("head")] = True

    def data(self, k: int) -> Batch:
        rows = self.splits.train[k]
        return torch.tensor(self.dataset.x)[rows], torch.tensor(self.dataset.y)[rows]

    def batches(self, t: int, k: int, purpose: str = "batches", epochs: int = 2) -> list[Batch]:
        x, y = self.data(k)
        rng, size = (
            keyed_rng(self.experiment.seed, f"local_update/{purpose}", t, k),
            self.experiment.train.batch_size,
        )
        orders = [torch.tensor(rng.permutation(len(y))).split(size) for _ in range(epochs)]
        return [(x[rows], y[rows]) for order in orders for rows in order]

    def gradient(self, w: Tensor, batch: Batch) -> Tensor:
        nn.utils.vector_to_parameters(w.clone(), self.network.parameters())
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        parts = torch.autograd.grad(loss, list(self.network.parameters()))
        return torch.cat([part.reshape(-1) for part in parts])

    def loss(self, w: Tensor, k: int) -> float:
        nn.utils.vector_to_parameters(w.clone(), self.network.parameters())
        x, y = self.data(k)
        with torch.no_grad():
            return float(nn.functional.cross_entropy(self.network(x), y))

    def sgd(self, w: Tensor, batches: list[Batch], change: Change = lambda g, w: g) -> Tensor:
        for batch in batches:
            w = w - self.lr * change(self.gradient(w, batch), w)
        return w

    def rounds(self) -> Any:
        """(t, cohort, the server's state, what clients keep) after each round."""
        state = self.experiment.method.init(self.fed)
        for t in range(1, self.experiment.train.rounds + 1):
            state = one_round(self.fed.runner, self.experiment, state, t)
            kept = {
                k: self.fed.runner.fetch(handle) for k, handle in self.fed.runner.states().items()
            }
            yield t, self.fed.sample(t).tolist(), state, kept


def close(found: Any, expected: Any, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=atol)


def states_of(experiment: Experiment) -> list[NDArray[np.float32]]:
    return [state.weights for state in server_states(experiment)]


def kept_after(experiment: Experiment) -> tuple[Federation, dict[int, Any]]:
    """The federation after all rounds, and what its clients keep."""
    fed = federation(experiment)
    state = experiment.method.init(fed)
    for t in range(1, experiment.train.rounds + 1):
        state = one_round(fed.runner, experiment, state, t)
    return fed, {k: fed.runner.fetch(handle) for k, handle in fed.runner.states().items()}


class TestSharedParts:
    @pytest.mark.parametrize("name", ["fedper", "lg_fedavg", "fedrep"])
    def test_as_written_out(self, name: str) -> None:
        hand = ByHand(method={"name": name, **({"head_epochs": 3} if name == "fedrep" else {})})
        shared = hand.head if name == "lg_fedavg" else ~hand.head
        body = (~hand.head).float()
        w, own = hand.initial.clone(), {}
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
                trained.append(v.numpy())
                sizes.append(1 if name == "fedrep" else len(hand.splits.train[k]))
                close(kept[k]["weights"], v)
            mean = torch.tensor(np.average(trained, axis=0, weights=sizes)).float()
            w = torch.where(shared, mean, w)
            close(state.weights, w)
            np.testing.assert_array_equal(state.weights[~shared], hand.initial[~shared])
            assert sorted(kept) == sorted(own)

    def test_fedbn_keeps_batch_norm_with_its_clients(self) -> None:
        """The rest is what FedAvg makes of the same local models."""
        experiment = small_experiment(
            **EVEN, method={"name": "fedbn"}, model=NORMALISED, train={"rounds": 2}
        )
        fed, kept = kept_after(experiment)
        model = fed.server.model
        own = entries_of(model, ["features.2"])
        assert own.sum() == 4 * 32  # γ, β, and the statistics
        names = [name for name in model.shapes if name.startswith("features.2.")]
        assert {name.rpartition(".")[2] for name in names} == {
            *("weight", "bias", "running_mean", "running_var")
        }
        before, first, second = states_of(experiment)
        np.testing.assert_array_equal(second[own], before[own])
        mean = np.mean([state["weights"] for state in kept.values()], axis=0)
        close(second[~own], mean[~own])
        for a in kept.values():
            assert (a["weights"][own] != before[own]).mean() > 0.9
        plain = states_of(small_experiment(**EVEN, model=NORMALISED, train={"rounds": 2}))
        close(first[~own], plain[1][~own])  # in the first round all batch norms are the same
        assert not np.allclose(second[~own], plain[2][~own], atol=1e-4)

    def test_layers_are_chosen_by_name(self) -> None:
        """FedPer and LG-FedAvg are each other's mirror images."""
        model = {"name": "mlp", "hidden": [8, 6]}
        common: dict[str, Any] = {"model": model, "train": {"rounds": 2}}
        layers = ("features.1", "features.3", "head")
        for personal, shared in ((layers[1:], layers[:1]), (layers[2:], layers[:2])):
            per = {"name": "fedper", "personal": personal}
            lg = {"name": "lg_fedavg", "shared": shared}
            one, other = (
                states_of(small_experiment(**common, method=method)) for method in (per, lg)
            )
            np.testing.assert_array_equal(one[2], other[2])

    def test_scores_are_of_the_shared_part_now_and_ones_own(self, finish: Finish) -> None:
        """And of the initial one, of clients that have not been trained."""
        sections: dict[str, Any] = {
            "method": {"name": "fedper"},
            "partition": {"test_fraction": 0.3, "alpha": 0.3, "min_samples": 6},
            "train": {"rounds": 2, "participation": 0.3},
            "evaluate": {"clients": True},
        }
        hand = ByHand(**sections)
        *_, (_, _, state, kept) = hand.rounds()
        assert 3 <= len(kept) < 10
        done = finish(**sections)
        last = done.clients[done.clients["round"] == 2].set_index("client")
        central = []
        for k in range(10):
            own = torch.tensor(kept[k]["weights"]) if k in kept else hand.initial
            w = torch.where(hand.head, own, torch.tensor(state.weights))
            nn.utils.vector_to_parameters(w, hand.network.parameters())
            rows = hand.splits.test[k]
            with torch.no_grad():
                found = hand.network(torch.tensor(hand.dataset.x[rows])).argmax(dim=1).numpy()
                whole = hand.network(torch.tensor(hand.dataset.test_x)).argmax(dim=1).numpy()
            right = (found == hand.dataset.y[rows]).mean()
            assert last.loc[k, "test_accuracy"] == pytest.approx(right)
            if k in kept:
                central.append((whole == hand.dataset.test_y).mean())
        assert done.rounds["accuracy"].iloc[-1] == pytest.approx(np.mean(central))
        assert done.rounds["client_accuracy"].iloc[-1] == last["test_accuracy"].mean()

    def test_a_head_of_ones_own_helps(self, finish: Finish) -> None:
        accuracy = {}
        for name in ("fedavg", "fedper", "fedavg_ft", "ditto"):
            done = finish(
                method={"name": name},
                partition={"test_fraction": 0.3, "alpha": 0.1, "min_samples": 4},
                train={"rounds": 3},
                evaluate={"clients": True, "every": 3},
            )
            accuracy[name] = done.rounds["client_accuracy"].iloc[-1]
        assert all(accuracy[name] > accuracy["fedavg"] for name in accuracy if name != "fedavg")


class TestDitto:
    def test_its_global_model_is_fedavg_s(self, finish: Finish) -> None:
        train = {"rounds": 3, "participation": 0.5}
        done = finish(method={"name": "ditto"}, train=train)
        assert done.result_hash == finish(train=train).result_hash

    def test_personal_models_as_written_out(self) -> None:
        hand = ByHand(method={"name": "ditto", "lam": 0.7})
        w, own = hand.initial, {}
        for t, cohort, state, kept in hand.rounds():
            for k in cohort:
                v = own.get(k, hand.initial)
                batches = hand.batches(t, k, "batches/2")
                own[k] = hand.sgd(v, batches, lambda g, v, w=w: g + 0.7 * (v - w))
            w = torch.tensor(state.weights)
            assert sorted(kept) == sorted(own)
            for k, v in own.items():
                close(kept[k]["weights"], v)

    def test_clients_that_were_never_trained_have_the_initial_model(self) -> None:
        experiment = small_experiment(
            method={"name": "ditto"},
            partition={"test_fraction": 0.3},
            train={"rounds": 1, "participation": 0.3},
            evaluate={"clients": True},
        )
        fed = federation(experiment)
        state = one_round(fed.runner, experiment, experiment.method.init(fed), 1)
        evaluate_round(fed.runner, experiment, state, 1)
        _, tables = fed.runner.records()
        tested = {row["client"]: row["test_loss"] for row in tables["clients"]}
        fed.runner.begin(2)
        method = experiment.method
        fed.each(method.local_test, range(10), weights=fed.initial_weights())
        again = {row["client"]: row["test_loss"] for row in fed.runner.records()[1]["clients"]}
        assert tested == again
        assert len(fed.runner.states()) == 3

    def test_a_personal_model_that_diverges_is_told(
        self, finish: Finish, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Ditto, "pull", lambda self, splits: None)  # or it would be refused
        with pytest.raises(Diverged, match=r"round \d+: client \d: NaN or infinite weights; lo"):
            finish(method={"name": "ditto", "lam": 1e8}, train={"rounds": 9})


class TestAPFL:
    @pytest.mark.parametrize("adaptive", [False, True])
    def test_as_written_out(self, adaptive: bool) -> None:
        hand = ByHand(method={"name": "apfl", "alpha": 0.6, "adaptive": adaptive})
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
                trained.append(own.numpy())
                close(kept[k]["local"], v)
                close(kept[k]["weights"], a * v + (1 - a) * own)
                assert kept[k]["alpha"] == pytest.approx(a, abs=1e-5)
            w = torch.tensor(np.mean(trained, axis=0))
            close(state.weights, w)
        assert adaptive == (len(set(alphas.values())) > 1)

    def test_without_a_local_model_it_is_fedavg(self) -> None:
        common: dict[str, Any] = {**EVEN, "model": NORMALISED, "train": {"rounds": 2}}
        method = {"name": "apfl", "alpha": 0, "adaptive": False}
        experiment = small_experiment(**common, method=method)
        for one, other in zip(
            states_of(small_experiment(**common)), states_of(experiment), strict=True
        ):
            close(other, one, 2e-5)
        fed, kept = kept_after(experiment)
        P = fed.server.model.num_parameters
        for state in kept.values():
            np.testing.assert_array_equal(state["local"][:P], fed.initial_weights()[:P])

    def test_alpha_is_on_record_and_stays_between_0_and_1(self, finish: Finish) -> None:
        train = {"rounds": 4, "optimizer": {"lr": 0.5}}
        done = finish(method={"name": "apfl", "alpha": 0.95}, train=train)
        alpha = done.clients["alpha"]
        assert (alpha[done.clients["round"] == 1] == 0.95).all()  # v_k = w: no slope yet
        assert alpha.between(0, 1).all()
        assert alpha.nunique() > 5


class TestPFedMe:
    def test_as_written_out(self) -> None:
        hand = ByHand(method={"name": "pfedme", "lam": 2.0, "eta": 0.3, "steps": 3, "beta": 1.5})
        w = hand.initial
        for t, cohort, state, kept in hand.rounds():
            trained = []
            for k in cohort:
                own, theta = w.clone(), w.clone()
                for batch in hand.batches(t, k):
                    for _ in range(3):
                        g = hand.gradient(theta, batch) + 2.0 * (theta - own)
                        theta = theta - hand.lr * g
                    own = own - 0.3 * 2.0 * (own - theta)
                trained.append(own.numpy())
                close(kept[k]["weights"], theta)
            w = (1 - 1.5) * w + 1.5 * torch.tensor(np.mean(trained, axis=0))
            close(state.weights, w)

    @pytest.mark.parametrize(
        "train",
        [{"local_epochs": 2}, {"local_steps": 3}, {"sampler": "balanced", "accumulate": 2}],
    )
    @pytest.mark.parametrize("model", [{"name": "mlp", "hidden": [8]}, NORMALISED])
    def test_with_one_step_and_w_where_it_leads_it_is_fedavg(
        self, train: dict[str, Any], model: dict[str, Any]
    ) -> None:
        """From θ = w, one step of θ is one of plain SGD; 17 samples are a batch and one more."""
        common: dict[str, Any] = {
            "data": {"name": "synthetic", "samples": 170, "test_samples": 20},
            "partition": {"kind": "iid", "clients": 10},
            "model": model,
            "train": {"rounds": 2, **train},
        }
        method = {"name": "pfedme", "lam": 2, "eta": 0.5, "steps": 1}
        one, other = (
            states_of(small_experiment(**common, **with_))
            for with_ in ({}, {"method": method})  # type: ignore[attr-defined]
        )
        close(one, other, 2e-5)


class TestPerFedAvg:
    @pytest.mark.parametrize("variant", ["fo", "hf"])
    def test_as_written_out(self, variant: str) -> None:
        method = {"name": "perfedavg", "alpha": 0.3, "variant": variant, "delta": 0.01}
        hand = ByHand(method=method, model={"name": "mlp", "hidden": []})
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
                trained.append(own.numpy())
            w = torch.tensor(np.mean(trained, axis=0))
            close(state.weights, w, 2e-5)

    def test_the_hessian_makes_a_difference(self) -> None:
        method = {"name": "perfedavg", "alpha": 0.3}
        fo, hf = (
            states_of(small_experiment(method={**method, "variant": v}, train={"rounds": 1}))[1]
            for v in ("fo", "hf")
        )
        assert np.abs(hf - fo).max() > 1e-3

    def hessian_product(self, hand: ByHand, w: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """∇²f(w; batch)·v, by autograd."""
        nn.utils.vector_to_parameters(w.clone(), hand.network.parameters())
        parameters = list(hand.network.parameters())
        loss = nn.functional.cross_entropy(hand.network(batch[0]), batch[1])
        parts = torch.autograd.grad(loss, parameters, create_graph=True)
        along = torch.cat([part.reshape(-1) for part in parts]) @ v
        return torch.cat([p.reshape(-1) for p in torch.autograd.grad(along, parameters)])

    @pytest.mark.parametrize("variant", ["fo", "hf"])
    @pytest.mark.parametrize(
        "optimizer", [{"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}, {"name": "adam"}]
    )
    def test_without_a_step_of_alpha_it_is_fedavg(
        self, variant: str, optimizer: dict[str, Any]
    ) -> None:
        common: dict[str, Any] = {
            **EVEN,
            "model": NORMALISED,
            "train": {"rounds": 2, "clip_norm": 1.0, "optimizer": {"lr": 0.01, **optimizer}},
        }
        method = {"name": "perfedavg", "alpha": 0, "variant": variant}
        plain = states_of(small_experiment(**common))
        close(states_of(small_experiment(**common, method=method)), plain, 1e-4)

    def test_clients_are_tested_after_one_step(self, finish: Finish) -> None:
        sections: dict[str, Any] = {
            "method": {"name": "perfedavg", "alpha": 0.2},
            "partition": {"test_fraction": 0.3},
            "train": {"rounds": 1},
            "evaluate": {"clients": True},
        }
        hand = ByHand(**sections)
        ((_, _, state, _),) = hand.rounds()
        tested = finish(**sections).clients.set_index("client")["test_loss"]
        w = torch.tensor(state.weights)
        for k in range(10):
            adapted = w - 0.2 * hand.gradient(w, hand.data(k))
            nn.utils.vector_to_parameters(adapted, hand.network.parameters())
            rows = hand.splits.test[k]
            logits = hand.network(torch.tensor(hand.dataset.x[rows]))
            expected = nn.functional.cross_entropy(logits, torch.tensor(hand.dataset.y[rows]))
            assert tested[k] == pytest.approx(float(expected.detach()), rel=1e-4)


class TestFedAvgFT:
    def test_the_federation_is_fedavg_s(self, finish: Finish) -> None:
        done = finish(method={"name": "fedavg_ft"}, train={"rounds": 3})
        assert done.result_hash == finish(train={"rounds": 3}).result_hash

    def test_it_is_fine_tuned_as_fedbabu_is(self) -> None:
        """The same client function, of the same stream."""
        common: dict[str, Any] = {"partition": {"test_fraction": 0.3}, "train": {"rounds": 1}}
        for part in ("head", "all"):
            losses = []
            for name in ("fedavg_ft", "fedbabu"):
                method = {"name": name, "fine_tune": part, "fine_tune_epochs": 2}
                experiment = small_experiment(**common, method=method)
                fed = federation(experiment)
                fed.runner.begin(1)
                weights = fed.initial_weights()
                fed.each(experiment.method.local_test, range(10), weights=weights)
                losses.append([row["test_loss"] for row in fed.runner.records()[1]["clients"]])
            assert losses[0] == losses[1]


class TestIFCA:
    def test_as_written_out(self) -> None:
        hand = ByHand(method={"name": "ifca", "clusters": 3})
        models = torch.tensor(hand.experiment.method.init(hand.fed).models)  # type: ignore[attr-defined]
        assert len(models) == 3
        np.testing.assert_array_equal(models[0], hand.initial)
        assert (models[1] != models[2]).any()
        assert (models[1] != models[0]).any()
        idle = 0
        for t, cohort, state, kept in hand.rounds():
            assert kept == {}
            chosen = {k: int(np.argmin([hand.loss(w, k) for w in models])) for k in cohort}
            before, models = models, models.clone()
            for j in range(3):
                members = [k for k, own in chosen.items() if own == j]
                idle += not members
                if members:
                    trained = [hand.sgd(before[j], hand.batches(t, k)).numpy() for k in members]
                    models[j] = torch.tensor(np.mean(trained, axis=0))
            close(state.models, models)
            close(state.weights, models.mean(dim=0))
        assert 0 < idle < 9

    def test_one_cluster_is_fedavg(self) -> None:
        one = states_of(small_experiment(**EVEN, train={"rounds": 3}))
        method = {"name": "ifca", "clusters": 1}
        other = states_of(small_experiment(**EVEN, train={"rounds": 3}, method=method))
        close(other, one, 1e-6)

    def test_it_finds_clusters(self, finish: Finish, tmp_path: Path) -> None:
        """Clients of two groups with different classes."""
        y = small_experiment().data.load().y
        groups = [np.flatnonzero(y < 5), np.flatnonzero(y >= 5)]
        path = tmp_path / "clients.json"
        path.write_text(json.dumps([rows[i::4].tolist() for rows in groups for i in range(4)]))
        done = finish(
            method={"name": "ifca"},
            partition={"kind": "file", "path": str(path)},
            train={"rounds": 5},
        )
        last = done.clients[done.clients["round"] == 5].set_index("client")["cluster"]
        assert last.loc[:3].nunique() == last.loc[4:].nunique() == 1
        assert last.loc[0] != last.loc[4]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"method": {"name": "fedper", "personal": ["haed"]}},
            "method.personal: the model has no module 'haed' with parameters; it has "
            "features.1, head",
        ),
        (
            {"method": {"name": "fedper", "personal": ["features", "head"]}},
            "method.personal: all parameters of the model are in features, head; leave some out",
        ),
        (
            {"method": {"name": "lg_fedavg", "shared": ["features.0"]}},
            "method.shared: the model has no module 'features.0' with parameters",
        ),
        ({"method": {"name": "fedper", "personal": []}}, r"method.personal: .*at least 1 item"),
        (
            {"method": {"name": "fedbn"}},
            "method.name=fedbn keeps batch norm with the clients, and the model has none",
        ),
        (
            {"method": {"name": "fedrep"}, "model": {"name": "mlp", "hidden": []}},
            "method.name=fedrep shares the features, and the model's have no parameters",
        ),
        ({"method": {"name": "ditto", "lam": -1}}, r"method.lam: .*greater than or equal to 0"),
        ({"method": {"name": "apfl", "alpha": 1.5}}, r"method.alpha: .*less than or equal to 1"),
        ({"method": {"name": "pfedme", "lam": 0}}, r"method.lam: .*greater than 0"),
        ({"method": {"name": "perfedavg", "variant": "so"}}, r"method.variant: .*'fo' or 'hf'"),
        ({"method": {"name": "ifca", "clusters": 0}}, r"method.clusters: .*greater than or equal"),
    ],
)
def test_bad_input(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        prepare(small_experiment(**sections))
