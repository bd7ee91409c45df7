"""The work that all contenders of ../speed.py carry out, and what their scripts share.

Needs nothing but PyTorch and NumPy, because it is imported in the rivals' environments too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

LEARNING_RATE, CLASSES = 0.1, 10
# Rounds before those that are measured: caches fill, and pfl-research evaluates in its first.
WARM_UP = 3


def mlp(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """784-200-200-10, as fedsim's `mlp`."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(int(np.prod(shape)), 200),
        nn.ReLU(),
        nn.Linear(200, 200),
        nn.ReLU(),
        nn.Linear(200, classes),
    )


def cnn(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Two 5×5 convolutions and a linear layer for 28×28 pixels, as fedsim's `cnn`."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, classes),
    )


def cifar(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """The network of pfl-research's CIFAR-10 benchmark, for 32×32 pixels.

    Two 3×3 convolutions, one pooling, a hidden layer, dropout before and after it.
    """
    return nn.Sequential(
        nn.Conv2d(shape[0], 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, classes),
    )


class Block(nn.Module):
    """Two 3×3 convolutions with batch norm, around which the input is added."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride != 1:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.relu(self.layers(x) + self.shortcut(x))
        return found


def resnet8(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """As fedsim's `resnet8` of width 16."""
    w = 16
    return nn.Sequential(
        nn.Conv2d(shape[0], w, 3, padding=1, bias=False),
        nn.BatchNorm2d(w),
        nn.ReLU(),
        Block(w, w, stride=1),
        Block(w, 2 * w, stride=2),
        Block(2 * w, 4 * w, stride=2),
        Block(4 * w, 8 * w, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * w, classes),
    )


@dataclass(frozen=True)
class Work:
    """A federation and its network.

    Attributes:
        title: for tables.
        clients: in all.
        shape: of one input.
        parameters: of the network.
        model: fedsim's `model` section for the same network.
        cohort: clients that take part in a round.
        samples: of each client.
        epochs: local ones.
        batch: examples a step.
    """

    title: str
    clients: int
    shape: tuple[int, ...]
    network: Callable[[tuple[int, ...], int], nn.Sequential]
    parameters: int
    model: dict[str, object]
    cohort: int = 50
    samples: int = 50
    epochs: int = 1
    batch: int = 10

    @property
    def steps(self) -> int:
        """Local steps of a client."""
        return self.epochs * self.samples // self.batch

    def build(self) -> nn.Sequential:
        network = self.network(self.shape, CLASSES)
        found = sum(p.numel() for p in network.parameters())
        assert found == self.parameters, f"{self.title} has {found} parameters"
        return network

    def experiment(
        self, clients: int, cohort: int, rounds: int, method: str, engine: dict[str, object]
    ) -> dict[str, object]:
        """The work as fedsim's experiment; nothing is evaluated or saved but at the end."""
        return {
            "name": "work",
            "data": {
                "name": "synthetic",
                "samples": clients * self.samples,
                "test_samples": CLASSES,
                "shape": self.shape,
                "classes": CLASSES,
            },
            "partition": {"kind": "iid", "clients": clients},
            "model": self.model,
            "method": {"name": method},
            "train": {
                "rounds": rounds,
                "participation": cohort / clients,
                "local_epochs": self.epochs,
                "batch_size": self.batch,
                "optimizer": {"lr": LEARNING_RATE},
            },
            "engine": engine,
            "evaluate": {"every": rounds},
            "checkpoint": {"every": 0},
        }

    def data(self, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
        """Each client's inputs and labels, drawn like fedsim's `synthetic`: a cluster a class.

        They lie on the device from the start, which is the fastest for whoever uses them.
        """
        stream = np.random.default_rng(0)
        centres = stream.standard_normal((CLASSES, *self.shape), dtype=np.float32)
        clients = []
        for _ in range(self.clients):
            y = stream.integers(CLASSES, size=self.samples)
            x = stream.standard_normal((self.samples, *self.shape), dtype=np.float32) + centres[y]
            clients.append((torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)))
        return clients


WORKS = {
    "mlp": Work("MLP", 200, (1, 28, 28), mlp, 199_210, {"name": "mlp", "hidden": [200, 200]}),
    "cnn": Work("CNN", 200, (1, 28, 28), cnn, 18_378, {"name": "cnn"}),
    "resnet8": Work(
        "ResNet8, five epochs",
        *(16, (3, 32, 32), resnet8, 308_826, {"name": "resnet8", "width": 16}),
        **{"cohort": 8, "samples": 200, "epochs": 5, "batch": 20},
    ),
    "cifar": Work("CIFAR-10 CNN", 1_000, (3, 32, 32), cifar, 1_626_442, {"name": "work:cifar"}),
}


def parser() -> argparse.ArgumentParser:
    """What every contender's script is told."""
    options = argparse.ArgumentParser()
    options.add_argument("--work", choices=WORKS, required=True)
    options.add_argument("--rounds", type=int, required=True, help="to be measured")
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--device", default="cpu")
    return options


def all_rounds(measured: int) -> int:
    """The last round is not measured either: fedsim evaluates and saves after it."""
    return WARM_UP + measured + 1


class Stopwatch:
    """Notes when rounds end."""

    def __init__(self, device: str = "cpu") -> None:
        self._on_card = device == "cuda"
        self._ends: list[float] = []

    def lap(self) -> None:
        if self._on_card:
            torch.cuda.synchronize()
        self._ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of each measured round, from the end of the one before it to its own."""
        ends = np.array(self._ends)
        return list(np.diff(ends)[WARM_UP - 1 : -1])


def report(seconds: list[float]) -> None:
    """Tell ../speed.py."""
    print(json.dumps({"seconds": [float(s) for s in seconds]}), flush=True)
