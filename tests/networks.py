"""Networks that experiments of the tests name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.models import Classifier
from fedsim.objectives import Classification


class Written(nn.Module):
    """A network whose forward pass is a function of it and of its inputs."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def look_at(net: nn.Module) -> Any:
    """All that an explainer might disturb."""
    modules = {
        name: (
            type(module),
            module.training,
            sorted(set(vars(module)) - {"training"}),
            len(module._forward_hooks) + len(module._forward_pre_hooks),
            len(module._backward_hooks) + len(module._backward_pre_hooks),
            getattr(module, "eps", None),
        )
        for name, module in net.named_modules()
    }
    parameters = {
        name: (id(p), p.data_ptr(), p.requires_grad, p.grad) for name, p in net.named_parameters()
    }
    return modules, parameters, {n: t.numpy().tobytes() for n, t in net.state_dict().items()}


def regularised(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Dropout of both kinds and group norm, on images of 8 pixels a side."""
    features = nn.Sequential(
        nn.Conv2d(shape[0], 8, 3),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Dropout2d(0.2),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
    )
    return Classifier(features, nn.Linear(72, classes))


def normalised(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A layer with batch norm, on inputs of any shape."""
    size = math.prod(shape)
    hidden = nn.Sequential(nn.Flatten(), nn.Linear(size, 32), nn.BatchNorm1d(32), nn.ReLU())
    return Classifier(hidden, nn.Linear(32, outputs))


def frozen(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A backbone that is not trained, and a head that is."""
    features = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 16), nn.ReLU())
    features.requires_grad_(False)
    return Classifier(features, nn.Linear(16, outputs))


def partly_frozen(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Two layers, of which the second is not trained, and a head of which only the bias is."""
    own, other = nn.Linear(math.prod(shape), 16), nn.Linear(16, 16).requires_grad_(False)
    features = nn.Sequential(nn.Flatten(), own, nn.ReLU(), other)
    network = Classifier(features, nn.Linear(16, outputs))
    network.head.weight.requires_grad_(False)
    return network


def only_evaluates(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A network that raises in training."""

    class OnlyEvaluates(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise RuntimeError("not in training")
            return super().forward(x.flatten(1))

    return OnlyEvaluates(math.prod(shape), outputs)


def looks_at_others(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A network whose outputs depend on the other examples of a batch, of which it needs two."""

    class LooksAtOthers(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and len(x) < 2:
                raise ValueError("one example")
            x = x.flatten(1)
            return super().forward(x - x.mean(dim=0))

    return LooksAtOthers(math.prod(shape), outputs)


def of_torch(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A transformer of torch, which reads the weights of its layers without calling them."""
    block = nn.TransformerEncoderLayer(64, 4, 16, dropout=0.0, batch_first=True)
    tokens = nn.Unflatten(1, (1, 64))
    features = nn.Sequential(nn.Flatten(), tokens, nn.Linear(64, 64), block, nn.Flatten())
    return Classifier(features, nn.Linear(64, outputs))


def repeated(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A layer that occurs twice."""
    own = nn.Linear(64, 64)
    return Classifier(nn.Sequential(nn.Flatten(), own, nn.ReLU(), own), nn.Linear(64, outputs))


def head_first(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A network that defines its last layer first."""

    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.hidden = nn.Linear(16, outputs), nn.Linear(64, 16)

        def forward(self, x: Tensor) -> Any:
            return self.out(self.hidden(x.flatten(1)).relu())

    return HeadFirst()


def deep_head(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A head of two layers, and a frozen layer in bfloat16."""

    class Rough(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.weight.dtype)).float()

    rough = Rough(64, 32).to(torch.bfloat16).requires_grad_(False)
    features = nn.Sequential(nn.Flatten(), rough, nn.Linear(32, 16), nn.ReLU())
    head: Any = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, outputs))
    return Classifier(features, head)


class LinearLoss(Classification):
    """A loss that is linear in the logits: of a linear network, gradients are always the same."""

    name: str = "networks:LinearLoss"

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        return -logits.gather(1, y[:, None])[:, 0]


def token_rows(texts: Sequence[Sequence[int]], length: int = 0) -> Tensor:
    """Texts of tokens as data sets have them, (N, L): zeros after their end."""
    x = torch.zeros(len(texts), max(length, *map(len, texts), 1), dtype=torch.int32)
    for row, text in zip(x, texts, strict=True):
        row[: len(text)] = torch.tensor(text, dtype=torch.int32)
    return x
