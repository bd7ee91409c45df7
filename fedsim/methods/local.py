"""Local training without a federation."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedsim.federation import (
    Client,
    DivergedUpdate,
    Federation,
    NotCounted,
    Vector,
    client_function,
)
from fedsim.methods.learns import Learns
from fedsim.methods.method import Method, State, log_means, methods


@methods.register
class Local(Method[State]):
    """Each client trains its own model and nothing is sent: a baseline for federated methods.

    A round is `train.local_epochs` more epochs, with a new optimiser. Scores on the central test
    set are means over the models of all clients that have trained so far.
    """

    name: str = "local"
    learns: ClassVar[Learns] = Learns(dp_compatible=False)
    has_global_model: ClassVar[bool] = False

    def init(self, fed: Federation) -> State:
        return State(weights=fed.initial_weights())

    def round(self, fed: Federation, state: State, t: int) -> State:
        fed.each(self.local_training, fed.sample(t), initial=NotCounted(state.weights))
        return state

    @client_function("local_training")
    def local_training(self, client: Client, initial: Tensor) -> None:
        """(client) Go on training the client's own model."""
        trained = client.train(client.state.get("weights", initial))
        if not torch.isfinite(trained).all():
            raise DivergedUpdate("NaN or infinite weights")
        client.state["weights"] = trained

    def evaluate(self, fed: Federation, state: State) -> None:
        found = fed.gather(self.local_scores, range(fed.num_clients))
        log_means(fed, found.values())

    @client_function("local_scores")
    def local_scores(self, client: Client) -> dict[str, float]:
        """(client) What the client's own model, if any, is worth on the central test set."""
        if "weights" not in client.state:
            return {}
        return client.score(client.state["weights"])

    @client_function("local_test")
    def local_test(self, client: Client, weights: Tensor) -> None:
        """(client) Evaluate the client's own model on its own test examples."""
        client.evaluate(client.state.get("weights", weights))

    def own_model(self, client: Client) -> Tensor | None:
        return client.state.get("weights")

    def global_model(self, fed: Federation, state: State) -> dict[str, Vector]:
        """None: the clients' models are with their kept states, in the last checkpoint."""
        return {}
