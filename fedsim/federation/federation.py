"""What a method sees of the clients: sample a cohort, run a function on it, get results back."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedsim.data import ClientSplits, Dataset, TaskSequence
from fedsim.errors import ClientError, RunError
from fedsim.explain.rationales import aspect_scores
from fedsim.federation.client import Update, record, task_row
from fedsim.federation.context import Examples, RunSpec, Table, WorkerContext
from fedsim.federation.engine import Engine, Handle, Outcome
from fedsim.federation.sums import ExactSum
from fedsim.federation.wire import NotCounted, PerClient, nbytes, to_arrays
from fedsim.federation.worker import TEST_SHARD, Call
from fedsim.models import RuleModel
from fedsim.models.rationale import Rationaliser
from fedsim.privacy.central import Privacy, Release, reference
from fedsim.rng import keyed_rng
from fedsim.training import FlatModel, scores

Cohort = NDArray[np.int64]  # client ids, ascending
Vector = NDArray[np.float32]
CPU = torch.device("cpu")

# Columns of rounds.parquet that are filled for every round.
RESERVED = frozenset(
    {"round", "clients", "failed", "seconds"}
    | {"epsilon"}
    | {f"{kind}_{way}" for kind in ("bytes", "one_off", "total_bytes") for way in ("up", "down")}
)


class Mean:
    """A cohort's weighted mean of each vector that its clients sent, as attributes.

    Attributes:
        count: how many clients contributed: fewer than the cohort if some were skipped, or had
            nothing to send. Under `privacy`, which must not tell, the expected number.
        clients: who they are; empty under `privacy`.
    """

    def __init__(
        self, vectors: Mapping[str, Vector], count: float, clients: Iterable[int] = ()
    ) -> None:
        self._vectors = vectors
        self.count = count
        self.clients = frozenset(clients)

    def __getattr__(self, name: str) -> Vector:
        try:
            return self.__dict__["_vectors"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(f"no client sent '{name}'") from None


class Federation:
    """The clients, as a method sees them.

    A method's client functions are its own methods `f(self, client, **arguments)`. They run where
    the clients live, usually in another process, on copies of the arguments (but for `NotCounted`
    ones): what they change stays there. What a client is to keep goes into `client.state`.

    An engine does the work in blocks: a block is a list of clients that one worker goes through
    in order, and the unit of what is lost and run again.

    Args:
        spec: model, training settings and seed.
        dataset, splits: the data, and who holds which examples.
        engine: carries the clients' work out.
        clients_per_step: V, how many clients are trained at once.
        device: what the server computes on.

    Attributes:
        num_clients: K.
        num_classes: C.
        shape: of one input.
        features: the names of a table's inputs, if they have any.
        target: the name of what is predicted, if it has one.
        settings: the experiment's `train` section.
        round: t.
        model: the network in this process, for its layout and for training on the server.
        device: where `model` and the server's examples are.
    """

    def __init__(
        self,
        spec: RunSpec,
        dataset: Dataset,
        splits: ClientSplits,
        engine: Engine,
        clients_per_step: int = 1,
        device: torch.device = CPU,
    ) -> None:
        self.num_clients = len(splits)
        self.num_classes = spec.classes
        self.shape = spec.shape
        self.features, self.target = dataset.features, dataset.target
        self.settings = spec.train
        self.seed = spec.seed
        self.device = device
        self.round = 0
        self._host = WorkerContext(spec, dataset, splits, device)
        self._initial = self._host.model.weights()
        self._holdings = splits
        self._test_y = dataset.test_y
        self._shards = range(math.ceil(len(dataset.test_y) / TEST_SHARD))
        self._clients_per_step = clients_per_step
        self._engine = engine
        self._states: dict[int, Handle] = {}
        self._serial = 0
        self._setup_traffic = False
        self._privacy = spec.privacy
        self._sums: Counter[float] = Counter()
        self._record: dict[str, Any] = {}
        self._rows: dict[int, dict[str, Any]] = {}
        self._explained: list[dict[str, Any]] = []
        self._tasks: list[dict[str, Any]] = []

    # -- for methods ---------------------------------------------------------------------------

    def initial_weights(self) -> Vector:
        """(size,) the run's initial weights, the same for every method with the same seed."""
        return self._initial.copy()

    @property
    def model(self) -> FlatModel:
        return self._host.model

    def network(self, name: str, build: Callable[[], nn.Module]) -> FlatModel:
        """A further network on the server, such as a generator, with weights of the run's seed.

        Its weights are whatever was left in it: what a round trains belongs into the state.
        """
        return self._host.network(name, build)

    @property
    def server_data(self) -> Examples:
        """The server's own examples (`partition.server_fraction`)."""
        return self._host.examples(self._holdings.server)

    @property
    def labelled_data(self) -> Examples:
        """All clients' labelled examples together, for baselines that no federation could run."""
        self._insist_on_sums("reads the clients' examples")
        return self._host.examples(np.sort(self._holdings.train.values))

    @property
    def task(self) -> int:
        """Of a stream, the task that is learnt in this round, 0 ≤ task < T; else 0."""
        return self._host.task(self.round)

    @property
    def stream(self) -> TaskSequence | None:
        """The tasks of all clients, if they learn one after another."""
        return self._holdings.stream

    @property
    def labelled_table(self) -> Table:
        """All clients' labelled examples together, as rows of a table."""
        self._insist_on_sums("reads the clients' examples")
        return self._host.table(np.sort(self._holdings.train.values))

    @property
    def test_table(self) -> Table:
        """The central test set, as rows of a table."""
        return self._host.test_table

    @property
    def rules(self) -> RuleModel:
        """The experiment's rule model."""
        return self._host.spec.rules

    def tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        """An array as a tensor of its own on the server's device."""
        return torch.tensor(array, device=self.device)

    def prepare(self, x: NDArray[np.generic], y: NDArray[np.int64]) -> Examples:
        """Further examples (another data set's), scaled and normalised as the run's data are."""
        return self._host.prepare(x, y)

    def pixels(self) -> Vector:
        """(2, C, 1, 1) what pixels of 0 and of 1 are to the network: how images are normalised."""
        edges = np.zeros((2, self.shape[0], 1, 1), dtype=np.float32)
        edges[1] = 1
        return np.array(self.prepare(edges, np.zeros(2, dtype=np.int64)).x.cpu())

    def rng(self, purpose: str) -> np.random.Generator:
        """The server's random stream for one purpose in this round."""
        return keyed_rng(self.seed, f"server/{purpose}", self.round)

    @contextmanager
    def setup_traffic(self) -> Iterator[None]:
        """What is sent within is sent once a run: it is put on record apart, too."""
        self._setup_traffic = True
        try:
            yield
        finally:
            self._setup_traffic = False

    @property
    def num_samples(self) -> NDArray[np.int64]:
        """(K,) n_k, labelled training examples of each client."""
        self._insist_on_sums("reads how many examples each client holds")
        return self._samples

    @property
    def num_unlabelled(self) -> NDArray[np.int64]:
        """(K,) examples of each client whose labels it does not know."""
        self._insist_on_sums("reads how many examples each client holds")
        return self._holdings.unlabelled.lengths

    def sample(self, t: int) -> Cohort:
        """The clients that take part in round t, drawn without replacement.

        Under `privacy` each client is drawn by itself, so that their number varies.
        """
        poisson = self._privacy is not None
        return draw_cohort(self.seed, self.settings.participation, self.num_clients, t, poisson)

    def mean(
        self, function: Callable[..., Update], cohort: Sequence[int] | Cohort, **arguments: Any
    ) -> Mean:
        """Run a client function on a cohort and average the updates: Σ weight·vector / Σ weight.

        Contributions are added where they are computed, and the sum is the same bits in any
        order; see `fedsim.federation.sums`. Under `privacy` it is the noisy mean of
        `fedsim.privacy.central`.

        Args:
            function: a method of the running Method; takes a client and the arguments.
            cohort: client ids.
            arguments: what the server sends to every client of the cohort, counted as downlink
                unless wrapped in `NotCounted`; or to each its own part (`PerClient`). Arrays
                arrive as tensors on the client's device.

        Raises:
            ClientError: a client failed (`train.on_client_error: stop`).
            RunError: every client of the cohort was skipped, or their weights sum to 0.
        """
        if self._privacy is not None:
            return self._noisy_mean(self._privacy, function, cohort, arguments)
        outcome = self._call(function, "mean", cohort, arguments)
        if not outcome.weights and (outcome.rows or not outcome.failures):
            return Mean({}, 0)  # all that did not fail had nothing to send
        weight = math.fsum(outcome.weights.values())  # exactly rounded, so in any order the same
        if weight <= 0:
            raise RunError(
                f"round {self.round}: no client of the cohort gave a contribution of any weight"
                + _first(outcome)
            )
        mean = {
            name: (total.value() / weight).astype(np.float32)
            for (name, _), total in outcome.sums.items()
        }
        return Mean(mean, len(outcome.weights), outcome.weights)

    def gather(
        self, function: Callable[..., Any], cohort: Sequence[int] | Cohort, **arguments: Any
    ) -> dict[int, Any]:
        """Run a client function on a cohort and return each client's own message, by client.

        Messages are arrays, tensors or numbers, or dicts and lists of them; tensors come back as
        arrays. In ascending order of clients; those that were skipped are missing.
        """
        self._insist_on_sums(f"gathers what each client sends ({function.__name__})")
        return dict(sorted(self._call(function, "gather", cohort, arguments).items.items()))

    def average(self, models: Mapping[int, Vector]) -> Vector:
        """Σ_k n_k·w_k / Σ_k n_k of gathered models, by client: what `mean` would come to.

        To the bit where each block is of one client; otherwise but for a rounding.

        Raises:
            RunError: there is none, because every client was skipped; or one is out of range.
        """
        if not models:
            raise RunError(f"round {self.round}: no client of the cohort sent a model")
        total, samples = ExactSum.zeros(self.model.size), self._samples
        for k, w in models.items():
            try:
                total.add(samples[k] * w.astype(np.float64))
            except OverflowError:
                raise RunError(
                    f"round {self.round}: the model of client {k} has weights out of range; "
                    "a smaller learning rate may help"
                ) from None
        weight = int(samples[list(models)].sum())
        mean: Vector = (total.value() / weight).astype(np.float32)
        return mean

    def each(
        self, function: Callable[..., None], cohort: Sequence[int] | Cohort, **arguments: Any
    ) -> None:
        """Run a client function that sends nothing back: it keeps state, or reports scalars."""
        self._call(function, "each", cohort, arguments)

    def evaluate(self, weights: Vector) -> dict[str, float]:
        """The scores of a network on the central test set; see `fedsim.training.scores`.

        And of the words that it chooses, if it is of that kind; see `fedsim.explain.rationales`.

        Where clients learn tasks one after another, it chooses among the classes of each task,
        and the scores are the mean over the tasks that have been learnt, of all clients; those of
        each are put on record.

        The test set is cut into shards of a fixed size, which the engine spreads.
        """
        call = self._next_call("test", "test")
        blocks = [[shard] for shard in self._shards]
        arguments = {"weights": weights}
        _freeze(arguments)
        rows = self._engine.run(call, blocks, arguments, {}).rows
        names = rows[0].keys()
        totals = {name: math.fsum(row[name] for row in rows.values()) for name in names}
        if self.stream is None:
            if isinstance(self.model.module, Rationaliser):
                return aspect_scores(totals)
            return scores(totals, self._test_y)
        found = {}
        for i, labels in enumerate(self.stream.kinds):
            own = {name: totals[f"{name}/{i}"] for name in ("loss", "right")}
            found[labels] = scores(own, self._test_y[np.isin(self._test_y, labels)])
        for k, tasks in enumerate(self.stream.labels):
            for i, labels in enumerate(tasks):
                self._tasks.append(task_row(self.stream, k, i, self.task, found[labels]))
        return self.task_scores()

    def task_scores(self) -> dict[str, float]:
        """The mean of each score over the tasks that have been learnt, as put on record."""
        seen = [row for row in self._tasks if row["seen"]]
        if not seen:
            raise RunError(f"round {self.round}: no client has a model: all were skipped")
        return {
            name: math.fsum(row[name] for row in seen) / len(seen) for name in ("loss", "accuracy")
        }

    def log(self, **scalars: float | int | str) -> None:
        """Put scalars of this round on record, in rounds.parquet.

        Raises:
            ValueError: a name is taken by what is recorded of every round.
        """
        self._record.update(record(scalars, RESERVED))

    def explain(
        self, explainer: str, rows: Iterable[Mapping[str, float | int | str | None]]
    ) -> None:
        """Put explanations of this round on record, in explanations.parquet.

        Args:
            explainer: who explains; a column, like `round`.
            rows: what each explanation says in numbers and words.
        """
        columns = frozenset({"round", "explainer"})
        for row in rows:
            known = {"round": self.round, "explainer": explainer}
            self._explained.append({**known, **record(row, columns)})

    # -- for the loop of a run -----------------------------------------------------------------

    def begin_round(self, t: int) -> None:
        """Start the records of round t."""
        self.round, self._record, self._rows = t, {}, {}
        self._explained, self._tasks = [], []
        self._sums = Counter()

    @property
    def releases(self) -> list[Release]:
        """What was released with noise since `begin_round`."""
        return sorted(self._sums.items())

    def records(self) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
        """What was put on record since `begin_round`: of the round, and the rows of each table."""
        rows = [{"round": self.round, "client": k, **self._rows[k]} for k in sorted(self._rows)]
        tasks = [{"round": self.round, **row} for row in self._tasks]
        tables = {"clients": rows, "explanations": list(self._explained), "tasks": tasks}
        return dict(self._record), tables

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

    @property
    def _samples(self) -> NDArray[np.int64]:
        """(K,) labelled training examples that each client holds in this round."""
        return self._host.held_in(self.round).train.lengths

    def _noisy_mean(
        self,
        privacy: Privacy,
        function: Callable[..., Update],
        cohort: Sequence[int] | Cohort,
        arguments: Mapping[str, Any],
    ) -> Mean:
        """reference + (Σ_k clipped change + N(0, (zS)²)) / expected number of clients."""
        drawn = np.array_equal(cohort, self.sample(self.round))
        q = self.settings.participation if drawn else 1.0
        count = q * self.num_clients if drawn else float(len(cohort))
        if count == 0:
            raise RunError(f"round {self.round}: a mean of no clients")
        if len(cohort):
            outcome = self._call(function, "mean", cohort, arguments)
        else:  # client 0 shows what would be sent, and nothing is kept of it
            call = self._next_call(function.__name__, "mean")
            outcome = self._engine.run(call, [[0]], arguments, self._states)
        if not outcome.sums:
            raise RunError(
                f"round {self.round}: no client of the cohort sent anything to add noise to"
                + _first(outcome)
            )
        self._sums[q] += 1
        rng = self.rng(f"privacy/{self._sums.total()}")
        mean = {}
        for (name, size), total in sorted(outcome.sums.items()):
            noise = privacy.noise_multiplier * privacy.clip * rng.standard_normal(size)
            change = ((total.value() if len(cohort) else 0.0) + noise) / count
            sent = reference(to_arrays(arguments.get(name)), size)
            mean[name] = (sent + change).astype(np.float32)
        return Mean(mean, count)

    def _insist_on_sums(self, does: str) -> None:
        """Refuse what noise on sums does not cover."""
        if self._privacy is not None:
            raise RunError(
                f"the method {does}, which `privacy` does not cover: it covers sums alone"
            )

    def _next_call(self, function: str, mode: Literal["mean", "gather", "each", "test"]) -> Call:
        self._serial += 1
        return Call(function, mode, self.round, self._serial, self._clients_per_step)

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
        blocks = cut_blocks(cohort, self._samples[cohort], self._clients_per_step)
        _freeze(arguments)
        outcome = self._engine.run(call, blocks, arguments, self._states)
        if mode == "mean":
            _check_alike(call, outcome)
        self._states.update(outcome.states)
        for id in sorted(outcome.tasks):
            self._tasks += outcome.tasks[id]
        sent = sum(
            nbytes(v) for v in arguments.values() if not isinstance(v, NotCounted | PerClient)
        )
        own = [v.parts for v in arguments.values() if isinstance(v, PerClient)]
        failed = {id: {"error": why} for id, why in outcome.failures.items()}
        for id, row in {**outcome.rows, **failed}.items():
            known = self._rows.setdefault(id, {})
            # A client may work several times in a round: costs add up, the rest is the latest.
            down = sent + sum(nbytes(parts.get(id)) for parts in own)
            costs = {"bytes_up": row.get("bytes_up", 0), "bytes_down": down}
            if self._setup_traffic:
                costs |= {"one_off_up": costs["bytes_up"], "one_off_down": down}
            costs["seconds"] = row.get("seconds", 0.0)
            known.update({**row, **{name: known.get(name, 0) + c for name, c in costs.items()}})
        return outcome


def _first(outcome: Outcome) -> str:
    """How many clients failed, and why the first of them did, as the end of a sentence."""
    failed = [outcome.failures[id] for id in sorted(outcome.failures)]
    return f"; {len(failed)} failed, the first of them: {failed[0]}" if failed else ""


def _freeze(tree: Any) -> None:
    """Make arrays read-only: a state that was sent to clients must not change afterwards."""
    if isinstance(tree, np.ndarray):
        tree.flags.writeable = False
    elif isinstance(tree, NotCounted):
        _freeze(tree.value)
    elif isinstance(tree, PerClient):
        _freeze(tree.parts)
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


def draw_cohort(
    seed: int, participation: float, num_clients: int, t: int, poisson: bool = False
) -> Cohort:
    """The clients that take part in round t, drawn without replacement.

    Args:
        poisson: draw each client by itself with that probability, for `privacy`.
    """
    if poisson:
        chances = keyed_rng(seed, "cohort", t).random(num_clients)
        return np.flatnonzero(chances < participation)
    size = cohort_size(participation, num_clients)
    if size == num_clients:
        return np.arange(size)
    return np.sort(keyed_rng(seed, "cohort", t).choice(num_clients, size=size, replace=False))


def cut_blocks(
    cohort: Cohort, costs: NDArray[np.int64], clients_per_step: int = 1
) -> list[list[int]]:
    """Cut a cohort into blocks, the costliest first.

    The rule knows nothing of the cluster, because the sum within a block is rounded. Without
    stacks, blocks are of about equal cost: one client a block for cohorts of up to 16, then 16
    blocks, and from 128 clients on blocks of about eight. With stacks a block is a stack, of
    clients with about the same cost, so that as little as possible is padded.

    Args:
        cohort: (n,) client ids.
        costs: (n,) a client's cost, in any unit.
        clients_per_step: V, clients of a stack.

    Returns:
        Blocks of ascending ids.
    """
    order = np.lexsort((cohort, -costs))
    if clients_per_step > 1:
        stacks = np.array_split(cohort[order], max(1, math.ceil(len(cohort) / clients_per_step)))
        return [sorted(stack.tolist()) for stack in stacks if len(stack)]
    count = min(len(cohort), max(16, math.ceil(len(cohort) / 8)))
    blocks: list[list[int]] = [[] for _ in range(count)]
    load = [(0, b) for b in range(count)]  # a heap: the least loaded block first
    for i in order:
        total, b = heapq.heappop(load)
        blocks[b].append(int(cohort[i]))
        heapq.heappush(load, (total + int(costs[i]), b))
    loads = {b: total for total, b in load}
    return [sorted(blocks[b]) for b in sorted(loads, key=lambda b: (-loads[b], b))]
