"""FedDisco: clients with skewed labels get smaller weights.

Ye et al., FedDisco: Federated Learning with Discrepancy-Aware Collaboration, ICML 2023, Eq. 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedsim.federation import Client, Cohort, Federation, NotCounted, Update, client_function
from fedsim.methods.learns import Learns
from fedsim.methods.method import Method, State, methods
from fedsim.objectives import Classification, Concepts

UNKNOWN = -1.0


@dataclass(frozen=True)
class FedDiscoState(State):
    """(K,) KL(client's labels ‖ uniform), -1 if unknown, besides the weights."""

    divergence: NDArray[np.float64]


@methods.register
class FedDisco(Method[FedDiscoState]):
    """FedAvg with weights ∝ ReLU(p_k − a·d_k + b) (Ye et al. 2023).

    p_k = n_k/Σn is the share of samples in the cohort, and d_k the Kullback-Leibler divergence of
    the client's labels from the uniform distribution, normalised to sum 1 over the cohort as in
    the authors' code. If no client has a weight above 0, p_k is used instead. A client sends its
    label counts once, when it first takes part.

    Args:
        a: weight of the discrepancy.
        b: constant added to all weights.
    """

    name: str = "feddisco"
    learns: ClassVar[Learns] = Learns(
        objectives=(Classification, Concepts), task_sequences="no", asks=("messages", "sizes")
    )
    a: float = Field(0.5, ge=0)
    b: float = Field(0.1, ge=0)

    def init(self, fed: Federation) -> FedDiscoState:
        unknown = np.full(fed.num_clients, UNKNOWN)
        return FedDiscoState(weights=fed.initial_weights(), divergence=unknown)

    def round(self, fed: Federation, state: FedDiscoState, t: int) -> FedDiscoState:
        cohort = fed.sample(t)
        divergence = self.ask(fed, cohort, state.divergence)
        cohort = cohort[divergence[cohort] != UNKNOWN]  # without clients that failed to send it
        shares = self.shares(fed.server.num_samples[cohort], divergence[cohort])
        of_client = NotCounted(dict(zip(cohort.tolist(), shares.tolist(), strict=True)))
        mean = fed.mean(self.local_update, cohort, weights=state.weights, shares=of_client)
        weights = mean.weights if mean.count else state.weights
        return FedDiscoState(weights=weights, divergence=divergence)

    def ask(
        self, fed: Federation, cohort: Cohort, known: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """The divergences, including those of clients that take part for the first time."""
        divergence = known.copy()
        with fed.setup_traffic():
            counts = fed.gather(self.label_counts, cohort[known[cohort] == UNKNOWN])
        for k, n in counts.items():
            q = n[n > 0] / n.sum()
            divergence[k] = max(0.0, float(np.sum(q * np.log(q * len(n)))))
        return divergence

    def shares(
        self, num_samples: NDArray[np.int64], divergence: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Each client's weight in the mean, before normalisation."""
        p = num_samples / num_samples.sum()
        total = divergence.sum()
        d = divergence / total if total > 0 else divergence
        kept: NDArray[np.float64] = np.maximum(p - self.a * d + self.b, 0)
        return kept if kept.any() else p

    @client_function("label_counts")
    def label_counts(self, client: Client) -> NDArray[np.int32]:
        """(client) (C,) its number of examples of each class."""
        counts = client.data.y.bincount(minlength=client.num_classes)
        return counts.cpu().numpy().astype(np.int32)

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor, shares: dict[int, float]) -> Update:
        """(client) As in FedAvg, with another weight."""
        return Update(weights=client.train(weights), weight=shares[client.id])
