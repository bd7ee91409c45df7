"""Methods that change local training or the mean, against their formulas, client by client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from by_hand import EVEN, LITTLE, ByHand, close
from torch import Tensor
from torch.nn import functional

from experiments import Finish, server_states, small_experiment
from fedsim.errors import Diverged, RunError
from fedsim.objectives import Classification

SOME = {"rounds": 3, "participation": 0.6, "local_epochs": 2}
NESTEROV = {"momentum": 0.9, "nesterov": True}
SGD: list[dict[str, Any]] = [{}, {"momentum": 0.5}, {"momentum": 0.9}, NESTEROV]


def by_hand(method: dict[str, Any], **sections: Any) -> ByHand:
    return ByHand(small_experiment(**{**LITTLE, "train": SOME, **sections}, method=method))


def test_centralised_is_fedavg_on_one_client() -> None:
    """But for the order of the examples, which does not matter to one batch of all."""
    train = {"rounds": 3, "batch_size": 2000, "optimizer": {"lr": 0.3}}
    alone = {**LITTLE, "partition": {"kind": "iid", "clients": 1}}
    *_, one = server_states(small_experiment(**alone, train=train))
    method = {"name": "centralised"}
    *_, union = server_states(small_experiment(**EVEN, train=train, method=method))
    close(union.weights, one.weights)


class TestScaffold:
    def test_as_written_out(self) -> None:
        hand = by_hand({"name": "scaffold", "server_lr": 0.7})
        K, x = 5, hand.initial
        c, own = torch.zeros_like(x), {k: torch.zeros_like(x) for k in range(K)}
        for t, cohort, state, _ in hand.rounds():
            deltas, changes = [], []
            for k in cohort:
                y = hand.trained(x, t, k, lambda g, w, d=c - own[k]: g + d)
                new = own[k] - c + (x - y) / (len(hand.batches(t, k)) * hand.lr)
                deltas.append(y - x)
                changes.append(new - own[k])
                own[k] = new
            x = x + 0.7 * hand.mean(deltas)
            c = c + sum(changes) / K
            close(state.weights, x)
            close(state.control, c, 1e-4)
            # What the server keeps is the mean of what all clients keep.
            close(c, hand.mean(list(own.values())), 1e-12)

    @pytest.mark.parametrize("optimizer", SGD, ids=str)
    def test_it_keeps_gradients(self, optimizer: dict[str, Any]) -> None:
        """Of a linear loss, c_k⁺ is its gradient in every round, and c is their mean."""
        train = {"rounds": 3, "local_epochs": 7, "batch_size": 2000, "lr_decay": 0.5}
        train |= {"optimizer": {"lr": 0.1, **optimizer}}
        linear = {"model": {"name": "mlp", "hidden": []}, "train": train}
        loss = {"name": "networks:LinearLoss"}
        hand = by_hand({"name": "scaffold"}, **linear, objective=loss)
        gradients = []
        for k in range(5):
            x, y = (values.numpy() for values in hand.data(k))
            chosen = np.eye(3)[y]
            gradients.append(np.concatenate([(-chosen.T @ x / len(x)).ravel(), -chosen.mean(0)]))
        for _, _, state, kept in hand.rounds():
            for k, own in kept.items():
                close(own["control"], gradients[k], 2e-5)
            close(state.control, np.mean(gradients, axis=0), 2e-5)


def test_fedprox() -> None:
    hand = by_hand({"name": "fedprox", "mu": 0.5}, train={"rounds": 1, "local_epochs": 3})
    _, after = server_states(hand.experiment)
    expected = hand.fedavg(hand.initial, 1, change=lambda g, w: g + 0.5 * (w - hand.initial))
    close(after.weights, expected)


def test_fedavgm() -> None:
    """With a warm-up over a round, and then a third after each."""
    method: dict[str, Any] = {"name": "fedavgm", "beta": 0.6, "server_lr": 0.5}
    method["server_schedule"] = {"name": "step", "warmup": 1, "every": 1, "gamma": 1 / 3}
    hand = by_hand(method, train={"rounds": 3})
    w, v = hand.initial, torch.zeros(())
    for t, _, state, _ in hand.rounds():
        v = 0.6 * v + (w - hand.fedavg(w, t))
        w = w - (1 / 2, 1, 1 / 3)[t - 1] * 0.5 * v
        close(state.weights, w)


@pytest.mark.parametrize("scale", ["samples", "none"])
def test_feddyn(scale: str) -> None:
    hand = by_hand({"name": "feddyn", "alpha": 0.1, "scale": scale})
    w, n = hand.initial, hand.n
    h = {k: torch.zeros_like(w) for k in range(5)}
    for t, cohort, state, _ in hand.rounds():
        trained = []
        for k in cohort:
            alpha = 0.1 / (5 * n[k] / n.sum()) if scale == "samples" else 0.1
            own = hand.trained(w, t, k, lambda g, v, a=alpha, b=h[k] - w: g + a * b + a * v)
            h[k] = h[k] + own - w
            trained.append(own)
        mean_h = hand.mean(list(h.values()))
        w = hand.mean(trained) + mean_h
        close(state.weights, w - mean_h)
        close(state.server, w)
        close(state.h, mean_h)


def test_the_loss_of_moon() -> None:
    torch.manual_seed(0)
    model = {"name": "mlp", "hidden": [12], "projection": 6}
    hand = by_hand({"name": "moon", "mu": 3.0, "tau": 0.4}, model=model)
    network = hand.fed.server.model.module
    assert network.head.in_features == 6  # type: ignore[union-attr]
    x, y = torch.randn(5, 6), torch.arange(5) % 3
    now = hand.fed.server.model.vector.clone()
    others = [now + 0.3 * torch.randn(len(now)) for _ in range(2)]
    context = {"global": others[0], "previous": others[1], "mu": torch.tensor([3.0])}
    moon: Any = hand.experiment.method
    prepared = moon.prepare(network, x, context)
    found = moon.loss(Classification(), network, x, y, {**context, **prepared})
    z, *zs = (
        hand.network(w).features(x.double()).float().detach()  # type: ignore[operator]
        for w in (now, *others)
    )
    near, far = (functional.cosine_similarity(z, other).div(0.4).exp() for other in zs)
    task = functional.cross_entropy(network(x), y, reduction="none")
    expected = task - 3.0 * torch.log(near / (near + far))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["sam", "asam"])
def test_fedsam(variant: str) -> None:
    method = {"name": "fedsam", "rho": 0.3, "variant": variant, "eta": 0.05}
    hand = by_hand(method, train={"rounds": 1})
    _, after = server_states(hand.experiment)

    def trained(k: int) -> Tensor:
        w = hand.initial
        for batch in hand.batches(1, k):
            g = hand.gradient(w, batch)
            if variant == "sam":
                step = 0.3 * g / g.norm()
            else:
                T = w.abs() + 0.05
                step = 0.3 * T**2 * g / (T * g).norm()
            w = w - 0.1 * hand.gradient(w + step, batch)
        return w

    close(after.weights, hand.mean([trained(k) for k in range(5)], hand.n))


class TestFedDisco:
    def test_as_written_out(self) -> None:
        method = {"name": "feddisco", "a": 0.8, "b": 0.02}
        hand = by_hand(method, train={"rounds": 2, "participation": 0.6})
        w, dropped = hand.initial, 0
        for t, cohort, state, _ in hand.rounds():
            raw = []
            for k in cohort:
                shares = np.bincount(hand.data(k)[1], minlength=3) / hand.n[k]
                raw.append(sum(q * np.log(q * 3) for q in shares if q > 0))
            n = hand.n[cohort]
            counts = [
                max(0.0, p - 0.8 * d / sum(raw) + 0.02)
                for p, d in zip(n / sum(n), raw, strict=True)
            ]
            dropped += counts.count(0.0)
            w = hand.mean([hand.trained(w, t, k) for k in cohort], counts)
            close(state.weights, w)
        assert dropped  # the case of the ReLU

    def test_it_falls_back_on_sample_shares(self) -> None:
        method: Any = small_experiment(method={"name": "feddisco", "a": 50.0, "b": 0.0}).method
        n, d = np.array([10, 30]), np.array([0.5, 0.5])
        for discrepancies in (d, 0 * d):
            np.testing.assert_allclose(method.shares(n, discrepancies), [0.25, 0.75])


def test_fedbabu_averages_with_equal_weights() -> None:
    hand = by_hand({"name": "fedbabu"}, train={"rounds": 1})
    _, after = server_states(hand.experiment)
    own = [hand.trained(hand.initial, 1, k, lambda g, w: g * ~hand.head) for k in range(5)]
    close(after.weights, hand.mean(own))


class TestLocal:
    @pytest.mark.parametrize(("rounds", "participation"), [(2, 1.0), (1, 0.6)])
    def test_each_client_trains_alone(
        self, finish: Finish, rounds: int, participation: float
    ) -> None:
        """Clients that have not trained do not count."""
        train = {"rounds": rounds, "participation": participation}
        sections = {**LITTLE, "method": {"name": "local"}, "train": train}
        done, hand = finish(**sections), ByHand(small_experiment(**sections))
        cohort = done.clients.dropna(subset="loss")["client"].unique().tolist()
        assert len(cohort) == 5 * participation
        right = []
        for k in cohort:
            w = hand.initial
            for t in range(1, rounds + 1):
                w = hand.sgd(w, hand.batches(t, k, function="local_training"))
            test = torch.tensor(hand.dataset.test_x).double()
            found = hand.network(w)(test).argmax(dim=1).numpy()
            right.append((found == hand.dataset.test_y).mean())
        assert done.rounds["accuracy"].iloc[-1] == pytest.approx(np.mean(right))

    def test_a_model_that_diverges_is_told(self, finish: Finish) -> None:
        train: dict[str, Any] = {"rounds": 2, "optimizer": {"lr": 1e20}}
        wild = {**EVEN, "method": {"name": "local"}, "train": train}
        with pytest.raises(Diverged, match=r"round 1: client \d: NaN or infinite weights; lo"):
            finish(**wild)
        train["on_client_error"] = "skip"
        with pytest.raises(RunError, match="round 1: no client has a model: all were skipped"):
            finish(**wild)
