"""Steps without a gradient in memory, against those of the flat gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, linear

from fedsim.training import FlatModel, Hooks, Train, Trained, TrainingJob, train
from fedsim.training.direct import LARGE, DirectSgd

CPU = torch.device("cpu")
WIDTH = math.isqrt(LARGE - 1) + 1  # of a square weight that is just large


def examples(n: int = 7) -> tuple[Tensor, Tensor]:
    torch.manual_seed(n)
    return torch.randn(n, WIDTH), torch.randint(3, (n,))


class Chain(nn.Module):
    """Two large layers and a small one."""

    def __init__(self, bias: bool = True, inplace: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.second = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.last = nn.Linear(WIDTH, 3, bias=bias)
        self.act = nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.act(self.second(self.act(self.first(x)))))
        return logits


class Twice(Chain):
    """One layer is run twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x))
        logits: Tensor = self.last(self.second(self.act(self.second(x))))
        return logits


class Shared(Chain):
    """A weight is used outside of its layer as well."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x))
        logits: Tensor = self.last(self.second(x) + linear(x, self.first.weight))
        return logits


class SometimesShared(Chain):
    """A weight is used outside of its layer in some batches, and a layer is not run in others."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.act(self.first(x))
        if float(x.detach().sum()) > 0:
            z = z + linear(x, self.first.weight)
        elif float(x.detach()[0, 0]) > 0:
            z = self.second(z)
        logits: Tensor = self.last(z)
        return logits


class Tied(Chain):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight = self.first.weight


class Sequence(Chain):
    """Inputs of a layer have three dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.stack([x, x.flip(1), x * x], dim=1)
        logits: Tensor = self.last(self.act(self.first(steps)).mean(dim=1))
        return logits


class Unused(Chain):
    """What a layer returns is dropped, and another layer is never run."""

    def forward(self, x: Tensor) -> Tensor:
        self.second(x)
        logits: Tensor = self.last(x)
        return logits


class Hooked(Chain):
    """A hook of the network's own changes what a layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(lambda module, inputs, z: 2 * z)


def frozen(network: nn.Module, *names: str) -> nn.Module:
    for name in names:
        network.get_parameter(name).requires_grad_(False)
    return network


def mixed() -> nn.Module:
    torch.manual_seed(1)
    grouped = nn.GroupNorm(2, WIDTH)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), grouped, nn.Tanh(), nn.Linear(WIDTH, 3))


def losses(network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    return cross_entropy(network(x), y, reduction="none")


def penalised(network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    """With a penalty on all weights, which does not pass through any layer."""
    penalty = sum((p.square().sum() for p in network.parameters()), torch.zeros(()))
    return losses(network, x, y, context) + 0.01 * penalty


def smooth(network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    """With a penalty on the gradient at the inputs: its own gradient needs the weights again."""
    x = x.clone().requires_grad_()
    found = losses(network, x, y, context)
    (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    return found + slope.square().sum(dim=1)


def other_weights(
    network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]
) -> Tensor:
    """The network is run with changed weights as well."""
    own = {name: 0.5 * p for name, p in network.named_parameters()}
    with torch.no_grad():
        network(x)
    return losses(network, x, y, context) + functional_call(network, own, (x,)).square().mean(1)


def finish(
    build: Callable[[], nn.Module],
    loss: Callable[..., Tensor] = losses,
    flat: bool = False,
    **optimizer: Any,
) -> Trained:
    torch.manual_seed(0)
    model = FlatModel(build(), CPU)
    settings = Train.model_validate({"batch_size": 3, "optimizer": {"lr": 0.1, **optimizer}})
    x, y = examples()
    # A gradient that a method may change is made as one flat vector: the oracle.
    hooks = Hooks(loss, (lambda g, w, context: g) if flat else None)
    rng, start = np.random.default_rng(0), model.vector.clone()
    return train(model, TrainingJob(start, x, y, 0.1, 2, rng, hooks), settings)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "a chain": Chain,
    "no bias": lambda: Chain(bias=False),
    "in place": lambda: Chain(inplace=True),
    "a layer twice": Twice,
    "a weight outside": Shared,
    "a weight outside at times": SometimesShared,
    "tied weights": Tied,
    "three dimensions": Sequence,
    "unused layers": Unused,
    "a hook": Hooked,
    "frozen weights": lambda: frozen(Chain(), "first.weight", "second.bias"),
    "a frozen layer": lambda: frozen(Chain(), "second.weight", "second.bias"),
    "norm": mixed,
    "small layers alone": lambda: nn.Linear(WIDTH, 3),
}


@pytest.mark.parametrize("loss", [losses, penalised, smooth, other_weights])
@pytest.mark.parametrize("network", NETWORKS)
def test_steps_are_those_of_the_flat_gradient(network: str, loss: Callable[..., Tensor]) -> None:
    found = finish(NETWORKS[network], loss)
    expected = finish(NETWORKS[network], loss, flat=True)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-4, atol=1e-6)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.steps == expected.steps == 6


@pytest.mark.parametrize("network", ["a chain", "tied weights", "norm"])
def test_weight_decay(network: str) -> None:
    found = finish(NETWORKS[network], weight_decay=0.3)
    expected = finish(NETWORKS[network], weight_decay=0.3, flat=True)
    without = finish(NETWORKS[network], flat=True)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found.weights, without.weights, rtol=1e-4, atol=1e-6)


def step(network: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the gradients that a step asks autograd for."""
    model = FlatModel(network, CPU)
    sgd = DirectSgd(model, 0.1, 0.0)
    asked: list[tuple[int, ...]] = []
    gradient = torch.autograd.grad

    def note(*arguments: Any, **options: Any) -> tuple[Tensor | None, ...]:
        found = gradient(*arguments, **options)
        asked.extend(tuple(g.shape) for g in found if g is not None)
        return found

    x, y = examples()
    with sgd.watching():
        loss = losses(model.module, x, y, {}).mean()
        monkeypatch.setattr(torch.autograd, "grad", note)
        sgd.step(loss)
    return asked


def test_no_large_gradient_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert step(Chain(), monkeypatch) == [(7, WIDTH), (7, WIDTH), (3, WIDTH), (3,)]


def test_shared_weights_get_all_of_their_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (WIDTH, WIDTH) in step(Shared(), monkeypatch)


def test_no_hook_is_left_behind() -> None:
    network = Chain()
    with DirectSgd(FlatModel(network, CPU), 0.1, 0.0).watching():
        assert network.first._forward_hooks
    assert not network.first._forward_hooks


def test_inputs_changed_in_place_are_refused_as_autograd_does() -> None:
    class Changed(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            z = self.first(x)
            x.add_(1)
            logits: Tensor = self.last(z)
            return logits

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        finish(Changed)
