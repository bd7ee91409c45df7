"""Centralised training on the union of the clients' data, as a reference for federated methods."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from fedsim.federation import Federation
from fedsim.methods.learns import Learns
from fedsim.methods.method import Method, State, methods
from fedsim.training import Hooks, TrainingJob, train


@methods.register
class Centralised(Method[State]):
    """Centralised training: same model and optimiser, on all clients' labelled examples.

    No real federation could do this: the server reads every client's data, and nothing is sent. A
    round is `train.local_epochs` passes over the union, with a new optimiser.
    """

    name: str = "centralised"
    private_by_example: ClassVar[bool] = False
    learns: ClassVar[Learns] = Learns(asks=("data",), averages=False)
    exchanges_models: ClassVar[bool] = False
    trains_clients: ClassVar[bool] = False

    def init(self, fed: Federation) -> State:
        return State(weights=fed.initial_weights())

    def round(self, fed: Federation, state: State, t: int) -> State:
        union = fed.server.labelled_data
        job = TrainingJob(
            weights=fed.server.tensor(state.weights),
            x=union.x,
            y=union.y,
            lr=fed.settings.lr(t),
            epochs=fed.settings.most_epochs,
            rng=fed.rng("batches"),
            hooks=Hooks(fed.server.objective.loss),
            most_steps=fed.settings.local_steps,
            facts=union.facts,
        )
        trained = train(fed.server.model, job, fed.settings)
        fed.log(train_loss=trained.loss)
        return replace(state, weights=trained.weights.cpu().numpy())
