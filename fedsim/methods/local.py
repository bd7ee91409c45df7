"""Local training without a federation."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fedsim.federation import Client, Federation, NotCounted, client_function
from fedsim.methods.learns import Learns
from fedsim.methods.method import State, methods
from fedsim.methods.shared.personal import PersonalModelsAlone


@methods.register
class Local(PersonalModelsAlone[State]):
    """Each client trains its own model and nothing is sent: a baseline for federated methods.

    A round is `train.local_epochs` more epochs, with a new optimiser. Scores on the central test
    set are means over the models of all clients that have trained so far.
    """

    name: str = "local"
    exchanges_models: ClassVar[bool] = False
    learns: ClassVar[Learns] = Learns(averages=False)

    def init(self, fed: Federation) -> State:
        return State(weights=fed.initial_weights())

    def round(self, fed: Federation, state: State, t: int) -> State:
        fed.each(self.local_training, fed.sample(t), initial=NotCounted(state.weights))
        return state

    @client_function("local_training")
    def local_training(self, client: Client, initial: Tensor) -> None:
        """(client) Go on training the client's own model."""
        self.keep_model(client, client.train(client.state.get("weights", initial)))
