"""Methods whose client functions have habits that an engine must bear, or refuse."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.federation import Client, Federation, NotCounted, Update
from fedsim.methods import State
from fedsim.methods.fedavg import FedAvg
from fedsim.objectives import Classification
from fedsim.training import Context

HABITS = (
    *("StateNowAndThen", "NestedState", "DrawsFromTorch"),
    *("FailsNowAndThen", "Gathers", "TrainsTwice", "LeftOut"),
)
IN_STACKS = (*HABITS, "Aliases", "NoisyGradient")  # what a stack must bear as well


class StateNowAndThen(FedAvg):
    """Some clients change their state in some rounds."""

    name: str = "misbehaving_methods:StateNowAndThen"

    def local_update(self, client: Client, weights: Tensor) -> Update:
        update = super().local_update(client, weights)
        if (client.round + client.id) % 2:
            client.state["last"] = update.vectors["weights"]
        elif "last" in client.state:
            update.vectors["weights"] = (update.vectors["weights"] + client.state["last"]) / 2
        return update


class NestedState(FedAvg):
    """The state is a list that grows, changed where it lies."""

    name: str = "misbehaving_methods:NestedState"

    def local_update(self, client: Client, weights: Tensor) -> Update:
        client.state.setdefault("rounds", []).append(client.round)
        client.report(remembered=len(client.state["rounds"]))
        return super().local_update(client, weights)


class DrawsFromTorch(FedAvg):
    """Noise from torch's own generator, outside of training."""

    name: str = "misbehaving_methods:DrawsFromTorch"

    def local_update(self, client: Client, weights: Tensor) -> Update:
        trained = client.train(weights)
        noise = 1e-3 * torch.randn_like(trained)
        return Update(weights=trained + noise, weight=client.num_samples)


class FailsNowAndThen(NestedState):
    """Clients 4 and 7 fail in every third round, after they changed their state."""

    name: str = "misbehaving_methods:FailsNowAndThen"

    def local_update(self, client: Client, weights: Tensor) -> Update:
        update = super().local_update(client, weights)
        if client.round % 3 == 0 and client.id in (4, 7):
            client.model.vector.mul_(0)  # what it does before it fails touches nobody else
            raise RuntimeError("battery empty")
        return update


class Gathers(FedAvg):
    """Clients send messages of their own, and keep how often they were asked."""

    name: str = "misbehaving_methods:Gathers"

    def round(self, fed: Federation, state: State, t: int) -> State:
        cohort = fed.sample(t)
        fed.each(self.count, cohort, step=2)
        hint = NotCounted(np.zeros(100, dtype=np.float32))
        messages = fed.gather(self.message, cohort, weights=state.weights, hint=hint)
        assert list(messages) == list(cohort)
        for k, message in messages.items():
            assert message["labels"].dtype == np.uint8
            assert message["n"] == len(message["labels"]) == fed.server.num_samples[k]
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

    name: str = "misbehaving_methods:TrainsTwice"

    def local_update(self, client: Client, weights: Tensor) -> Update:
        first, second = client.train(weights), client.train(weights)
        assert not torch.equal(first, second)
        return Update(weights=(first + second) / 2, weight=client.num_samples)


class Spoils(FedAvg):
    """Changes what all clients share, in ways that torch notices and in ways that it does not."""

    name: str = "misbehaving_methods:Spoils"
    how: str

    def round(self, fed: Federation, state: State, t: int) -> State:
        hint = NotCounted({"hint": np.zeros(3, dtype=np.float32)})
        mean = fed.mean(self.spoil, fed.sample(t), nest={"weights": [state.weights]}, hint=hint)
        return State(weights=mean.weights)

    def spoil(
        self, client: Client, nest: dict[str, list[Tensor]], hint: dict[str, Tensor]
    ) -> Update:
        (weights,) = nest["weights"]
        if self.how == "in place":
            weights *= 0.9
        elif self.how == "not counted":
            hint["hint"].add_(1)
        elif self.how == "data":
            weights.data.mul_(0.9)
        elif self.how == "array":
            weights.numpy()[3] = 0.5
        elif self.how == "NaN" and client.id == 3:
            weights.numpy()[3] = math.nan
        elif self.how == "nest":
            nest["weights"].append(weights)
        return self.local_update(client, weights)


class LeftOut(FedAvg):
    """Even clients have nothing to send in even rounds, and nobody has in the third."""

    name: str = "misbehaving_methods:LeftOut"

    def round(self, fed: Federation, state: State, t: int) -> State:
        mean = fed.mean(self.local_update, fed.sample(t), weights=state.weights)
        fed.log(contributions=mean.count)
        return State(mean.weights) if mean.count else state

    def local_update(self, client: Client, weights: Tensor) -> Update:
        if client.round == 3 or client.round % 2 == client.id % 2 == 0:
            return Update()
        return super().local_update(client, weights)


class Aliases(FedAvg):
    """Trains from the network as it is, changes what it gets, and looks at the network."""

    name: str = "misbehaving_methods:Aliases"

    def local_update(self, client: Client, weights: Tensor) -> Update:
        network = client.model
        network.load(weights * (1 + 0.1 * client.id))
        to = client.parameters(network.vector)
        first = client.train(network.vector, linear=to, quadratic=0.1)
        assert torch.equal(network.vector, first)
        assert network.module.training
        first.mul_(0.9)
        second = client.train(first)
        return Update(weights=second, weight=client.num_samples)


class NoisyGradient(FedAvg):
    """Gradients at points that torch's own generator draws."""

    name: str = "misbehaving_methods:NoisyGradient"

    def local_update(self, client: Client, weights: Tensor) -> Update:
        trained = client.train(weights, perturb=self.noise)
        return Update(weights=trained, weight=client.num_samples)

    def noise(self, g: Tensor, w: Tensor, context: Context) -> Tensor:
        return 0.01 * torch.randn_like(w)


class BrokenLoss(FedAvg):
    """A loss that fails for everyone."""

    name: str = "misbehaving_methods:BrokenLoss"

    def local_update(self, client: Client, weights: Tensor) -> Update:
        return Update(weights=client.train(weights, loss=self.loss))

    def loss(self, network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
        return context["missing"]


class OwnLoss(FedAvg):
    """Each client brings a loss of its own, which happens to be the usual one."""

    name: str = "misbehaving_methods:OwnLoss"

    def local_update(self, client: Client, weights: Tensor) -> Update:
        trained = client.train(weights, loss=lambda *arguments: client.objective.loss(*arguments))
        return Update(weights=trained, weight=client.num_samples)


class BranchingLoss(FedAvg):
    """A loss that looks at its values, which vmap cannot."""

    name: str = "misbehaving_methods:BranchingLoss"

    def local_update(self, client: Client, weights: Tensor) -> Update:
        return Update(weights=client.train(weights, loss=self.loss), weight=client.num_samples)

    def loss(self, network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
        losses = Classification().loss(network, x, y, context)
        return 2 * losses if losses.sum() > 1 else losses


class Reports(FedAvg):
    """Reports a scalar under a name of the user's choice."""

    name: str = "misbehaving_methods:Reports"
    column: str

    def local_update(self, client: Client, weights: Tensor) -> Update:
        client.report(**{self.column: 1.0})
        return super().local_update(client, weights)
