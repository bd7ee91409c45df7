"""What a federated method is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.data import ClientSplits, Dataset
from fedsim.data.stored import AnyArray
from fedsim.errors import ExperimentError, RunError
from fedsim.explain import Explainer
from fedsim.federation import Client, Federation, NotCounted, Vector, client_function
from fedsim.methods.learns import Learns, Problem, check_fit
from fedsim.models import Rules
from fedsim.objectives.slices import mean_over_tasks
from fedsim.registry import Component, Registry
from fedsim.training import Train

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class State:
    """What the server keeps from round to round; methods that keep more extend it.

    Fields hold arrays, numbers, strings, None, and dicts, lists and tuples of them, so that every
    round can be a checkpoint. Arrays are never changed in place.

    Attributes:
        weights: (size,) the global network; (0,) where the model is none.
    """

    weights: Vector


S = TypeVar("S", bound=State)


class Method(Component, ABC, Generic[S]):
    """A federated algorithm: two functions on the server, and the client functions they call.

    The fields of a method are its hyper-parameters: the keys of the experiment's `method` section.

    Attributes:
        learns: which models, objectives and sequences of tasks it can learn.
        has_global_model: whether the server ends up with a model.
        trains_clients: whether clients train models of the experiment.
    """

    name: str
    learns: ClassVar[Learns] = Learns()
    has_global_model: ClassVar[bool] = True
    trains_clients: ClassVar[bool] = True

    @abstractmethod
    def init(self, fed: Federation) -> S:
        """The server's state before the first round."""

    @abstractmethod
    def round(self, fed: Federation, state: S, t: int) -> S:
        """One communication round, t = 1, 2, ...: the server's next state.

        Pure in the state: everything that later rounds need is in the state returned, or kept by
        the clients.
        """

    def evaluate(self, fed: Federation, state: S) -> None:
        """Put the state's scores on record: those of the global model on the central test set."""
        fed.log(**fed.evaluate(state.weights))

    def evaluate_clients(self, fed: Federation, state: S) -> None:
        """Put on record what the model is worth to each client, on its own test examples."""
        fed.each(self.local_test, range(fed.num_clients), weights=NotCounted(state.weights))

    @client_function("local_test")
    def local_test(self, client: Client, weights: Tensor) -> None:
        """(client) Evaluate on the client's own test examples."""
        client.evaluate(weights)

    @property
    def stackable(self) -> bool:
        """Whether clients train the model by `client.train`, so that many can in one stack."""
        return True

    def own_model(self, client: Client) -> nn.Module | Tensor | Rules | None:
        """(client) Its model as a client function has left it, for explanations.

        What it trained last; methods with personal models have these.

        Returns:
            Weights (size,) of the experiment's network, another network, or rules; None if it has
            not learnt yet.
        """
        trained: Tensor | Rules | None = client.trained
        return trained

    @property
    def keeps_models(self) -> bool:
        """Whether clients keep models of their own."""
        return type(self).own_model is not Method.own_model

    @client_function("keep")
    def _keep(self, client: Client) -> None:
        """(client) Nothing new: the model that it keeps stands for what it has trained."""
        client.trained = self.own_model(client)

    def global_model(self, fed: Federation, state: S) -> Mapping[str, NDArray[Any]]:
        """The arrays of the global model by name, as the run's `weights/` keep them."""
        return fed.model.named_arrays(state.weights)

    def explainer(self) -> Explainer | None:
        """What explains a model of a run, if nobody says what; by default what the model says."""
        return None

    def explained_clients(self, clients: pd.DataFrame) -> list[int]:
        """Whose models of a run are explained, if nobody says whose; by default the global one.

        Args:
            clients: rows of clients.parquet up to the round in question.
        """
        return []

    def overview(self) -> Explainer | None:
        """What shows a run as a whole; None for what the partition says, if anything."""
        return None

    def check(self, train: Train) -> None:
        """Refuse training settings that the method cannot work with.

        Raises:
            ExperimentError: with what would be right.
        """

    def check_privacy(self) -> None:
        """Refuse client-level differential privacy where settings of the method break it.

        Raises:
            ExperimentError: with what would be right.
        """

    def check_fit(self, problem: Problem) -> None:
        """Refuse what the method cannot learn.

        Raises:
            ExperimentError: with the names of the methods that can.
        """
        check_fit(self.name, self.learns, problem, ((n, m.learns) for n, m in methods.items()))

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        """Refuse data, partitions and networks that the method cannot work with.

        Called before anything starts.

        Raises:
            BadInput: with what would be right.
        """

    def extra_hash_inputs(self) -> list[AnyArray]:
        """What the result depends on besides the data set, for the run's `data_hash`.

        A run is only resumed on the same.
        """
        return []


def check_rounds_left(key: str, before: int, train: Train) -> None:
    """Refuse as many rounds before a round of sharing as leave none to train the model in.

    Args:
        key: of the method, which says how many rounds come `before`.

    Raises:
        ExperimentError: with how many rounds it takes.
    """
    least = before + 2
    if train.rounds < least:
        raise ExperimentError(
            f"method.{key}={before} and a round of sharing leave none of "
            f"train.rounds={train.rounds} to train the model in; it takes train.rounds={least} or "
            "more"
        )


def log_means(fed: Federation, found: Iterable[Mapping[str, float]]) -> None:
    """Put the means of clients' scores on record; those that sent none are left out.

    Where clients learn tasks one after another, the means over their tasks.

    Raises:
        RunError: no client has any.
    """
    if fed.splits.sequence is not None:
        fed.log(**mean_over_tasks(fed.recorded("tasks")))
        return
    scores = [own for own in found if own]
    if not scores:
        raise RunError(f"round {fed.round}: no client has a model: all were skipped")
    fed.log(**{name: math.fsum(own[name] for own in scores) / len(scores) for name in scores[0]})


methods: Registry[Method[Any]] = Registry("method", Method)  # type: ignore[type-abstract]
