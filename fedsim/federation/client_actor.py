"""The process of a client actor."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray

from fedsim.cluster.settings import EngineSettings
from fedsim.config.modules import enter
from fedsim.data import ClientSplits, Dataset
from fedsim.federation.context import RunSpec, WorkerContext
from fedsim.federation.engine import Block, limit_threads, pick_device
from fedsim.federation.reduction import Reduction
from fedsim.federation.worker import Call, Worker
from fedsim.support.hardware import Arithmetic

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


@dataclass(frozen=True)
class Introduction:
    """An actor's node and arithmetic.

    Attributes:
        arithmetic: what its rounding depends on.
        node: the id of its node.
        card: the GPU that it uses or shares, by Ray's id.
    """

    arithmetic: Arithmetic
    node: str
    card: str | None


class ClientActor:
    """A worker in an actor's process, which works in the folder of the command."""

    def __init__(
        self,
        settings: EngineSettings,
        spec: RunSpec,
        dataset: Dataset,
        splits: ClientSplits,
        folder: str,
    ) -> None:
        enter(folder)
        limit_threads(settings.cpus_per_actor)
        _keep_freed_memory()
        part = min(1.0, settings.gpus_per_actor)
        self._worker = Worker(WorkerContext(spec, dataset, splits, pick_device(settings), part))

    def introduce(self) -> Introduction:
        """Return once the actor has started."""
        context = ray.get_runtime_context()
        card = next(iter(context.get_accelerator_ids()["GPU"]), None)
        arithmetic = Arithmetic.of(self._worker.context.device)
        return Introduction(arithmetic, context.get_node_id(), card)

    def run_blocks(
        self,
        call: Call,
        blocks: Sequence[Block],
        with_sum: bool,
        names: Sequence[str],
        with_state: Sequence[int],
        states_apart: bool,
        *objects: Any,
    ) -> Any:
        """`Worker.run_blocks`, with Ray objects as top-level arguments so that Ray resolves them.

        Args:
            with_sum: also return the partial sum of the blocks.
            names: names of the arguments, which come first in `objects`.
            with_state: the clients whose kept states follow.
            states_apart: return changed states as separate objects, which stay on this node until
                they are needed, rather than in the result.

        Returns:
            The result of all blocks, followed by separate objects: the partial sum (`with_sum`)
            and each client's changed state or None (`states_apart`; the result then has empty
            states).
        """
        arguments = dict(zip(names, objects, strict=False))
        states = dict(zip(with_state, objects[len(names) :], strict=True))
        result = self._worker.run_blocks(call, blocks, arguments, states)
        apart: list[Any] = [self._worker.take_partial(call.serial)] if with_sum else []
        if states_apart:
            apart += [result.states.get(id) for block in blocks for id in block]
            result.states = {id: {} for id in result.states}  # whose states changed
        return [result, *apart] if apart else result

    def take_partial(self, serial: int) -> Reduction | None:
        return self._worker.take_partial(serial)

    def combine(self, call: Call, *partials: Reduction) -> Reduction:
        """Merge partial results of actors."""
        total = copy.deepcopy(call.reduction)
        for partial in partials:
            total.merge(partial)
        return total

    def choose_clients_per_step(self, *arguments: Any) -> tuple[int, str]:
        return self._worker.choose_clients_per_step(*arguments)


def _keep_freed_memory() -> None:
    """Keep freed memory in this process, because each training step allocates the same again.

    By default the C library returns much of it to the system, and pages have to be mapped again
    several thousand times a round.
    """
    with suppress(OSError, AttributeError):  # other C libraries have no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_TRIM_THRESHOLD, 1 << 28)  # bytes of freed memory to keep
        mallopt(M_MMAP_THRESHOLD, 1 << 25)  # mmap from this size (the maximum)
