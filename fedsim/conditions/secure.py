"""Secure aggregation, simulated: the server adds up masked updates and learns their sum alone.

Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017,
the protocol of Figure 4 for an honest-but-curious server; and Bell et al., Secure Single-Server
Aggregation with (Poly)Logarithmic Overhead, CCS 2020, in which clients mask with neighbours only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from fedsim.config.registry import Config
from fedsim.data import ClientSplits
from fedsim.errors import ExperimentError, RunError
from fedsim.federation.cohort import Cohort, cohort_size, draw_cohort
from fedsim.federation.condition import ConditionOnMeans, Round
from fedsim.federation.context import RunSpec
from fedsim.federation.reduction import InvalidUpdate, Mean, NothingToReduce, Update, WeightedMean
from fedsim.federation.sums import CLIENT_LIMIT, ExactSum, add_scaled
from fedsim.federation.wire import nbytes
from fedsim.support.rng import keyed_rng, stream_key

ROUNDS = 4  # of messages between the clients and the server, for one sum
KEY = 32  # bytes of a public key (X25519), and of a share of a secret
ENCRYPTED = 12 + 2 * KEY + 16  # nonce, the shares of a key and of a seed, and tag (AES-GCM)
ENTRY = 16  # bytes of a masked entry: two integers of 64 bits
WEIGHT = ""  # the name of the sum of the weights among the vectors' names
_CHUNK = 1 << 14  # words masked at a time, so that they stay in the cache
_BLOCK = 16  # bytes of a block of AES
_ZEROS = memoryview(bytes(8 * _CHUNK))


class Words:
    """Random words of 64 bits: AES in counter mode of a key of 16 bytes, as in Bonawitz et al."""

    def __init__(self, key: bytes) -> None:
        self._cipher = Cipher(AES(key), CTR(bytes(_BLOCK))).encryptor()

    def next(self, count: int, buffer: NDArray[np.uint8]) -> NDArray[np.uint64]:
        """(count,) words, `_CHUNK` at most, which overwrite a `buffer_of_words`."""
        size = self._cipher.update_into(_ZEROS[: 8 * count], buffer.data)
        return buffer[:size].view(np.uint64)


def buffer_of_words() -> NDArray[np.uint8]:
    """A buffer for `Words.next`: the library wants a block more than it writes."""
    return np.empty(8 * _CHUNK + _BLOCK, np.uint8)


# A stream of random words, and whether it is added (1) or subtracted (-1).
Stream = tuple[int, Words]


class SecureSettings(Config):
    """Secure aggregation, simulated: the server learns the sum of the clients' updates alone.

    Each client writes its weight and weight·update as integers (two of 64 bits an entry; see
    `fedsim.federation.sums`) and adds random masks modulo 2^64: one of its own, and one with each
    of its d neighbours, which the one adds and the other subtracts. In the sum the pairwise
    masks cancel, and the server removes clients' own masks with seeds that it recovers from shares
    which their neighbours hold; likewise the pairwise masks of clients that have dropped out.
    Neighbours are all n − 1 other clients of a cohort, or a few that are drawn in each round.

    The masked integers are real, so the sum is that of a run without masks, to the bit, and so is
    the result hash, if blocks hold one client each: cohorts of up to 16, not trained in stacks.
    Larger blocks add their clients in floating point without masks, which rounds differently. (A
    weight below 1/16 is rounded to a multiple of 2^-56.)

    Keys and shares are simulated: all seeds follow from the experiment's, so anyone who knows it
    can remove the masks. Records of a run are taken from the clients unmasked.

    For one sum of m entries, the weight among them, a client with d neighbours sends and receives

    - 64 bytes and 64·d: two public keys;
    - 92·d and 92·d: encrypted shares of its secrets;
    - 16·m and ⌈(d + 1)/8⌉: the masked entries, and who of them has sent theirs;
    - 32·(d + 1) and nothing: a share for each, itself included.

    One that drops out sends and receives the first two. These bytes are in `bytes_up` and
    `bytes_down`; `protocol_bytes_up` and `protocol_bytes_down` are by how much they are more than
    without secure aggregation. `protocol_rounds` counts the four exchanges of each sum. The hash
    leaves out what the protocol adds.

    Args:
        graph: `complete`, in which all pairs of a cohort share a mask; or d, an even number of
            neighbours (Bell et al. 2020): the clients are in a ring, in random order, and each has
            d/2 neighbours on either side, so that it makes d + 1 masks instead of n. If dropouts
            cut the ring apart, the server could learn the sum of a part of the cohort; then the
            run ends.
        threshold: share of a client and its neighbours that must remain to recover its masks, two
            clients at least; otherwise the run ends.
        dropout: probability of each client to drop out after it has shared its secrets and before
            it sends the masked update.
    """

    graph: Literal["complete"] | Annotated[int, Field(ge=2, multiple_of=2)] = "complete"
    threshold: float = Field(0.6, gt=0, le=1)
    dropout: float = Field(0.0, ge=0, lt=1)

    @property
    def hides(self) -> frozenset[str]:
        """What of clients the server does not see."""
        return frozenset({"messages", "sizes", "data"})


class SecureAggregation(ConditionOnMeans):
    """Means of which the server learns the sums alone."""

    name: str = "secure_aggregation"
    columns: ClassVar[tuple[str, ...]] = ("protocol_rounds", "protocol_dropped")
    settings: SecureSettings

    @property
    def hides(self) -> frozenset[str]:
        return self.settings.hides

    def check(self, spec: RunSpec, splits: ClientSplits, network: nn.Module) -> None:
        share, K = spec.train.participation, len(splits)
        if cohort_size(share, K) < 2:
            raise ExperimentError(
                f"secure_aggregation: hides a client among others of its cohort, and "
                f"train.participation={share} of {K} clients samples one; {2 / K:g} samples two"
            )
        for t in range(1, spec.train.rounds + 1) if spec.without is not None else ():
            if len(draw_cohort(spec.seed, share, K, t, without=spec.without)) == 1:
                raise ExperimentError(
                    f"without.clients: leaves one client of the cohort of round {t}, and "
                    "secure_aggregation hides a client among others; raise train.participation"
                )

    def mean(self, round: Round, cohort: Cohort) -> WeightedMean:
        if len(cohort) < 2:
            raise RunError(
                f"round {round.t}: a cohort of {len(cohort)}, and secure_aggregation hides a "
                "client among others; raise train.participation"
            )
        purpose = f"secure_aggregation/{len(round.notes.get(self.name, ())) + 1}"
        lost = round.rng(f"{purpose}/dropout").random(len(cohort)) < self.settings.dropout
        masks = Masks(round.runner.seed, purpose, round.t, cohort.tolist(), self.settings.graph)
        dropped = frozenset(k for k, out in zip(masks.cohort, lost, strict=True) if out)
        round.note(self.name, len(dropped))
        return MaskedMean(masks, dropped, self.settings.threshold)

    def close(self, round: Round, ledger: dict[str, Any]) -> dict[str, float]:
        """The exchanges of the round's sums, and how many clients dropped out of them."""
        dropped = round.notes.get(self.name, [])
        return {"protocol_rounds": ROUNDS * len(dropped), "protocol_dropped": sum(dropped)}


class Masks:
    """The masks of one sum: streams of random words from the seeds that clients agree on.

    Args:
        seed: of the experiment.
        purpose: tells the sums of a round apart.
        graph: who masks with whom; see `SecureSettings`.

    Attributes:
        degree: d, with how many others each client shares a mask.
        complete: whether these are all others.
    """

    def __init__(
        self,
        seed: int,
        purpose: str,
        round: int,
        cohort: Sequence[int],
        graph: Literal["complete"] | int = "complete",
    ) -> None:
        self._seed, self._purpose, self._round, self.cohort = seed, purpose, round, tuple(cohort)
        others = len(cohort) - 1
        self.degree = min(graph, others) if isinstance(graph, int) else others
        self.complete = self.degree == others
        if not self.complete:
            order = keyed_rng(seed, f"{purpose}/graph", round).permutation(len(cohort))
            self._ring = [self.cohort[place] for place in order]
            self._place = {k: place for place, k in enumerate(self._ring)}

    def neighbours(self, k: int) -> list[int]:
        """The d clients that share a mask with client k."""
        if self.complete:
            return [other for other in self.cohort if other != k]
        place, n = self._place[k], len(self.cohort)
        steps = range(-(self.degree // 2), self.degree // 2 + 1)
        return [self._ring[(place + step) % n] for step in steps if step]

    def own(self, k: int) -> Stream:
        """The mask of client k alone."""
        return 1, self._stream("self", k)

    def pair(self, k: int, other: int) -> Stream:
        """What client k adds for its pair with another, which adds its negative."""
        first, second = sorted((k, other))
        return 1 if k == first else -1, self._stream(f"pair/{first}", second)

    def of(self, k: int) -> list[Stream]:
        """All that client k adds."""
        return [self.own(k), *(self.pair(k, other) for other in self.neighbours(k))]

    def left_in(self, sent: Collection[int]) -> list[Stream]:
        """What is left in the sum of those who have sent."""
        there = set(sent)
        halves = [(k, other) for k in sent for other in self.neighbours(k) if other not in there]
        return [*map(self.own, sent), *(self.pair(k, other) for k, other in halves)]

    def connect(self, sent: Collection[int]) -> bool:
        """Whether those who have sent are one part: no sum of fewer of them can be unmasked."""
        if self.complete or not sent:
            return True
        there, waiting = set(sent), [next(iter(sent))]
        while waiting:
            k = waiting.pop()
            if k in there:
                there.remove(k)
                waiting += self.neighbours(k)
        return not there

    def _stream(self, what: str, client: int) -> Words:
        return Words(stream_key(self._seed, f"{self._purpose}/{what}", self._round, client))


def add_masks(total: ExactSum, streams: Sequence[Stream], sign: int = 1) -> None:
    """Add the next words of each stream to a sum, modulo 2^64; subtract them if `sign` is -1."""
    buffer = buffer_of_words()
    for part in (total.high, total.low):
        words = part.view(np.uint64)
        for start in range(0, len(words), _CHUNK):
            chunk = words[start : start + _CHUNK]
            for own_sign, stream in streams:
                combine = np.add if own_sign == sign else np.subtract
                combine(chunk, stream.next(len(chunk), buffer), out=chunk)


class MaskedMean(WeightedMean):
    """The mean of updates that clients mask, each by itself, and the server adds up.

    What it holds of clients are sums of masked integers until `result` unmasks them; those that
    have `dropped` out send nothing.
    """

    def __init__(self, masks: Masks, dropped: frozenset[int], threshold: float) -> None:
        super().__init__()
        self.masks, self.dropped, self.threshold = masks, dropped, threshold
        self._silent: set[int] = set()  # have nothing to send, but hold shares of others
        self._unmasked_bytes: dict[int, int] = {}

    def check(self, message: Any) -> None:
        super().check(message)
        if message.weight >= CLIENT_LIMIT:
            raise InvalidUpdate(
                f"the update's weight is {message.weight:.3g}; with secure_aggregation, which "
                "masks weights as well, it must stay under 2^30"
            )

    def fold(self, id: int, message: Update, arguments: Mapping[str, Any]) -> None:
        super().fold(id, message, arguments)
        self._unmasked_bytes[id] = nbytes(message.vectors)
        if not message.vectors and id not in self.dropped:
            self._silent.add(id)

    def add(self, id: int, weight: float, vectors: Mapping[str, Tensor]) -> None:
        """Add what a client sends: its masked integers."""
        if id in self.dropped:
            return
        self.lengths[id] = {name: vector.numel() for name, vector in vectors.items()}
        self.wide |= {name for name, v in vectors.items() if v.dtype == torch.float64}
        streams = self.masks.of(id)
        sent = {WEIGHT: torch.ones(1), **vectors}
        for name in sorted(sent):
            values = add_scaled(None, sent[name].detach().reshape(-1), weight)
            masked = ExactSum.zeros(len(values))
            masked.add(values.cpu().numpy())
            add_masks(masked, streams)
            key = (name, len(values))
            if key in self.sums:
                self.sums[key].merge(masked)
            else:
                self.sums[key] = masked

    def merge(self, other: WeightedMean) -> None:
        super().merge(other)
        assert isinstance(other, MaskedMean)
        self._silent |= other._silent
        self._unmasked_bytes.update(other._unmasked_bytes)

    def overhead(self, id: int) -> tuple[int, int]:
        d = self.masks.degree
        up, down = 2 * KEY + d * ENCRYPTED, d * (2 * KEY + ENCRYPTED)
        if id in self.lengths or id in self._silent:
            entries = sum(self.lengths[id].values()) + 1 if id in self.lengths else 0
            up += ENTRY * entries + (d + 1) * KEY
            down += -(-(d + 1) // 8)
        return up - self._unmasked_bytes.get(id, 0), down

    def check_left(self) -> None:
        """Insist that the masks of those who have sent can be removed, and no fewer of them."""
        there = self.lengths.keys() | self._silent
        for k in self.masks.cohort[:1] if self.masks.complete else self.masks.cohort:
            group = [k, *self.masks.neighbours(k)]
            if self.lengths and self.lengths.keys().isdisjoint(group):
                continue  # the sum has no mask of this client
            left = len(there.intersection(group))
            least = max(2, math.ceil(self.threshold * len(group) - 1e-9))
            if left < least:
                around = "" if self.masks.complete else f" around client {k}"
                raise NothingToReduce(
                    f"{left} of {len(group)} clients{around} are left to unmask the sum, and "
                    f"secure_aggregation.threshold={self.threshold:g} takes {least}"
                )
        if len(self.lengths) == 1:
            raise NothingToReduce(
                "one client alone has sent an update, and the sum would be its own"
            )
        if not self.masks.connect(sorted(self.lengths)):
            raise NothingToReduce(
                "dropouts have cut the clients apart, so that the server could unmask the sum of "
                "a part of them; raise secure_aggregation.graph"
            )

    def result(self, arguments: Mapping[str, Any], failures: Mapping[int, str]) -> Mean:
        self.check_alike()
        self.check_left()
        sent = sorted(self.lengths)
        if not sent:
            return Mean({}, 0)
        streams = self.masks.left_in(sent)
        totals = {}
        for name, size in sorted(self.sums):
            totals[name] = self.sums[name, size].copy()
            add_masks(totals[name], streams, sign=-1)
        weight = float(totals.pop(WEIGHT).value()[0])
        if weight <= 0:
            raise NothingToReduce("no client of the cohort gave a contribution of any weight")
        vectors = {name: self.as_sent(name, total.value(weight)) for name, total in totals.items()}
        return Mean(vectors, len(sent), sent)
