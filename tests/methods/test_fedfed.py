"""FedFed: the split, what is shared of it, the three stages."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from experiments import PARAMETERS, QUARTER, Finish, federation, server_states, small_experiment
from fedsim import Experiment
from fedsim.data import Dataset, Source
from fedsim.launch.prepare import prepare
from fedsim.methods.fedfed import FedFed, balanced, mosaics, split
from fedsim.models.autoencoder import Autoencoder
from fedsim.support.rng import keyed_rng, keyed_torch_rng
from fedsim.training import FlatModel

MODEL = 4 * PARAMETERS  # bytes of the small experiment's model
ITEM = 2 * 4 * 64 + 1  # of what is shared of one digit


def fedfed(rounds: int = 2, **keys: Any) -> dict[str, Any]:
    """The method with a generator that trains in no time."""
    small = {"width": 4, "distillation": {"mosaics": 8, **keys.pop("distillation", {})}}
    return {"name": "fedfed", "distillation_rounds": rounds, **small, **keys}


class Bytes(Source):
    """Noise as bytes, with a mean and a deviation to normalise by."""

    name: str = "test_fedfed:Bytes"
    samples: int = 120
    num_classes: int = 10
    seed: int = 0
    mean: float = 0.3

    def load(self) -> Dataset:
        rng = np.random.default_rng(self.seed)
        x = rng.integers(256, size=(self.samples, 1, 6, 7), dtype=np.uint8)
        y = np.arange(self.samples) % self.num_classes
        classes = tuple(str(c) for c in range(self.num_classes))
        return Dataset(x, y, x[:10], y[:10], classes, mean=(self.mean,), std=(0.5,))


def of_bytes(method: dict[str, Any], **sections: Any) -> Experiment:
    """An experiment on normalised images of odd sides, with clients of very different sizes."""
    given = {
        "data": {"name": "test_fedfed:Bytes"},
        "partition": {"kind": "quantity", "clients": 3, "sigma": 1.5, "min_samples": 3},
        "model": {"name": "mlp", "hidden": [8]},
    }
    return small_experiment(method=method, **{**given, **sections})


def generator(method: FedFed, shape: tuple[int, ...], weights: Any) -> nn.Module:
    """G with these weights, in evaluation."""
    model = FlatModel(Autoencoder(shape, method.width, method.latent), torch.device("cpu"))
    model.load(torch.tensor(weights))
    return model.module.eval()


class TestSharing:
    @pytest.mark.parametrize("normalised", [False, True])
    def test_clients_share_what_g_leaves_and_noise(self, normalised: bool) -> None:
        method = fedfed(2, sigma1=0.1, sigma2=0.3)
        rounds = {"rounds": 4}
        experiment = (
            of_bytes(method, train=rounds)
            if normalised
            else small_experiment(data=QUARTER, method=method, train=rounds)
        )
        _, _, distilled, pooled, last = server_states(experiment)
        dataset, splits, _ = prepare(experiment)
        scale = 255 if normalised else 1
        G = generator(experiment.method, dataset.shape, distilled.generator)
        shared1, shared2, labels = [], [], []
        for k in range(len(splits)):
            x = torch.tensor(dataset.x[splits.train[k]]) / scale  # pixels in [0, 1]
            rng = keyed_rng(experiment.seed, "share/noise", 3, k)
            with torch.no_grad():
                rx = (x - G(x)[0]).numpy()
            shared1.append(rx + 0.1 * rng.standard_normal(rx.shape, dtype=np.float32))
            shared2.append(rx + 0.3 * rng.standard_normal(rx.shape, dtype=np.float32))
            labels.append(dataset.y[splits.train[k]])
        np.testing.assert_allclose(pooled.shared1, np.concatenate(shared1), atol=1e-5)
        np.testing.assert_allclose(pooled.shared2, np.concatenate(shared2), atol=1e-5)
        np.testing.assert_array_equal(pooled.labels, np.concatenate(labels))
        assert pooled.shared1.dtype == np.float32
        assert pooled.labels.dtype == np.uint8
        assert [s.phase for s in (distilled, pooled, last)] == ["share", "train", "train"]
        assert last.shared1 is pooled.shared1

    def test_the_split_is_exact(self) -> None:
        x = torch.rand(700, 1, 8, 8)  # more than are split at once
        G = Autoencoder((1, 8, 8), 4)
        rx = split(G, x)
        with torch.no_grad():
            gx = torch.cat([G(part)[0] for part in (x[:500], x[500:])])
        assert torch.equal(rx, x - gx)
        assert float((rx + gx - x).abs().max()) <= 2**-24  # half a unit in the last place of 1
        assert not G.training

    def test_the_pool_travels_once(self, finish: Finish) -> None:
        done = finish(data=QUARTER, method=fedfed(2), train={"rounds": 6, "participation": 0.5})
        vae = 4 * FlatModel(Autoencoder((1, 8, 8), 4), torch.device("cpu")).size
        clients = done.clients.fillna({"one_off_up": 0, "one_off_down": 0})
        assert list(done.rounds["phase"]) == ["distil"] * 2 + ["share"] + ["train"] * 3
        assert list(clients.groupby("round").size()) == [10, 10, 10, 5, 5, 5]
        distil, share, train = (
            clients[clients["round"].isin(rounds)] for rounds in ([1, 2], [3], [4, 5, 6])
        )
        for way in ("up", "down"):
            assert (distil[f"bytes_{way}"] == MODEL + vae).all()
            assert (train[f"bytes_{way}"] == MODEL).all()
            assert (share[f"bytes_{way}"] == share[f"one_off_{way}"]).all()
            assert (distil[f"one_off_{way}"] == 0).all()
            assert (train[f"one_off_{way}"] == 0).all()
        total = share["samples"].sum()
        assert (share["one_off_up"] == ITEM * share["samples"]).all()
        assert (share["one_off_down"] == vae + ITEM * total).all()

    def test_labels_of_many_classes_take_two_bytes(self) -> None:
        data = {"name": "test_fedfed:Bytes", "num_classes": 300, "samples": 600}
        experiment = of_bytes(fedfed(1), data=data, train={"rounds": 3})
        *_, last = server_states(experiment)
        dataset, splits, _ = prepare(experiment)
        assert last.labels.dtype == np.uint16
        np.testing.assert_array_equal(last.labels, dataset.y[splits.train.values])


class TestDistillation:
    def test_the_terms_of_the_full_pass(self) -> None:
        method = FedFed(sigma1=0.2, sigma2=0.4)
        G = Autoencoder((1, 8, 8), 4, latent=5).train()
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
        x, y = torch.rand(7, 1, 8, 8), torch.arange(7) % 3
        torch.manual_seed(1)
        terms = method.terms(network, G, x, y)

        torch.manual_seed(1)
        gx, mean, log_variance = G(x)
        rx = x - gx
        shared = [rx + 0.2 * torch.randn(rx.shape), rx + 0.4 * torch.randn(rx.shape)]

        one, other, own = (nn.functional.cross_entropy(network(v), y) for v in (*shared, x))
        kl = 0.5 * (log_variance.exp() + mean**2 - 1 - log_variance).sum() / (7 * 3 * 5)
        expected = [((gx - x) ** 2).mean(), (one + other) / 2, kl, own]
        torch.testing.assert_close(terms, torch.stack(expected), rtol=1e-5, atol=1e-6)
        assert kl > 0

    def test_clients_adapt_their_multipliers(self) -> None:
        method = FedFed()

        def of(*counts: int, mean: float = 100) -> list[float]:
            y = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
            return method.multipliers(method.kind(y, mean))

        usual, scarce, skewed = [50, 2, 0.005, 0.4], [250, 2, 0.0025, 0.4], [50, 10, 0.025, 2]
        assert of(50, 50) == pytest.approx(usual)
        assert of(10, 10) == pytest.approx(usual)  # 20 % of the mean
        assert of(10, 9) == pytest.approx(scarce)
        assert of(19) == pytest.approx(scarce)  # that first
        assert of(70, 30) == pytest.approx(usual)
        assert of(71, 29) == pytest.approx(skewed)
        method = FedFed.model_validate({"distillation": {"adaptive": False}})
        assert of(19) == of(71, 29) == pytest.approx(usual)

    @pytest.mark.parametrize(
        "partition",
        [
            {"kind": "quantity", "clients": 3, "sigma": 1.5, "min_samples": 3},
            {"kind": "pathological", "clients": 3, "classes_per_client": 1},
        ],
    )
    def test_a_round_is_three_passes_and_an_average(self, partition: dict[str, Any]) -> None:
        """Written out in plain PyTorch, client by client."""
        settings = {"lr": 0.01, "weight_decay": 0.1, "epochs": 2, "batch_size": 9}
        experiment = of_bytes(
            fedfed(1, latent=6, distillation=settings), partition=partition, train={"rounds": 3}
        )
        method = experiment.method
        before, after, *_ = server_states(experiment)
        dataset, splits, spec = prepare(experiment)
        sizes = splits.train.lengths
        weights, generators, kinds = [], [], []
        for k in range(3):
            x = torch.tensor(dataset.x[splits.train[k]]) / 255
            y = torch.tensor(dataset.y[splits.train[k]])
            network = FlatModel(spec.build_model(), torch.device("cpu"))
            G = FlatModel(Autoencoder((1, 6, 7), 4, 6), torch.device("cpu"))
            network.load(torch.tensor(before.weights))
            G.load(torch.tensor(before.generator))
            network.module.train()
            G.module.train()
            of_network, of_generator = (
                torch.optim.AdamW(m.module.parameters(), lr=0.01, weight_decay=0.1)
                for m in (network, G)
            )
            kinds.append(method.kind(y, float(sizes.mean())))
            multipliers = method.multipliers(kinds[-1])
            order = keyed_rng(experiment.seed, "distil/batches", 1, k)
            mixing = keyed_rng(experiment.seed, "distil/mixup", 1, k)

            def classify(images: torch.Tensor, network: FlatModel = network) -> Any:
                return network.module((images - 0.3) / 0.5)

            def batches(x: Any = x, y: Any = y, order: Any = order) -> Any:
                rows = torch.tensor(order.permutation(len(y))).split(9)
                return [(x[r], y[r]) for r in rows if len(r) > 1]

            with keyed_torch_rng(experiment.seed, "distil/torch", 1, k):
                for _ in range(2):
                    for images, labels in batches():
                        lam = mixing.beta(2, 2)
                        other = torch.randperm(len(labels))
                        logits = classify(lam * images + (1 - lam) * images[other])
                        mine = nn.functional.cross_entropy(logits, labels)
                        others = nn.functional.cross_entropy(logits, labels[other])
                        of_network.zero_grad()
                        (lam * mine + (1 - lam) * others).backward()
                        of_network.step()
                    for images, _ in batches():
                        if kinds[-1] == "skewed" or len(images) < 4:
                            continue
                        pictures = mosaics(images, 8)
                        gx, mean, log_variance = G.module(pictures)
                        kl = 0.5 * (log_variance.exp() + mean**2 - 1 - log_variance).sum()
                        loss = 50 * ((gx - pictures) ** 2).mean() + 0.005 * kl / (8 * 3 * 6)
                        of_generator.zero_grad()
                        loss.backward()
                        of_generator.step()
                    for images, labels in batches():
                        terms = method.terms(classify, G.module, images, labels)
                        of_network.zero_grad()
                        of_generator.zero_grad()
                        sum(m * t for m, t in zip(multipliers, terms, strict=True)).backward()
                        of_network.step()
                        of_generator.step()
            weights.append(network.weights())
            generators.append(G.weights())
        assert ("skewed" if partition["kind"] == "pathological" else "usual") in kinds
        expected = np.average(weights, axis=0, weights=sizes)
        np.testing.assert_allclose(after.weights, expected, atol=2e-4)
        expected = np.average(generators, axis=0, weights=sizes)
        layers = FlatModel(Autoencoder((1, 6, 7), 4, 6), torch.device("cpu")).named
        ours, theirs = layers(torch.tensor(after.generator)), layers(torch.tensor(expected))
        for name, layer in ours.items():
            # Batch norm undoes these biases: their gradients are rounding, which AdamW scales up.
            if not name.endswith(("convolutions.1.bias", "convolutions.4.bias", "running_mean")):
                np.testing.assert_allclose(layer, theirs[name], atol=2e-4, err_msg=name)
        assert np.abs(after.weights - before.weights).max() > 0.01
        assert np.abs(after.generator - before.generator).max() > 0.01

    def test_mosaics_are_windows_of_four_images(self) -> None:
        for H, W in ((8, 8), (5, 6)):
            h, w = -(-H // 2), -(-W // 2)
            places = torch.arange(H)[:, None] * 10 + torch.arange(W)
            x = (1000 * torch.arange(6)[:, None, None] + places)[:, None].repeat(1, 2, 1, 1)
            torch.manual_seed(0)
            found = mosaics(x.float(), 50)
            assert found.shape == (50, 2, H, W)
            corners = set()
            for picture in found[:, 0]:
                parts = [picture[:h, :w], picture[:h, w:], picture[h:, :w], picture[h:, w:]]
                images = [int(part[0, 0]) // 1000 for part in parts]
                assert len(set(images)) == 4
                corner = {int(part[0, 0]) % 1000 for part in parts}
                assert len(corner) == 1  # the same window of all four
                top, left = divmod(corner.pop(), 10)
                corners.add((top, left))
                for image, part in zip(images, parts, strict=True):
                    window = x[image, 0, top : top + h, left : left + w]
                    assert torch.equal(part, window[: part.shape[0], : part.shape[1]].float())
            assert torch.equal(found[:, 0], found[:, 1])
            # Every place where a window fits.
            assert {top for top, _ in corners} == set(range(H - h + 1))
            assert {left for _, left in corners} == set(range(W - w + 1))

    @pytest.mark.parametrize(
        ("shape", "latent"),
        [((1, 8, 8), 128), ((1, 28, 28), 1568), ((3, 32, 32), 2048), ((2, 7, 13), 96)],
    )
    def test_generators_of_any_size(self, shape: tuple[int, ...], latent: int) -> None:
        G = Autoencoder(shape, 32)
        x = torch.rand(3, *shape)
        with torch.no_grad():
            gx, mean, log_variance = G.eval()(x)
        assert gx.shape == x.shape
        assert mean.shape == log_variance.shape == (3, latent)
        assert 0 < float(gx.min()) < float(gx.max()) < 1
        torch.testing.assert_close(gx[:2], G(x[:2])[0])  # nothing is drawn, nor shared in a batch
        assert not torch.equal(G.train()(x)[0], G(x)[0])
        assert Autoencoder(shape, 4, latent=7)(x)[1].shape == (3, 7)

    def test_who_takes_part(self, finish: Finish) -> None:
        method = fedfed(1, distillation={"clients": "sample"})
        done = finish(data=QUARTER, method=method, train={"rounds": 3, "participation": 0.5})
        assert list(done.clients.groupby("round").size()) == [5, 10, 5]
        assert list(done.rounds["clients"]) == [5, 0, 5]


class TestTraining:
    def test_draws_are_class_balanced(self) -> None:
        labels = np.repeat(np.arange(4, dtype=np.uint8) * 3, [50, 30, 20, 3])
        drawn = balanced(labels, 22, np.random.default_rng(0))
        first, second = (np.array(list(islice(drawn, 22))) for _ in range(2))
        for rows in (first, second):
            counts = np.array([(labels[rows] == c).sum() for c in (0, 3, 6, 9)])
            assert counts.min() >= 5  # 22 // 4 of each, and 2 of any
            assert counts.sum() == 22
            of_first = rows[labels[rows] == 0]
            assert len(of_first) - len(set(of_first)) <= 2  # not drawn twice, but among the 2
            scarce = np.bincount(rows)[100:]  # of 3 rows, which have to come again
            assert scarce.sum() >= 5
            assert scarce.max() - scarce.min() <= 2
        assert set(first) != set(second)
        assert list(first) != sorted(first, key=lambda row: labels[row])  # shuffled
        few = list(islice(balanced(labels, 3, np.random.default_rng(0)), 3))
        assert len(set(few)) == 3  # fewer than classes: any

    @pytest.mark.parametrize("average", ["samples", "uniform"])
    def test_a_round_with_a_pool(self, average: str) -> None:
        """Written out in plain PyTorch: local, first and second batch in one forward pass."""
        optimizer = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
        local = {"local_epochs": 2, "batch_size": 8, "clip_norm": 0.5, "optimizer": optimizer}
        experiment = of_bytes(fedfed(1, average=average), train={"rounds": 3, **local})
        _, _, pooled, after = server_states(experiment)
        dataset, splits, spec = prepare(experiment)
        fed = federation(experiment)
        np.testing.assert_array_equal(pooled.weights, fed.initial_weights())
        sizes = splits.train.lengths
        pools = [(torch.tensor(p) - 0.3) / 0.5 for p in (pooled.shared1, pooled.shared2)]
        labels = torch.tensor(pooled.labels).long()
        trained = []
        for k in range(3):
            network = spec.build_model()
            x = (torch.tensor(dataset.x[splits.train[k]]) / 255 - 0.3) / 0.5
            y = torch.tensor(dataset.y[splits.train[k]])
            n = len(y)
            seed = experiment.seed
            order = keyed_rng(seed, "local_update/batches", 3, k)
            streams = [keyed_rng(seed, f"local_update/pool/{i}", 3, k) for i in (0, 1)]
            draws = [balanced(pooled.labels, n, stream) for stream in streams]
            sgd = torch.optim.SGD(network.parameters(), **optimizer)
            for _ in range(2):
                rows = torch.tensor(order.permutation(n))
                drawn = [torch.tensor(list(islice(d, n))) for d in draws]
                for start in range(0, n, 8):
                    own = rows[start : start + 8]
                    items = [d[start : start + 8] for d in drawn]
                    images = [x[own], *(p[i] for p, i in zip(pools, items, strict=True))]
                    targets = torch.cat([y[own], *(labels[i] for i in items)])
                    loss = nn.functional.cross_entropy(network(torch.cat(images)), targets)
                    sgd.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(network.parameters(), 0.5)
                    sgd.step()
            trained.append(nn.utils.parameters_to_vector(network.parameters()).detach().numpy())
        weights = sizes if average == "samples" else None
        np.testing.assert_allclose(
            after.weights, np.average(trained, axis=0, weights=weights), atol=1e-5
        )


def test_a_client_with_one_example(finish: Finish, tmp_path: Path) -> None:
    partition = tmp_path / "partition.json"
    partition.write_text(json.dumps([[0], [*range(1, 34)]]))
    done = finish(
        method=fedfed(1),
        partition={"kind": "file", "path": str(partition)},
        train={"rounds": 3},
    )
    first = done.clients[done.clients["round"] == 1].set_index("client")
    # One pass each of mix-up, mosaics and the full loss, over a batch of 32.
    assert list(first["steps"]) == [0, 3]
    assert list(first["loss"].isna()) == [True, False]


def test_without_distillation_it_is_fedavg() -> None:
    methods: list[dict[str, Any]] = [{"name": "fedavg"}, fedfed(0)]
    plain, other = (server_states(small_experiment(data=QUARTER, method=m)) for m in methods)
    for one, same in zip(plain, other, strict=True):
        np.testing.assert_array_equal(one.weights, same.weights)


def test_shared_items_are_combined_by_their_precisions() -> None:
    """The sum with the least variance: 1/σ² = 1/σ₁² + 1/σ₂²."""
    made = FedFed(sigma1=0.5, sigma2=2.0)
    one, other = torch.eye(2)
    weights = made.combined(one, other)
    assert float(weights.sum()) == pytest.approx(1)
    variance = float((weights.square() * torch.tensor([0.5**2, 2.0**2])).sum())
    assert variance == pytest.approx(1 / (1 / 0.5**2 + 1 / 2.0**2))
    assert torch.equal(FedFed(sigma1=0.5, sigma2=0.5).combined(one, other), torch.full((2,), 0.5))
