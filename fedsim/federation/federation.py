"""What a method sees of the clients: sample a cohort, run a function on it, get results back."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim.data import Holdings
from fedsim.errors import ClientError, RunError
from fedsim.federation.client import Update, record
from fedsim.federation.engine import Engine, Handle, Outcome
from fedsim.federation.host import Setup
from fedsim.federation.wire import Unsent, nbytes
from fedsim.federation.worker import TEST_SHARD, Call
from fedsim.streams import numpy_stream
from fedsim.training import FlatModel

Cohort = NDArray[np.int64]  # client ids, ascending
Vector = NDArray[np.float32]

# Columns of rounds.parquet that are filled for every round.
RESERVED = frozenset(
    {"round", "clients", "failed", "seconds"}
    | {"bytes_up", "bytes_down", "total_bytes_up", "total_bytes_down"}
)


class Mean:
    """A cohort's weighted mean of each vector that its clients sent, as attributes.

    Attributes:
        count: how many clients contributed (fewer than the cohort if some were skipped).
    """

    def __init__(self, vectors: Mapping[str, Vector], count: int) -> None:
        self._vectors = vectors
        self.count = count

    def __getattr__(self, name: str) -> Vector:
        try:
            return self.__dict__["_vectors"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(f"no client sent '{name}'") from None


class Federation:
    """The clients, as a method sees them.

    A method's client functions are its own methods `f(self, client, **arguments)`. They run where
    the clients live, usually in another process, on copies of the arguments: what they change
    stays there. What a client is to keep goes into `client.state`.

    An engine does the work in blocks: a block is a list of clients that one worker goes through
    in order, and the unit of what is lost and run again.

    Args:
        setup: model, training settings and seed.
        holdings: who holds which examples.
        num_test: examples of the central test set.
        engine: carries the work out.

    Attributes:
        num_clients: K.
        model: the network in this process, for its layout and for training on the server.
    """

    def __init__(self, setup: Setup, holdings: Holdings, num_test: int, engine: Engine) -> None:
        self.num_clients = len(holdings)
        self.settings = setup.train
        self.seed = setup.seed
        self.model = FlatModel(setup.build_model(), torch.device("cpu"))
        self._samples = holdings.train.lengths
        self._shards = range(math.ceil(num_test / TEST_SHARD))
        self._num_test = num_test
        self._engine = engine
        self._states: dict[int, Handle] = {}
        self._round = 0
        self._serial = 0
        self._record: dict[str, Any] = {}
        self._rows: dict[int, dict[str, Any]] = {}

    # -- for methods ---------------------------------------------------------------------------

    def initial_weights(self) -> Vector:
        """(size,) the run's initial weights, the same for every method with the same seed."""
        return self.model.weights()

    @property
    def num_samples(self) -> NDArray[np.int64]:
        """(K,) n_k, labelled training examples of each client."""
        return self._samples

    def sample(self, t: int) -> Cohort:
        """The clients that take part in round t, drawn without replacement."""
        size = cohort_size(self.settings.participation, self.num_clients)
        if size == self.num_clients:
            return np.arange(size)
        rng = numpy_stream(self.seed, "cohort", t)
        return np.sort(rng.choice(self.num_clients, size=size, replace=False))

    def mean(
        self, function: Callable[..., Update], cohort: Sequence[int] | Cohort, **arguments: Any
    ) -> Mean:
        """Run a client function on a cohort and average the updates: Σ weight·vector / Σ weight.

        Contributions are added where they are computed, and the sum is the same bits in any
        order; see `fedsim.federation.sums`.

        Args:
            function: a method of the running Method; takes a client and the arguments.
            cohort: client ids.
            arguments: what the server sends to every client of the cohort, counted as downlink
                unless wrapped in `Unsent`. Arrays arrive as tensors on the client's device.

        Raises:
            ClientError: a client failed (`train.on_client_error: stop`).
            RunError: every client of the cohort was skipped.
        """
        outcome = self._call(function, "mean", cohort, arguments)
        weight = math.fsum(outcome.weights.values())  # exactly rounded, so in any order the same
        if weight <= 0:
            failed = [outcome.failures[id] for id in sorted(outcome.failures)]
            raise RunError(
                f"round {self._round}: no client of the cohort gave a contribution of any weight"
                + (f"; {len(failed)} failed, the first of them: {failed[0]}" if failed else "")
            )
        mean = {
            name: (total.value() / weight).astype(np.float32)
            for (name, _), total in outcome.sums.items()
        }
        return Mean(mean, len(outcome.weights))

    def gather(
        self, function: Callable[..., Any], cohort: Sequence[int] | Cohort, **arguments: Any
    ) -> dict[int, Any]:
        """Run a client function on a cohort and return each client's own message, by client.

        Messages are arrays, tensors or numbers, or dicts and lists of them; tensors come back as
        arrays. In ascending order of clients; those that were skipped are missing.
        """
        return dict(sorted(self._call(function, "gather", cohort, arguments).items.items()))

    def each(
        self, function: Callable[..., None], cohort: Sequence[int] | Cohort, **arguments: Any
    ) -> None:
        """Run a client function that sends nothing back: it keeps state, or reports scalars."""
        self._call(function, "each", cohort, arguments)

    def evaluate(self, weights: Vector) -> dict[str, float]:
        """loss (mean cross-entropy) and accuracy of a model on the central test set.

        The test set is cut into shards of a fixed size, which the engine spreads.
        """
        call = self._next_call("test", "test")
        blocks = [[shard] for shard in self._shards]
        arguments = {"weights": weights}
        _freeze(arguments)
        rows = self._engine.run(call, blocks, arguments, {}).rows
        loss = math.fsum(row["loss_sum"] for row in rows.values())
        right = sum(row["right"] for row in rows.values())
        return {"loss": loss / self._num_test, "accuracy": right / self._num_test}

    def log(self, **scalars: float | int | str) -> None:
        """Put scalars of this round on record, in rounds.parquet.

        Raises:
            ValueError: a name is taken by what is recorded of every round.
        """
        self._record.update(record(scalars, RESERVED))

    # -- for the loop of a run -----------------------------------------------------------------

    def begin_round(self, t: int) -> None:
        """Start the records of round t."""
        self._round, self._record, self._rows = t, {}, {}

    def records(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What was put on record since `begin_round`: of the round, and of each client."""
        rows = [{"round": self._round, "client": k, **self._rows[k]} for k in sorted(self._rows)]
        return dict(self._record), rows

    def states(self) -> dict[int, Handle]:
        """Handles of all kept client states. A state that changes gets a new handle."""
        return dict(self._states)

    def fetch(self, handle: Handle) -> dict[str, Any]:
        """A kept state itself."""
        return self._engine.fetch(handle)

    def restore(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Take the kept client states of a checkpoint, and forget all others."""
        self._states = {id: self._engine.keep(state) for id, state in states.items()}

    # -- within --------------------------------------------------------------------------------

    def _next_call(self, function: str, mode: Literal["mean", "gather", "each", "test"]) -> Call:
        self._serial += 1
        return Call(function, mode, self._round, self._serial)

    def _call(
        self,
        function: Callable[..., Any],
        mode: Literal["mean", "gather", "each"],
        cohort: Sequence[int] | Cohort,
        arguments: Mapping[str, Any],
    ) -> Outcome:
        """Run a call, commit the states that it changed, and merge its records."""
        cohort = np.asarray(cohort, dtype=np.int64)
        if len(np.unique(cohort)) < len(cohort):
            raise ValueError("a client occurs twice in the cohort: it can answer once a call")
        call = self._next_call(function.__name__, mode)
        blocks = cut_blocks(cohort, self._samples[cohort])
        _freeze(arguments)
        outcome = self._engine.run(call, blocks, arguments, self._states)
        if mode == "mean":
            _check_alike(call, outcome)
        self._states.update(outcome.states)
        sent = sum(nbytes(v) for v in arguments.values() if not isinstance(v, Unsent))
        failed = {id: {"error": why} for id, why in outcome.failures.items()}
        for id, row in {**outcome.rows, **failed}.items():
            known = self._rows.setdefault(id, {})
            # A client may work several times in a round: costs add up, the rest is the latest.
            costs = {
                "bytes_up": known.get("bytes_up", 0) + row.get("bytes_up", 0),
                "bytes_down": known.get("bytes_down", 0) + sent,
                "seconds": known.get("seconds", 0.0) + row.get("seconds", 0.0),
            }
            known.update(row, **costs)
        return outcome


def _freeze(tree: Any) -> None:
    """Make arrays read-only: a state that was sent to clients must not change afterwards."""
    if isinstance(tree, np.ndarray):
        tree.flags.writeable = False
    elif isinstance(tree, Unsent):
        _freeze(tree.value)
    elif isinstance(tree, Mapping):
        for part in tree.values():
            _freeze(part)
    elif isinstance(tree, list | tuple):
        for part in tree:
            _freeze(part)


def _check_alike(call: Call, outcome: Outcome) -> None:
    """Refuse to add up vectors that are not the same from every client."""
    sent = dict(sorted(outcome.lengths.items()))
    for id, lengths in sent.items():
        first = next(iter(sent))
        if lengths != sent[first]:
            cause = f"sends vectors of these lengths: {lengths}, client {first}: {sent[first]}"
            raise ClientError(id, call.round, call.function, cause)


def cohort_size(participation: float, num_clients: int) -> int:
    """How many clients a round samples: participation·K, rounded."""
    return round(participation * num_clients)


def cut_blocks(cohort: Cohort, costs: NDArray[np.int64]) -> list[list[int]]:
    """Cut a cohort into blocks of about equal cost, the costliest first.

    The rule knows nothing of the cluster, because the sum within a block is rounded: one client a
    block for cohorts of up to 16, then 16 blocks, and from 128 clients on blocks of about eight.

    Args:
        cohort: (n,) client ids.
        costs: (n,) a client's cost, in any unit.

    Returns:
        Blocks of ascending ids.
    """
    count = min(len(cohort), max(16, math.ceil(len(cohort) / 8)))
    blocks: list[list[int]] = [[] for _ in range(count)]
    load = [(0, b) for b in range(count)]  # a heap: the least loaded block first
    for i in np.lexsort((cohort, -costs)):
        total, b = heapq.heappop(load)
        blocks[b].append(int(cohort[i]))
        heapq.heappush(load, (total + int(costs[i]), b))
    loads = {b: total for total, b in load}
    return [sorted(blocks[b]) for b in sorted(loads, key=lambda b: (-loads[b], b))]
