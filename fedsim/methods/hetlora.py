"""HetLoRA: clients train adapters of ranks of their own, and give up ranks that they do not need.

Cho, Liu, Xu, Fahrezi and Joshi, Heterogeneous LoRA for Federated Fine-tuning of On-Device
Foundation Models, EMNLP 2024 (arXiv 2401.06432), Section 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from fedsim.data import ClientSplits, Dataset
from fedsim.errors import ExperimentError
from fedsim.federation import Client, Federation, NotCounted, PerClient, Update, client_function
from fedsim.methods.learns import Learns
from fedsim.methods.method import Method, State, methods
from fedsim.models.adapters import A, B
from fedsim.objectives import Objective
from fedsim.training import FlatModel
from fedsim.training.adapters import pairs
from fedsim.training.flat import named


@dataclass(frozen=True)
class HetLoRAState(State):
    """The ranks r_k, (K,), besides the weights."""

    ranks: NDArray[np.int64]


@methods.register
class HetLoRA(Method[HetLoRAState]):
    """FedAvg of adapters whose rank r_k differs by client (Cho et al. 2024).

    Truncation: client k gets and trains the first r_k rows of A and columns of B, of the
    `adapters.r` that the server has. Rank self-pruning: it minimises
    F_k + λ·‖B_{:, γr_k:}‖·‖A_{γr_k:, :}‖, and where the second term has become smaller by its
    training than it was in what the client got, it sends the first γ·r_k rows and columns alone
    and has that rank from then on. Sparsity-weighted aggregation: the server pads what it gets
    with zeros, A ← Σ_k s_k·A_k / Σ_k s_k, and B and the head likewise, with s_k = ‖B_k·A_k‖_F.

    Where the paper speaks of one layer, norms are taken here over all layers (‖·‖·‖·‖ is summed),
    so that a client has one rank and one weight. γ·r_k is rounded down, to 1 at least. All ranks
    have the same factor α/`adapters.r`. A client predicts with the ranks that it has. What
    it did not get it does not send: bytes are those of r_k.

    Recorded in clients.parquet: `rank`, with which the client has trained.

    Args:
        ranks: of the clients in the first round: client k has the entry k, counted in a circle.
            By default 1, 2, ... `adapters.r`.
        gamma: γ; with 1 ranks stay as they are. There is no official default.
        lam: λ; there is no official default.
    """

    name: str = "hetlora"
    learns: ClassVar[Learns] = Learns(asks=("messages", "sizes"), averages=False)
    adapts = "both"
    private_by_example: ClassVar[bool] = False  # its noise reaches ranks that are not trained
    ranks: tuple[Annotated[int, Field(ge=1)], ...] = ()
    gamma: float = Field(0.99, gt=0, le=1)
    lam: float = Field(0.01, ge=0)

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        layers: list[Any] = [m for m in network.modules() if hasattr(m, "lora_A")]
        most = layers[0].r["default"]
        if self.ranks and max(self.ranks) > most:
            raise ExperimentError(
                f"method.ranks: {max(self.ranks)} is above adapters.r={most}, the largest rank"
            )
        if len(self.ranks) > len(splits):
            raise ExperimentError(
                f"method.ranks: {len(self.ranks)} ranks for {len(splits)} clients; leave some out"
            )

    # -- the server ----------------------------------------------------------------------------

    def init(self, fed: Federation) -> HetLoRAState:
        most = next(pairs(fed.server.model)).shape[1]
        ranks = np.resize(self.ranks or range(1, most + 1), fed.num_clients)
        return HetLoRAState(fed.initial_weights(), ranks.astype(np.int64))

    def round(self, fed: Federation, state: HetLoRAState, t: int) -> HetLoRAState:
        model, weights, ranks = fed.server.model, state.weights, state.ranks.copy()
        cohort = fed.sample(t).tolist()
        sent = fed.gather(
            self.local_update,
            cohort,
            weights=PerClient({k: weights[within(model, ranks[k])] for k in cohort}),
            rank=PerClient({k: int(ranks[k]) for k in cohort}),
        )
        padded, norms = {}, {}
        for k, update in sent.items():
            if len(update["change"]) < within(model, ranks[k]).sum():
                ranks[k] = self.pruned(int(ranks[k]))
            inside = within(model, ranks[k])
            padded[k] = np.zeros_like(weights)
            padded[k][inside] = weights[inside] + update["change"]
            norms[k] = norm_of_products(model, padded[k])
        total, n = math.fsum(norms.values()), fed.server.num_samples
        # `average` weighs by n_k. Where each B is still 0, all count alike.
        share = {k: (norm / total if total else 1.0) / n[k] for k, norm in norms.items()}
        return replace(state, weights=fed.server.average(padded, share), ranks=ranks)

    def pruned(self, rank: int) -> int:
        """γ·r, rounded down; 1 at least."""
        return max(1, math.floor(self.gamma * rank + 1e-9))

    # -- the clients ---------------------------------------------------------------------------

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor, rank: int) -> Update:
        """(client) The change of its rows and columns (n,), without those that it gives up."""
        client.report(rank=rank)
        inside, fewer = (self._within(client, r) for r in (rank, self.pruned(rank)))
        start = torch.zeros(client.model.size, device=client.device)
        start[inside] = weights
        last = (inside & ~fewer).float()
        loss = partial(self.loss, client.objective) if self.lam and self.gamma < 1 else None
        # The rest of A and B is 0, and so are its gradients.
        trained = client.train(start, loss=loss, context={"last": last})
        of = client.model.named
        if last_norms(of(trained), of(last)) < last_norms(of(start), of(last)):
            inside = fewer
        client.trained = torch.where(inside, trained, 0)
        weight = norm_of_products(client.model, client.trained.cpu().numpy())
        return Update(change=(trained - start)[inside], weight=weight)

    def loss(
        self,
        objective: Objective,
        network: nn.Module,
        x: Tensor,
        y: Tensor,
        context: Mapping[str, Tensor],
    ) -> Tensor:
        """The objective's loss of each example + λ·‖B_{:, γr_k:}‖·‖A_{γr_k:, :}‖."""
        last = named(network.flat_shapes, context["last"])  # type: ignore[arg-type]
        penalty = last_norms(dict(network.named_parameters()), last)
        return objective.loss(network, x, y, context) + self.lam * penalty

    def own_model(self, client: Client, weights: Tensor, rank: int) -> Tensor:
        """(client) The first rows and columns of the global adapters, as many as its rank."""
        return torch.where(self._within(client, rank), weights, 0)

    def for_own_models(self, fed: Federation, state: HetLoRAState) -> dict[str, Any]:
        ranks = PerClient(dict(enumerate(state.ranks.tolist())))
        return {"weights": NotCounted(state.weights), "rank": ranks}

    def _within(self, client: Client, rank: int) -> Tensor:
        return torch.from_numpy(within(client.model, rank)).to(client.device)


def within(model: FlatModel, rank: int) -> NDArray[np.bool_]:
    """(size,) which weights a client of a rank has: all but the last rows of A, columns of B."""
    found = np.ones(model.size, np.bool_)
    for pair in pairs(model):
        out, r, into = pair.shape
        found[pair.a].reshape(r, into)[rank:] = False
        found[pair.b].reshape(out, r)[:, rank:] = False
    return found


def last_norms(layers: Mapping[str, Tensor], last: Mapping[str, Tensor]) -> Tensor:
    """Σ ‖B‖·‖A‖ over layers, of the entries where `last` is 1; both by name."""
    norms = {name: (layers[name] * last[name]).norm() for name in last if name.endswith((A, B))}
    found = [
        norms[name] * norms[f"{name.removesuffix(B)}{A}"] for name in norms if name.endswith(B)
    ]
    return torch.stack(found).sum()


def norm_of_products(model: FlatModel, weights: NDArray[np.float32]) -> float:
    """‖B·A‖_F over all layers, from products of the rank's size."""
    factors = [pair.factors(weights) for pair in pairs(model)]
    with np.errstate(invalid="ignore"):  # of a client that has diverged
        square = sum(float(np.sum((a @ a.T) * (b.T @ b))) for a, b in factors)
    return math.sqrt(max(square, 0.0))
