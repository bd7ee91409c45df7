"""Methods that disturb their own run, once: what crash tests run.

A disturbance leaves a file behind, the marker, so that it does not happen again on the second
try; with the file there from the start, the same method runs undisturbed. Without a marker it
happens on every try.
"""

from __future__ import annotations

import inspect
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.federation import Client, Federation, Update
from fedsim.federation.reduction import WeightedMean
from fedsim.federation.worker import Worker
from fedsim.methods import State
from fedsim.methods.fedavg import FedAvg
from fedsim.methods.scaffold import Scaffold, ScaffoldState
from fedsim.objectives import Classification
from fedsim.training import Context

MERGE, TAKE_PARTIAL = WeightedMean.merge, Worker.take_partial


def once(path: Path | None) -> bool:
    """True the first time only, whichever process asks; without a file, always."""
    if path is None:
        return True
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, "the test did nothing"
        time.sleep(0.1)


def dropout_net(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network whose training draws random numbers."""
    inputs = math.prod(shape)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, classes)
    )


class DyingClient(Scaffold):
    """A client's actor is killed in the middle of round 3; without a marker, every time."""

    name: str = "faults:DyingClient"
    marker: Path | None = None

    def local_update(self, client: Client, weights: Tensor, control: Tensor) -> Update:
        update = super().local_update(client, weights, control)
        if client.round == 3 and client.id % 5 == 2 and once(self.marker):
            die()
        return update


class WaitingClient(Scaffold):
    """From round 2 on, clients wait until the test has seen to something."""

    name: str = "faults:WaitingClient"
    marker: Path

    def local_update(self, client: Client, weights: Tensor, control: Tensor) -> Update:
        if client.round >= 2:
            wait_for(self.marker)
        return super().local_update(client, weights, control)


class DyingDriver(FedAvg):
    """The driver is killed in round 7; without a marker, every time."""

    name: str = "faults:DyingDriver"
    marker: Path | None = None

    def round(self, fed: Federation, state: State, t: int) -> State:
        state = super().round(fed, state, t)
        if t == 7 and once(self.marker):
            die()
        return state


class ScarceMemory(FedAvg):
    """There is no memory for the first stack."""

    name: str = "faults:ScarceMemory"
    marker: Path

    def local_update(self, client: Client, weights: Tensor) -> Update:
        return Update(weights=client.train(weights, loss=self.loss), weight=client.num_samples)

    def loss(self, network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
        if once(self.marker):
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        return Classification().loss(network, x, y, context)


class WaitingDriver(Scaffold):
    """Round 7 waits until the test has done something to the cluster."""

    name: str = "faults:WaitingDriver"
    marker: Path

    def round(self, fed: Federation, state: ScaffoldState, t: int) -> ScaffoldState:
        if t == 7 and once(self.marker):
            wait_for(self.marker.with_suffix(".done"))
        return super().round(fed, state, t)


class DyingSums(Scaffold):
    """The first actor that is asked for its sums is killed, as if it ran out of memory there.

    The sums of other actors are there. Without a marker every actor is killed.
    """

    name: str = "faults:DyingSums"
    marker: Path | None = None

    def local_update(self, client: Client, weights: Tensor, control: Tensor) -> Update:
        def take_partial(worker: Worker, serial: int) -> Any:
            if once(self.marker):
                die()
            return TAKE_PARTIAL(worker, serial)

        if client.round > 1:  # when all actors have started: see the test
            Worker.take_partial = take_partial  # type: ignore[method-assign]
        return super().local_update(client, weights, control)


class DyingWhileCombining(Scaffold):
    """The actor that adds up the sums of its node is killed at it."""

    name: str = "faults:DyingWhileCombining"
    marker: Path

    def local_update(self, client: Client, weights: Tensor, control: Tensor) -> Update:
        def merge(mean: WeightedMean, other: WeightedMean) -> None:
            if once(self.marker):
                die()
            MERGE(mean, other)

        WeightedMean.merge = merge  # type: ignore[method-assign]
        return super().local_update(client, weights, control)


def deadly_net(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network that takes down the client actors that build it, and nobody else."""
    callers = [(Path(frame.filename).name, frame.function) for frame in inspect.stack()]
    if ("client_actor.py", "__init__") in callers:
        die()
    return dropout_net(shape, classes)


class FailsUntil(FedAvg):
    """Client 2 raises in round 4, as long as a file is not there."""

    name: str = "faults:FailsUntil"
    mended: Path

    def local_update(self, client: Client, weights: Tensor) -> Update:
        if client.id == 2 and client.round == 4 and not self.mended.exists():
            raise ValueError("something is broken")
        return super().local_update(client, weights)
