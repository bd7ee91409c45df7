"""FedNova: normalised averaging, for clients that make different numbers of local steps.

Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
NeurIPS 2020, Eq. 5 and 8 (section 4).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import numpy as np
from torch import Tensor

from fedsim.errors import ExperimentError
from fedsim.federation import Client, Federation, MeanAndMessages, Update, client_function
from fedsim.methods.learns import Learns
from fedsim.methods.method import Method, State, methods
from fedsim.methods.scaffold import steps_worth
from fedsim.training import Train


@methods.register
class FedNova(Method[State]):
    """Normalised averaging: w ← w + τ_eff·Σ_k p_k·Δ_k/‖a_k‖₁ (Wang et al. 2020).

    FedAvg gives more say to clients that make more local steps. Here each change Δ_k = w_k − w is
    divided by ‖a_k‖₁, the number of plain SGD steps that its local steps amount to: τ_k without
    momentum, more with momentum (`fedsim.methods.scaffold.steps_worth`). p_k = n_k/Σn is the share
    of samples in the cohort, and τ_eff = Σ_k p_k·‖a_k‖₁, as in the paper's experiments. If all
    clients make the same number of steps, this is FedAvg. Batch norm's statistics are averaged.
    Clients send ‖a_k‖₁ along with Δ_k, so robust aggregation does not apply. τ_eff is the column
    `tau_eff` of the rounds.
    """

    name: str = "fednova"
    learns: ClassVar[Learns] = Learns(dp_compatible=False)
    averages: ClassVar[bool] = False

    def check(self, train: Train) -> None:
        if train.optimizer.name != "sgd":
            raise ExperimentError(
                "method.name=fednova needs train.optimizer.name=sgd: it divides by the number of "
                f"SGD steps that a change amounts to, which {train.optimizer.name}'s steps do not "
                "have"
            )

    def init(self, fed: Federation) -> State:
        return State(weights=fed.initial_weights())

    def round(self, fed: Federation, state: State, t: int) -> State:
        P = fed.model.num_parameters
        mean, worth = fed.reduce(
            self.local_update, fed.sample(t), MeanAndMessages(), weights=state.weights
        )
        n = {k: int(fed.num_samples[k]) for k in worth}
        tau_eff = math.fsum(n[k] * a for k, a in worth.items()) / sum(n.values())
        fed.log(tau_eff=tau_eff)
        weights = state.weights + mean.change
        weights[:P] = state.weights[:P] + np.float32(tau_eff) * mean.change[:P]
        return replace(state, weights=weights)

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor) -> tuple[Update, float]:
        """(client) Δ_k/‖a_k‖₁, and ‖a_k‖₁."""
        change = client.train(weights) - weights
        worth = steps_worth(client.steps, client.settings.optimizer)
        client.parameters(change).div_(worth)
        return Update(change=change, weight=client.num_samples), worth
