"""Models, methods and an objective of a user's own, each with a mistake."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import nn

from fedsim import Method, Update
from fedsim.methods.fedavg import FedAvg
from fedsim.objectives import Classification

# What is refused before a run starts.


class Incomplete(Method):
    name: str = "incomplete"


class Plain:
    """Of no base class."""


class Called:
    def __call__(self, *_):
        raise SystemExit


class Capitals(FedAvg):
    name: str = "own_mistakes:Capitals"
    Mu: float = Field(0.1, ge=0)


number = 3
called = Called()


def net(shape, classes, width: int = 3):
    return nn.Sequential(nn.Flatten(), nn.Linear(4, width), nn.Linear(width, classes))


def no_module(shape, classes):
    return "a network"


def other_inputs(shape, classes):
    return nn.Linear(7, classes)


def other_classes(shape, classes):
    return nn.Linear(4, classes + 1)


def raises(shape, classes):
    raise ValueError("made of cheese")


# What breaks a run off.


class Raises(FedAvg):
    def local_update(self, client, weights):
        if client.id == 2 and client.round == 2:
            raise ValueError("made of cheese")
        return super().local_update(client, weights)


class Shorter(FedAvg):
    def local_update(self, client, weights):
        trained = client.train(weights)
        return Update(weights=trained[:-1] if client.id == 2 else trained)


class Scalar(FedAvg):
    def local_update(self, client, weights):
        trained = client.train(weights)
        return Update(weights=trained[:1] if client.id == 2 else trained)


class OtherName(FedAvg):
    def local_update(self, client, weights):
        trained = client.train(weights)
        return Update(delta=trained) if client.id == 2 else Update(weights=trained)


class NoUpdate(FedAvg):
    def local_update(self, client, weights):
        return client.train(weights)


class Complex(FedAvg):
    def local_update(self, client, weights):
        return Update(weights=client.train(weights).to(torch.complex64))


class KeepsAWord(FedAvg):
    def local_update(self, client, weights):
        client.state = "cheese"
        return super().local_update(client, weights)


class ServerRaises(FedAvg):
    def round(self, fed, state, t):
        raise ValueError("made of cheese\nof all sorts" * t)


class ServerExits(FedAvg):
    def round(self, fed, state, t):
        raise SystemExit(0)


class Stateless(FedAvg):
    def round(self, fed, state, t):
        return super().round(fed, state, t).weights


class BareInit(FedAvg):
    def init(self, fed):
        return super().init(fed).weights


class InitRaises(FedAvg):
    def init(self, fed):
        raise KeyError("cheese")


class Strangers(FedAvg):
    def round(self, fed, state, t):
        fed.mean(self.local_update, [99], weights=state.weights)


class WordsForScores(Classification):
    def scores(self, totals):
        return {"accuracy": "good"}


# What a run can leave out.

POISONED = {0, 3}  # clients


class Poisoned(FedAvg):
    """Two clients send NaN in their second vector."""

    def local_update(self, client, weights):
        trained = client.train(weights)
        other = trained * float("nan") if client.id in POISONED else trained
        return Update(weights=trained, other=other, weight=client.num_samples)


class Without(FedAvg):
    """As Poisoned, but these two are never asked."""

    def round(self, fed, state, t):
        cohort = [k for k in range(fed.num_clients) if k not in POISONED]
        mean = fed.mean(self.local_update, cohort, weights=state.weights)
        return type(state)(weights=mean.weights)
