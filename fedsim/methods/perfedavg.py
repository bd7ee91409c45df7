"""Per-FedAvg: a global model from which one step makes each client's own.

Fallah, Mokhtari and Ozdaglar, Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach, NeurIPS 2020, Algorithm 1.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from fedsim.federation import Client, Examples, Update, client_function
from fedsim.methods.fedavg import FedAvg
from fedsim.methods.method import methods
from fedsim.methods.shared.local_steps import batches_of, gradient
from fedsim.training import with_terms


@methods.register
class PerFedAvg(FedAvg):
    """Clients minimise F_k(w) = f_k(w − α·∇f_k(w)) over the global w (Fallah et al. 2020).

    A local step on batches D, D' and D'' is w ← w − β·(I − α·∇²f(w; D''))·∇f(w − α·∇f(w; D); D').
    `fo` leaves out the Hessian; `hf` takes its product with a vector from the difference of two
    gradients, at w ± δ·∇f(w − α·∇f(w; D); D'). The step is made by the experiment's optimiser,
    whose learning rate is β. D' are the batches of local training in turn, D and D'' the following
    ones. The server averages with equal weights, as in Algorithm 1.

    `evaluate.clients` evaluates w − α·∇f_k(w), with the gradient over all of the client's training
    examples; w as it is is evaluated on the central test set. Recorded losses are those after the
    step of α, on D'.

    Args:
        alpha: α, learning rate of a client's own step; with 0 the method is FedAvg with equal
            weights.
        variant: `fo` (first order) or `hf` (Hessian-free).
        delta: δ of `hf`.
    """

    name: str = "perfedavg"
    stackable: ClassVar[bool] = False
    alpha: float = Field(0.01, ge=0)
    variant: Literal["fo", "hf"] = "fo"
    delta: float = Field(1e-3, gt=0)

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor) -> Update:
        """(client) w_k, from w."""
        P, settings = client.model.num_parameters, client.settings
        weights, batches, losses = weights.clone(), list(batches_of(client)), []
        w = nn.Parameter(weights[:P])
        optimizer = settings.optimizer.build(w, client.lr)
        for b in range(len(batches)):
            D1, D, D2 = (batches[(b + i) % len(batches)] for i in range(3))
            adapted = self.adapted(client, weights, D)
            g, loss = gradient(client, adapted, D1)
            weights[P:] = client.model.vector[P:]
            if self.variant == "hf":
                g = g - self.alpha * self.hessian_product(client, weights, g, D2)
            w.grad = with_terms(g, weights[:P], None, None, settings)
            optimizer.step()
            losses.append(loss)
        client.report(loss=math.fsum(losses) / len(losses), steps=len(losses))
        client.steps, client.trained = len(losses), weights
        return Update(weights=weights)

    def adapted(self, client: Client, weights: Tensor, data: Examples) -> Tensor:
        """(client) (size,) w − α·∇f(w; data)."""
        g, _ = gradient(client, weights, data)
        adapted = weights.clone()
        client.parameters(adapted).sub_(g, alpha=self.alpha)
        return adapted

    def hessian_product(
        self, client: Client, weights: Tensor, v: Tensor, data: Examples
    ) -> Tensor:
        """(client) (P,) about ∇²f(w; data)·v: (∇f(w + δ·v) − ∇f(w − δ·v)) / 2δ."""
        found = []
        for sign in (1, -1):
            moved = weights.clone()
            client.parameters(moved).add_(v, alpha=sign * self.delta)
            found.append(gradient(client, moved, data)[0])
        above, below = found
        return (above - below) / (2 * self.delta)

    def own_model(self, client: Client, weights: Tensor) -> Tensor:
        """(client) The adapted model."""
        return self.adapted(client, weights, client.data)
