"""FedNova: normalised averaging, for clients that make different numbers of local steps.

Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
NeurIPS 2020, Eq. 5 and 8 (section 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedsim.errors import ExperimentError
from fedsim.federation import Client, Federation, Update, client_function
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
    Clients send ‖a_k‖₁ along with Δ_k; an aggregation rule decides about Δ_k alone. τ_eff is the
    column `tau_eff` of the rounds.
    """

    name: str = "fednova"

    def check(self, train: Train) -> None:
        if train.optimizer.name != "sgd":
            raise ExperimentError(
                "method.name=fednova needs train.optimizer.name=sgd: it divides by the number of "
                f"SGD steps that a change amounts to, which {train.optimizer.name}'s steps do not "
                "have"
            )

    def check_hidden(self, hidden: Mapping[str, str]) -> None:
        if "weights" in hidden:
            raise ExperimentError(
                f"{hidden['weights']}: with method.name=fednova clients send their number of "
                "local steps beside the change, and clipping both to one norm would leave little "
                "of the change; take another method"
            )

    def init(self, fed: Federation) -> State:
        return State(weights=fed.initial_weights())

    def round(self, fed: Federation, state: State, t: int) -> State:
        P = fed.server.model.num_parameters
        mean = fed.mean(self.local_update, fed.sample(t), weights=state.weights)
        (tau_eff,) = mean.worth
        fed.log(tau_eff=tau_eff)
        weights = state.weights + mean.change
        weights[:P] = state.weights[:P] + tau_eff * mean.change[:P]
        return replace(state, weights=weights)

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor) -> Update:
        """(client) Δ_k/‖a_k‖₁, and ‖a_k‖₁."""
        change = client.train(weights) - weights
        worth = steps_worth(client.steps, client.settings.optimizer)
        client.parameters(change).div_(worth)
        return Update(change=change, worth=torch.tensor([worth]), weight=client.num_samples)
