"""Shared code of methods whose clients keep models of their own."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.errors import ExperimentError
from fedsim.federation import (
    Client,
    DivergedUpdate,
    Federation,
    NotCounted,
    Update,
    Vector,
    client_function,
)
from fedsim.methods.method import Method, State, log_means
from fedsim.training import FlatModel

S = TypeVar("S", bound=State)


class PersonalModels(Method[S]):
    """A method whose clients keep personal models, which `evaluate.clients` evaluates."""

    def keep_model(self, client: Client, weights: Tensor) -> None:
        """(client) Keep a personal model (size,), which must be finite."""
        if not torch.isfinite(weights).all():
            raise DivergedUpdate("NaN or infinite weights")
        client.state["weights"] = weights

    def own_model(self, client: Client, weights: Tensor) -> Tensor:
        """(client) Its personal model; `weights` if it keeps none yet."""
        own: Tensor = client.state.get("weights", weights)
        return own


class PersonalBesideGlobal(PersonalModels[State]):
    """FedAvg's rounds; clients also train personal models, which begin as the run's weights."""

    def init(self, fed: Federation) -> State:
        return State(weights=fed.initial_weights())

    def round(self, fed: Federation, state: State, t: int) -> State:
        initial = NotCounted(fed.initial_weights())
        mean = fed.mean(self.local_update, fed.sample(t), weights=state.weights, initial=initial)
        return replace(state, weights=mean.weights)

    def for_own_models(self, fed: Federation, state: State) -> dict[str, Any]:
        return {"weights": NotCounted(fed.initial_weights())}

    @abstractmethod
    def local_update(self, client: Client, weights: Tensor, initial: Tensor) -> Update:
        """(client) Its update of the global model; keeps its personal model, first `initial`."""


class PersonalModelsAlone(PersonalModels[S]):
    """Personal models without a global one.

    Scores on the central test set are means over the personal models of all clients that have
    been trained so far; this takes as many evaluations (`evaluate.every`).
    """

    has_global_model: ClassVar[bool] = False

    def evaluate(self, fed: Federation, state: S) -> None:
        given = self.for_own_models(fed, state)
        found = fed.gather(self.local_scores, range(fed.num_clients), **given)
        log_means(fed, found.values())

    @client_function("local_scores")
    def local_scores(self, client: Client, weights: Tensor) -> dict[str, float]:
        """(client) The scores of its personal model, if any, on the central test set."""
        if "weights" not in client.state:
            return {}
        return client.score(self.own_model(client, weights))

    def global_model(self, fed: Federation, state: S) -> dict[str, Vector]:
        """None: clients keep their models, which are in the last checkpoint."""
        return {}


class SharedPart(PersonalModelsAlone[State]):
    """A part of the weights is averaged over clients; the rest is each client's own.

    `State.weights` holds the shared part and, in the other places, the initial weights, with which
    a client's own part begins. Only the shared part is sent. A client's personal model is the
    current shared part with its own part: all scores are of this model.
    """

    @abstractmethod
    def sent_part(self, model: FlatModel) -> NDArray[np.bool_]:
        """(size,) which of the weights are shared."""

    def init(self, fed: Federation) -> State:
        return State(weights=fed.initial_weights())

    def round(self, fed: Federation, state: State, t: int) -> State:
        shared = self.sent_part(fed.server.model)
        mean = fed.mean(
            self.local_update,
            fed.sample(t),
            shared=state.weights[shared],
            initial=NotCounted(state.weights[~shared]),
        )
        weights = state.weights.copy()
        weights[shared] = mean.shared
        return State(weights=weights)

    @client_function("local_update")
    def local_update(self, client: Client, shared: Tensor, initial: Tensor) -> Update:
        """(client) The shared part, trained together with its own part, which it keeps."""
        inside = self._is_shared(client)
        weights = torch.empty(client.model.size, device=client.device)
        weights[inside], weights[~inside] = shared, initial
        trained = self.train(client, self.own_model(client, weights))
        self.keep_model(client, trained)
        return Update(shared=trained[inside], weight=self.weight(client))

    def train(self, client: Client, weights: Tensor) -> Tensor:
        """(client) Local training of both parts."""
        return client.train(weights)

    def weight(self, client: Client) -> float:
        """(client) What it counts in the mean."""
        return client.num_samples

    def own_model(self, client: Client, weights: Tensor) -> Tensor:
        own = client.state.get("weights")
        return weights if own is None else torch.where(self._is_shared(client), weights, own)

    def _is_shared(self, client: Client) -> Tensor:
        return torch.from_numpy(self.sent_part(client.model)).to(client.device)


def entries_of(model: FlatModel, modules: Iterable[str]) -> NDArray[np.bool_]:
    """(size,) which of the weights are parameters and buffers of these submodules."""
    inside = tuple(f"{name}." for name in modules)
    return np.concatenate(
        [np.full(math.prod(shape), n.startswith(inside)) for n, shape in model.shapes.items()]
    )


def check_modules(key: str, modules: Sequence[str], network: nn.Module) -> None:
    """Refuse submodules, named by a method's `key`, that a network lacks or that are all of it."""
    trained = [name for name, p in network.named_parameters() if p.requires_grad]
    for module in modules:
        if not any(name.startswith(f"{module}.") for name in trained):
            known = dict.fromkeys(name.rpartition(".")[0] for name in trained)
            raise ExperimentError(
                f"method.{key}: the model has no module '{module}' with parameters; it has "
                + ", ".join(name for name in known if name)
            )
    if all(name.startswith(tuple(f"{module}." for module in modules)) for name in trained):
        raise ExperimentError(
            f"method.{key}: all parameters of the model are in {', '.join(modules)}; leave some "
            "out"
        )
