"""APFL: each client mixes a local model with the global one, and learns by how much.

Deng, Kamani and Mahdavi, Adaptive Personalized Federated Learning, 2020, Algorithm 1.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from fedsim.federation import Client, Update, client_function
from fedsim.methods.method import methods
from fedsim.methods.shared.local_steps import batches_of, gradient
from fedsim.methods.shared.personal import PersonalBesideGlobal
from fedsim.objectives import Objective
from fedsim.training import Hooks, TrainingJob, WithLoss, train


@methods.register
class APFL(PersonalBesideGlobal):
    """FedAvg, and personal models v̄_k = α_k·v_k + (1 − α_k)·w_k (Deng et al. 2020).

    On each mini-batch, a client of the cohort moves its copy of the global model by
    w_k ← w_k − η·∇f(w_k), and its local model by v_k ← v_k − η·∇_v f(v̄_k) (which is α_k·∇f(v̄_k)).
    The server averages the w_k, with equal weights as in the paper, and evaluates the mean on the
    central test set. v_k begins as w⁰. v̄_k as after the client's last round is its personal model,
    which `evaluate.clients` evaluates.

    If `adaptive`, α_k ← α_k − η·⟨v_k − w, ∇f(v̄_k)⟩ at the start of a round, on one mini-batch, and
    clipped to [0, 1]; the column `alpha` of clients.parquet has it. Batch norm's statistics of v̄_k
    are taken in place of mixed ones. `train.clip_norm` applies to both gradients as one vector.

    Args:
        alpha: α_k at the start.
        adaptive: clients learn α_k; otherwise it stays.
    """

    name: str = "apfl"
    stackable: ClassVar[bool] = False
    alpha: float = Field(0.5, ge=0, le=1)
    adaptive: bool = True

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor, initial: Tensor) -> Update:
        """(client) w_k; keeps v_k, α_k and v̄_k."""
        P, settings = client.model.num_parameters, client.settings
        v, alpha = client.state.get("local", initial), client.state.get("alpha", self.alpha)
        if self.adaptive:
            alpha = self.moved(client, alpha, v, weights)
        pair = client.network("apfl", lambda: Pair(client.model.module))
        loss = partial(pair_loss, client.objective, alpha)
        job = TrainingJob(
            torch.cat([weights[:P], v[:P], weights[P:], v[P:]]),
            client.data.x,
            client.data.y,
            client.lr,
            settings.most_epochs,
            client.rng("batches"),
            Hooks(loss),
            most_steps=settings.local_steps,
            facts=client.data.facts,
        )
        trained = train(pair, job, settings)
        w, v, w_statistics, v_statistics = trained.weights.tensor_split(
            [P, 2 * P, P + len(weights)]
        )
        mixed = torch.cat([alpha * v + (1 - alpha) * w, v_statistics])
        client.report(loss=trained.loss, steps=trained.steps, alpha=alpha)
        client.steps = trained.steps
        client.visit(2 * trained.visited)
        client.state["local"], client.state["alpha"] = torch.cat([v, v_statistics]), alpha
        client.trained = torch.cat([w, w_statistics])
        self.keep_model(client, mixed)
        return Update(weights=client.trained)

    def moved(self, client: Client, alpha: float, v: Tensor, w: Tensor) -> float:
        """(client) α_k after a step of gradient descent."""
        P, batch = client.model.num_parameters, next(batches_of(client))
        g, _ = gradient(client, torch.cat([(alpha * v + (1 - alpha) * w)[:P], v[P:]]), batch)
        slope = torch.dot((v - w)[:P].double(), g.double())
        return min(max(alpha - client.lr * float(slope), 0.0), 1.0)


class Pair(nn.Module):
    """Two copies of a network, with weights w and v."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.w, self.v = copy.deepcopy(network), copy.deepcopy(network)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.w(x), self.v(x)


def pair_loss(
    objective: Objective,
    alpha: float,
    pair: Pair,
    x: Tensor,
    y: Tensor,
    context: Mapping[str, Tensor],
) -> Tensor:
    """(B,) f(w), with the gradients of f(w) at w and of f(α·v + (1 − α)·w) at v."""
    others = dict(pair.w.named_parameters())
    mixed = {
        f"network.{name}": alpha * v + (1 - alpha) * others[name].detach()
        for name, v in pair.v.named_parameters()
        if v.requires_grad
    }
    of_mixed: Tensor = functional_call(WithLoss(pair.v), mixed, (objective.loss, x, y, context))
    of_w = objective.loss(pair.w, x, y, context)
    return of_w + (of_mixed - of_mixed.detach())  # the loss on record is that of w alone
