"""FedAUX: scores, their noise, scored teachers, and pretraining."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import expit, logit
from test_fedftg import Cohort
from torch import nn

from experiments import WHOLE, Finish, federation, server_states, small_experiment
from fedsim import run
from fedsim.errors import ExperimentError
from fedsim.federation import Client
from fedsim.launch.prepare import prepare
from fedsim.methods.fedaux import FedAUX
from fedsim.methods.shared.auxiliary import augment, contrast, pretrain
from fedsim.support.rng import keyed_rng, keyed_torch_rng

SHARE = {"server_fraction": 0.2}  # of the whole digits 287: 57 negatives, 230 to distil on
PLAIN = {"name": "fedaux", "pretrain_epochs": 0}
TO_DISTIL = 230
FLAT = {"name": "synthetic", "shape": [16]}


def rows(n: int = 287, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the auxiliary inputs that are negatives, and that are distilled on."""
    order = keyed_rng(seed, "server/negatives").permutation(n)
    return torch.tensor(np.sort(order[:57])), torch.tensor(np.sort(order[57:]))


class TestScores:
    def features(self, D: int, n: int = 90) -> tuple[torch.Tensor, torch.Tensor]:
        rng = np.random.default_rng(0)
        own, negatives = rng.gamma(2, size=(n, D)), rng.gamma(2.5, size=(2 * n, D))
        return torch.from_numpy(own).float(), torch.from_numpy(negatives).float()

    @pytest.mark.parametrize("variant", ["paper", "code"])
    def test_they_are_the_regression_s(self, variant: str) -> None:
        """Against another minimiser of the objective, written out."""
        own, negatives = self.features(6)
        to_score = torch.rand(50, 6, generator=torch.Generator().manual_seed(0)) * 4
        method = FedAUX(regression=variant, epsilon=None, l2=0.02)
        found = method.scores(own, negatives, to_score, np.random.default_rng(0))

        h = torch.cat([own, negatives]).double().numpy()
        norm = np.sqrt((h**2).sum(axis=1)).max()
        h, n = h / norm, len(h)
        t = np.where(np.arange(n) < len(own), 1, -1)
        l2 = 0.02 if variant == "paper" else 0.02 / n

        def objective(theta: np.ndarray) -> float:
            b = theta[-1] if variant == "code" else 0.0
            losses = np.logaddexp(0, -t * (h @ theta[:-1] + b))
            return float(losses.mean() + l2 / 2 * (theta[:-1] ** 2).sum())

        theta = minimize(objective, np.zeros(7), method="BFGS", options={"gtol": 1e-8}).x
        assert (theta[-1] != 0) == (variant == "code")
        expected = expit(to_score.double().numpy() / norm @ theta[:-1] + theta[-1]) + 1e-8
        np.testing.assert_allclose(found.numpy(), expected, atol=2e-5)
        assert found.dtype == torch.float32

    def test_sigma_is_that_of_the_gaussian_mechanism(self) -> None:
        # √(2·ln 125,000) = 4.84481, and a sensitivity of 2/(12,500·0.01) = 0.016.
        assert FedAUX().sigma(12_500) == pytest.approx(4.84481 * 0.016 / 0.1, rel=1e-5)
        # √(2·ln 125) = 3.10751, and a sensitivity of 2/(100·0.5) = 0.04.
        sigma = FedAUX(epsilon=0.5, delta=0.01, l2=0.5).sigma(100)
        assert sigma == pytest.approx(3.10751 * 0.04 / 0.5, rel=1e-5)

    @pytest.mark.parametrize("variant", ["paper", "code"])
    def test_noise_has_that_deviation_in_every_weight(self, variant: str) -> None:
        """Scores of unit vectors give the weights away, and that of zero the bias."""
        own, negatives = self.features(8, n=500)
        norm = float(torch.cat([own, negatives]).norm(dim=1).max())
        units = norm * torch.cat([torch.eye(8), torch.zeros(1, 8)])
        common = {"regression": variant, "l2": 5.0}
        exact = FedAUX(**common, epsilon=None).scores(own, negatives, units, None)  # type: ignore
        noisy = FedAUX(**common, epsilon=0.2)
        found = np.stack(
            [
                noisy.scores(own, negatives, units, np.random.default_rng(seed)).numpy()
                for seed in range(60)
            ]
        )
        noise = logit(found.astype(float)) - logit(exact.numpy().astype(float))
        sigma = math.sqrt(2 * math.log(1.25 / 1e-5)) * (2 / (1500 * 5.0)) / 0.2
        if variant == "code":
            noise[:, :8] -= noise[:, 8:]
            assert noise[:, 8].std() == pytest.approx(sigma, rel=0.25)
        else:
            assert np.abs(noise[:, 8]).max() < 1e-6
        assert noise[:, :8].std() == pytest.approx(sigma, rel=0.08)
        assert abs(noise[:, :8].mean()) < sigma / 8

    def test_hopeless_noise_and_dead_features_give_scores_all_the_same(self) -> None:
        own, negatives = self.features(4)
        wild = FedAUX(epsilon=1e-9).scores(own, negatives, own, np.random.default_rng(0))
        dead = FedAUX().scores(0 * own, 0 * negatives, 0 * own, np.random.default_rng(0))
        for scores in (wild, dead):
            assert torch.isfinite(scores).all()
            assert scores.min() >= 1e-8
            assert scores.max() <= 1.0 + 1e-6

    def test_clients_send_what_the_first_features_say(self) -> None:
        """Features under w_0, however late a client comes."""
        experiment = small_experiment(
            method={**PLAIN, "epsilon": None},
            data=WHOLE,
            partition=SHARE,
            train={"rounds": 3, "participation": 0.3, "local_epochs": 3},
        )
        dataset, splits, spec = prepare(experiment)
        h = spec.build_model().features.eval()(torch.tensor(dataset.x)).detach()
        negatives, to_distil = (h[splits.server[part]] for part in rows())
        assert (len(negatives), len(to_distil)) == (57, TO_DISTIL)
        _, first, _, last = server_states(experiment)
        assert set(first.scored) < set(last.scored)
        np.testing.assert_array_equal(last.scores[:3], first.scores)
        for k, found in zip(last.scored, last.scores, strict=True):
            own = h[splits.train[k]]
            expected = experiment.method.scores(own, negatives, to_distil, None)
            np.testing.assert_allclose(found, expected, atol=2e-5)

    def test_noise_is_each_client_s_own(self) -> None:
        common = {"partition": SHARE, "train": {"rounds": 1}}
        _, noisy = server_states(small_experiment(method=PLAIN, **common))
        _, exact = server_states(small_experiment(method={**PLAIN, "epsilon": None}, **common))
        assert len(np.unique(noisy.scores - exact.scores, axis=0)) == 10

    def test_who_fails_to_score_teaches_nothing_and_is_asked_again(
        self, finish: Finish, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        undisturbed = FedAUX.score

        def score(self: FedAUX, client: Client, **arguments: Any) -> Any:
            if client.round == 1 and client.id != 4:
                raise RuntimeError("battery empty")
            return undisturbed(self, client, **arguments)

        monkeypatch.setattr(FedAUX, "score", score)
        train = {"rounds": 2, "on_client_error": "skip"}
        done = finish(method=PLAIN, partition=SHARE, train=train)
        asked = done.clients[done.clients["one_off_up"] > 0]
        assert set(asked[asked["round"] == 1]["client"]) == {4}
        assert set(asked[asked["round"] == 2]["client"]) == set(range(10)) - {4}
        assert list(done.rounds["clients"]) == [10, 10]  # they train all the same
        assert (done.rounds["distillation_loss"] > 0).all()


def test_the_student_follows_scored_teachers() -> None:
    """Every step written out, for a second round in which some clients are new."""
    method = {**PLAIN, "epochs": 2, "batch_size": 64, "lr": 0.01, "regression": "code"}
    experiment = small_experiment(
        method=method,
        data=WHOLE,
        partition=SHARE,
        train={"rounds": 2, "participation": 0.5},
    )
    dataset, splits, _ = prepare(experiment)
    x = torch.tensor(dataset.x[splits.server])[rows()[1]]
    states = server_states(experiment)
    assert 5 < len(states[2].scored) < 10
    cohort = Cohort(experiment, federation(experiment), states[1].weights, 2)
    top, bottom = torch.zeros(TO_DISTIL, 10), torch.zeros(TO_DISTIL, 1)
    for k, w in zip(cohort.clients, cohort.models, strict=True):
        s = torch.tensor(states[2].scores[list(states[2].scored).index(k)])[:, None]
        top += s * cohort.network(w)(x).detach()
        bottom += s
    targets = (top / bottom).softmax(dim=1)

    student = cohort.network(cohort.average)
    adam = torch.optim.Adam(student.parameters(), lr=0.01)
    rng = keyed_rng(experiment.seed, "server/distillation", 2)
    for _ in range(2):
        for batch in torch.tensor(rng.permutation(TO_DISTIL)).split(64):
            loss = nn.functional.kl_div(
                student(x[batch]).log_softmax(dim=1), targets[batch], reduction="batchmean"
            )
            adam.zero_grad()
            loss.backward()
            adam.step()
    expected = nn.utils.parameters_to_vector(student.parameters()).detach().numpy()
    np.testing.assert_allclose(states[2].weights, expected, atol=2e-5)


class TestPretraining:
    def test_contrast_is_nt_xent(self) -> None:
        z = torch.randn(10, 7, generator=torch.Generator().manual_seed(0))
        alike = nn.functional.cosine_similarity(z[:, None], z, dim=2) / 0.5
        partners = (torch.arange(10) + 5) % 10
        expected = nn.functional.cross_entropy(alike.fill_diagonal_(-torch.inf), partners)
        torch.testing.assert_close(contrast(z), expected)

    @pytest.mark.parametrize("channels", [1, 3])
    def test_augmentation_scales_channels_and_adds_noise(self, channels: int) -> None:
        rng = np.random.default_rng(0)
        flat = torch.full((50, channels, 16, 16), 5.0)  # which no movement changes
        found = augment(flat, rng)
        factors = found.mean(dim=(2, 3)) / 5
        assert factors.shape == (50, channels)
        assert 0.58 < factors.min() < 0.7
        assert 1.3 < factors.max() < 1.42
        assert len(factors.unique()) == 50 * channels
        assert float((found - 5 * factors[..., None, None]).std()) == pytest.approx(0.1, rel=0.05)
        x = torch.rand(4, channels, 16, 16, generator=torch.Generator().manual_seed(0))
        one, other = augment(x, rng), augment(x, rng)
        assert one.dtype == x.dtype
        assert not torch.equal(one, other)
        assert torch.equal(
            augment(x, np.random.default_rng(1)), augment(x, np.random.default_rng(1))
        )

    def test_it_teaches_the_features_and_leaves_the_head(self) -> None:
        experiment = small_experiment(method={"name": "fedaux"}, partition=SHARE)
        fed, method = federation(experiment), experiment.method

        def started(fed: Any) -> Any:
            with keyed_torch_rng(experiment.seed, "server", 0):
                return method.init(fed).weights

        initial, trained = fed.initial_weights(), started(fed)
        head, features = fed.server.model.part("head"), fed.server.model.part("features")
        np.testing.assert_array_equal(trained[head], initial[head])
        assert np.abs(trained[features] - initial[features]).max() > 1e-3
        np.testing.assert_array_equal(started(fed), trained)  # whatever came before
        np.testing.assert_array_equal(started(federation(experiment)), trained)

        held_out = torch.tensor(prepare(experiment)[0].test_x[:200])
        losses = []
        for weights in (initial, trained):
            fed.server.model.load(torch.tensor(weights))
            rng = np.random.default_rng(0)
            views = torch.cat([augment(held_out, rng), augment(held_out, rng)])
            losses.append(float(contrast(fed.server.model.module.features(views)).detach()))
        assert losses[1] < losses[0]
        again = pretrain(fed, trained, method.inputs(fed), epochs=0, batch_size=128)
        np.testing.assert_array_equal(again, trained)

    def test_features_can_come_from_a_run(self, finish: Finish) -> None:
        before = finish(train={"rounds": 2})
        path = before.path / "weights" / "final.safetensors"
        method = {"name": "fedaux", "encoder": str(path)}
        experiment = small_experiment(method=method, partition=SHARE)
        fed = federation(experiment)
        named = fed.server.model.named(torch.tensor(experiment.method.init(fed).weights))
        initial = fed.server.model.named(torch.tensor(fed.initial_weights()))
        for name, tensor in named.items():
            source = before.weights() if name.startswith("features.") else initial
            assert torch.equal(tensor, source[name])
        assert finish(method=method, partition=SHARE, train={"rounds": 1}).result_hash


def test_without_pretraining_any_data_do(finish: Finish) -> None:
    assert finish(method=PLAIN, data=FLAT, partition=SHARE, train={"rounds": 1}).result_hash


def test_encoders_that_do_not_fit(finish: Finish, tmp_path: Path) -> None:
    path = tmp_path / "encoder.safetensors"
    method = {"name": "fedaux", "encoder": str(path)}

    def refused(line: str, **sections: Any) -> None:
        with pytest.raises(ExperimentError, match=re.escape(f"method.encoder: {path} {line}")):
            prepare(small_experiment(partition=SHARE, method=method, **sections))

    refused("cannot be read: ")
    path.write_text("no tensors")
    refused("cannot be read: ")
    done = finish(model={"name": "mlp", "hidden": [16]}, train={"rounds": 1})
    path.write_bytes((done.path / "weights" / "final.safetensors").read_bytes())
    need = "which the model's features need"
    same = "; use the final.safetensors of a run with the same model"
    one = ", but one of shape (16, 64)"
    refused(f"has no 'features.1.weight' of shape (32, 64), {need}{one}{same}")
    cnn = {"model": {"name": "cnn"}}
    refused(f"has no 'features.0.weight' of shape (16, 1, 5, 5), {need}{same}", **cnn)


def test_a_warning_where_noise_swamps_the_scores(finish: Finish, tmp_path: Path) -> None:
    events: list[Any] = []
    made = small_experiment(method=PLAIN, partition=SHARE, train={"rounds": 1})
    run(made, tmp_path, events.append)
    (line,) = (e for e in events if isinstance(e, str) and "FedAUX" in e)
    assert re.search(
        r"scores are noise: with \d+ inputs, .* norm of \d.*raise method.epsilon", line
    )


def test_there_is_none_where_scores_can_be_seen() -> None:
    """The bound of the warning: no regression's weights are larger."""
    own, negatives = torch.full((90, 4), 3.0), -torch.full((180, 4), 3.0)
    method = FedAUX(epsilon=0.9, l2=0.5)
    assert method.swamped(10**6, negatives) is None
    assert FedAUX(epsilon=None).swamped(2, negatives) is None
    assert method.swamped(20, negatives) is not None
    quiet = FedAUX(epsilon=None, l2=0.5)
    scores = quiet.scores(own, negatives, torch.eye(4) * 6, np.random.default_rng(0))
    weights = logit(scores.double().numpy() - 1e-8)  # of entries at the largest norm: 1
    assert np.linalg.norm(weights) <= math.sqrt(2 * math.log(2) / 0.5)
