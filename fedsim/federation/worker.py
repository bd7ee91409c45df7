"""Client work where it is carried out: in an actor, or in process."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.errors import ClientError, RunError
from fedsim.explain.rationales import OF, rationale_totals
from fedsim.federation.client import Client, Update
from fedsim.federation.context import WorkerContext
from fedsim.federation.sums import CLIENT_LIMIT, ExactSum
from fedsim.federation.wire import NotCounted, PerClient, nbytes, same, to_arrays, to_tensors
from fedsim.models.rationale import Rationaliser
from fedsim.privacy.central import clipped
from fedsim.rng import keyed_torch_rng
from fedsim.training import (
    Task,
    Trained,
    evaluate,
    evaluate_among,
    generator_state,
    in_words,
    lacks_memory,
    set_generator_state,
    train,
)

Sums = dict[tuple[str, int], ExactSum]  # by name and length of the vectors

MOST_ADDED = 64  # clients added in floating point: what `CLIENT_LIMIT` allows for
TEST_SHARD = 500  # examples of the central test set that are one unit of evaluation


@dataclass(frozen=True)
class Call:
    """One request of the server to a cohort.

    Attributes:
        function: the name of the client function.
        mode: what becomes of its results: added up, returned one by one, or nothing.
        round: t.
        serial: a number for the call, so that partial sums of an earlier one cannot mix in.
        clients_per_step: V, how many clients are trained at once.
    """

    function: str
    mode: Literal["mean", "gather", "each", "test"]
    round: int
    serial: int
    clients_per_step: int


@dataclass
class BlockResult:
    """What a block of clients leaves behind, apart from its part in the sums: each by client.

    Attributes:
        rows: what goes on record.
        failures: why a client was left out.
        weights: what an update counts with (mode «mean»).
        lengths: of the vectors of an update, by name (mode «mean»).
        items: messages (mode «gather»).
        states: kept states that changed.
        tasks: what was reported of a client's tasks.
        notices: lines for the user.
    """

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)
    lengths: dict[int, dict[str, int]] = field(default_factory=dict)
    items: dict[int, Any] = field(default_factory=dict)
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    tasks: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    notices: set[str] = field(default_factory=set)

    def take(self, other: BlockResult) -> None:
        """Add what another block left behind."""
        for part in fields(BlockResult):
            getattr(self, part.name).update(getattr(other, part.name))


class InvalidUpdate(Exception):
    """A message that cannot be accepted, in words for a person."""


class SharedInputMutated(InvalidUpdate):
    """What all clients share is no longer what it was: the run cannot go on."""


class SuspendForStack(BaseException):
    """A client function has come to where it trains, and waits for the others of its stack.

    Not an Exception, so that no client function catches it.
    """

    def __init__(self, task: Task, generator: Tensor) -> None:
        self.task, self.generator = task, generator


class StackedTrainer:
    """Trains one client of a stack.

    The function of each client of a stack is run up to where it trains. Then all are trained at
    once, and each is run again from its start: with the same inputs and random streams, so to the
    same point, where it finds its trained weights and goes on.

    Attributes:
        alone: train this client by itself after all.
        results: what training, and torch's generator, have come to so far.
        seconds: spent on this client in stacks.
    """

    def __init__(self, host: WorkerContext) -> None:
        self.alone = False
        self.seconds = 0.0
        self.results: list[tuple[Trained, Tensor]] = []
        self._host = host
        self._next = 0

    def rewind(self) -> None:
        """The client function starts anew."""
        self._next = 0

    def __call__(self, task: Task) -> Trained:
        if self.alone:
            return self._host.train(task)
        if self._next == len(self.results):
            raise SuspendForStack(task, generator_state(self._host.device))
        trained, generator = self.results[self._next]
        self._next += 1
        set_generator_state(generator, self._host.device)
        # As `train` would leave the network.
        self._host.model.load(trained.weights)
        self._host.model.module.train()
        return replace(trained, weights=trained.weights.clone())


class Worker:
    """Carries out blocks of client work, one client after another, on one model.

    A worker keeps nothing between calls but the sums of the call under way, which the engine
    collects at its end; whatever it loses can be computed again from the same inputs.

    Attributes:
        on_client_done: is shown each client after a client function, as that has left it.
    """

    def __init__(self, host: WorkerContext) -> None:
        self.host = host
        self.on_client_done: Callable[[Client], None] = lambda client: None
        self._serial = -1
        self._sums: Sums = {}
        self._sent: dict[str, Any] = {}  # the call's arguments
        self._shared: dict[str, Any] = {}  # those that came as `NotCounted`
        self._own: dict[str, Mapping[int, Any]] = {}  # those that came as `PerClient`

    def run_block(
        self,
        call: Call,
        block: Sequence[int],
        arguments: Mapping[str, Any],
        states: Mapping[int, Mapping[str, Any]],
    ) -> BlockResult:
        """Carry out a call for a block of clients, in the order given.

        Args:
            call: what is asked for.
            block: client ids; for mode «test», numbers of test shards.
            arguments: what the server sent to all, by the function's parameter names.
            states: kept states of those of the clients that have one.

        Raises:
            ClientError: a client failed and the experiment says `on_client_error: stop`.
        """
        if call.serial != self._serial:
            self._serial, self._sums = call.serial, {}
            self._sent, self._shared = (
                {
                    name: to_tensors(a.value if isinstance(a, NotCounted) else a, self.host.device)
                    for name, a in arguments.items()
                    if isinstance(a, NotCounted) is unsent and not isinstance(a, PerClient)
                }
                for unsent in (False, True)
            )
            self._own = {
                name: a.parts for name, a in arguments.items() if isinstance(a, PerClient)
            }
        if call.mode == "test":
            return BlockResult(rows={shard: self._test_shard(call, shard) for shard in block})
        result = BlockResult()
        sums: dict[str, Tensor] = {}
        for start in range(0, len(block), call.clients_per_step):
            together = block[start : start + call.clients_per_step]
            trainers = {id: StackedTrainer(self.host) for id in together}
            if len(together) == 1:
                trainers[together[0]].alone = True
            waiting: Sequence[int] = together
            while waiting:
                tasks = {}
                for id in waiting:
                    try:
                        trainers[id].rewind()
                        state = states.get(id, {})
                        self._run_client(id, call, state, trainers[id], sums, result)
                        if len(result.weights) % MOST_ADDED == 0:
                            self._convert(sums)
                    except SuspendForStack as reached:
                        tasks[id] = reached
                    except Exception as error:
                        self._failed(id, call, error, result)
                if tasks:
                    self._train_together(tasks, trainers, result)
                waiting = list(tasks)
        self._convert(sums)
        return result

    def _convert(self, sums: dict[str, Tensor]) -> None:
        """Move what was added up in floating point to the exact sums."""
        for name, total in sums.items():
            # By length as well, so that blocks that disagree can be told apart, and refused.
            key = (name, len(total))
            if key not in self._sums:
                self._sums[key] = ExactSum.zeros(len(total))
            self._sums[key].add(total.cpu().numpy())
        sums.clear()

    def _failed(self, id: int, call: Call, error: Exception, result: BlockResult) -> None:
        cause = str(error) if isinstance(error, InvalidUpdate) else _traceback(error)
        failure = ClientError(id, call.round, call.function, cause)
        if self.host.spec.train.on_client_error == "stop" or isinstance(error, SharedInputMutated):
            raise failure from None  # the cause holds the traceback, and pickles
        result.failures[id] = str(failure)

    def _train_together(
        self,
        waiting: Mapping[int, SuspendForStack],
        trainers: Mapping[int, StackedTrainer],
        result: BlockResult,
    ) -> None:
        """Train the clients of a stack; or note why each is to train by itself."""
        tasks = [reached.task for reached in waiting.values()]
        started = time.perf_counter()
        obstacle = self.host.obstacle or _different(tasks)
        if obstacle is None:
            before = generator_state(self.host.device)
            try:
                trained, generators = self.host.stack.train(
                    tasks, self.host.spec.train, [r.generator for r in waiting.values()]
                )
            except Exception as error:  # what vmap cannot do; or fails for one client as well
                if lacks_memory(error):
                    raise RunError(
                        f"no memory to train {len(tasks)} clients at once ({error}); "
                        "lower engine.clients_per_step"
                    ) from None
                obstacle = in_words(error)
            if not torch.equal(before, generator_state(self.host.device)):
                set_generator_state(before, self.host.device)
                obstacle = "gradient or perturb draws random numbers"
        if obstacle is not None:
            result.notices.add(f"clients are not stacked, but trained one by one: {obstacle}")
            for id in waiting:
                trainers[id].alone = True
            return
        seconds = (time.perf_counter() - started) / len(tasks)
        for id, outcome in zip(waiting, zip(trained, generators, strict=True), strict=True):
            trainers[id].results.append(outcome)
            trainers[id].seconds += seconds

    def _run_client(
        self,
        id: int,
        call: Call,
        state: Mapping[str, Any],
        train: StackedTrainer,
        sums: dict[str, Tensor],
        result: BlockResult,
    ) -> None:
        """Run the client function, and file what it returns, keeps and reports.

        Nothing is filed of a client that fails.
        """
        started = time.perf_counter()
        host = self.host
        kept_state = to_tensors(state, host.device)
        function = getattr(host.spec.functions, call.function)
        rng = getattr(function, "rng", call.function)
        client = Client(host, id, call.round, rng, kept_state, train)
        host.model.module.train()
        host.model.restrict_classes(host.labels(id, client.task))
        # Copies, so that no client sees what another did to them.
        arguments = to_tensors(self._sent, host.device)
        for name, parts in self._own.items():
            arguments[name] = to_tensors(parts.get(id), host.device)
        versions = _versions(self._shared)
        # Whatever draws from torch's own generator draws from this client's stream.
        with keyed_torch_rng(host.spec.seed, f"{rng}/torch", call.round, id, host.device):
            try:
                message = function(client, **arguments, **self._shared)
            finally:
                if _versions(self._shared) != versions:
                    raise SharedInputMutated(
                        "changes an argument that came as NotCounted; copy it first"
                    )
        self.on_client_done(client)
        kept = to_arrays(client.state)
        changed = not same(kept, state)
        if call.mode == "mean":
            _check(message, sums)
            vectors, weight = message.vectors, message.weight
            if host.spec.privacy is not None and vectors:
                vectors = clipped(vectors, self._sent, host.spec.privacy.clip)
                weight = 1.0
            if vectors:
                result.weights[id] = weight
                result.lengths[id] = {n: v.numel() for n, v in vectors.items()}
            for name, vector in vectors.items():
                if name not in sums:
                    sums[name] = torch.zeros(
                        vector.numel(), dtype=torch.float64, device=vector.device
                    )
                sums[name].add_(vector.detach().reshape(-1), alpha=weight)
            message = message.vectors
        elif call.mode == "gather":
            message = to_arrays(message)
            _check_finite(message)
            result.items[id] = message
        if changed:
            result.states[id] = kept
        if client.tasks:
            result.tasks[id] = client.tasks
        result.rows[id] = {
            **client.row,
            "samples": client.num_samples,
            "bytes_up": nbytes(message) if call.mode != "each" else 0,
            "seconds": time.perf_counter() - started + train.seconds,
        }

    def choose_clients_per_step(
        self, wanted: int | Literal["auto"], clients: Sequence[int], most: int
    ) -> tuple[int, str]:
        """V, how many clients to train at once, and why so in words for the log.

        For `auto`, plain local training of real clients is timed, alone and in stacks of 2, 4, 8
        ... up to `most`, one epoch each. A stack must be a tenth faster to be chosen.

        Args:
            wanted: `engine.clients_per_step`.
            clients: ids of clients to try it with.
            most: largest stack to try.
        """
        if self.host.obstacle is not None:
            return 1, f"clients are trained one by one: {self.host.obstacle}"
        if wanted != "auto":
            return wanted, f"{wanted} clients are trained at once, as asked for"
        settings = self.host.spec.train
        start = self.host.model.vector.clone()
        generator = generator_state(self.host.device)
        with_examples = [k for k in clients if len(self.host.splits.train[k])]

        def finish() -> float:
            if self.host.device.type == "cuda":
                torch.cuda.synchronize(self.host.device)
            return time.perf_counter()

        def seconds(V: int) -> float:  # of one client
            tasks = []
            for v in range(V):
                own = self.host.examples(
                    self.host.splits.train[with_examples[v % len(with_examples)]]
                )
                rng = np.random.default_rng(v)
                tasks.append(Task(start, own.x, own.y, settings.optimizer.lr, 1, rng))
            before = finish()
            if V == 1:
                train(self.host.model, tasks[0], settings)
            else:
                self.host.stack.train(tasks, settings, [generator] * V)
            return (finish() - before) / V

        times: dict[int, float] = {}
        for V in (2**i for i in range(most.bit_length())):
            try:
                times[V] = min(seconds(V) for _ in range(4))
            except Exception as error:
                if V == 1 or not lacks_memory(error):
                    raise
                break
            if times[V] > 2 * min(times.values()):
                break
        self.host.model.load(start)
        best = min(times, key=lambda V: times[V])
        chosen = best if times[best] < 0.9 * times[1] else 1
        measured = ", ".join(f"{V}: {1000 * t:.2f} ms" for V, t in times.items())
        return chosen, f"clients trained at once: {chosen}, as measured (a client in {measured})"

    def take_sums(self, serial: int) -> Sums:
        """Hand over the sums over the blocks of that call carried out since the last time."""
        if serial != self._serial:
            return {}
        sums, self._sums = self._sums, {}
        return sums

    def _test_shard(self, call: Call, shard: int) -> dict[str, Any]:
        part = slice(shard * TEST_SHARD, (shard + 1) * TEST_SHARD)
        examples = self.host.test_examples(part)
        model, stream = self.host.model, self.host.splits.stream
        model.load(self._sent["weights"])
        # For networks that draw in evaluation as well.
        with keyed_torch_rng(
            self.host.spec.seed, "test/torch", call.round, shard, self.host.device
        ):
            if stream is not None:
                found = evaluate_among(model, examples.x, examples.y, stream.kinds)
                return {f"{n}/{i}": v for i, own in enumerate(found) for n, v in own.items()}
            if not isinstance(model.module, Rationaliser):
                return {**evaluate(model, examples.x, examples.y)}
            marks, totals = self.host.test_marks(part), dict[str, Any]()
            for aspect, rows in self.host.test_aspects(part).items():
                own = rationale_totals(
                    *(model.module, examples.x[rows], examples.y[rows]),
                    None if marks is None else marks[rows],
                )
                totals |= {f"{aspect}{OF}{name}": total for name, total in own.items()}
            return totals


def _different(tasks: Sequence[Task]) -> str | None:
    """Why these cannot be trained as one stack, in words; None if they can."""
    first = tasks[0]
    if any(task.hooks != first.hooks for task in tasks):
        return "each client has functions of its own (loss, gradient, perturb), or another part"
    if any(task.context.keys() != first.context.keys() for task in tasks):
        return "the clients' contexts hold different vectors"
    if any(len(task.y) * task.epochs == 0 for task in tasks):
        return "a client has nothing to train on"
    return None


def _versions(tree: Any) -> list[int]:
    """How often each tensor of a nest was changed where it lies."""
    if isinstance(tree, Tensor):
        return [tree._version]
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [version for part in tree for version in _versions(part)]
    return []


def _check(update: Update, sums: dict[str, Tensor]) -> None:
    """Refuse what cannot be added, before any of it is."""
    if not isinstance(update, Update):
        raise InvalidUpdate(f"must return an Update, not {type(update).__name__}")
    if not (math.isfinite(update.weight) and update.weight >= 0):
        raise InvalidUpdate(f"the update's weight is {update.weight}")
    if update.vectors and sums and update.vectors.keys() != sums.keys():
        raise InvalidUpdate(
            f"sends {sorted(update.vectors)}, where clients before sent {sorted(sums)}"
        )
    for name, vector in update.vectors.items():
        low, high = (float(bound) for bound in torch.aminmax(vector.detach()))
        largest = max(-low, high)
        if not math.isfinite(largest):
            raise InvalidUpdate(_not_finite(f"'{name}'", math.isnan(low)))
        if largest * max(update.weight, 1.0) >= CLIENT_LIMIT:
            raise InvalidUpdate(
                f"'{name}' is out of range: |value| up to {largest:.3g} with weight "
                f"{update.weight:.3g}; weight × value must stay under 2^30"
            )
        if name in sums and len(sums[name]) != vector.numel():
            raise InvalidUpdate(
                f"'{name}' has {vector.numel()} entries, that of clients before {len(sums[name])}"
            )


def _check_finite(message: Any) -> None:
    if isinstance(message, Mapping):
        message = list(message.values())
    if isinstance(message, list | tuple):
        for part in message:
            _check_finite(part)
    elif (
        isinstance(message, np.ndarray)
        and message.dtype.kind == "f"
        and not np.isfinite(message).all()
    ):
        raise InvalidUpdate(_not_finite("its message", bool(np.isnan(message).any())))


def _not_finite(where: str, is_nan: bool) -> str:
    kind = "NaN" if is_nan else "infinite"
    return f"{kind} values in {where}; a smaller learning rate may help"


def _traceback(error: Exception) -> str:
    return "".join(traceback.format_exception(error)).rstrip()
