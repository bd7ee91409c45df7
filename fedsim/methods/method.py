"""The base class of federated methods."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedsim.config.registry import Component, Registry
from fedsim.data import ClientSplits, Dataset
from fedsim.data.stored import AnyArray
from fedsim.errors import ExperimentError, RunError
from fedsim.explain import Explainer
from fedsim.federation import Client, Federation, NotCounted, Vector, client_function
from fedsim.methods.learns import Learns, Problem, check_fit
from fedsim.objectives.slices import mean_over_tasks
from fedsim.training import FlatModel, Train

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class State:
    """The server's state between rounds; methods that keep more subclass it.

    Fields hold arrays, numbers, strings, None, and dicts, lists and tuples of them, so that the
    state can be checkpointed after every round. Never change arrays in place.

    Attributes:
        weights: (size,) weights of the global network; (0,) if the model is not a network.
    """

    weights: Vector


S = TypeVar("S", bound=State)


class Method(Component, ABC, Generic[S]):
    """A federated algorithm: `init` and `round` on the server, and the client functions they call.

    The fields of a method are its hyper-parameters, which are the keys of the experiment's
    `method` section.

    Attributes:
        learns: the models, objectives and sequences of tasks that it can learn.
        has_global_model: whether the server obtains a global model.
        trains_clients: whether clients train the experiment's model.
        needs_labels: whether clients train on their labelled examples alone.
        exchanges_models: whether clients and server send each other weights of models, which
            `uplink` and `downlink` compress, `aggregation` averages and `adversaries` forge.
        takes_downlink: whether clients train from what arrives of the model, not from the model.
        private_by_example: whether DP-SGD in `Client.train` covers all that clients compute from
            their examples for training (`privacy.level=example`).
        adapts: how it trains the experiment's `adapters`, without which it is refused: `b`, with
            A as it is drawn; `both`; or `both, exactly`, in which case the server adds to the
            frozen weights. Empty if it needs none.
        stackable: whether clients train with `client.train`, so that a stack can have several.
        asynchronous: whether updates are aggregated as they arrive, in the time of `devices`.
    """

    name: str
    learns: ClassVar[Learns] = Learns()
    has_global_model: ClassVar[bool] = True
    trains_clients: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = True
    exchanges_models: ClassVar[bool] = True
    takes_downlink: ClassVar[bool] = True
    stackable: ClassVar[bool] = True
    asynchronous: ClassVar[bool] = False
    private_by_example: ClassVar[bool] = True
    adapts: ClassVar[Literal["", "b", "both", "both, exactly"]] = ""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.niche = bool(cls.adapts) or not cls.learns.any_network

    @abstractmethod
    def init(self, fed: Federation) -> S:
        """The server's state before the first round."""

    @abstractmethod
    def round(self, fed: Federation, state: S, t: int) -> S:
        """One communication round, t = 1, 2, ...: the server's next state.

        A pure function of the state: everything that later rounds need is in the returned state,
        or kept by the clients.
        """

    def evaluate(self, fed: Federation, state: S) -> None:
        """Record the scores of the global model on the central test set."""
        fed.log(**fed.evaluate(state.weights))

    def evaluate_clients(self, fed: Federation, state: S) -> None:
        """Record the scores of each client's `own_model` on its own test examples."""
        fed.each(self.local_test, range(fed.num_clients), **self.for_own_models(fed, state))

    @client_function("local_test")
    def local_test(self, client: Client, *_: Any, **given: Any) -> None:
        """(client) Evaluate its `own_model` on its own test examples."""
        client.evaluate(self.own_model(client, **given))

    def own_model(self, client: Client, *_: Any, **given: Any) -> Any:
        """(client) The model that a client predicts with after a round.

        Methods with personal models return these; by default it is the global model. It is what
        `evaluate.clients` tests, and what `explain.of: [personal]` explains. What a client has
        trained and sends is another one: `client.trained`.

        Args:
            given: see `for_own_models`; by default `weights`, those of the server's state.

        Returns:
            Weights (size,) of the experiment's network, another network, or arrays; None if the
            client has none yet.
        """
        return given["weights"]

    def for_own_models(self, fed: Federation, state: S) -> dict[str, Any]:
        """What `own_model` takes from the server, by name."""
        return {"weights": NotCounted(state.weights)}

    def updates_per_round(self, cohort: int) -> int:
        """How many updates a round averages if no client drops out; `cohort` clients take part."""
        return cohort

    def sent_part(self, model: FlatModel) -> NDArray[np.bool_] | None:
        """(size,) which of the model's weights clients send, if not all of them.

        Codecs and attacks look for batch norm's statistics among them, which they leave alone.
        """
        return None

    @property
    def keeps_models(self) -> bool:
        """Whether clients have personal models: `own_model` is not the global one."""
        return type(self).own_model is not Method.own_model

    @client_function("local_test")  # the same draws, so that it is the model that was tested
    def _keep(self, client: Client, **given: Any) -> None:
        """(client) Makes its `own_model`, to be explained."""
        client.trained = self.own_model(client, **given)

    def global_model(self, fed: Federation, state: S) -> Mapping[str, NDArray[Any]]:
        """The arrays of the global model by name, as stored in the run's `weights/`."""
        return fed.server.model.named_arrays(state.weights)

    def explainer(self) -> Explainer | None:
        """The default explainer of models of a run; unless overridden, the model's own."""
        return None

    def explained_clients(self, clients: pd.DataFrame) -> list[int]:
        """The clients whose models are explained by default; unless overridden, the global model.

        Args:
            clients: rows of clients.parquet up to the round in question.
        """
        return []

    def overview(self) -> Explainer | None:
        """The explainer of a run as a whole; None for the partition's, if it has one."""
        return None

    def check(self, train: Train) -> None:
        """Reject unsupported training settings, by an ExperimentError that says what is."""

    def check_hidden(self, hidden: Mapping[str, str]) -> None:
        """Reject sections that hide from the server what the method needs with these settings.

        Args:
            hidden: what is hidden, and by which section; see `Learns.asks`.
        """

    def check_fit(self, problem: Problem) -> None:
        """Reject models, objectives and tasks that it cannot learn, by naming methods that can."""
        check_fit(self.name, self.learns, problem, ((n, m.learns) for n, m in methods.items()))

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        """Reject unsupported data, partitions and networks, by a BadInput that says what is."""

    def pull(self, splits: ClientSplits) -> tuple[str, float] | None:
        """The strongest a of a term (a/2)·‖w − u‖² in a client's loss, and the key that sets it.

        Steps of SGD that diverge on it are refused before anything starts.
        """
        return None

    def extra_hash_inputs(self) -> list[AnyArray]:
        """Inputs of the result besides the data set, for the run's `data_hash`.

        A run is only resumed if they are unchanged.
        """
        return []


def check_rounds_left(key: str, before: int, train: Train) -> None:
    """Reject a number of rounds before sharing that leaves none for training the model.

    Args:
        key: the method's key that sets the number of rounds `before`.
    """
    least = before + 2
    if train.rounds < least:
        raise ExperimentError(
            f"method.{key}={before} and a round of sharing leave none of "
            f"train.rounds={train.rounds} for training the model; set train.rounds={least} or "
            "more"
        )


def log_means(fed: Federation, found: Iterable[Mapping[str, float]]) -> None:
    """Record the means of clients' scores; clients that sent none are left out.

    In continual learning, the means over the clients' tasks.
    """
    if fed.server.splits.sequence is not None:
        found = [mean_over_tasks(fed.server.recorded("tasks"))]
    scores = [own for own in found if own]
    if not scores and fed.server.loses_clients:
        return  # nobody has taken part yet
    if not scores:
        raise RunError(f"round {fed.round}: no client has a model: all were skipped")
    fed.log(**{name: math.fsum(own[name] for own in scores) / len(scores) for name in scores[0]})


methods: Registry[Method[Any]] = Registry("method", Method)  # type: ignore[type-abstract]
