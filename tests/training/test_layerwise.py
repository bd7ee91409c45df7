"""Steps that are made layer by layer, against those of the flat gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, linear

from fedsim.models import Classifier
from fedsim.objectives import Classification
from fedsim.objectives.classification import _cross_entropy
from fedsim.training import FlatModel, Hooks, Train, Trained, TrainingJob, train
from fedsim.training.layerwise import LayerwiseSgd

CPU = torch.device("cpu")


def examples(n: int = 7, shape: tuple[int, ...] = (1, 4, 4)) -> tuple[Tensor, Tensor]:
    torch.manual_seed(n)
    return torch.randn(n, *shape), torch.randint(3, (n,))


def mlp(bias: bool = True, inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(16, 9, bias),
        nn.ReLU(inplace),
        nn.Sequential(nn.Linear(9, 6, bias), nn.ReLU(inplace)),
        nn.Linear(6, 3, bias),
    )


def cnn() -> nn.Module:
    features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return Classifier(nn.Sequential(features, nn.Flatten(), nn.ReLU()), nn.Linear(16, 3))


def with_batch_norm() -> nn.Module:
    convolution = nn.Conv2d(1, 4, 3, padding=1, bias=False)
    head = nn.Linear(16, 5), nn.BatchNorm1d(5), nn.ELU(inplace=True), nn.Linear(5, 3)
    return nn.Sequential(convolution, nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Flatten(), *head)


def with_dropout() -> nn.Module:
    layers = nn.Linear(16, 9), nn.Dropout(0.4), nn.ReLU(), nn.Linear(9, 3)
    return nn.Sequential(nn.Flatten(), *layers)


def tied() -> nn.Module:
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.Linear(16, 3))


def twice() -> nn.Module:
    layer = nn.Linear(16, 16)
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer, nn.Linear(16, 3))


def three_dimensions() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Flatten(1), nn.Linear(20, 3))


class Outside(nn.Module):
    """A weight is used outside of its layer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        logits: Tensor = self.second(self.first(x).relu() + linear(x, self.first.weight))
        return logits


class Doubled(nn.Sequential):
    """Not what a sequence of layers returns."""

    def forward(self, input: Tensor) -> Tensor:
        logits: Tensor = 2 * super().forward(input)
        return logits


class Remembering(nn.Module):
    """A layer that keeps what it returned."""

    def forward(self, x: Tensor) -> Tensor:
        self.latest = x.tanh()
        return self.latest


def remembering() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 9), Remembering(), nn.Linear(9, 3))


def hooked() -> nn.Module:
    network = mlp()
    network[1].register_forward_hook(lambda module, inputs, z: 2 * z)
    network[3].register_forward_pre_hook(lambda module, inputs: inputs[0] + 1)
    return network


def hooked_as_a_whole() -> nn.Module:
    network = mlp()
    network.register_forward_hook(lambda module, inputs, z: 2 * z)
    return network


def frozen(*names: str) -> nn.Module:
    network = mlp()
    for name in names:
        network.get_parameter(name).requires_grad_(False)
    return network


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "no bias": lambda: mlp(bias=False),
    "in place": lambda: mlp(inplace=True),
    "cnn": cnn,
    "batch norm": with_batch_norm,
    "dropout": with_dropout,
    "tied weights": tied,
    "a layer twice": twice,
    "three dimensions": three_dimensions,
    "a weight outside": Outside,
    "its own forward": lambda: Doubled(*mlp()),
    "hooks": hooked,
    "a layer that remembers": remembering,
    "a hook of all": hooked_as_a_whole,
    "frozen weights": lambda: frozen("1.weight", "3.0.bias"),
    "a frozen first layer": lambda: frozen("1.weight", "1.bias"),
    "a frozen layer": lambda: frozen("3.0.weight", "3.0.bias"),
    "one layer": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)),
    "a last layer of another kind": lambda: nn.Sequential(*mlp(), nn.Softplus()),
}
BY_LAYERS = {
    *("mlp", "no bias", "in place", "cnn", "batch norm", "dropout", "three dimensions", "hooks"),
    *("frozen weights", "a frozen first layer", "a frozen layer", "one layer"),
    "a layer that remembers",
}


def losses(network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    return cross_entropy(network(x), y, reduction="none")


def two_views(network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    """The network is run twice."""
    return losses(network, x, y, context) + losses(network, x.flip(-1), y, context)


def pseudo(network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    """The network is run without autograd as well."""
    with torch.no_grad():
        wanted = network(x.flip(-1)).argmax(dim=1)
    return losses(network, x, y, context) + losses(network, x, wanted, context)


def penalised(network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    """With a penalty on all weights, which does not pass through any layer."""
    penalty = sum((p.square().sum() for p in network.parameters()), torch.zeros(()))
    return losses(network, x, y, context) + 0.01 * penalty


def at_times(network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    """With a penalty in some batches alone, and noise that comes first."""
    x = x + 0.1 * torch.randn_like(x)
    return (penalised if float(x.detach().sum()) > 0 else losses)(network, x, y, context)


def smooth(network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    """With a penalty on the gradient at the inputs: its own gradient needs the weights again."""
    x = x.clone().requires_grad_()
    found = losses(network, x, y, context)
    (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    return found + slope.square().flatten(1).sum(dim=1)


def confident(network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    """With a gradient at the outputs within."""
    logits = network(x)
    found = cross_entropy(logits, y, reduction="none")
    (slope,) = torch.autograd.grad(found.sum(), logits, create_graph=True)
    return found + slope.square().sum(dim=1)


def other_weights(
    network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]
) -> Tensor:
    """The network is run with changed weights as well."""
    own = {name: 0.5 * p for name, p in network.named_parameters()}
    found = functional_call(network, own, (x,), tie_weights=False).square().mean(dim=1)
    return found + losses(network, x, y, context)


def inner(network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    """With a penalty on what a layer within returns."""
    found: list[Tensor] = []
    first = next(m for m in network.modules() if isinstance(m, nn.Linear))
    handle = first.register_forward_hook(lambda module, inputs, z: found.append(z))
    try:
        return losses(network, x, y, context) + 0.1 * found[0].flatten(1).square().sum(dim=1)
    finally:
        handle.remove()


def masked(network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    """The outputs are changed in place."""
    logits = network(x)
    logits[:, 0] -= 1
    return cross_entropy(logits.mul_(2), y, reduction="none")


def by_two(network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    """Two losses an example, (B, 2), whose mean is minimised."""
    logits = network(x)
    return torch.stack([cross_entropy(logits, y, reduction="none"), logits.square().mean(1)], 1)


class Counted:
    """A loss that counts how often it was called, and draws as often."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __call__(
        self, network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]
    ) -> Tensor:
        return float(self.rng.random()) * two_views(network, x, y, context)


LOSSES = [
    *(losses, two_views, pseudo, penalised, at_times, smooth, confident, other_weights, inner),
    *(masked, by_two),
]


def finish(
    build: Callable[[], nn.Module],
    loss: Callable[..., Tensor] = losses,
    flat: bool = False,
    linear: float = 0.0,
    quadratic: float = 0.0,
    **optimizer: Any,
) -> tuple[Trained, Tensor]:
    """What training comes to, and torch's generator afterwards."""
    torch.manual_seed(0)
    model = FlatModel(build(), CPU)
    # Clipping takes the flat gradient, which is the oracle; this bound changes nothing.
    section = {"batch_size": 3, "optimizer": optimizer, "clip_norm": 1e9 if flat else None}
    x, y = examples(8)
    rng, start = np.random.default_rng(0), model.vector.clone()
    v = torch.full((model.num_parameters,), linear) if linear else None
    job = TrainingJob(start, x, y, 0.1, 2, rng, Hooks(loss), {}, v, quadratic)
    torch.manual_seed(5)
    return train(model, job, Train.model_validate(section)), torch.get_rng_state()


def agree(one: tuple[Trained, Tensor], other: tuple[Trained, Tensor]) -> None:
    torch.testing.assert_close(one[0].weights, other[0].weights, rtol=1e-4, atol=1e-5)
    assert one[0].loss == pytest.approx(other[0].loss, rel=1e-5)
    assert one[0].steps == other[0].steps == 6
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("network", NETWORKS)
def test_steps_are_those_of_the_flat_gradient(network: str, loss: Callable[..., Tensor]) -> None:
    agree(finish(NETWORKS[network], loss), finish(NETWORKS[network], loss, flat=True))


def remembered(network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    """With a penalty on what a layer within has kept."""
    found = losses(network, x, y, context)
    return found + 0.3 * network[2].latest.square().sum(dim=1)  # type: ignore[index, operator]


def test_what_a_layer_has_kept_is_a_way_to_the_loss() -> None:
    agree(finish(remembering, remembered), finish(remembering, remembered, flat=True))
    assert not made_by_layers(remembering, remembered)


@pytest.mark.parametrize("flat", [True, False])
def test_what_was_frozen_later_is_not_trained(flat: bool) -> None:
    def freezing(
        network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]
    ) -> Tensor:
        frozen_later = next(network.parameters())
        frozen_later.requires_grad_(False)
        return losses(network, x, y, context)

    with pytest.raises(RuntimeError, match="does not require grad"):
        finish(mlp, freezing, flat=flat)


def test_a_loss_is_called_once_a_step() -> None:
    agree(finish(mlp, Counted()), finish(mlp, Counted(), flat=True))


@pytest.mark.parametrize("network", NETWORKS)
def test_terms_and_weight_decay(network: str) -> None:
    build, changes = NETWORKS[network], {"weight_decay": 0.3, "linear": -0.5, "quadratic": 0.4}
    found = finish(build, **changes)
    agree(found, finish(build, flat=True, **changes))
    for less in changes:
        without = finish(build, **{name: c for name, c in changes.items() if name != less})
        assert not torch.allclose(found[0].weights, without[0].weights, rtol=1e-4, atol=1e-6)


class Halved(Classification):
    """Another loss than that whose gradient is written out."""

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        return 0.5 * super().losses(logits, y)


class Squared(Classification):
    def loss(
        self, network: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]
    ) -> Tensor:
        return super().loss(network, x, y, context).square()


@pytest.mark.parametrize("network", NETWORKS)
def test_steps_by_a_gradient_that_is_written_out(network: str) -> None:
    build, loss = NETWORKS[network], Classification().loss
    terms = {"weight_decay": 0.3, "linear": -0.5, "quadratic": 0.4}
    found = finish(build, loss, **terms)
    agree(found, finish(build, loss, flat=True, **terms))
    by_autograd = finish(build, losses, **terms)
    assert torch.equal(found[0].weights, by_autograd[0].weights)


@pytest.mark.parametrize("kind", [Halved, Squared])
def test_another_loss_is_not_taken_for_it(kind: type[Classification]) -> None:
    agree(finish(mlp, kind().loss), finish(mlp, kind().loss, flat=True))


def test_labels_of_a_byte_are_classes_as_well() -> None:
    x, y = examples(8)
    logits = x.flatten(1)[:, :3]
    whole, bytes_ = (_cross_entropy(logits, labels) for labels in (y, y.to(torch.uint8)))
    assert torch.equal(whole[0], bytes_[0])
    assert torch.equal(whole[1], bytes_[1])


def test_a_network_that_was_hooked_later_does_not_run_as_built() -> None:
    model = FlatModel(mlp(), CPU)
    by_layers = LayerwiseSgd(model)
    assert by_layers.runs_as_built()
    handle = model.module.register_forward_hook(lambda module, inputs, z: 2 * z)
    assert not by_layers.runs_as_built()
    handle.remove()
    assert by_layers.runs_as_built()
    model.restrict_classes([0, 2])
    assert not by_layers.runs_as_built()


def test_what_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[type] = []
    step_to = LayerwiseSgd.step_to

    def note(self: LayerwiseSgd, *arguments: Any) -> Tensor:
        asked.append(kind)
        return step_to(self, *arguments)

    monkeypatch.setattr(LayerwiseSgd, "step_to", note)
    for kind in (Classification, Halved, Squared):
        finish(mlp, kind().loss)
    assert set(asked) == {Classification}


def made_by_layers(build: Callable[[], nn.Module], loss: Callable[..., Tensor] = losses) -> bool:
    torch.manual_seed(0)
    model = FlatModel(build(), CPU)
    x, y = examples(8)
    before = model.vector.clone()
    _, gradient = LayerwiseSgd(model).step(lambda: loss(model.module, x, y, {}), lr=0.1)
    assert "forward" not in vars(model.module)
    assert (gradient is None) == (not torch.equal(model.vector, before))
    return gradient is None


@pytest.mark.parametrize("network", NETWORKS)
def test_which_networks_are_trained_layer_by_layer(network: str) -> None:
    assert made_by_layers(NETWORKS[network]) == (network in BY_LAYERS)


@pytest.mark.parametrize("loss", LOSSES)
def test_which_losses_are_minimised_layer_by_layer(loss: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    assert made_by_layers(mlp, loss) == (loss in (losses, confident, masked, by_two))


def test_no_gradient_of_a_linear_layer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    gradient = torch.autograd.grad

    def note(*arguments: Any, **options: Any) -> tuple[Tensor | None, ...]:
        found = gradient(*arguments, **options)
        asked.extend(tuple(g.shape) for g in found if g is not None)
        return found

    monkeypatch.setattr(torch.autograd, "grad", note)
    assert made_by_layers(cnn)
    assert asked == [(8, 3), (4, 1, 3, 3), (4,)]
