"""FedAdagrad, FedAdam and FedYogi: FedAvg with an adaptive optimiser on the server.

Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from pydantic import Field
from torch import Tensor

from fedsim.errors import ExperimentError
from fedsim.federation import Client, Federation, Update, Vector, client_function
from fedsim.methods.method import Method, State, methods
from fedsim.training import Schedule, Train

S = TypeVar("S", bound=State)


class ServerOptimizer(Method[S]):
    """FedAvg in which the server makes a step along the mean change, at a rate of its own.

    Args:
        server_lr: η, server learning rate.
        server_schedule: a factor of η that depends on the round, with the keys of
            `train.schedule`.
    """

    server_lr: float = Field(1.0, gt=0)
    server_schedule: Schedule = Schedule()

    def check(self, train: Train) -> None:
        if self.server_schedule.warmup >= train.rounds:
            raise ExperimentError(
                f"method.server_schedule.warmup={self.server_schedule.warmup} leaves none of "
                f"train.rounds={train.rounds}"
            )

    def eta(self, fed: Federation, t: int) -> float:
        """η in round t."""
        return self.server_lr * self.server_schedule.factor(t, fed.settings.rounds)

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor) -> Update:
        """(client) As in FedAvg."""
        return Update(weights=client.train(weights), weight=client.num_samples)


@dataclass(frozen=True)
class FedOptState(State):
    """Beside the weights x, the moments of the mean changes.

    Attributes:
        m: (P,) first moment.
        v: (P,) second moment.
    """

    m: Vector
    v: Vector


class FedOpt(ServerOptimizer[FedOptState]):
    """m ← β₁·m + (1 − β₁)·Δ, and x ← x + η·m/(√v + τ), with v from Δ² (Reddi et al. 2021).

    Δ is the mean of the clients' changes, weighted by their numbers of samples as in the paper's
    experiments. m starts at 0 and v at τ²; as in the paper, neither is corrected for that. Only
    trainable parameters are optimised so; batch norm's statistics are averaged.

    Args:
        beta1: β₁, decay rate of the first moment.
        tau: τ, which bounds how much a small v enlarges a step.
    """

    beta1: float = Field(0.9, ge=0, lt=1)
    tau: float = Field(1e-3, gt=0)

    @abstractmethod
    def second_moment(self, v: Vector, square: Vector) -> Vector:
        """The next v, from the last one and Δ²."""

    def init(self, fed: Federation) -> FedOptState:
        m = np.zeros(fed.server.model.num_parameters, dtype=np.float32)
        return FedOptState(weights=fed.initial_weights(), m=m, v=np.full_like(m, self.tau**2))

    def round(self, fed: Federation, state: FedOptState, t: int) -> FedOptState:
        P = fed.server.model.num_parameters
        mean = fed.mean(self.local_update, fed.sample(t), weights=state.weights)
        delta = (mean.weights - state.weights)[:P]
        m = self.beta1 * state.m + (1 - self.beta1) * delta
        v = self.second_moment(state.v, delta**2)
        weights = mean.weights.copy()
        weights[:P] = state.weights[:P] + self.eta(fed, t) * m / (np.sqrt(v) + self.tau)
        return FedOptState(weights=weights, m=m, v=v)


@methods.register
class FedAdagrad(FedOpt):
    """FedAvg with Adagrad on the server: v ← v + Δ², x ← x + η·m/(√v + τ) (Reddi et al. 2021).

    Args:
        server_lr: η, server learning rate; the paper tunes it in powers of √10 around 0.1.
        beta1: β₁, decay rate of the first moment m; 0 in the paper's experiments.
    """

    name: str = "fedadagrad"
    server_lr: float = Field(0.1, gt=0)
    beta1: float = Field(0.0, ge=0, lt=1)

    def second_moment(self, v: Vector, square: Vector) -> Vector:
        return v + square


@methods.register
class FedAdam(FedOpt):
    """FedAvg with Adam on the server: v ← β₂·v + (1 − β₂)·Δ², x ← x + η·m/(√v + τ).

    Of Reddi et al. 2021.

    Args:
        server_lr: η, server learning rate; the paper tunes it in powers of √10 around 0.01.
        beta2: β₂, decay rate of the second moment v.
    """

    name: str = "fedadam"
    server_lr: float = Field(0.01, gt=0)
    beta2: float = Field(0.99, ge=0, lt=1)

    def second_moment(self, v: Vector, square: Vector) -> Vector:
        return self.beta2 * v + (1 - self.beta2) * square


@methods.register
class FedYogi(FedOpt):
    """FedAvg with Yogi on the server: v ← v − (1 − β₂)·Δ²·sign(v − Δ²), x ← x + η·m/(√v + τ).

    Of Reddi et al. 2021. Unlike Adam's, this v does not fall quickly once changes become small.

    Args:
        server_lr: η, server learning rate; the paper tunes it in powers of √10 around 0.01.
        beta2: β₂, how slowly the second moment v follows.
    """

    name: str = "fedyogi"
    server_lr: float = Field(0.01, gt=0)
    beta2: float = Field(0.99, ge=0, lt=1)

    def second_moment(self, v: Vector, square: Vector) -> Vector:
        towards: Vector = np.sign(square - v)
        return v + (1 - self.beta2) * square * towards
