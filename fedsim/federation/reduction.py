"""Reductions of the messages that a cohort's clients send back."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.federation.sums import CLIENT_LIMIT, ExactSum, add_scaled
from fedsim.federation.wire import nbytes, to_arrays
from fedsim.objectives import Totals, merged

Vector = NDArray[np.float32]
MOST_ADDED = 64  # clients added in floating point, within `CLIENT_LIMIT`


class InvalidUpdate(Exception):
    """A message that cannot be accepted.

    Attributes:
        client: who sent it; -1 if the context says so.
    """

    def __init__(self, problem: str, client: int = -1) -> None:
        super().__init__(problem)
        self.client = client


class DivergedUpdate(InvalidUpdate):
    """Numbers of a client that are NaN, infinite or too large, as when training diverges."""


class NothingToReduce(Exception):
    """No client has sent anything to reduce."""


class TooFewUpdates(NothingToReduce):
    """Fewer clients have answered than the result takes."""


class Update:
    """One client's contribution to a mean: named vectors and their weight.

    An update without vectors leaves the client out of the mean, as it has nothing to send.

    Args:
        weight: share in the mean, before normalisation; usually the number of samples.
        message: what the client sends beside, for the server to see as its own: arrays, tensors
            or numbers, or dicts and lists of them (`Mean.messages`).
        vectors: float tensors of any shape, the same names and shapes from every client. One
            named like an argument that the server sent to all, such as `weights`, is as long.
    """

    def __init__(self, *, weight: float = 1.0, message: Any = None, **vectors: Tensor) -> None:
        self.weight = float(weight)
        self.message = message
        self.vectors = vectors

    def with_vectors(self, vectors: Mapping[str, Tensor]) -> Update:
        """The same with other vectors."""
        return Update(weight=self.weight, message=self.message, **vectors)


def since_sent(result: Any, sent: Mapping[str, Any], arrived: Mapping[str, Any]) -> Any:
    """A reduced vector plus what a codec lost of that which clients started from.

    One convention for all methods: the server takes w + (mean of w_k − what arrived of w), so that
    an error of `downlink` is no step of the method.

    Args:
        result: of a reduction: a `Mean`, or nested dicts, with a vector under the name of an
            argument.
        sent, arrived: the arguments as the server has them, and as clients have received them.
    """
    if isinstance(result, Mean):
        vectors = since_sent(result.vectors, sent, arrived)
        return Mean(vectors, result.count, result.clients, result.messages)
    if not isinstance(result, Mapping):
        return result
    found = {}
    for name, value in result.items():
        before, after = sent.get(name), arrived.get(name)
        if before is after or not isinstance(before, np.ndarray):
            found[name] = since_sent(value, sent, arrived)
        elif isinstance(value, np.ndarray) and value.size == before.size:
            assert isinstance(after, np.ndarray)
            lost = before.reshape(-1).astype(np.float64) - after.reshape(-1)
            moved = value.reshape(-1) + lost
            found[name] = moved.astype(value.dtype).reshape(value.shape)
        else:
            found[name] = since_sent(value, sent, arrived)
    return found


class Reduction(ABC):
    """Reduces a cohort's messages: they are checked and folded by the workers, then merged.

    Passed to `Federation.reduce`. Each worker folds the messages of its clients into its own copy,
    and the server merges the copies. `merge` must not depend on the order, so that the result is
    independent of which worker computes what.

    Example:
        >>> class Median(Reduction):
        ...     def __init__(self):
        ...         self.sent = {}
        ...     def fold(self, id, message, arguments):
        ...         self.sent[id] = to_arrays(message)
        ...     def merge(self, other):
        ...         self.sent.update(other.sent)
        ...     def result(self, arguments, failures):
        ...         if not self.sent:
        ...             raise NothingToReduce("no client of the cohort sent a vector")
        ...         return np.median([self.sent[k] for k in sorted(self.sent)], axis=0)

    Attributes:
        stays: the copy stays with its worker until all blocks of a call are done, so that traffic
            grows with the number of workers, not of clients; otherwise each block sends its own
            copy.
        probes: for an empty cohort, run client 0 only to determine the shapes of the result;
            nothing else of it is kept.
    """

    stays: ClassVar[bool] = False
    probes: ClassVar[bool] = False

    def check(self, message: Any) -> None:
        """Reject an invalid message before any of it is folded.

        Raises:
            InvalidUpdate: the message cannot be accepted.
        """
        check_finite(message)

    def size(self, message: Any) -> int:
        """The size of the message in bytes, as sent over the network."""
        return nbytes(message)

    def overhead(self, id: int) -> tuple[int, int]:
        """(server) Bytes up and down of a client that a protocol takes beside messages."""
        return 0, 0

    @abstractmethod
    def fold(self, id: int, message: Any, arguments: Mapping[str, Any]) -> None:
        """(worker) Fold a client's message, in the order of its block.

        Args:
            arguments: what the server sent to all, by name: tensors on the worker's device.
        """

    def end_block(self) -> None:  # noqa: B027  # most have nothing to do
        """(worker) All clients of a block have been folded, or have failed."""

    @abstractmethod
    def merge(self, other: Any) -> None:
        """Merge another copy, with other clients' messages."""

    def forget(self) -> None:  # noqa: B027  # only those that probe
        """(server) Keep the shapes of what was folded and discard the values; see `probes`."""

    @abstractmethod
    def result(self, arguments: Mapping[str, Any], failures: Mapping[int, str]) -> Any:
        """(server) The result of all messages.

        Args:
            arguments: what the server sent to all, by name.
            failures: why clients were left out.

        Raises:
            NothingToReduce: there are no messages.
            InvalidUpdate: messages are incompatible.
        """


class Discard(Reduction):
    """Clients send nothing: they keep state, or report scalars."""

    def check(self, message: Any) -> None:
        pass

    def size(self, message: Any) -> int:
        return 0

    def fold(self, id: int, message: Any, arguments: Mapping[str, Any]) -> None:
        pass

    def merge(self, other: Discard) -> None:
        pass

    def result(self, arguments: Mapping[str, Any], failures: Mapping[int, str]) -> None:
        return None


class Gather(Reduction):
    """Each client's own message, by client in ascending order; tensors as arrays.

    Of an `Update`, all of whose vectors codecs encode, these by name.
    """

    def __init__(self) -> None:
        self.messages: dict[int, Any] = {}

    def check(self, message: Any) -> None:
        if isinstance(message, Update) and message.message is not None:
            raise InvalidUpdate("returns an Update with a message, which is for means")
        super().check(_content(message))

    def size(self, message: Any) -> int:
        return super().size(_content(message))

    def fold(self, id: int, message: Any, arguments: Mapping[str, Any]) -> None:
        self.messages[id] = to_arrays(_content(message))

    def merge(self, other: Gather) -> None:
        self.messages.update(other.messages)

    def result(self, arguments: Mapping[str, Any], failures: Mapping[int, str]) -> dict[int, Any]:
        return dict(sorted(self.messages.items()))


class MergeTotals(Reduction):
    """Merges totals of shards of a test set, by slice."""

    def __init__(self) -> None:
        self.shards: dict[int, Mapping[str, Totals]] = {}

    def check(self, message: Any) -> None:
        pass

    def fold(self, id: int, message: Any, arguments: Mapping[str, Any]) -> None:
        self.shards[id] = message

    def merge(self, other: MergeTotals) -> None:
        self.shards.update(other.shards)

    def result(
        self, arguments: Mapping[str, Any], failures: Mapping[int, str]
    ) -> dict[str, Totals]:
        shards = [self.shards[k] for k in sorted(self.shards)]
        names = dict.fromkeys(name for shard in shards for name in shard)
        return {name: merged(shard[name] for shard in shards if name in shard) for name in names}


class Mean:
    """A cohort's weighted mean of each vector that its clients sent, as attributes.

    Attributes:
        vectors: the means, by name.
        count: how many clients contributed: fewer than the cohort if some were skipped, or had
            nothing to send. With noise, which must not tell, the expected number.
        clients: who they are; empty with noise.
        messages: what clients sent beside, by client in ascending order; tensors as arrays.
    """

    def __init__(
        self,
        vectors: Mapping[str, Vector],
        count: float,
        clients: Iterable[int] = (),
        messages: Mapping[int, Any] | None = None,
    ) -> None:
        self.vectors = vectors
        self.count = count
        self.clients = frozenset(clients)
        self.messages = dict(sorted((messages or {}).items()))

    def __getattr__(self, name: str) -> Vector:
        try:
            return self.__dict__["vectors"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(f"no client sent '{name}'") from None


class WeightedMean(Reduction):
    """Σ_k weight_k·vector_k / Σ_k weight_k of each named vector of clients' updates: a `Mean`.

    Within a block contributions are added in client order, across blocks as fixed-point integers,
    so the result is the same bits in any order; see `fedsim.federation.sums`. It has 32 bits, or
    64 if clients sent 64.
    """

    stays: ClassVar[bool] = True

    def __init__(self) -> None:
        # Keyed by name and length, to detect clients that disagree.
        self.sums: dict[tuple[str, int], ExactSum] = {}
        self.weights: dict[int, float] = {}
        self.lengths: dict[int, dict[str, int]] = {}
        self.messages: dict[int, Any] = {}
        self.answered = False
        self.wide = set[str]()  # names of vectors that clients sent in 64 bits
        self._block: dict[str, Tensor] = {}
        self._added = 0

    def check(self, message: Any) -> None:
        if not isinstance(message, Update):
            raise InvalidUpdate(f"must return an Update, not {type(message).__name__}")
        weight, vectors, added = message.weight, message.vectors, self._block
        if not (math.isfinite(weight) and weight >= 0):
            raise InvalidUpdate(f"the update's weight is {weight}")
        check_finite(message.message)
        if vectors and added and vectors.keys() != added.keys():
            raise InvalidUpdate(
                f"sends {sorted(vectors)}, but earlier clients sent {sorted(added)}"
            )
        for name, vector in vectors.items():
            _check_range(name, vector.detach().reshape(-1), weight)
            if name in added and len(added[name]) != vector.numel():
                raise InvalidUpdate(
                    f"'{name}' has {vector.numel()} entries, that of clients before "
                    f"{len(added[name])}"
                )

    def size(self, message: Update) -> int:
        return nbytes(message.vectors) + nbytes(message.message)

    def fold(self, id: int, message: Update, arguments: Mapping[str, Any]) -> None:
        for name, vector in message.vectors.items():
            sent = arguments.get(name)
            if isinstance(sent, Tensor) and sent.numel() != vector.numel():
                raise InvalidUpdate(
                    f"'{name}' has {vector.numel()} entries, expected {sent.numel()}, as the "
                    "server sent; give a part another name"
                )
        self.answered = True
        if message.message is not None:
            self.messages[id] = to_arrays(message.message)
        if message.vectors:
            self.add(id, message.weight, message.vectors)

    def add(self, id: int, weight: float, vectors: Mapping[str, Tensor]) -> None:
        """Add a client's vectors to those of its block."""
        self.weights[id] = weight
        self.lengths[id] = {name: vector.numel() for name, vector in vectors.items()}
        for name, vector in vectors.items():
            if vector.dtype == torch.float64:
                self.wide.add(name)
            flat = vector.detach().reshape(-1)
            self._block[name] = add_scaled(self._block.get(name), flat, weight)
        self._added += 1
        if self._added == MOST_ADDED:
            self.end_block()

    def end_block(self) -> None:
        for name, total in self._block.items():
            key = (name, len(total))
            if key not in self.sums:
                self.sums[key] = ExactSum.zeros(len(total))
            self.sums[key].add(total.cpu().numpy())
        self._block, self._added = {}, 0

    def merge(self, other: WeightedMean) -> None:
        for key, part in other.sums.items():
            if key in self.sums:
                self.sums[key].merge(part)
            else:
                self.sums[key] = part.copy()
        self.weights.update(other.weights)
        self.lengths.update(other.lengths)
        self.messages.update(other.messages)
        self.answered |= other.answered
        self.wide |= other.wide

    def result(self, arguments: Mapping[str, Any], failures: Mapping[int, str]) -> Mean:
        self.check_alike()
        if not self.weights and (self.answered or not failures):
            return Mean({}, 0, (), self.messages)  # nobody had a vector to send
        weight = math.fsum(self.weights.values())  # exactly rounded, so independent of the order
        if weight <= 0:
            raise NothingToReduce("the weights of the cohort's updates sum to 0")
        sums = self.sums.items()
        vectors = {name: self.as_sent(name, sum.value(weight)) for (name, _), sum in sums}
        return Mean(vectors, len(self.weights), self.weights, self.messages)

    def as_sent(self, name: str, vector: NDArray[Any]) -> NDArray[Any]:
        """A vector in the 32 or 64 bits in which clients sent it."""
        return vector if name in self.wide else vector.astype(np.float32, copy=False)

    def check_alike(self) -> None:
        """Check that all clients sent vectors of the same names and lengths."""
        sent = dict(sorted(self.lengths.items()))
        for id, lengths in sent.items():
            first = next(iter(sent))
            if lengths != sent[first]:
                raise InvalidUpdate(
                    f"sends vectors of these lengths: {lengths}, client {first}: {sent[first]}",
                    id,
                )


def _content(message: Any) -> Any:
    return message.vectors if isinstance(message, Update) else message


def _check_range(name: str, vector: Tensor, weight: float) -> None:
    """Reject a vector (n,) that cannot be added exactly."""
    if vector.is_complex():
        raise InvalidUpdate(f"'{name}' has complex numbers")
    # The norm bounds every entry and is much faster to compute.
    if math.sqrt(float(torch.dot(vector, vector))) * max(weight, 1.0) < CLIENT_LIMIT:
        return
    low, high = (float(bound) for bound in torch.aminmax(vector))
    largest = max(-low, high)
    if not math.isfinite(largest):
        raise DivergedUpdate(_not_finite(f"'{name}'", math.isnan(low)))
    if largest * max(weight, 1.0) >= CLIENT_LIMIT:
        if largest >= weight:
            raise DivergedUpdate(f"values up to {largest:.3g} in '{name}'")
        raise InvalidUpdate(
            f"'{name}' is out of range: |value| up to {largest:.3g} with weight {weight:.3g}; "
            "weight × value must stay under 2^30"
        )


def check_finite(message: Any) -> None:
    """Reject nested arrays and tensors with NaN or infinite values.

    Raises:
        DivergedUpdate: it does.
    """
    if isinstance(message, Mapping):
        message = list(message.values())
    if isinstance(message, list | tuple):
        for part in message:
            check_finite(part)
    elif isinstance(message, Tensor):
        if message.is_floating_point() and not bool(torch.isfinite(message).all()):
            raise DivergedUpdate(_not_finite("its message", bool(message.isnan().any())))
    elif (
        isinstance(message, np.ndarray)
        and message.dtype.kind == "f"
        and not np.isfinite(message).all()
    ):
        raise DivergedUpdate(_not_finite("its message", bool(np.isnan(message).any())))


def _not_finite(where: str, is_nan: bool) -> str:
    return f"{'NaN' if is_nan else 'infinite'} values in {where}"
