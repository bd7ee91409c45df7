"""Methods whose client functions have habits that an engine must bear, or refuse."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedsim.federation import Client, Federation, Unsent, Update
from fedsim.methods import State
from fedsim.methods.fedavg import FedAvg

HABITS = (
    *("StateNowAndThen", "NestedState", "DrawsFromTorch"),
    *("FailsNowAndThen", "Gathers", "TrainsTwice", "Spoils"),
)


class StateNowAndThen(FedAvg):
    """Some clients change their state in some rounds."""

    name: str = "habits:StateNowAndThen"

    def local_update(self, client: Client, weights: Tensor) -> Update:
        update = super().local_update(client, weights)
        if (client.round + client.id) % 2:
            client.state["last"] = update.vectors["weights"]
        elif "last" in client.state:
            update.vectors["weights"] = (update.vectors["weights"] + client.state["last"]) / 2
        return update


class NestedState(FedAvg):
    """The state is a list that grows, changed where it lies."""

    name: str = "habits:NestedState"

    def local_update(self, client: Client, weights: Tensor) -> Update:
        client.state.setdefault("rounds", []).append(client.round)
        client.report(remembered=len(client.state["rounds"]))
        return super().local_update(client, weights)


class DrawsFromTorch(FedAvg):
    """Noise from torch's own generator, outside of training."""

    name: str = "habits:DrawsFromTorch"

    def local_update(self, client: Client, weights: Tensor) -> Update:
        trained = client.train(weights)
        noise = 1e-3 * torch.randn_like(trained)
        return Update(weights=trained + noise, weight=client.num_samples)


class FailsNowAndThen(NestedState):
    """Clients 4 and 7 fail in every third round, after they changed their state."""

    name: str = "habits:FailsNowAndThen"

    def local_update(self, client: Client, weights: Tensor) -> Update:
        update = super().local_update(client, weights)
        if client.round % 3 == 0 and client.id in (4, 7):
            weights.mul_(0)  # what it does before it fails touches nobody else
            raise RuntimeError("battery empty")
        return update


class Gathers(FedAvg):
    """Clients send messages of their own, and keep how often they were asked."""

    name: str = "habits:Gathers"

    def round(self, fed: Federation, state: State, t: int) -> State:
        cohort = fed.sample(t)
        fed.each(self.count, cohort, step=2)
        hint = Unsent(np.zeros(100, dtype=np.float32))
        messages = fed.gather(self.message, cohort, weights=state.weights, hint=hint)
        assert list(messages) == list(cohort)
        for k, message in messages.items():
            assert message["labels"].dtype == np.uint8
            assert message["n"] == len(message["labels"]) == fed.num_samples[k]
            assert message["parts"][1] == 2 * t
        trained = [message["parts"][0] for message in messages.values()]
        return State(weights=np.mean(trained, axis=0))

    def count(self, client: Client, step: int) -> None:
        client.state["asked"] = client.state.get("asked", 0) + step

    def message(self, client: Client, weights: Tensor, hint: Tensor) -> dict[str, object]:
        assert hint.shape == (100,)
        labels = client.data.y.to(torch.uint8)
        parts = [client.train(weights), client.state["asked"]]
        return {"labels": labels, "n": client.num_samples, "parts": parts}


class TrainsTwice(FedAvg):
    """Two trainings in one function, in different orders of the data."""

    name: str = "habits:TrainsTwice"

    def local_update(self, client: Client, weights: Tensor) -> Update:
        first, second = client.train(weights), client.train(weights)
        assert not torch.equal(first, second)
        return Update(weights=(first + second) / 2, weight=client.num_samples)


class Spoils(FedAvg):
    """Changes what it was given, in ways that torch notices and in ways that it does not."""

    name: str = "habits:Spoils"

    def round(self, fed: Federation, state: State, t: int) -> State:
        mean = fed.mean(self.spoil, fed.sample(t), nest={"weights": [state.weights]})
        return State(weights=mean.weights)

    def spoil(self, client: Client, nest: dict[str, list[Tensor]]) -> Update:
        update = self.local_update(client, nest["weights"][0])
        nest["weights"][0] *= 0.9
        nest["weights"][0].data.mul_(0.9)
        nest["weights"].append(nest["weights"][0])
        assert len(nest["weights"]) == 2
        return update


class Reports(FedAvg):
    """Reports a scalar under a name of the user's choice."""

    name: str = "habits:Reports"
    column: str

    def local_update(self, client: Client, weights: Tensor) -> Update:
        client.report(**{self.column: 1.0})
        return super().local_update(client, weights)
