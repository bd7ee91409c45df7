"""AFL: agnostic federated learning, for the worst mixture of the clients.

Mohri, Sivek and Suresh, Agnostic Federated Learning, ICML 2019, section 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedsim.errors import Diverged
from fedsim.federation import Client, Federation, NotCounted, Update, client_function
from fedsim.methods.learns import Learns
from fedsim.methods.method import Method, State, methods
from fedsim.methods.shared.local_steps import mean_loss


@dataclass(frozen=True)
class AFLState(State):
    """Beside the weights, the mixture λ of the clients, (K,): it sums to 1."""

    mixture: NDArray[np.float64]


@methods.register
class AFL(Method[AFLState]):
    """Minimises max_λ Σ_k λ_k·F_k(w) over mixtures λ of the clients (Mohri et al. 2019).

    In a round w ← Σ_k λ_k·w_k / Σ_k λ_k over the cohort, and λ ← Π(λ + γ_λ·F), with Π the
    projection onto the simplex and F_k the mean loss of w, before training, on the client's
    training examples. λ starts at n_k/Σn, so that γ_λ = 0 is FedAvg.

    The paper makes one gradient step a round, as `train.local_steps=1` does; more local steps are
    averaged as in FedAvg. The paper asks all clients in every round. In a smaller cohort, λ_k
    changes by γ_λ times F_k minus the cohort's mean loss, so that clients that were not drawn keep
    theirs; for all clients at once this makes no difference to the projection. The model of the
    latest round is evaluated, where the paper returns the mean over the rounds. A client with
    λ_k = 0 does not train and sends its loss alone. λ_k is the column `mixture` of the clients.

    Args:
        mixture_lr: γ_λ, learning rate of λ.
    """

    name: str = "afl"
    private_by_example: ClassVar[bool] = False
    learns: ClassVar[Learns] = Learns(asks=("messages", "sizes", "weights"))
    mixture_lr: float = Field(0.01, ge=0)

    def init(self, fed: Federation) -> AFLState:
        return AFLState(
            fed.initial_weights(), fed.server.num_samples / fed.server.num_samples.sum()
        )

    def round(self, fed: Federation, state: AFLState, t: int) -> AFLState:
        cohort = fed.sample(t)
        shares = dict(zip(cohort.tolist(), state.mixture[cohort].tolist(), strict=True))
        mean = fed.mean(
            self.local_update, cohort, weights=state.weights, mixture=NotCounted(shares)
        )
        losses = mean.messages
        for k, loss in losses.items():
            if not math.isfinite(loss):
                raise Diverged(t, f"the loss of client {k} is {loss}")
        return AFLState(
            mean.weights if mean.count else state.weights, self.raised(state.mixture, losses)
        )

    def raised(
        self, mixture: NDArray[np.float64], losses: dict[int, float]
    ) -> NDArray[np.float64]:
        """(K,) λ after a step of projected gradient ascent."""
        if not losses:
            return mixture
        clients, F = list(losses), np.array(list(losses.values()))
        raised = mixture.copy()
        raised[clients] += self.mixture_lr * (F - F.mean())
        return onto_simplex(raised)

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor, mixture: dict[int, float]) -> Update:
        """(client) w_k, which counts λ_k, and F_k(w)."""
        share = mixture[client.id]
        client.report(mixture=share)
        vectors = {"weights": client.train(weights)} if share else {}
        return Update(weight=share, message=mean_loss(client, weights), **vectors)


def onto_simplex(v: NDArray[np.float64]) -> NDArray[np.float64]:
    """The nearest point of {λ ≥ 0, Σλ = 1} to v, (K,): max(v − θ, 0) with the θ that fits.

    Source:
        Duchi et al., Efficient Projections onto the ℓ1-Ball, ICML 2008, Figure 1.

    Example:
        >>> onto_simplex(np.array([0.5, 0.8, -1.0])).round(3).tolist()
        [0.35, 0.65, 0.0]
    """
    largest = np.sort(v)[::-1]
    theta = (np.cumsum(largest) - 1) / np.arange(1, len(v) + 1)
    last = np.flatnonzero(largest > theta)[-1]
    projected: NDArray[np.float64] = np.maximum(v - theta[last], 0)
    return projected
