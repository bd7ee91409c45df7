"""The interface of engines, which carry out client work, and the in-process engine."""

from __future__ import annotations

import copy
import os
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from threadpoolctl import ThreadpoolController

from fedsim.cluster.settings import EngineSettings
from fedsim.data import ClientSplits, Dataset
from fedsim.federation.client import Client
from fedsim.federation.context import RunSpec, WorkerContext
from fedsim.federation.reduction import Discard, Reduction
from fedsim.federation.stacking import StackedTrainer
from fedsim.federation.wire import to_tensors
from fedsim.federation.worker import BlockResult, Call, Worker

# A client's kept state as the server holds it: the state itself, or a reference.
Handle = Any
Block = Sequence[int]


def pick_device(settings: EngineSettings) -> torch.device:
    """The worker's device: a GPU if the experiment asks for one and one is available."""
    if settings.gpus_per_actor == 0 or not torch.cuda.is_available():
        return torch.device("cpu")
    # Without these two, some sums on a GPU depend on the order of its threads.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    return torch.device("cuda")


def limit_threads(count: int) -> Callable[[], None]:
    """Limit the threads of torch, NumPy and SciPy; their number can change the last bits.

    Returns:
        A function that restores the limits.
    """
    import scipy.linalg  # noqa: F401  # only what is loaded can be limited

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    limits = _libraries(len(sys.modules)).limit(limits=count, user_api="blas")

    def undo() -> None:
        limits.restore_original_limits()  # also those of OpenMP, which torch's are
        torch.set_num_threads(before)

    return undo


@lru_cache(maxsize=1)
def _libraries(modules: int) -> ThreadpoolController:
    """Those that compute in threads, after so many imports: looking for them takes 5 ms."""
    return ThreadpoolController()


@dataclass
class Outcome(BlockResult):
    """The results of all blocks of a call, with handles of kept states."""

    states: dict[int, Handle] = field(default_factory=dict)
    partial: Reduction = field(default_factory=Discard)


class Engine(ABC):
    """Carries out calls on blocks of clients, with results independent of place and order.

    Attributes:
        notices: lines for the user, such as a lost actor that was replaced.
    """

    def __init__(self) -> None:
        self.notices: deque[str] = deque()
        self._noticed: set[str] = set()

    def notice(self, lines: Iterable[str]) -> None:
        """Pass on workers' notices, each once per run."""
        self.notices.extend(sorted(set(lines) - self._noticed))
        self._noticed.update(lines)

    @abstractmethod
    def run(
        self,
        call: Call,
        blocks: Sequence[Block],
        arguments: Mapping[str, Any],
        states: Mapping[int, Handle],
    ) -> Outcome:
        """Carry out a call on every block.

        Raises:
            ClientError: a client failed.
            StateLost: a kept state that a client needs is gone.
        """

    @abstractmethod
    def server_device(self) -> torch.device:
        """The server's device, in this process."""

    @abstractmethod
    def choose_clients_per_step(self, clients: Sequence[int]) -> tuple[int, str]:
        """V, how many clients to train at once, and why; see `Worker`.

        Args:
            clients: a cohort to try it with.
        """

    @abstractmethod
    def fetch(self, handle: Handle) -> dict[str, Any]:
        """A kept state as arrays.

        Raises:
            StateLost: it is gone.
        """

    @abstractmethod
    def keep(self, state: Mapping[str, Any]) -> Handle:
        """A handle for a kept state (of a checkpoint)."""

    @abstractmethod
    def close(self) -> None:
        """Release the engine's resources."""


class LocalEngine(Engine):
    """All client work in this process, one block after another.

    Uses as many threads as an actor would.
    """

    def __init__(
        self, settings: EngineSettings, spec: RunSpec, dataset: Dataset, splits: ClientSplits
    ) -> None:
        super().__init__()
        self._settings = settings
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._undo_threads = limit_threads(settings.cpus_per_actor)
        self._worker = Worker(WorkerContext(spec, dataset, splits, pick_device(settings), 1.0))

    def on_client_done(self, callback: Callable[[Client], None]) -> None:
        """Call `callback` with each client after each client function."""
        self._worker.on_client_done = callback

    def client(self, id: int, round: int, state: Mapping[str, Any]) -> Client:
        """A client with its kept state, outside of any client function."""
        context = self._worker.context
        trainer = StackedTrainer(context)
        trainer.alone = True
        return Client(context, id, round, "", to_tensors(state, context.device), trainer, {})

    def run(
        self,
        call: Call,
        blocks: Sequence[Block],
        arguments: Mapping[str, Any],
        states: Mapping[int, Handle],
    ) -> Outcome:
        outcome = Outcome(partial=copy.deepcopy(call.reduction))
        result = self._worker.run_blocks(call, blocks, arguments, states)
        outcome.take(result)
        self.notice(result.notices)
        outcome.add_partial(self._worker.take_partial(call.serial))
        return outcome

    def server_device(self) -> torch.device:
        return self._worker.context.device

    def choose_clients_per_step(self, clients: Sequence[int]) -> tuple[int, str]:
        return self._worker.choose_clients_per_step(
            self._settings.clients_per_step, clients, len(clients)
        )

    def fetch(self, handle: Handle) -> dict[str, Any]:
        return dict(handle)

    def keep(self, state: Mapping[str, Any]) -> Handle:
        return state

    def close(self) -> None:
        self._undo_threads()
        # Loads libraries, which takes a second.
        if torch.are_deterministic_algorithms_enabled() != self._deterministic:
            torch.use_deterministic_algorithms(self._deterministic)
