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


class Fails(FedAvg):
    """Client 2, all clients or the server do something wrong."""

    name: str = "own_mistakes:Fails"
    how: str

    def init(self, fed):
        if self.how == "init raises":
            raise KeyError("cheese")
        state = super().init(fed)
        return state.weights if self.how == "bare init" else state

    def round(self, fed, state, t):
        match self.how:
            case "server raises":
                raise ValueError("made of cheese\nof all sorts" * t)
            case "server exits":
                raise SystemExit(0)
            case "strangers":
                return fed.mean(self.local_update, [99], weights=state.weights)
        after = super().round(fed, state, t)
        return after.weights if self.how == "stateless" else after

    def local_update(self, client, weights):
        trained, second = client.train(weights), client.id == 2
        match self.how:
            case "raises" if second and client.round == 2:
                raise ValueError("made of cheese")
            case "keeps a word":
                client.state = "cheese"
            case "no update":
                return trained
            case "complex":
                trained = trained.to(torch.complex64)
            case "shorter" if second:
                trained = trained[:-1]
            case "scalar" if second:
                trained = trained[:1]
            case "other name" if second:
                return Update(delta=trained)
        return Update(weights=trained)


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
