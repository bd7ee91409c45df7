"""pFedMe: personal models as Moreau envelopes around the global one.

T Dinh, Tran and Nguyen, Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020,
Algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from fedsim.data import ClientSplits
from fedsim.federation import Client, Federation, NotCounted, Update, client_function
from fedsim.methods.method import State, methods
from fedsim.methods.shared.local_steps import batches_of, gradient
from fedsim.methods.shared.personal import PersonalModels
from fedsim.training import with_terms


@methods.register
class PFedMe(PersonalModels[State]):
    """The server minimises Σ_k min_θ F_k(θ) + (λ/2)·‖θ − w‖² over w (T Dinh et al. 2020).

    For each mini-batch of its local training, a client of the cohort

    1. approximates θ_k(w_k) = argmin_θ f(θ) + (λ/2)·‖θ − w_k‖² on that batch by K steps of the
       experiment's optimiser, starting from its last θ (at first w);
    2. moves its w_k ← w_k − η·λ·(w_k − θ_k).

    The server takes w ← (1 − β)·w + β·Σ_k w_k / |S|, with equal weights as in the paper.
    `train.optimizer.lr` is the personal learning rate of step 1; R, the number of local rounds,
    follows from `train.local_epochs` or `local_steps`. The last θ_k is the personal model, as in
    the paper, and `evaluate.clients` evaluates it; the personal accuracy that the authors publish
    is of w_k, which their code evaluates. w is evaluated on the central test set. Batch norm's
    statistics are those of θ_k.

    Args:
        lam: λ (the authors use 15). Steps of the personal learning rate diverge if it is above
            2/λ.
        eta: η, learning rate of w_k; with 1/λ, w_k becomes θ_k (the authors use 0.005).
        steps: K, steps for each batch (the authors use 5).
        beta: β; above 1, the server extrapolates.
    """

    name: str = "pfedme"
    stackable: ClassVar[bool] = False
    lam: float = Field(1.0, gt=0)
    eta: float = Field(0.5, gt=0)
    steps: int = Field(5, ge=1)
    beta: float = Field(1.0, gt=0)

    def pull(self, splits: ClientSplits) -> tuple[str, float]:
        return "lam", self.lam

    def init(self, fed: Federation) -> State:
        return State(weights=fed.initial_weights())

    def for_own_models(self, fed: Federation, state: State) -> dict[str, Any]:
        return {"weights": NotCounted(fed.initial_weights())}

    def round(self, fed: Federation, state: State, t: int) -> State:
        P = fed.server.model.num_parameters
        mean = fed.mean(self.local_update, fed.sample(t), weights=state.weights)
        weights = mean.weights.copy()
        weights[:P] = (1 - self.beta) * state.weights[:P] + self.beta * mean.weights[:P]
        return replace(state, weights=weights)

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor) -> Update:
        """(client) w_k after R local rounds; keeps θ_k."""
        P, settings, losses = client.model.num_parameters, client.settings, list[float]()
        w, theta = weights.clone(), weights.clone()
        for batch in batches_of(client):
            parameters = nn.Parameter(theta[:P])  # a view
            optimizer = settings.optimizer.build(parameters, client.lr)
            for _ in range(self.steps):
                g, loss = gradient(client, theta, batch)
                theta[P:] = client.model.vector[P:]
                linear = -self.lam * w[:P]
                parameters.grad = with_terms(g, theta[:P], linear, self.lam, settings)
                optimizer.step()
                losses.append(loss)
            w[:P] -= self.eta * self.lam * (w - theta)[:P]
        w[P:] = theta[P:]
        client.report(loss=math.fsum(losses) / len(losses), steps=len(losses))
        client.steps, client.trained = len(losses), w
        self.keep_model(client, theta)
        return Update(weights=w)
