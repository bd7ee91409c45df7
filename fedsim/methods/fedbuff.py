"""FedBuff: asynchronous training with a buffer of updates.

Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022,
Algorithm 1.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from fedsim.data import ClientSplits, Dataset
from fedsim.errors import ExperimentError
from fedsim.federation import (
    Client,
    Federation,
    PerClient,
    Update,
    Vector,
    client_function,
    cohort_size,
)
from fedsim.methods.method import Method, State, methods


@dataclass(frozen=True)
class FedBuffState(State):
    """The server's state between two steps.

    Attributes:
        clients: (M,) active clients.
        finish: (M,) when each finishes, in simulated seconds.
        versions: (M,) the step after which each started.
        models: the models that they started from, by version.
        buffer: the step after which clients started whose updates have arrived, by client.
        steps: how many steps the server has made.
    """

    clients: NDArray[np.int64]
    finish: NDArray[np.float64]
    versions: NDArray[np.int64]
    models: dict[str, Vector]
    buffer: dict[str, int]
    steps: int


@methods.register
class FedBuff(Method[FedBuffState]):
    """Buffered asynchronous aggregation (Nguyen et al. 2022): no client waits for another.

    M clients are always at work (`train.participation` of all), each from the model that was
    current when it started. As soon as K updates have arrived, the server makes a step, which is
    what counts as a round: w ← w + η_g · Σ_{i ≤ K} s(τ_i)·Δ_i / K, with the staleness τ_i, the
    number of steps since client i started. A round in which too few clients are online to send K
    makes no step; its updates wait for the next round. A client that finishes is replaced at once
    by another that is online, drawn at random; no client contributes twice to a step. Who finishes
    when follows from `devices`, so the result is the same on any cluster. An update is lost with
    the chances `devices.dropout` and `devices.packet_error`.

    Args:
        buffer: K, updates per step.
        server_lr: η_g.
        staleness: a in s(τ) = (1 + τ)^−a; 0.5 in the paper, 0 to ignore staleness.
    """

    name: str = "fedbuff"
    buffer: int = Field(10, ge=1)
    server_lr: float = Field(1.0, gt=0)
    staleness: float = Field(0.5, ge=0)
    asynchronous: ClassVar[bool] = True

    def check_hidden(self, hidden: Mapping[str, str]) -> None:
        if "weights" in hidden:
            raise ExperimentError(
                f"{hidden['weights']}: with method.name=fedbuff the clients of a step are those "
                "that finish first, which depends on their data, and not drawn at random; take "
                "another method"
            )

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        count = int(splits.present.sum())
        if self.buffer >= count:
            raise ExperimentError(
                f"method.buffer={self.buffer} of {count} clients: no client would be left to "
                f"start while the buffer fills; set at most {count - 1}"
                if count > 1
                else f"method.name={self.name}: has one client, and two must be at work"
            )

    def updates_per_round(self, cohort: int) -> int:
        return self.buffer

    def init(self, fed: Federation) -> FedBuffState:
        weights, nobody = fed.initial_weights(), np.zeros(0, dtype=np.int64)
        return FedBuffState(weights, nobody, np.zeros(0), nobody, {}, {}, 0)

    def round(self, fed: Federation, state: FedBuffState, t: int) -> FedBuffState:
        rng, time = fed.rng("arrivals"), fed.time
        clock = time.now
        M = cohort_size(fed.settings.participation, fed.num_clients)
        at_work = [
            (float(finish), int(client), int(version))
            for finish, client, version in zip(
                state.finish, state.clients, state.versions, strict=True
            )
        ]
        heapq.heapify(at_work)
        steps, weights = state.steps, state.weights
        buffer = {int(k): version for k, version in state.buffer.items()}
        while True:
            busy = {client for _, client, _ in at_work} | buffer.keys()
            idle = [int(k) for k in np.flatnonzero(time.online(clock)) if k not in busy]
            count = min(M - len(at_work), len(idle))
            if count:
                starting = rng.choice(idle, size=count, replace=False)
                starting = starting[time.present[starting]].tolist()
                seconds = time.planned_seconds(starting).tolist()
                for k, takes in zip(starting, seconds, strict=True):
                    heapq.heappush(at_work, (clock + takes, k, steps))
            if not at_work:
                clock += time.retry
                break
            finish, client, version = heapq.heappop(at_work)
            clock = max(clock, finish)
            if rng.random() >= time.loss:
                buffer[client] = version
            if len(buffer) == self.buffer:
                break
        models = {**state.models, str(steps): weights}
        time.set_round_time(clock - time.now)
        if len(buffer) == self.buffer:
            staleness = {k: steps - version for k, version in buffer.items()}
            fed.log(staleness=sum(staleness.values()) / len(buffer))
            mean = fed.mean(
                self.local_update,
                sorted(buffer),
                weights=PerClient({k: models[str(version)] for k, version in buffer.items()}),
                tau=PerClient(staleness),
            )
            weights = weights + np.float32(self.server_lr) * mean.change
            buffer, steps = {}, steps + 1
        else:
            fed.server.notice(
                f"round {t} makes no step: {len(buffer)} updates have arrived, and nobody is "
                f"online to send the rest of method.buffer={self.buffer}; they wait"
            )
        used = {str(version) for _, _, version in at_work} | {*map(str, buffer.values())}
        return FedBuffState(
            weights,
            np.array([client for _, client, _ in at_work], dtype=np.int64),
            np.array([finish for finish, _, _ in at_work]),
            np.array([version for _, _, version in at_work], dtype=np.int64),
            {version: model for version, model in models.items() if version in used},
            {str(k): version for k, version in buffer.items()},
            steps,
        )

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor, tau: int) -> Update:
        """(client) s(τ)·Δ, from the model that it started from."""
        change = client.train(weights) - weights
        return Update(change=(1 + tau) ** -self.staleness * change)
