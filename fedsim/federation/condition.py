"""Conditions: what an experiment says about how server and clients reach each other."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedsim.config.registry import Component, Registry
from fedsim.federation.cohort import Cohort
from fedsim.federation.reduction import Reduction, WeightedMean
from fedsim.federation.wire import sent_to_all
from fedsim.support.rng import keyed_rng
from fedsim.training import FlatModel, Trained, TrainingJob

Vector = NDArray[np.float32]
Shape = tuple[int, ...]
Layers = Mapping[int, Sequence[Shape]]  # see `trained_layers`

# What a method may ask for beside means of clients' updates, and means under which a client has
# the same weight whatever its data are.
Asked = Literal["messages", "sizes", "data", "weights"]


@dataclass(frozen=True)
class Exchange:
    """One request of the server to a cohort, on its way to the clients.

    Attributes:
        function: name of the client function.
        cohort: (n,) the clients.
        arguments: what the server sends, by name.
        reduction: of the clients' messages.
        saved: by how many bytes fewer the arguments are sent: those to all (None), and the parts
            of each client.
    """

    function: str
    cohort: Cohort
    arguments: Mapping[str, Any]
    reduction: Reduction
    saved: Counter[int | None] = field(default_factory=Counter)

    @property
    def to_all(self) -> dict[str, Any]:
        """What all clients receive, by name."""
        return sent_to_all(self.arguments)


@dataclass(frozen=True)
class Sent:
    """What a client sends, on its way to the server.

    Attributes:
        message: what its function returned: an `Update`, or what the method's reduction takes.
        size: bytes.
        received: what the server sent to all, as tensors by name.
        layers: see `trained_layers`.
        memory: what the condition keeps at this client for this function, by name.
    """

    message: Any
    size: int
    received: Mapping[str, Tensor]
    layers: Layers
    memory: Mapping[str, Any]


@dataclass
class Round:
    """A round on the server, as conditions see it.

    Attributes:
        t: its number.
        seed: the experiment's.
        num_clients: K.
        participation: share of the clients in a cohort.
        layers: see `trained_layers`.
        sample: the clients that take part.
        rows: the rows of clients.parquet so far, by client; conditions may add to them.
        notes: what conditions note until the round ends, by their names; those of clients
            (`Client.notes`) as pairs of the client and the note.
    """

    t: int
    seed: int
    num_clients: int
    participation: float
    layers: Callable[[], Layers]
    sample: Callable[[], Cohort]
    rows: Callable[[], dict[int, dict[str, Any]]]
    notes: dict[str, list[Any]] = field(default_factory=dict)

    def rng(self, purpose: str) -> np.random.Generator:
        """The server's random stream for one purpose in this round."""
        return keyed_rng(self.seed, f"server/{purpose}", self.t)

    def note(self, name: str, what: Any) -> int:
        """Note something; returns how often the condition has done so in this round."""
        self.notes.setdefault(name, []).append(what)
        return len(self.notes[name])


class Condition(Component):
    """What happens to requests and messages between server and clients.

    Conditions form a chain in ascending `order`: a request passes it from the first to the last,
    messages and results come back from the last to the first. Hooks do nothing by default. They
    keep nothing in the condition itself: on the server use `Round.notes` and the ledger, at the
    client `Sent.memory`.

    Sections of the experiment are conditions; your own are named in its list `conditions`.

    Attributes:
        name: the section of the experiment, or `package.module:Class`.
        order: place in the chain.
        hides: what of clients it hides from the server.
        independent_draws: whether each client is drawn for a cohort independently.
        columns: names of the columns of rounds.parquet that `close` returns.
        idle: what is missing if it never changes anything, such as "clients send no updates":
            then the run ends after its first round. By default it may have nothing to do.
        patient: it may have nothing to do before the last round.

    Example:
        >>> class Halved(Condition):
        ...     \"\"\"Only half of each vector's length arrives.\"\"\"
        ...     name: str = "my_module:Halved"
        ...     def sent(self, client, sent):
        ...         if not isinstance(sent.message, Update):
        ...             return sent
        ...         vectors = {n: v / 2 for n, v in sent.message.vectors.items()}
        ...         return replace(sent, message=sent.message.with_vectors(vectors))
    """

    name: str
    order: ClassVar[int] = 50
    columns: ClassVar[tuple[str, ...]] = ()
    independent_draws: ClassVar[bool] = False
    idle: ClassVar[str] = ""
    patient: ClassVar[bool] = False

    @property
    def hides(self) -> frozenset[str]:
        return frozenset()

    def outgoing(self, round: Round, exchange: Exchange) -> Exchange:
        """(server) The request as it goes out; the same object if nothing changes.

        Arguments and the reduction may be others; the cohort and the function stay.
        """
        return exchange

    def training(self, client: Any, job: TrainingJob) -> TrainingJob:
        """(client) Local training as it is carried out, if the method uses `Client.train`."""
        return job

    def trained(self, client: Any, job: TrainingJob, done: Trained) -> None:
        """(client) After local training; `client.notes` takes what the server's side counts."""

    def sent(self, client: Any, sent: Sent) -> Sent:
        """(client) The message as it arrives; the same object if nothing changes.

        Not called for functions that send nothing (`Federation.each`).

        Args:
            client: who sends; `client.rng` gives random streams.
        """
        return sent

    def incoming(self, round: Round, before: Exchange, after: Exchange, result: Any) -> Any:
        """(server) The result of the reduction, as the method gets it.

        Args:
            before, after: the request that `outgoing` got and returned.
        """
        return result

    def close(self, round: Round, ledger: dict[str, Any]) -> Mapping[str, float]:
        """(server) Columns of the round in rounds.parquet.

        Args:
            ledger: the condition's own, carried from round to round and saved in checkpoints.
        """
        return {}

    def planned(
        self, way: Literal["down", "up"], vector: Vector, layers: Layers, rng: np.random.Generator
    ) -> int | None:
        """The bytes of a vector on its way to or from clients; None if it does not change them."""
        return None


class ConditionOnMeans(Condition):
    """A condition that makes another mean of clients' updates: one of these in a run at most."""

    order: ClassVar[int] = 40
    idle: ClassVar[str] = "no updates are averaged"
    patient: ClassVar[bool] = True

    def outgoing(self, round: Round, exchange: Exchange) -> Exchange:
        if type(exchange.reduction) is not WeightedMean:
            return exchange
        return replace(exchange, reduction=self.mean(round, exchange.cohort))

    @abstractmethod
    def mean(self, round: Round, cohort: Cohort) -> WeightedMean:
        """(server) The reduction in place of the weighted mean of a cohort's updates."""


conditions: Registry[Condition] = Registry("condition", Condition)


def trained_layers(model: FlatModel, part: NDArray[np.bool_] | None) -> dict[int, list[Shape]]:
    """The shapes of the trained layers in vectors of weights, by the length of the vector.

    Vectors hold all weights, all parameters, or the part that the method sends. Parameters come
    first, and buffers are at the end.

    Args:
        part: (size,) which weights the method sends, if not all.
    """
    found = {}
    for sent in (
        np.ones(model.size, np.bool_),
        np.arange(model.size) < model.num_parameters,
        part,
    ):
        if sent is None:
            continue
        shapes, start = [], 0
        for shape in itertools.islice(model.shapes.values(), len(model.leaves)):
            end = start + math.prod(shape)
            inside = int(sent[start:end].sum())
            if inside:
                shapes.append(shape if inside == end - start else (inside,))
            start = end
        found[int(sent.sum())] = shapes
    return found
