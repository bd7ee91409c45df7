"""FedXDS: what is shared, how it is trained on, what it costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import ByHand, close, load
from torch import nn

from experiments import PARAMETERS, Finish, by_day, federation, server_states, small_experiment
from fedsim import Experiment, run
from fedsim.conditions.gaussian import analytic_sigma
from fedsim.data.augment import strong, weak
from fedsim.errors import BadInput
from fedsim.explain.explainers.attribution import attributions, heatmap
from fedsim.launch.prepare import prepare
from fedsim.methods.fedxds import FedXDS, FedXDSState, augmented_loss, decode, encode
from fedsim.support.rng import keyed_rng

# LRP of a fully connected network.
LRP = {"name": "lrp", "composite": "epsilon"}
FEDXDS: dict[str, Any] = {"name": "fedxds", "warmup_rounds": 2, "attribution": LRP}
N = 400
DATA = {"name": "digits", "subset": N}
TRAIN = {"rounds": 5, "local_epochs": 1, "batch_size": 16, "optimizer": {"lr": 0.1}}


def experiment(train: dict[str, Any] | None = None, **fields: Any) -> Experiment:
    return small_experiment(
        data=DATA, method={**FEDXDS, **fields}, train={**TRAIN, **(train or {})}
    )


# phases


@pytest.mark.parametrize("epochs", [1, 3])
def test_warm_up_is_fedavg(epochs: int) -> None:
    states = server_states(experiment(warmup_epochs=epochs))
    train = {**TRAIN, "rounds": 2, "local_epochs": epochs}
    *_, plain = server_states(small_experiment(data=DATA, train=train))
    np.testing.assert_array_equal(states[2].weights, plain.weights)


@pytest.mark.parametrize("start", ["fresh", "continue"])
def test_where_training_starts(start: str) -> None:
    made = experiment(start=start)
    states = server_states(made)
    expected = federation(made).initial_weights() if start == "fresh" else states[2].weights
    np.testing.assert_array_equal(states[3].weights, expected)
    assert states[3].phase == "train"


def test_without_warm_up_an_untrained_model_attributes() -> None:
    states = server_states(experiment(warmup_rounds=0))
    assert [s.phase for s in states] == ["share"] + ["train"] * 5
    assert len(states[1].labels) == N


def test_warm_up_of_all_clients(finish: Finish) -> None:
    """As in the released code: all of them, for local epochs of their own."""
    half = {**TRAIN, "participation": 0.5}
    method = {**FEDXDS, "warmup_clients": "all", "warmup_epochs": 3}
    clients = finish(data=DATA, method=method, train=half).clients
    rounds = clients.groupby("round")
    assert rounds.size().tolist() == [10, 10, 10, 5, 5]
    epochs = clients["steps"] / np.ceil(clients["samples"] / 16)
    assert (epochs[clients["round"] <= 2] == 3).all()
    assert (epochs[clients["round"] >= 4] == 1).all()


# what is shared


def until_shared(made: Experiment) -> list[FedXDSState]:
    """The server's state before the first round and after each, until there is a pool."""
    train = made.train.model_copy(update={"rounds": 3})
    return server_states(made.model_copy(update={"train": train}))


def shared_of(made: Experiment) -> tuple[list[tuple[torch.Tensor, ...]], list[FedXDSState]]:
    """Of each client its images, what it shared of them, and the heatmaps; the server's states.

    All of each client's images must be shared.
    """
    fed, method, states = federation(made), made.method, until_shared(made)
    assert isinstance(method, FedXDS)
    dataset, splits, spec = prepare(made)
    pool, start, found = states[3].shared, 0, []
    network = load(spec.build_model(), fed.server.model, states[2].weights)
    for k in range(fed.num_clients):
        x = torch.tensor(dataset.x[splits.train[k]])
        y = torch.tensor(dataset.y[splits.train[k]])
        rng = keyed_rng(made.seed, "share/attribution", 3, k)
        h = heatmap(method.attribution.relevance(network, x, y, rng))
        found.append((x, torch.tensor(pool[start : start + len(y)]), h))
        np.testing.assert_array_equal(states[3].labels[start : start + len(y)], y.numpy())
        start += len(y)
    return found, states


def largest(heat: torch.Tensor, removed: int) -> torch.Tensor:
    """(n, H, W) which pixels stay where so many of each image are removed."""
    return heat >= heat.flatten(1).kthvalue(removed, dim=1).values[:, None, None]


@pytest.mark.parametrize(
    "name",
    by_day(
        (name for name, _ in attributions.items() if name not in ("attention_rollout", "gradcam")),
        ["lrp", "occlusion"],
    ),
)
def test_the_most_relevant_pixels_are_shared(name: str) -> None:
    made = experiment(attribution={"name": name}, sigma=0.0, clip=None, removed=75)
    found, _ = shared_of(made)
    for x, shared, h in found:
        kept = largest(h, 48)  # 75 % of 64
        assert not kept.flatten(1).all(dim=1).any()
        torch.testing.assert_close(shared[:, 0], x[:, 0] * kept)


def test_soft_masks_weigh_what_they_keep() -> None:
    made = experiment(sigma=0.0, clip=None, removed=75, mask="soft")
    found, _ = shared_of(made)
    for x, shared, h in found:
        least, most = h.amin(dim=(1, 2), keepdim=True), h.amax(dim=(1, 2), keepdim=True)
        weight = (h - least) / (most - least) * largest(h, 48)
        torch.testing.assert_close(shared[:, 0], x[:, 0] * weight)


@pytest.mark.parametrize("noise_on", ["retained", "all"])
def test_noise_is_where_it_is_asked_for(noise_on: str) -> None:
    quiet = experiment(sigma=0.0, clip=None, removed=50)
    noisy = experiment(sigma=0.5, clip=None, removed=50, noise_on=noise_on)
    (found, before), (_, after) = shared_of(quiet), shared_of(noisy)
    noise = after[3].shared[:, 0] - before[3].shared[:, 0]
    kept = largest(torch.cat([h for _, _, h in found]), 32).numpy()
    assert (noise[kept] != 0).all()
    assert (noise[~kept] != 0).all() == (noise_on == "all")
    assert noise[noise != 0].std() == pytest.approx(0.5, rel=0.02)


def test_images_are_clipped_before_noise() -> None:
    found, _ = shared_of(experiment(sigma=0.0, clip=0.5, removed=0.0))
    for x, shared, _ in found:
        norms = shared.flatten(1).norm(dim=1)
        assert (norms <= 0.5 + 1e-5).all()
        torch.testing.assert_close(
            shared, x * (0.5 / x.flatten(1).norm(dim=1)).clamp(max=1)[:, None, None, None]
        )


def test_a_fraction_is_shared_by_class() -> None:
    made = experiment(fraction=0.5)
    fed, states = federation(made), until_shared(made)
    dataset, splits, _ = prepare(made)
    start = 0
    for k in range(fed.num_clients):
        y = dataset.y[splits.train[k]]
        count = round(0.5 * len(y))
        labels = np.bincount(states[3].labels[start : start + count], minlength=10)
        start += count
        assert (np.abs(labels - 0.5 * np.bincount(y, minlength=10)) < 1).all()
    assert start == len(states[3].labels)


def test_noise_from_a_guarantee() -> None:
    made = experiment(epsilon=5.0, delta=1e-5)
    assert isinstance(made.method, FedXDS)
    assert made.method.noise == analytic_sigma(5.0, 1e-5)
    assert FedXDS().noise == 0.15


def test_another_models_attributions() -> None:
    """Each client's own, trained once more: another mask."""
    quiet = {"sigma": 0.0, "clip": None}
    one = until_shared(experiment(**quiet))
    other = until_shared(experiment(**quiet, attribute_with="local"))
    assert one[3].shared.shape == other[3].shared.shape
    assert 0 < np.mean((one[3].shared != 0) != (other[3].shared != 0)) < 0.5


def test_negative_logits_are_counted(finish: Finish) -> None:
    """Of these images most relevances of LRP are negative."""
    made = experiment()
    (found, states), fed = shared_of(made), federation(made)
    done = finish(data=DATA, method=FEDXDS, train=TRAIN)
    recorded = done.clients.set_index(["round", "client"])["negative_logits"].loc[3]
    fed.server.model.load(torch.tensor(states[2].weights))
    dataset, splits, _ = prepare(made)
    for k, (x, _, _) in enumerate(found):
        y = torch.tensor(dataset.y[splits.train[k]])
        own = fed.server.model.module.eval()(x).gather(1, y[:, None])
        assert recorded[k] == int((own < 0).sum())
    assert 0 < recorded.sum() < N


# bytes


@pytest.mark.parametrize(("encoding", "size"), [("float32", 4), ("uint8", 1)])
def test_the_pool_is_counted_both_ways(finish: Finish, encoding: str, size: int) -> None:
    done = finish(data=DATA, method={**FEDXDS, "encoding": encoding}, train=TRAIN)
    assert done.rounds["phase"].tolist() == ["warm up"] * 2 + ["share"] + ["train"] * 2
    assert done.rounds["pool"].dropna().tolist() == [N]
    share = done.clients[done.clients["round"] == 3]
    model = 4 * PARAMETERS
    item = size * 64 + 1
    assert (share["one_off_up"] == share["samples"] * item).all()
    assert (share["one_off_down"] == model + N * item).all()
    others = done.clients[done.clients["round"] != 3]
    assert (others["bytes_up"] == model).all()
    assert (others["bytes_down"] == model).all()
    assert done.rounds["one_off_up"].sum() == N * item


def test_levels_keep_zero_and_lose_half_a_level() -> None:
    made = experiment(encoding="uint8")
    fed, method, states = federation(made), made.method, until_shared(made)
    assert isinstance(method, FedXDS)
    levels = torch.tensor(method.levels(fed))
    x = torch.linspace(-0.4, 1.4, 1000)
    again = decode(encode(x, levels), levels)
    assert (again - x).abs().max() <= levels[0] / 2 + 1e-6
    assert decode(encode(torch.zeros(3), levels), levels).tolist() == [0, 0, 0]
    assert states[3].shared.dtype == np.uint8
    exact = until_shared(experiment())[3].shared
    decoded = decode(torch.tensor(states[3].shared), levels).numpy()
    inside = (exact > -3 * 0.15) & (exact < 1 + 3 * 0.15)
    assert np.abs(decoded - exact)[inside].max() <= float(levels[0]) / 2 + 1e-6


# training on both


def test_a_step_is_on_a_local_batch_and_one_of_the_pool() -> None:
    hand = ByHand(experiment(train={"rounds": 4}))
    *_, before, after = server_states(hand.experiment)
    pool, labels = torch.tensor(before.shared).double(), torch.tensor(before.labels).long()
    trained = []
    for k in range(10):
        rng = keyed_rng(hand.experiment.seed, "local_update/pool", 4, k)
        rows, w = rng.permutation(len(pool)), torch.tensor(before.weights).double()
        for step, batch in enumerate(hand.batches(4, k)):
            drawn = rows.take(range(16 * step, 16 * step + 16), mode="wrap")
            shared = hand.gradient(w, (pool[drawn], labels[drawn]))
            w = w - 0.1 * (hand.gradient(w, batch) + shared)
        trained.append(w)
    close(after.weights, hand.mean(trained, hand.n))


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_local_images_are_augmented(fraction: float) -> None:
    """In training proper, and not in the warm-up; of the pool nothing is."""
    plain = server_states(experiment(fraction=fraction))
    states = server_states(experiment(fraction=fraction, augment="weak"))
    same = [np.array_equal(a.weights, b.weights) for a, b in zip(plain, states, strict=True)]
    assert same == [True, *([False] * 5 if fraction == 0 else [True, True, True, False, False])]


@pytest.mark.parametrize(("name", "function"), [("weak", weak), ("strong", strong)])
def test_the_loss_is_of_augmented_images(name: str, function: Callable[..., Any]) -> None:
    class Draws:
        def rng(self, stream: str) -> np.random.Generator:
            return keyed_rng(0, stream)

    method = FedXDS(augment=name)
    x, y = torch.rand(6, 1, 8, 8), torch.arange(6) % 3
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    draw = method.local(Draws())  # type: ignore[arg-type]
    rng = keyed_rng(0, "augment")
    for _ in range(2):  # drawn anew for each batch
        expected = nn.functional.cross_entropy(network(function(x, rng)), y, reduction="none")
        drawn, of_batch = draw(x, y)
        assert not of_batch
        torch.testing.assert_close(augmented_loss(network, x, y, drawn), expected)


# what cannot be


@pytest.mark.parametrize(
    ("attribution", "message"),
    [
        ({"name": "occlusion", "size": 8}, ": occlusion: size=8 makes one square of the 8×8"),
        ({"name": "attention_rollout"}, ": attention_rollout: the network has no attention"),
        (LRP, r": lrp: layer features.3.self_attn \(MultiheadAttention\): no rule"),
        ({"name": "occlusion", "baseline": "mean"}, r"\.baseline: images are attributed from"),
        ({"name": "integrated_gradients", "baseline": "mean"}, r"\.baseline: images are attr"),
    ],
)
def test_attributions_that_do_not_fit(attribution: dict[str, Any], message: str) -> None:
    model = {"name": "networks:of_torch" if attribution == LRP else "mlp"}
    method = {**FEDXDS, "attribution": attribution}
    with pytest.raises(BadInput, match=f"^method.attribution{message}"):
        prepare(small_experiment(method=method, model=model, train=TRAIN))


def test_a_pool_too_large_is_refused_with_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Memory:
        available = 140_000

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    with pytest.raises(BadInput, match=r"a pool of 400 images, 0.0 GB; .*method.fraction"):
        run(experiment(), tmp_path)
    run(experiment(encoding="uint8"), tmp_path)
