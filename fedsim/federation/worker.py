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
from torch import Tensor

from fedsim.errors import ClientError
from fedsim.federation.client import Client, Update
from fedsim.federation.host import Host
from fedsim.federation.sums import CLIENT_LIMIT, ExactSum
from fedsim.federation.wire import Unsent, nbytes, same, to_arrays, to_tensors
from fedsim.streams import torch_stream
from fedsim.training import evaluate

Sums = dict[tuple[str, int], ExactSum]  # by name and length of the vectors

TEST_SHARD = 500  # examples of the central test set that are one unit of evaluation


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
    """What a block of clients leaves behind, apart from its part in the sums: each by client.

    Attributes:
        rows: what goes on record.
        failures: why a client was left out.
        weights: what an update counts with (mode «mean»).
        lengths: of the vectors of an update, by name (mode «mean»).
        items: messages (mode «gather»).
        states: kept states that changed.
    """

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)
    lengths: dict[int, dict[str, int]] = field(default_factory=dict)
    items: dict[int, Any] = field(default_factory=dict)
    states: dict[int, dict[str, Any]] = field(default_factory=dict)


class _Refused(Exception):
    """A message that cannot be accepted, in words for a person."""


class Worker:
    """Carries out blocks of client work, one client after another, on one model.

    A worker keeps nothing between calls but the sums of the call under way, which the engine
    collects at its end; whatever it loses can be computed again from the same inputs.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self._serial = -1
        self._sums: Sums = {}
        self._arguments: dict[str, Any] = {}

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
                name: to_tensors(a.value if isinstance(a, Unsent) else a, self.host.device)
                for name, a in arguments.items()
            }
        if call.mode == "test":
            return BlockResult(rows={shard: self._test_shard(shard) for shard in block})
        result = BlockResult()
        sums: dict[str, Tensor] = {}
        for id in block:
            try:
                self._run_client(id, call, states.get(id, {}), sums, result)
            except Exception as error:
                cause = str(error) if isinstance(error, _Refused) else _traceback(error)
                failure = ClientError(id, call.round, call.function, cause)
                if self.host.setup.train.on_client_error == "stop":
                    raise failure from None  # the cause holds the traceback, and pickles
                result.failures[id] = str(failure)
        for name, total in sums.items():
            # By length as well, so that blocks that disagree can be told apart, and refused.
            key = (name, len(total))
            if key not in self._sums:
                self._sums[key] = ExactSum.zeros(len(total))
            self._sums[key].add(total.cpu().numpy())
        return result

    def _run_client(
        self,
        id: int,
        call: Call,
        state: Mapping[str, Any],
        sums: dict[str, Tensor],
        result: BlockResult,
    ) -> None:
        """Run the client function, and file what it returns, keeps and reports.

        Nothing is filed of a client that fails.
        """
        started = time.perf_counter()
        host = self.host
        client = Client(host, id, call.round, call.function, to_tensors(state, host.device))
        function = getattr(host.setup.functions, call.function)
        # Copies, so that no client sees what another did to them.
        arguments = to_tensors(self._arguments, host.device)
        # Whatever draws from torch's own generator draws from this client's stream.
        with torch_stream(host.setup.seed, f"{call.function}/torch", call.round, id, host.device):
            message = function(client, **arguments)
        kept = to_arrays(client.state)
        changed = not same(kept, state)
        if call.mode == "mean":
            _check(message, sums)
            for name, vector in message.vectors.items():
                if name not in sums:
                    sums[name] = torch.zeros(
                        vector.numel(), dtype=torch.float64, device=vector.device
                    )
                sums[name].add_(vector.detach().reshape(-1), alpha=message.weight)
            result.weights[id] = message.weight
            message = message.vectors
            result.lengths[id] = {name: vector.numel() for name, vector in message.items()}
        elif call.mode == "gather":
            message = to_arrays(message)
            _check_finite(message)
            result.items[id] = message
        if changed:
            result.states[id] = kept
        result.rows[id] = {
            **client.row,
            "samples": client.num_samples,
            "bytes_up": nbytes(message) if call.mode != "each" else 0,
            "seconds": time.perf_counter() - started,
        }

    def take_sums(self, serial: int) -> Sums:
        """Hand over the sums over the blocks of that call carried out since the last time."""
        if serial != self._serial:
            return {}
        sums, self._sums = self._sums, {}
        return sums

    def _test_shard(self, shard: int) -> dict[str, Any]:
        examples = self.host.test_examples(slice(shard * TEST_SHARD, (shard + 1) * TEST_SHARD))
        self.host.model.load(self._arguments["weights"])
        loss, right = evaluate(self.host.model, examples.x, examples.y)
        return {"loss_sum": loss, "right": right}


def _check(update: Update, sums: dict[str, Tensor]) -> None:
    """Refuse what cannot be added, before any of it is."""
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
        if name in sums and len(sums[name]) != vector.numel():
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
