"""IFCA: clients in clusters, which they choose by the loss of each cluster's model.

Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020, Algorithm 1
with model averaging (option II).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedsim.federation import Client, Federation, NotCounted, Update, Vector, client_function
from fedsim.methods.learns import Learns
from fedsim.methods.method import Method, State, log_means, methods
from fedsim.methods.shared.local_steps import mean_loss


@dataclass(frozen=True)
class IFCAState(State):
    """The clusters' models θ_j, (k, size); `weights` is their mean, which nothing uses."""

    models: NDArray[np.float32]


@methods.register
class IFCA(Method[IFCAState]):
    """FedAvg within clusters: a client joins j = argmin_j F_k(θ_j) in each round (Ghosh 2020).

    The server sends the models θ_j of all clusters. A client chooses the one with the lowest loss
    on its training examples, and trains it; θ_j becomes the mean over the clients that chose it,
    with equal weights, and stays as it is if none did. Initial models are drawn independently; the
    first is the run's. The column `cluster` of clients.parquet has what each client chose.

    There is no global model. Tests (`evaluate.clients`) are of the model that a client chooses by
    its training examples; scores on the central test set are means over all clients of these
    models, which takes as many evaluations (`evaluate.every`).

    Args:
        clusters: k, number of clusters.
    """

    name: str = "ifca"
    takes_downlink: ClassVar[bool] = False  # what was sent to choose from is not sent again
    private_by_example: ClassVar[bool] = False
    learns: ClassVar[Learns] = Learns(asks=("messages",))
    has_global_model: ClassVar[bool] = False
    clusters: int = Field(2, ge=1)

    def init(self, fed: Federation) -> IFCAState:
        server = fed.server
        drawn = [
            server.network(f"cluster {j}", server.build).weights() for j in range(1, self.clusters)
        ]
        return self.state(np.stack([fed.initial_weights(), *drawn]))

    def round(self, fed: Federation, state: IFCAState, t: int) -> IFCAState:
        chosen = fed.gather(self.choose, fed.sample(t), models=state.models)
        models = state.models.copy()
        for j in sorted(set(chosen.values())):
            members = [k for k, of_k in chosen.items() if of_k == j]
            start = NotCounted(state.models[j])  # which they have been sent to choose from
            mean = fed.mean(self.local_update, members, weights=start)
            if mean.count:  # otherwise all uploads are lost, or late
                models[j] = mean.weights
        return self.state(models)

    def state(self, models: NDArray[np.float32]) -> IFCAState:
        return IFCAState(weights=models.mean(axis=0), models=models)

    @client_function("choose")
    def choose(self, client: Client, models: Tensor) -> int:
        """(client) The cluster whose model has the lowest loss on its training examples."""
        j = int(np.argmin([mean_loss(client, weights) for weights in models]))
        client.report(cluster=j)
        return j

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor) -> Update:
        """(client) θ_k, trained from the model of its cluster."""
        return Update(weights=client.train(weights))

    # -- evaluation ----------------------------------------------------------------------------

    def evaluate(self, fed: Federation, state: IFCAState) -> None:
        given = self.for_own_models(fed, state)
        log_means(fed, fed.gather(self.local_scores, range(fed.num_clients), **given).values())

    @client_function("local_scores")
    def local_scores(self, client: Client, models: Tensor) -> dict[str, float]:
        """(client) The scores of its cluster's model on the central test set."""
        return client.score(self.own_model(client, models))

    def own_model(self, client: Client, models: Tensor) -> Tensor:
        """(client) The model of the cluster that it chooses."""
        return models[self.choose(client, models)]

    def for_own_models(self, fed: Federation, state: IFCAState) -> dict[str, Any]:
        return {"models": NotCounted(state.models)}

    def global_model(self, fed: Federation, state: IFCAState) -> dict[str, Vector]:
        """None: the clusters' models are in the state of the last checkpoint."""
        return {}
