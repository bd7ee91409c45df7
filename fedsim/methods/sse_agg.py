"""SSE-AGG: clients whose explanations agree with the others' get larger weights.

Shift-Stable Explanations via Aggregation. Only the abstract was available; choices that it leaves
open are made here and marked as such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from fedsim.data import ClientSplits, Dataset
from fedsim.errors import ExperimentError
from fedsim.explain.groups import group_parts, unit
from fedsim.federation import Client, Federation, Gather, NotCounted, Vector, client_function
from fedsim.federation.wire import nbytes, to_arrays
from fedsim.methods.learns import Learns
from fedsim.methods.method import Method, State, methods

FEWEST = 5  # examples of the reference set
Sketches = NDArray[np.float64]


@dataclass(frozen=True)
class SseAggState(State):
    """The consensus φ of the previous round, (G,), besides the weights; zeros before the first."""

    consensus: Vector


@methods.register
class SseAgg(Method[SseAggState]):
    """FedAvg with clients weighted by how well their explanations agree (SSE-AGG).

    For each client's model w_k the server computes an explanation sketch φ_k: the permutation
    importance of each group of input parts (squares of pixels, features of a table), that is the
    increase of the loss on the server's small reference set (`partition.server_fraction`) when the
    group's values are permuted among the examples, scaled to unit length. Clients are clustered by
    their updates w_k − w (average linkage, cosine distance). The consensus φ is the mean over
    clusters of each cluster's mean sketch, so that many similar clients do not determine it alone:

        w ← Σ_k n_k·a_k·w_k / Σ_k n_k·a_k,  a_k = exp(−β·‖φ_k − φ‖₂).

    The abstract names permutation importance on a shared reference set, clusters by updates, and
    aggregation steered towards clients that agree with the consensus; φ, a_k and the defaults are
    our reading. With β = 0 it is FedAvg. Clients do and send the same as in FedAvg: they cannot
    mislead the server by false claims, but their models can.

    Recorded in each round: `sketch_distance`, the mean ‖φ_j − φ_k‖₂ over pairs of clients,
    `consensus_drift`, ‖φ − φ_before‖₂, and for each client an explanation `permutation_importance`
    with its cluster, distance ‖φ_k − φ‖₂ and weight in the mean.

    Args:
        beta: β, how strongly disagreement reduces a client's weight; 0 for not at all.
        clusters: number of clusters of clients.
        size: side of the squares of images, in pixels; by default a seventh of the longer side.
    """

    name: str = "sse_agg"
    learns: ClassVar[Learns] = Learns(
        task_sequences="no", asks=("messages", "sizes"), averages=False
    )
    beta: float = Field(3.0, ge=0)
    clusters: int = Field(2, ge=1)
    size: int | None = Field(None, ge=1)

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        if dataset.words:
            raise ExperimentError(
                "method.name=sse_agg permutes pixels or features, and the data are documents"
            )
        if len(splits.server) < FEWEST:
            raise ExperimentError(
                f"method.name=sse_agg needs {FEWEST} reference examples or more on the server, "
                f"and it has {len(splits.server)}; raise partition.server_fraction"
            )

    def init(self, fed: Federation) -> SseAggState:
        groups = group_parts(fed.server.shape, self.size, fed.server.parts)
        return SseAggState(fed.initial_weights(), np.zeros(len(groups), np.float32))

    def round(self, fed: Federation, state: SseAggState, t: int) -> SseAggState:
        reference = fed.server.own_data
        sent = fed.reduce(
            self.local_update,
            fed.sample(t),
            Models(),
            weights=state.weights,
            x=NotCounted(reference.x.cpu().numpy()),
            y=NotCounted(reference.y.cpu().numpy()),
            facts=NotCounted(to_arrays(reference.facts)),
            order=NotCounted(fed.rng("order").permutation(len(reference))),
        )
        models = {k: message["weights"] for k, message in sent.items()}
        sketches = np.array([message["sketch"] for message in sent.values()])
        sketches = sketches.reshape(len(models), len(state.consensus))
        cluster = clustered([w - state.weights for w in models.values()], self.clusters)
        consensus = common_sketch(sketches, cluster)
        distance = np.linalg.norm(sketches - consensus, axis=1)
        a = np.exp(-self.beta * (distance - distance.min(initial=np.inf)))  # one of them is 1
        agreement = dict(zip(models, a.tolist(), strict=True))
        weights = fed.server.average(models, agreement)
        counted = fed.server.num_samples[list(models)] * a
        rows = zip(models, cluster, distance, counted / counted.sum(), strict=True)
        fed.explain(
            "permutation_importance",
            ({"client": k, "cluster": c, "distance": d, "share": s} for k, c, d, s in rows),
        )
        fed.log(
            sketch_distance=mean_distance(sketches),
            consensus_drift=float(np.linalg.norm(consensus - state.consensus)),
        )
        return SseAggState(weights, consensus.astype(np.float32))

    @client_function("local_update")
    def local_update(
        self,
        client: Client,
        weights: Tensor,
        x: Tensor,
        y: Tensor,
        facts: Mapping[str, Tensor],
        order: Tensor,
    ) -> dict[str, Tensor | NDArray[np.float64]]:
        """(client) w_k, as in FedAvg, and its sketch φ_k.

        The server could compute φ_k itself from w_k; clients' processes do it in parallel.
        """
        trained = client.train(weights)
        client.model.load(trained)
        groups = group_parts(tuple(x.shape[1:]), self.size, client.parts)

        def loss(changed: Tensor) -> float:
            losses = client.objective.loss(network, changed, y, facts)
            return float(losses.double().mean())

        network = client.model.module.eval()
        with torch.no_grad():
            whole, dealt = loss(x), x[order]
            others = ~np.eye(len(groups), dtype=bool)  # all groups but one
            rises = [loss(groups.masked(x, kept, dealt)) - whole for kept in others[:, None]]
        network.train()
        return {"weights": trained, "sketch": unit(np.array([rises]))[0]}


class Models(Gather):
    """Each client's message, without the sketch's bytes: the server could compute it."""

    def size(self, message: Mapping[str, Any]) -> int:
        return nbytes(message["weights"])


def clustered(updates: Sequence[Vector], clusters: int) -> NDArray[np.int64]:
    """(n,) the cluster 1, 2, ... of each update, by average linkage of cosine distances."""
    if len(updates) < 2:
        return np.ones(len(updates), dtype=np.int64)
    # SciPy is slow to import.
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import pdist

    directions = unit(np.stack(updates).astype(np.float64))
    distances = pdist(directions, "sqeuclidean") / 2  # 1 − cos; 1/2 for an update of zeros
    found: NDArray[np.int64] = fcluster(linkage(distances, "average"), clusters, "maxclust")
    return found.astype(np.int64)


def common_sketch(sketches: Sketches, cluster: NDArray[np.int64]) -> Sketches:
    """(G,) the mean over clusters of their mean sketches, (n, G)."""
    means = [sketches[cluster == c].mean(axis=0) for c in np.unique(cluster)]
    return np.mean(means, axis=0) if means else np.zeros(sketches.shape[1])


def mean_distance(sketches: Sketches) -> float:
    """‖φ_j − φ_k‖₂, mean over all pairs of rows; 0 without pairs."""
    from scipy.spatial.distance import pdist  # slow to import

    pairs = pdist(sketches)
    return float(pairs.mean()) if len(pairs) else 0.0
