"""Client work where it is carried out: in an actor, or in process."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.data import Dataset, Holdings
from fedsim.errors import ClientError
from fedsim.federation.client import Client, Examples, Update
from fedsim.federation.sums import CLIENT_LIMIT, ExactSum
from fedsim.federation.wire import Unsent, nbytes, to_arrays, to_tensors
from fedsim.models import Model
from fedsim.streams import torch_stream
from fedsim.training import FlatModel, Train, evaluate

TEST_SHARD = 500  # examples of the central test set that are one unit of evaluation


@dataclass(frozen=True)
class Setup:
    """What a worker needs to know besides the data. It travels once, when the worker starts."""

    model: Model
    train: Train
    seed: int
    # The object whose methods are the client functions; the Method, which this package never
    # imports.
    functions: Any
    shape: tuple[int, ...]
    classes: int

    def build_model(self) -> nn.Module:
        """The network with the run's initial weights, the same wherever it is built."""
        with torch_stream(self.seed, "init"):
            return self.model.build(self.shape, self.classes)


@dataclass(frozen=True)
class Call:
    """One request of the server to a cohort.

    Attributes:
        function: the name of the client function.
        mode: what becomes of its results: added up, returned one by one, or nothing.
        round: t.
        serial: a number for the call, so that partial sums of an earlier one cannot mix in.
    """

    function: str
    mode: Literal["mean", "gather", "each", "test"]
    round: int
    serial: int


@dataclass
class BlockResult:
    """What a block of clients leaves behind, apart from its part in the sums.

    Attributes:
        rows: a record for each client, by client.
        items: each client's message (mode «gather»), by client.
        states: kept states that changed, by client.
    """

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    items: dict[int, Any] = field(default_factory=dict)
    states: dict[int, dict[str, Any]] = field(default_factory=dict)


class _Refused(Exception):
    """A message that cannot be accepted, in words for a person."""


class Worker:
    """Carries out blocks of client work, one client after another, on one model.

    A worker keeps nothing between calls but the sums of the call under way, which the engine
    collects at its end; whatever it loses can be computed again from the same inputs.
    """

    def __init__(
        self, setup: Setup, dataset: Dataset, holdings: Holdings, device: torch.device
    ) -> None:
        self.setup, self.holdings, self.device = setup, holdings, device
        self.dataset = dataset
        self.model = FlatModel(setup.build_model(), device)
        self._serial = -1
        self._sums: dict[str, ExactSum] = {}
        self._arguments: dict[str, Any] = {}

    def examples(self, indices: NDArray[np.int64]) -> Examples:
        """Training examples by index."""
        return self._prepare(self.dataset.x[indices], self.dataset.y[indices])

    def _prepare(self, x: NDArray[np.generic], y: NDArray[np.int64]) -> Examples:
        inputs = torch.tensor(x, device=self.device)
        if inputs.dtype == torch.uint8:
            inputs = inputs.float() / 255
        if self.dataset.mean:
            per_channel = (-1, *[1] * (inputs.dim() - 2))
            mean = torch.tensor(self.dataset.mean, device=self.device).view(per_channel)
            std = torch.tensor(self.dataset.std, device=self.device).view(per_channel)
            inputs = (inputs - mean) / std
        return Examples(inputs, torch.tensor(y, device=self.device))

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
            self._arguments = {
                name: to_tensors(value.value if isinstance(value, Unsent) else value, self.device)
                for name, value in arguments.items()
            }
        if call.mode == "test":
            return BlockResult(rows={shard: self._test_shard(shard) for shard in block})
        result = BlockResult()
        sums: dict[str, Tensor] = {}
        for id in block:
            started = time.perf_counter()
            client = Client(
                self, id, call.round, call.function, to_tensors(states.get(id, {}), self.device)
            )
            before = _versions(client.state)
            try:
                message = getattr(self.setup.functions, call.function)(client, **self._arguments)
                if call.mode == "mean":
                    _check(message, sums)
                elif call.mode == "gather":
                    message = to_arrays(message)
                    _check_finite(message)
            except Exception as error:
                cause = str(error) if isinstance(error, _Refused) else _traceback(error)
                failure = ClientError(id, call.round, call.function, cause)
                if self.setup.train.on_client_error == "stop":
                    raise failure from None  # the cause holds the traceback, and pickles
                result.rows[id] = {"error": str(failure)}
                continue
            if call.mode == "mean":
                for name, vector in message.vectors.items():
                    sums[name].add_(vector.detach().reshape(-1), alpha=message.weight)
                client.row["weight"] = message.weight
                message = message.vectors
            elif call.mode == "gather":
                result.items[id] = message
            if _versions(client.state) != before:
                result.states[id] = to_arrays(client.state)
            result.rows[id] = {
                **client.row,
                "samples": client.num_samples,
                "bytes_up": nbytes(message) if call.mode != "each" else 0,
                "seconds": time.perf_counter() - started,
            }
        for name, total in sums.items():
            if name not in self._sums:
                self._sums[name] = ExactSum.zeros(len(total))
            self._sums[name].add(total.cpu().numpy())
        return result

    def take_sums(self, serial: int) -> dict[str, ExactSum]:
        """Hand over the sums over the blocks of that call carried out since the last time."""
        if serial != self._serial:
            return {}
        sums, self._sums = self._sums, {}
        return sums

    def _test_shard(self, shard: int) -> dict[str, Any]:
        part = slice(shard * TEST_SHARD, (shard + 1) * TEST_SHARD)
        examples = self._prepare(self.dataset.test_x[part], self.dataset.test_y[part])
        self.model.load(self._arguments["weights"])
        loss, right = evaluate(self.model, examples.x, examples.y)
        return {"loss_sum": loss, "right": right}


def _check(update: Update, sums: dict[str, Tensor]) -> None:
    """Refuse what cannot be added, before any of it is; make room for what is new."""
    if not isinstance(update, Update):
        raise _Refused(f"must return an Update, not {type(update).__name__}")
    if not (math.isfinite(update.weight) and update.weight >= 0):
        raise _Refused(f"the update's weight is {update.weight}")
    if sums and update.vectors.keys() != sums.keys():
        raise _Refused(f"sends {sorted(update.vectors)}, where clients before sent {sorted(sums)}")
    for name, vector in update.vectors.items():
        low, high = (float(bound) for bound in torch.aminmax(vector.detach()))
        largest = max(-low, high)
        if not math.isfinite(largest):
            raise _Refused(_not_finite(f"'{name}'", math.isnan(low)))
        if largest * max(update.weight, 1.0) >= CLIENT_LIMIT:
            raise _Refused(
                f"'{name}' is out of range: |value| up to {largest:.3g} with weight "
                f"{update.weight:.3g}; weight × value must stay under 2^30"
            )
        if name not in sums:
            sums[name] = torch.zeros(vector.numel(), dtype=torch.float64, device=vector.device)
        elif len(sums[name]) != vector.numel():
            raise _Refused(
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
        raise _Refused(_not_finite("its message", bool(np.isnan(message).any())))


def _not_finite(where: str, is_nan: bool) -> str:
    kind = "NaN" if is_nan else "infinite"
    return f"{kind} values in {where}; a smaller learning rate may help"


def _traceback(error: Exception) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def _versions(state: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Which objects a state holds, and how often each tensor was changed in place."""
    return {name: (id(value), getattr(value, "_version", 0)) for name, value in state.items()}
