"""Components that misbehave, for bad_inputs.py: models, networks, methods and objectives."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedsim import Client, Method, Update
from fedsim.methods.fedavg import FedAvg
from fedsim.objectives import Classification, Metric

number, none, text, module = 3, None, "text", sys


def function() -> None: ...


class NoComponent: ...


class Incomplete(Method[Any]):
    name: str = "x"


def forever() -> Any:
    while True:
        time.sleep(0.01)


# models


def net(shape: Any, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, outputs))


def build_exits(shape: Any, outputs: int) -> Any:
    sys.exit(3)


def build_recurses(shape: Any, outputs: int) -> Any:
    return build_recurses(shape, outputs)


def build_loops(shape: Any, outputs: int) -> Any:
    forever()


def build_nothing(shape: Any, outputs: int) -> Any:
    return None


def build_empty(shape: Any, outputs: int) -> Any:
    return nn.Sequential()


class Strange(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.line, self.way = nn.Linear(4, 3), way

    def forward(self, x: Tensor) -> Any:
        return FORWARD[self.way](self.line(x.flatten(1)))


def of_many_lines(*_: Any) -> Any:
    raise ValueError("not\nthis\nway\n" * 9)


FORWARD: dict[str, Callable[[Tensor], Any]] = {
    "raises": of_many_lines,
    "exits": lambda y: sys.exit(1),
    "loops": lambda y: forever(),
    "tuple": lambda y: (y, y),
    "none": lambda y: None,
    "nan": lambda y: y * float("nan"),
    "flat": lambda y: y.sum(),
    "ints": lambda y: y.long(),
    "string": lambda y: "x",
    "cut": lambda y: y[:1],
    "detached": lambda y: y.detach(),
}


def strange(shape: Any, outputs: int, way: str = "") -> nn.Module:
    return Strange(way)


# methods


class Server(FedAvg):
    """Goes wrong on the server."""

    name: str = "bad_code:Server"
    way: str = ""

    def round(self, fed: Any, state: Any, t: int) -> Any:
        return ROUND[self.way](self, fed, state)

    def usual(self, fed: Any, state: Any) -> Any:
        return super().round(fed, state, 1)

    def of(self, fed: Any, state: Any, cohort: Any) -> Any:
        mean = fed.mean(self.local_update, cohort, weights=state.weights)
        return type(state)(weights=mean.weights)


ROUND: dict[str, Callable[[Server, Any, Any], Any]] = {
    "raises": of_many_lines,
    "exits": lambda method, fed, state: sys.exit(0),
    "loops": lambda method, fed, state: forever(),
    "recurses": lambda method, fed, state: ROUND["recurses"](method, fed, state),
    "no state": lambda method, fed, state: None,
    "a number": lambda method, fed, state: 3,
    "nobody": lambda method, fed, state: method.of(fed, state, []),
    "a stranger": lambda method, fed, state: method.of(fed, state, [99]),
    "somebody twice": lambda method, fed, state: method.of(fed, state, [1, 1]),
    "a word as a cohort": lambda method, fed, state: method.of(fed, state, ["x"]),
    "objects on record": lambda method, fed, state: fed.log(x=object()),
    "arrays on record": lambda method, fed, state: fed.log(x=torch.zeros(3)),
    "objects as explanations": lambda method, fed, state: fed.explain("x", [{"a": object()}]),
    "a column that is taken": lambda method, fed, state: fed.log(round=3),
}


class NoInit(FedAvg):
    def init(self, fed: Any) -> Any:
        return None


class InitRaises(FedAvg):
    def init(self, fed: Any) -> Any:
        raise KeyError("x")


class MixedTypes(FedAvg):
    def round(self, fed: Any, state: Any, t: int) -> Any:
        fed.log(x="word" if t == 1 else 3)
        return super().round(fed, state, t)


class Sends(FedAvg):
    """Its clients go wrong."""

    name: str = "bad_code:Sends"
    way: str = ""

    def local_update(self, client: Client, weights: Any) -> Any:
        return SENT[self.way](client.train(weights))


SENT: dict[str, Callable[[Tensor], Any]] = {
    "raises": of_many_lines,
    "exits": lambda w: sys.exit("bye"),
    "loops": lambda w: forever(),
    "stops": lambda w: next(iter(())),
    "none": lambda w: None,
    "nothing": lambda w: Update(),
    "words": lambda w: Update(weights="x"),  # type: ignore[arg-type]
    "lists": lambda w: Update(weights=[1.0]),  # type: ignore[arg-type]
    "objects": lambda w: Update(weights=object()),  # type: ignore[arg-type]
    "complex": lambda w: Update(weights=w.to(torch.complex64)),
    "a negative weight": lambda w: Update(weights=w, weight=-1),
    "a weight that is NaN": lambda w: Update(weights=w, weight=float("nan")),
    "no weight": lambda w: Update(weights=w, weight=0),
    "a word as weight": lambda w: Update(weights=w, weight="x"),  # type: ignore[arg-type]
    "too little": lambda w: Update(weights=w[:3]),
    "no numbers": lambda w: Update(weights=w[:0]),
    "infinity": lambda w: Update(weights=w / 0),
}


class Keeps(FedAvg):
    name: str = "bad_code:Keeps"
    way: str = ""

    def local_update(self, client: Client, weights: Any) -> Any:
        client.state = KEPT[self.way]
        return super().local_update(client, weights)


KEPT: dict[str, Any] = {
    "objects": {"x": object()},
    "a word": "x",
    "a lock": {"x": threading.Lock()},
    "functions": {"x": print},
}


# objectives


class NoMetrics(Classification):
    name: str = "bad_code:NoMetrics"

    def metrics(self, data: Any) -> Any:
        return ()


class TwoPrimary(Classification):
    name: str = "bad_code:TwoPrimary"

    def metrics(self, data: Any) -> Any:
        return tuple(Metric(name, name, primary=True) for name in ("a", "b"))


class ScoresWords(Classification):
    name: str = "bad_code:ScoresWords"

    def scores(self, totals: Any) -> Any:
        return {"accuracy": "good", "loss": None}


class TotalsRaise(Classification):
    name: str = "bad_code:TotalsRaise"

    def totals(self, outputs: Any, batch: Any) -> Any:
        raise ValueError("x")
