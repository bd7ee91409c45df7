"""Images are trained on channels last, wherever the network takes them so."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.objectives import Classification
from fedsim.training import FlatModel, Hooks, Train, TrainingJob, train

CPU = torch.device("cpu")


class Watching(nn.Module):
    """A network that remembers how its inputs lay in memory."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.seen = nn.Sequential(*layers), set[bool]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(x.is_contiguous(memory_format=torch.channels_last))
        logits: Tensor = self.layers(x)
        return logits


class Viewed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1)


def convolutions(flatten: nn.Module, dropout: float = 0.0) -> Watching:
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    return Watching(*convolution, nn.Dropout(dropout), flatten, nn.Linear(16, 3))


def trained(network: Watching, monkeypatch: pytest.MonkeyPatch | None = None) -> Tensor:
    model = FlatModel(network, CPU)
    if monkeypatch is not None:
        monkeypatch.setattr(model, "arranged", lambda x: x)
    torch.manual_seed(1)
    x, y = torch.randn(8, 3, 4, 4), torch.randint(3, (8,))
    rng = np.random.default_rng(0)
    job = TrainingJob(model.vector.clone(), x, y, 0.1, 2, rng, Hooks(Classification().loss))
    return train(model, job, Train(batch_size=3)).weights


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_layout_changes_rounding_alone(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    arranged, plain = convolutions(nn.Flatten(), dropout), convolutions(nn.Flatten(), dropout)
    torch.testing.assert_close(
        trained(arranged), trained(plain, monkeypatch), rtol=1e-4, atol=1e-6
    )
    assert arranged.seen == {True}
    assert plain.seen == {False}


def test_a_network_that_looks_at_memory_gets_images_as_they_are() -> None:
    viewed, flattened = convolutions(Viewed()), convolutions(nn.Flatten())
    torch.testing.assert_close(trained(viewed), trained(flattened), rtol=1e-4, atol=1e-6)
    assert viewed.seen == {True, False}  # tried once, and then left alone


def test_other_inputs_stay_as_they_are() -> None:
    model = FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(48, 3)), CPU)
    assert model.arranged(torch.zeros(2, 3, 4, 4)).is_contiguous()
    x = torch.zeros(2, 5)
    assert model.arranged(x) is x
    images = FlatModel(convolutions(nn.Flatten()), CPU)
    none = torch.zeros(0, 3, 4, 4)
    assert images.arranged(none) is none


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "last"),
    [(7, 1, 2, False), (8, 1, 2, True), (2, 1, 1, True), (2, 3, 2, True)],
)
def test_images_stay_as_they_are_where_the_backward_pass_would_overrun(
    channels: int, kernel: int, stride: int, last: bool
) -> None:
    first = nn.Conv2d(3, channels, 3, padding=1)
    second = nn.Conv2d(channels, 4, kernel, stride, padding=kernel // 2)
    network = nn.Sequential(first, second, nn.Flatten(), nn.LazyLinear(3))
    network(torch.zeros(1, 3, 4, 4))
    x = FlatModel(network, CPU).arranged(torch.zeros(2, 3, 4, 4))
    assert x.is_contiguous(memory_format=torch.channels_last) is last


def test_trying_leaves_no_trace() -> None:
    network = convolutions(nn.Flatten(), dropout=0.5)
    model = FlatModel(network, CPU)
    network.train()
    before = torch.get_rng_state()
    model.arranged(torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)))
    assert network.training
    assert torch.equal(torch.get_rng_state(), before)
