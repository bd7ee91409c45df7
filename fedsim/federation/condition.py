"""Conditions: what an experiment says about how server and clients reach each other."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.config.registry import Component, Registry
from fedsim.data import ClientSplits
from fedsim.errors import RunError
from fedsim.federation.cohort import Cohort
from fedsim.federation.reduction import Reduction, Vector, WeightedMean
from fedsim.federation.wire import WAYS, NotCounted, PerClient, nbytes, sent_to_all
from fedsim.objectives import Metric, Totals
from fedsim.support.rng import keyed_rng
from fedsim.training import FlatModel, Train, Trained, TrainingJob

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
        told: what conditions tell their own side at a client, by their names and by client.
    """

    function: str
    cohort: Cohort
    arguments: Mapping[str, Any]
    reduction: Reduction
    saved: Counter[int | None] = field(default_factory=Counter)
    told: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)

    @property
    def to_all(self) -> dict[str, Any]:
        """What all clients receive, by name."""
        return sent_to_all(self.arguments)

    def tell(self, name: str, told: Mapping[int, Any]) -> Exchange:
        """The request, with what a condition tells its own side at clients."""
        return replace(self, told={**self.told, name: told})

    @cached_property
    def _bytes_to_all(self) -> int:
        apart = NotCounted | PerClient
        return sum(nbytes(v) for v in self.arguments.values() if not isinstance(v, apart))

    def bytes_down(self, client: int) -> int:
        """The bytes of the arguments that a client receives."""
        own = [v.parts for v in self.arguments.values() if isinstance(v, PerClient)]
        parts = sum(nbytes(each.get(client)) for each in own)
        return self._bytes_to_all + parts - self.saved.get(None, 0) - self.saved.get(client, 0)


@dataclass(frozen=True)
class Sent:
    """What a client sends, on its way to the server.

    Attributes:
        message: what its function returned: an `Update`, or what the method's reduction takes.
        size: bytes.
        received: what the server sent to all, as tensors by name.
        layers: see `trained_layers`.
        memory: what the condition keeps at this client for this function, by name; it keeps what
            it returns with `replace(sent, memory=…)`.
    """

    message: Any
    size: int
    received: Mapping[str, Tensor]
    layers: Layers
    memory: Mapping[str, Any]


@dataclass(frozen=True)
class Work:
    """What a call was for the clients.

    Attributes:
        costs: of those that answered or failed: `bytes_down`, `bytes_up`, `seconds`, what of the
            bytes is sent once or by a protocol; conditions may add columns of clients.parquet
            whose sums count.
        examples: on how many they trained, each pass counted.
        withdrawn: those that take no further part (`Withdrawn`): why, and the examples.
    """

    costs: dict[int, dict[str, float]]
    examples: Mapping[int, int]
    withdrawn: Mapping[int, tuple[str, int]]


class Runner(Protocol):
    """What conditions may use of the rounds of a run, on the server.

    Attributes:
        num_clients: K.
        seed, settings: the experiment's, and its `train` section.
        independent_draws: whether each client is drawn for a cohort independently.
        num_samples: (K,) labelled training examples that each client holds in this round.
        present: (K,) whether each client takes part in the federation (`without`).
        planned_bytes: of the model as it is sent to a client, and of the client's update.
        layers: see `trained_layers`.
        rows: the rows of clients.parquet so far, by client; conditions may add to them.
    """

    @property
    def num_clients(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def settings(self) -> Train: ...
    @property
    def independent_draws(self) -> bool: ...
    @property
    def num_samples(self) -> NDArray[np.int64]: ...
    @property
    def present(self) -> NDArray[np.bool_]: ...
    @property
    def planned_bytes(self) -> tuple[int, int]: ...
    @property
    def layers(self) -> Layers: ...
    @property
    def rows(self) -> dict[int, dict[str, Any]]: ...

    def draw(self, t: int, among: Cohort | None = None, over_selection: float = 1.0) -> Cohort:
        """A cohort, as `draw_cohort` draws it."""

    def sample(self, t: int) -> Cohort:
        """The clients that take part in round t."""

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What is made once in a run and process, by name."""

    def states(self) -> Mapping[int, Any]:
        """Clients that keep a state, and handles of these."""

    def ledger(self, name: str) -> dict[str, Any]:
        """What a condition carries from round to round; saved in checkpoints."""

    def run_unrecorded(
        self,
        function: str,
        clients: Sequence[int],
        arguments: Mapping[str, Any],
        told: Mapping[str, Mapping[int, Any]],
    ) -> Mapping[int, Mapping[str, Any]]:
        """Run a client function without recording or keeping anything; returns the notes."""

    def pieces(
        self, name: str, numbers: Sequence[int], arguments: Mapping[str, Any]
    ) -> dict[int, Any]:
        """Have workers carry out `Condition.piece` of a condition, by number."""

    def record(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows to a table of the round."""

    def notice(self, line: str) -> None:
        """Show the user a line, once in a run."""


@dataclass
class Round:
    """A round on the server, as conditions see it.

    Attributes:
        t: its number.
        runner: the rounds of the run.
        running: whether clients are at work; evaluation is no part of the protocol.
        cohort: the clients that take part, once they are drawn or chosen.
        kept: what conditions keep until the round ends, by their names.
        notes: what conditions note until the round ends, by their names; those of clients
            (`Client.notes`) as pairs of the client and the note.
    """

    t: int
    runner: Runner
    running: bool = False
    cohort: Cohort | None = None
    kept: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, list[Any]] = field(default_factory=dict)

    def rng(self, purpose: str) -> np.random.Generator:
        """The server's random stream for one purpose in this round."""
        return keyed_rng(self.runner.seed, f"server/{purpose}", self.t)

    def note(self, name: str, what: Any) -> int:
        """Note something; returns how often the condition has done so in this round."""
        self.notes.setdefault(name, []).append(what)
        return len(self.notes[name])


class Clock(Protocol):
    """Simulated time, for methods that do not wait for the slowest client.

    Attributes:
        now: seconds since the first round began, at the start of this round.
        loss: chance that a client's update never arrives.
        present: (K,) whether a client takes part in the federation; others never start.
        retry: seconds until a server that finds nobody looks again.
    """

    @property
    def now(self) -> float: ...
    @property
    def loss(self) -> float: ...
    @property
    def retry(self) -> float: ...
    @property
    def present(self) -> NDArray[np.bool_]: ...

    def online(self, now: float) -> NDArray[np.bool_]:
        """(K,) whether each client is online in this round, and at that time."""

    def planned_seconds(self, clients: Sequence[int] | Cohort) -> NDArray[np.float64]:
        """(n,) how long clients need for a round: the model both ways, and training."""

    def set_round_time(self, seconds: float) -> None:
        """Set the simulated time of this round; by default that of its slowest clients."""


class Withdrawn(BaseException):
    """A condition takes a client out of the round; nothing of its call is kept.

    Not an Exception, so that no client function catches it.

    Args:
        reason: a word for the column `dropped` of clients.parquet.
        examples: on how many it would have trained.
    """

    def __init__(self, reason: str, examples: int = 0) -> None:
        self.reason, self.examples = reason, examples


class ConditionFailed(RunError):
    """What a condition uses raised an exception at a client: the run cannot continue."""


@dataclass(frozen=True)
class Rehearsed:
    """A client function that was run without training.

    Attributes:
        client: afterwards; `client.examples` counts what it computes beside training as well.
        trained: on how many examples it would train, each pass counted.
        size: bytes that it would send.
    """

    client: Any
    trained: int
    size: int


class Condition(Component):
    """What happens to requests and messages between server and clients.

    Conditions form a chain in ascending `order`: a request passes it from the first to the last,
    messages (`sent`) and results (`incoming`) come back from the last to the first; other hooks
    are called in ascending order. Hooks do nothing by default. They keep nothing in the condition
    itself: on the server use `Round.kept`, `Round.notes` and the ledger, at the client
    `Sent.memory`.

    Sections of the experiment are conditions; your own are named in its list `conditions`.

    Attributes:
        name: the section of the experiment, or `package.module:Class`.
        order: place in the chain.
        hides: what of clients it hides from the server.
        independent_draws: whether each client is drawn for a cohort independently.
        columns: names of the columns of rounds.parquet that `close` returns.
        client_columns: names of the columns of clients.parquet that it adds to `Runner.rows`, or
            to `Client.row`, so that no method reports them.
        idle: what is missing if it never changes anything, such as "clients send no updates":
            then the run ends after the first round in which clients send something, or are not
            asked to. By default it may have nothing to do.
        patient: it may have nothing to do before the last round.
        loses_clients: clients, possibly all, may drop out of a round without an error.
        metrics: further scores of models, which `scores` returns.

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
    independent_draws: ClassVar[bool] = False
    idle: ClassVar[str] = ""
    patient: ClassVar[bool] = False
    loses_clients: ClassVar[bool] = False
    client_columns: ClassVar[tuple[str, ...]] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return ()

    @property
    def hides(self) -> frozenset[str]:
        return frozenset()

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return ()

    def check(self, spec: Any, splits: ClientSplits, network: nn.Module) -> None:
        """Refuse a run before it starts.

        Args:
            spec: the run's `RunSpec`: its method is `functions`.
            splits: the examples that each client holds.
            network: the run's model.

        Raises:
            ExperimentError: the condition cannot be met; the message names the key.
        """

    def clock(self, round: Round) -> Clock | None:
        """(server) Simulated time, if the condition has any."""
        return None

    def sample(self, round: Round) -> Cohort | None:
        """(server) The clients that take part in the round; None for those that are drawn.

        Raises:
            NobodyAnswers: nobody does.
        """
        return None

    def outgoing(self, round: Round, exchange: Exchange) -> Exchange:
        """(server) The request as it goes out, also in evaluation; the same if nothing changes.

        Arguments and the reduction may be others; the cohort and the function stay.
        """
        return exchange

    def begin(self, id: int, told: Any, rehearse: Callable[[], Rehearsed]) -> Any:
        """(client) Before its function; returns what `client.told` holds for this condition.

        Args:
            told: what `outgoing` has told this client; it is not called if that is nothing.
            rehearse: runs the function without training, under the conditions before this one.
        """
        return told

    def training(self, client: Any, job: TrainingJob) -> TrainingJob:
        """(client) Local training as it is carried out, if the method uses `Client.train`."""
        return job

    def trained(self, client: Any, job: TrainingJob, done: Trained) -> None:
        """(client) After local training; `client.notes` takes what the server's side counts."""

    def visited(self, client: Any) -> None:
        """(client) After it has trained on examples, counted in `client.examples`."""

    def sent(self, client: Any, sent: Sent) -> Sent:
        """(client) The message as it arrives; the same object if nothing changes.

        Not called for functions that send nothing (`Federation.each`).

        Args:
            client: who sends; `client.rng` gives random streams.
        """
        return sent

    def answered(self, client: Any, size: int) -> int:
        """(client) At the end of its work; returns how many bytes it sends in all.

        Args:
            size: bytes of its message and of what others send beside it.
        """
        return size

    def worked(self, round: Round, exchange: Exchange, work: Work) -> str | None:
        """(server) After a call, of evaluation too; returns why nobody answers, if nobody does.

        Then the round ends, and changes nothing.
        """
        return None

    def incoming(self, round: Round, before: Exchange, after: Exchange, result: Any) -> Any:
        """(server) The result of the reduction, as the method gets it.

        Args:
            before, after: the request that `outgoing` got and returned.
        """
        return result

    def evaluated(
        self, round: Round, model: Any, own_models: Callable[[], Mapping[str, Any]]
    ) -> None:
        """(server) After the models of a round were evaluated.

        Args:
            model: weights (size,), or the arrays of rules.
            own_models: returns what clients make their personal models from.
        """

    def close(self, round: Round, ledger: dict[str, Any]) -> Mapping[str, float]:
        """(server) Columns of the round in rounds.parquet.

        Args:
            ledger: the condition's own, carried from round to round and saved in checkpoints.
        """
        return {}

    def piece(self, context: Any, number: int, round: int, arguments: Mapping[str, Any]) -> Any:
        """(worker) A piece of work that is no client's; see `Runner.pieces`.

        Args:
            context: the worker's network and data.
        """
        raise NotImplementedError

    def totals(self, context: Any, network: nn.Module, part: slice) -> Totals:
        """(worker) Totals of a part of the test set, of the network that is evaluated."""
        return {}

    def scores(self, totals: Totals) -> dict[str, float]:
        """(server) The condition's `metrics`, from the sums of its totals."""
        return {}

    def manifest(self, dataset: Any) -> dict[str, Any]:
        """(server) Entries of the run's manifest."""
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


def planned_bytes(
    conditions: Iterable[Condition], seed: int, size: int, layers: Layers
) -> tuple[int, int]:
    """The bytes of a model on its way to a client, and of the client's update.

    Args:
        size: number of weights.
    """
    vector = keyed_rng(seed, "planned bytes").standard_normal(size).astype(np.float32)
    found = dict.fromkeys(WAYS, vector.nbytes)
    for way, condition in itertools.product(WAYS, conditions if size else ()):
        rng = keyed_rng(seed, "planned bytes/codec")
        planned = condition.planned(way, vector, layers, rng)
        found[way] = found[way] if planned is None else planned
    return found["down"], found["up"]


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
