"""BlazeFL's FedAvg: in threads where Python runs them side by side, else in processes.

Its data loaders get batches by index: its own examples' DataLoader would fetch and stack single
examples, which takes longer than the training.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from blazefl.contrib.fedavg import (
    FedAvgBaseServerHandler,
    FedAvgProcessPoolClientTrainer,
    FedAvgThreadPoolClientTrainer,
)
from torch import Tensor, nn
from work import LEARNING_RATE, WORKS, Stopwatch, all_rounds, parser, report


@cache
def data(work: str) -> list[tuple[Tensor, Tensor]]:
    """Drawn once in a process."""
    return WORKS[work].data()


class Loader:
    """Batches of a client, in a new order each time."""

    def __init__(self, x: Tensor, y: Tensor, size: int, generator: torch.Generator) -> None:
        self.x, self.y, self.size, self.generator = x, y, size, generator
        self.dataset = y  # whose length it asks for

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in torch.randperm(len(self.y), generator=self.generator).split(self.size):
            yield self.x[batch], self.y[batch]


class Clients:
    """What it asks of a data set."""

    def __init__(self, work: str) -> None:
        self.work = work

    def get_dataloader(
        self, type_: Any, cid: int, batch_size: int, generator: torch.Generator
    ) -> Loader:
        return Loader(*data(self.work)[cid], batch_size, generator)

    def set_dataset(self, type_: Any, cid: int, dataset: Any) -> None:
        """The data stay as they are."""


class Networks:
    """Builds the network of a work."""

    def select_model(self, model_name: str) -> nn.Module:
        return WORKS[model_name].build()


def main() -> None:
    arguments = parser().parse_args()
    name, work = arguments.work, WORKS[arguments.work]
    torch.set_num_threads(1)
    # It starts new processes in every round: forked ones find torch imported and the data drawn.
    torch.multiprocessing.set_start_method("fork")
    data(name)
    stopwatch = Stopwatch()
    rounds, networks, clients = all_rounds(arguments.rounds), Networks(), Clients(name)
    server = FedAvgBaseServerHandler(
        *(networks, name, clients, rounds, work.clients, work.cohort / work.clients),
        *(arguments.device, work.batch, 0),
    )
    common = (clients, arguments.device, work.clients, work.epochs, work.batch, LEARNING_RATE, 0)
    with tempfile.TemporaryDirectory() as folder:
        if getattr(sys, "_is_gil_enabled", lambda: True)():
            trainer: Any = FedAvgProcessPoolClientTrainer(
                networks, name, Path(folder), *common, arguments.processes
            )
        else:
            trainer = FedAvgThreadPoolClientTrainer(networks, name, *common, arguments.processes)
        while not server.is_stopped():
            sampled = server.sample_clients()
            trainer.local_process(server.downlink_package(), sampled)
            for package in trainer.uplink_package():
                server.load(package)
            stopwatch.lap()
    assert all(p.isfinite().all() for p in server.model.parameters())
    report(stopwatch.seconds())


if __name__ == "__main__":
    main()
