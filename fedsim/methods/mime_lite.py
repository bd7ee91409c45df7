"""MimeLite: clients apply the server's momentum, unchanged, in all of their local steps.

Karimireddy et al., Breaking the Centralized Barrier for Cross-Device Federated Learning, NeurIPS
2021, Algorithm 1 (MimeLite) with the momentum of its Table 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from pydantic import Field
from torch import Tensor

from fedsim.errors import ExperimentError
from fedsim.federation import Client, Federation, Update, Vector, client_function
from fedsim.methods.method import Method, State, methods
from fedsim.methods.shared.local_steps import gradient
from fedsim.training import Train


@dataclass(frozen=True)
class MimeLiteState(State):
    """The server's momentum m, (P,), beside the weights x."""

    momentum: Vector


@methods.register
class MimeLite(Method[MimeLiteState]):
    """Local steps y ← y − η·((1 − β)·∇f_k(y; batch) + β·m) (Karimireddy et al. 2021).

    The server's momentum m is the same in all steps of a round, so that local training imitates
    SGD with momentum on all data. Afterwards m ← β·m + (1 − β)·mean_k ∇f_k(x), of gradients at the
    model x that the server sent, over all of a client's examples, and x ← mean_k y_k. Both means
    weigh clients equally, as in Algorithm 1. Weight decay is part of f_k. ∇f_k(x) costs one
    more pass over the client's examples; batch norm computes it with batch statistics, and its
    running statistics are averaged. With β = 0 the method is FedAvg with equal weights.

    Args:
        beta: β, server momentum.
    """

    name: str = "mime_lite"
    private_by_example: ClassVar[bool] = False
    beta: float = Field(0.9, ge=0, lt=1)

    def check(self, train: Train) -> None:
        if train.optimizer.name != "sgd" or train.optimizer.momentum:
            raise ExperimentError(
                "method.name=mime_lite needs train.optimizer.name=sgd and "
                "train.optimizer.momentum=0: clients take their momentum from the server "
                "(method.beta)"
            )

    def init(self, fed: Federation) -> MimeLiteState:
        momentum = np.zeros(fed.server.model.num_parameters, dtype=np.float32)
        return MimeLiteState(weights=fed.initial_weights(), momentum=momentum)

    def round(self, fed: Federation, state: MimeLiteState, t: int) -> MimeLiteState:
        mean = fed.mean(
            self.local_update, fed.sample(t), weights=state.weights, momentum=state.momentum
        )
        momentum = self.beta * state.momentum + (1 - self.beta) * mean.gradient
        return MimeLiteState(weights=mean.weights, momentum=momentum)

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor, momentum: Tensor) -> Update:
        """(client) y_k and ∇f_k(x)."""
        # First, so that a deadline leaves the local steps what time is left.
        at_x, _ = gradient(client, weights, client.data)
        decay = client.settings.optimizer.weight_decay
        # η·((1 − β)·g + β·m) = (1 − β)·η·(g + β/(1 − β)·m)
        client.lr *= 1 - self.beta
        trained = client.train(weights, linear=self.beta / (1 - self.beta) * momentum)
        return Update(weights=trained, gradient=at_x + decay * client.parameters(weights))
