"""Stacked training against its oracle, the loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsim.models import models
from fedsim.objectives import Classification
from fedsim.support.rng import generator_state
from fedsim.training import (
    FlatModel,
    Hooks,
    Stack,
    Train,
    Trained,
    TrainingJob,
    train,
)

CPU = torch.device("cpu")

CROSS_ENTROPY = Classification().loss
PLAIN = Hooks(CROSS_ENTROPY)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def mlp() -> tuple[nn.Module, tuple[int, ...]]:
    return models.parse({"name": "mlp", "hidden": [9]}).build((6,), 3), (6,)


def cnn() -> tuple[nn.Module, tuple[int, ...]]:
    shape = (1, 8, 8)
    return models.parse({"name": "cnn", "channels": [3, 4]}).build(shape, 3), shape


def group_norm() -> tuple[nn.Module, tuple[int, ...]]:
    layers = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    return nn.Sequential(*layers), (2, 6, 6)


def layer_norm() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)), (5,)


def dropout() -> tuple[nn.Module, tuple[int, ...]]:
    layers = nn.Dropout(0.2), nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    return nn.Sequential(*layers), (5,)


def channel_dropout() -> tuple[nn.Module, tuple[int, ...]]:
    layers = nn.Conv2d(2, 4, 3), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(64, 3)
    return nn.Sequential(*layers), (2, 6, 6)


def frozen() -> tuple[nn.Module, tuple[int, ...]]:
    """An embedding that is not trained, and a buffer that is saved."""
    network = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    network[1].requires_grad_(False)
    network.register_buffer("constant", torch.randn(4))
    return network, (5,)


NETWORKS = [mlp, cnn, group_norm, layer_norm, dropout, channel_dropout, frozen]
SIZES = {
    "even": [8, 8, 8],
    "ragged": [9, 4, 17, 1],
    "one": [5],
    "last batches differ": [7, 6, 5, 6],
}
OPTIMIZERS: list[dict[str, Any]] = [
    {"lr": 0.2},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    {"lr": 0.1, "momentum": 0.5, "nesterov": True},
    {"name": "adam", "lr": 0.02, "betas": [0.5, 0.7], "weight_decay": 0.1},
    {"name": "adamw", "lr": 0.02, "weight_decay": 0.3},
]


def ascend(g: Tensor, w: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    return 0.3 * g / g.norm(dim=-1, keepdim=True).clamp(min=1e-12)


def weighted(network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    return Classification().loss(network, x, y, context) * (1 + context["anchor"][0] ** 2)


HOOKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "perturb": {"perturb": ascend},
    "loss": {"loss": weighted},
    "part": {"part": slice(3, 20)},
}


def tasks(
    model: FlatModel, shape: tuple[int, ...], sizes: list[int], hooks: Hooks, section: Train
) -> list[TrainingJob]:
    """Clients with data, starting points and contexts of their own."""
    made = []
    for k, n in enumerate(sizes):
        generator = torch.Generator().manual_seed(100 + k)
        noise = torch.randn(model.size, generator=generator)
        made.append(
            TrainingJob(
                model.vector + 0.05 * noise,
                torch.randn(n, *shape, generator=generator),
                torch.randint(3, (n,), generator=generator),
                0.07,
                section.most_epochs,
                np.random.default_rng(k),
                hooks,
                {"anchor": noise[: model.num_parameters]},
                0.3 * noise[: model.num_parameters] if k % 2 else None,
                0.2 * k,
                section.local_steps,
            )
        )
    return made


def both(
    network: Any, sizes: list[int], hooks: Hooks, section: Train
) -> tuple[list[Trained], list[Trained], list[Tensor], list[Tensor]]:
    """What comes of each client in a loop and in a stack, and torch's generator afterwards."""
    torch.manual_seed(0)
    module, shape = network()
    model = FlatModel(module, CPU)
    start = model.vector.clone()
    alone, before, after = [], [], []
    for k, task in enumerate(tasks(model, shape, sizes, hooks, section)):
        torch.manual_seed(k)
        before.append(generator_state(CPU))
        alone.append(train(model, task, section))
        after.append(generator_state(CPU))
    model.load(start)
    stacked, states = Stack(model).train(
        tasks(model, shape, sizes, hooks, section), section, before
    )
    assert torch.equal(model.vector, start)  # the network for one client is not touched
    return alone, stacked, after, states


def agree(alone: list[Trained], stacked: list[Trained]) -> None:
    for one, other in zip(alone, stacked, strict=True):
        assert (one.steps, one.visited) == (other.steps, other.visited)
        assert other.loss == pytest.approx(one.loss, rel=1e-4)
        torch.testing.assert_close(other.weights, one.weights, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: "-".join(map(str, o.values())))
def test_a_stack_is_the_loop(network: Any, sizes: list[int], optimizer: dict[str, Any]) -> None:
    section = Train.model_validate({"optimizer": optimizer, "batch_size": 4, "local_epochs": 2})
    alone, stacked, after, states = both(network, sizes, PLAIN, section)
    agree(alone, stacked)
    assert all(torch.equal(a, b) for a, b in zip(after, states, strict=True))


@pytest.mark.parametrize("network", [mlp, cnn, dropout, frozen])
@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS.keys())
@pytest.mark.parametrize("clip", [None, 0.3])
def test_hooks_act_on_a_stack_as_in_the_loop(
    network: Any, hooks: dict[str, Any], clip: float | None
) -> None:
    section = Train.model_validate(
        {"optimizer": {"momentum": 0.5}, "batch_size": 4, "local_epochs": 2, "clip_norm": clip}
    )
    alone, stacked, _, _ = both(
        network, SIZES["ragged"], Hooks(**{"loss": CROSS_ENTROPY, **hooks}), section
    )
    agree(alone, stacked)


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    batch_size=st.integers(1, 6),
    local_epochs=st.integers(1, 3),
)
@settings(max_examples=30)
def test_any_sizes(sizes: list[int], batch_size: int, local_epochs: int) -> None:
    section = Train(batch_size=batch_size, local_epochs=local_epochs)
    alone, stacked, _, _ = both(mlp, sizes, Hooks(CROSS_ENTROPY), section)
    agree(alone, stacked)


@pytest.mark.parametrize("fields", [{"sampler": "balanced"}, {"precision": "bfloat16"}])
def test_samplers_and_precisions(fields: dict[str, Any]) -> None:
    section = Train.model_validate({"batch_size": 4, "local_epochs": 2, **fields})
    alone, stacked, _, _ = both(mlp, [3, 8, 30], Hooks(CROSS_ENTROPY), section)
    if "precision" not in fields:
        agree(alone, stacked)
    for one, other in zip(alone, stacked, strict=True):
        torch.testing.assert_close(other.weights, one.weights, rtol=0.1, atol=0.02)


def test_gradients_in_parts_are_not_stacked() -> None:
    torch.manual_seed(0)
    module, shape = mlp()
    model = FlatModel(module, CPU)
    x, y = torch.randn(5, *shape), torch.arange(5) % 3
    found = Stack(model).why_not(x, y, Train(accumulate=2), CROSS_ENTROPY)
    assert found == "train.accumulate computes gradients in parts"


def test_the_same_number_of_steps_for_all() -> None:
    section = Train(batch_size=4, local_steps=5)
    alone, stacked, _, _ = both(mlp, [3, 8, 30], Hooks(CROSS_ENTROPY), section)
    agree(alone, stacked)
    assert [one.steps for one in alone] == [5, 5, 5]
    assert [one.visited for one in alone] == [15, 20, 20]


def test_dropout_drops_what_pytorch_drops() -> None:
    for plain, x in (
        (nn.Dropout(0.3), torch.ones(5, 7)),
        (nn.Dropout2d(0.5), torch.ones(4, 6, 3, 3)),
    ):
        torch.manual_seed(3)
        expected = plain(x)
        ours = FlatModel(nn.Sequential(plain), CPU).module
        torch.manual_seed(3)
        assert torch.equal(ours.train()(x), expected)
        assert torch.equal(ours.eval()(x), x)


class Calls(nn.Module):
    """Dropout that is called as a function: vmap cannot tell whose masks it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(x), 0.5, self.training)


class Branches(nn.Module):
    """Takes another way for some values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out * 2 if out.sum() > 0 else out


class Mixes(nn.Module):
    """Looks at the other examples of the batch, and at padding with them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x - 3 * x.mean(dim=0))
        return out


OBSTACLES = {
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
        "layer '1' (BatchNorm1d) mixes examples or keeps running statistics",
    ),
    "no statistics": (
        lambda: nn.Sequential(nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3)),
        "layer '0' (BatchNorm1d) mixes examples",
    ),
    "mixes examples": (Mixes, "training in a stack gives other weights"),
}


@pytest.mark.parametrize(("build", "words"), OBSTACLES.values(), ids=OBSTACLES.keys())
def test_what_cannot_be_stacked_says_why(build: Any, words: str) -> None:
    torch.manual_seed(0)
    model = FlatModel(build(), CPU)
    reason = Stack(model).why_not(torch.randn(5, 5), torch.arange(5) % 3, Train(), CROSS_ENTROPY)
    assert reason is not None
    assert words in reason
    assert "\n" not in reason


@pytest.mark.parametrize("build", [Calls, Branches])
def test_what_does_not_run_under_vmap(build: Any) -> None:
    model = FlatModel(build(), CPU)
    with pytest.raises(RuntimeError, match="vmap"):
        Stack(model).why_not(torch.randn(5, 5), torch.arange(5) % 3, Train(), CROSS_ENTROPY)


def test_a_dropout_of_the_user_s_own_stays() -> None:
    class Times7(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            return 7 * x

    model = FlatModel(nn.Sequential(Times7(0.5), nn.Linear(2, 2)), CPU)
    assert isinstance(model.module[0], Times7)  # type: ignore[index]


@pytest.mark.parametrize("network", NETWORKS)
def test_what_can_be_stacked_has_no_obstacle(network: Any) -> None:
    torch.manual_seed(0)
    module, shape = network()
    model = FlatModel(module, CPU)
    before = model.vector.clone()
    assert (
        Stack(model).why_not(torch.randn(5, *shape), torch.arange(5) % 3, Train(), CROSS_ENTROPY)
        is None
    )
    assert torch.equal(model.vector, before)
