"""Clients' devices: how fast they are, when they are online, and what fails.

A virtual clock follows from the devices alone: a client takes

    bytes down / download + examples trained on / speed + bytes up / upload

seconds for a call of the server, and a synchronous round as long as the slowest client of its
cohort. The clock decides nothing but who takes part, so results stay the same on any cluster.
Whether a client meets a deadline follows from what the method makes it compute and send.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fedsim.config.registry import Config
from fedsim.data.sources.files import ArrayUnpickler, reading
from fedsim.errors import DataError, ExperimentError
from fedsim.support.rng import keyed_rng
from fedsim.training import Train

BITS = 8
MBIT = 1e6 / BITS  # bytes
RETRY = 60.0  # seconds until a server that finds nobody looks again
TRAINING = 3.0  # forward and backward pass of an example, in forward passes

Clients = Sequence[int] | NDArray[np.int64]
Amount = NDArray[Any] | float  # one for each client, or the same for all

# Why a client that was sampled sends nothing.
Reason = Literal["dropout", "deadline", "surplus"]


# From the slowest to the fastest device, in any unit: beyond, times and energies are no floats.
RATES = (1e-30, 1e60)


def _is_rate(value: float) -> bool:
    return RATES[0] <= value <= RATES[1]


class LogNormal(Config):
    """A positive quantity that differs from client to client, drawn with the seed.

    Args:
        median: half of the clients have more.
        sigma: standard deviation of the logarithm; with 1, one client in six has less than
            median/2.7.
    """

    median: float = Field(gt=0)
    sigma: float = Field(ge=0, le=10)


class Power(Config):
    """What a device consumes, in watts.

    Args:
        training: while it trains.
        radio: while it sends or receives.
    """

    training: float = Field(3.0, ge=0)
    radio: float = Field(1.0, ge=0)


class Devices(Config):
    """Simulated devices: seconds and energy of every round, and who fails to finish it.

    `speed`, `download`, `upload`, and `power` are the same for all clients (a number), or drawn
    for each (`{median: 100, sigma: 1}`). Time is that of what clients compute and send.

    Args:
        speed: examples per second that a client trains on.
        download: bandwidth towards the client, in Mbit/s.
        upload: bandwidth towards the server, in Mbit/s.
        capacity_trace: a file of measured devices in FedScale's layout instead, a pickle or JSON
            of `{key: {computation: ms for inference of one example, communication: kbit/s}}`;
            training takes three times as long as inference. Client k is the k-th device, in
            ascending order of keys, starting over after the last.
        available: chance that a client is online in a round; only those online are sampled.
        availability_trace: a file that says when devices are online, in FedScale's layout instead,
            a pickle or JSON of `{key: {active: [seconds], inactive: [seconds], finish_time:
            seconds}}`: device `key` is online from `active[i]` to `inactive[i]`, and begins again
            after `finish_time`.
        dropout: chance that a sampled client fails after training, and sends nothing.
        packet_error: chance that an upload is lost; unlike `dropout`, the client keeps its own
            state.
        deadline: seconds after which a round ends; clients that need longer do not count.
        partial_work: clients that would miss the deadline train on as many batches as they can
            before it instead; each training of a method that has several gets the same share.
        over_selection: factor by which more clients are sampled than a round needs; the slowest do
            not count. The order is that of plain local training in the first round, and follows
            from the work of the round before in later ones.
        power: what a device consumes, in watts.

    Source:
        Bonawitz et al., Towards Federated Learning at Scale (MLSys 2019), for deadlines and
        over-selection; Lai et al., FedScale (ICML 2022), for the traces.
    """

    speed: float | LogNormal = Field(100.0)
    download: float | LogNormal = Field(20.0)
    upload: float | LogNormal = Field(5.0)
    capacity_trace: Path | None = None
    available: float = Field(1.0, gt=0, le=1)
    availability_trace: Path | None = None
    dropout: float = Field(0.0, ge=0, lt=1)
    packet_error: float = Field(0.0, ge=0, lt=1)
    deadline: float | None = Field(None, gt=0)
    partial_work: bool = False
    over_selection: float = Field(1.0, ge=1, le=10)
    power: Power = Power()

    @model_validator(mode="after")
    def _fits_together(self) -> Devices:
        quantities = ("speed", "download", "upload")
        for name in quantities:
            value = getattr(self, name)
            least = value.median if isinstance(value, LogNormal) else value
            if not _is_rate(least):
                words = f"{{name}} must be above 0, {RATES[0]:g} or more"
                raise PydanticCustomError("positive", words, {"name": name})
        for trace, keys in (
            ("capacity_trace", quantities),
            ("availability_trace", ("available",)),
        ):
            fields = type(self).model_fields
            twice = [key for key in keys if getattr(self, key) != fields[key].default]
            if getattr(self, trace) is not None and twice:
                raise PydanticCustomError(
                    "twice",
                    "{trace} says what {key} says; leave one of them out",
                    {"trace": trace, "key": twice[0]},
                )
        if self.partial_work and self.deadline is None:
            raise PydanticCustomError("deadline", "partial_work needs a deadline")
        return self


@dataclass(frozen=True)
class Selection:
    """Who takes part in a round.

    Attributes:
        kept: clients that take part, ascending.
        dropped: why others of the sample do not.
        lost: clients whose upload is lost.
        waited: seconds that the round lasts at least, because the server waits for somebody.
    """

    kept: NDArray[np.int64]
    dropped: Mapping[int, Reason]
    lost: frozenset[int]
    waited: float = 0.0


@dataclass(frozen=True)
class Allowance:
    """What a client's device can do until the deadline of a round.

    Attributes:
        seconds: left when it has received what the server sends.
        speed: examples per second.
        upload: bytes per second.
    """

    seconds: float
    speed: float
    upload: float

    def examples(self, up: int = 0) -> int:
        """On how many it can train and still send so many bytes; below 0 for none at all."""
        return math.floor((self.seconds - up / self.upload) * self.speed * (1 + 1e-12))

    def covers(self, examples: int, up: int) -> bool:
        """Whether it can train on so many examples and send so many bytes."""
        return examples / self.speed + up / self.upload <= self.seconds * (1 + 1e-12)


class Fleet:
    """The devices of a run's clients.

    Attributes:
        speed: (K,) examples per second.
        download, upload: (K,) bytes per second.
    """

    def __init__(self, settings: Devices, num_clients: int, seed: int) -> None:
        self.settings, self.seed = settings, seed
        if settings.capacity_trace is None:
            self.speed = self._quantity("speed", num_clients)
            self.download = self._quantity("download", num_clients) * MBIT
            self.upload = self._quantity("upload", num_clients) * MBIT
        else:
            found = read_capacities(settings.capacity_trace)
            of_clients = found[np.arange(num_clients) % len(found)]
            self.speed = 1000 / (TRAINING * of_clients[:, 0])
            self.download = self.upload = of_clients[:, 1] * 1000 / BITS
        self._trace = None
        if settings.availability_trace is not None:
            self._trace = read_availability(settings.availability_trace)

    def _quantity(self, name: str, num_clients: int) -> NDArray[np.float64]:
        value = getattr(self.settings, name)
        if not isinstance(value, LogNormal):
            return np.full(num_clients, float(value))
        rng = keyed_rng(self.seed, f"devices/{name}")
        drawn: NDArray[np.float64] = value.median * np.exp(
            value.sigma * rng.standard_normal(num_clients)
        )
        for drawn_rate in (drawn.min(), drawn.max()):
            if not _is_rate(drawn_rate):
                raise ExperimentError(
                    f"devices.{name}: {drawn_rate:.3g} is drawn, and devices have from "
                    f"{RATES[0]:g} to {RATES[1]:g}; lower devices.{name}.sigma"
                )
        return drawn

    def online(self, t: int, clock: float) -> NDArray[np.bool_]:
        """(K,) whether each client is online in round t, `clock` seconds after the first began."""
        K = len(self.speed)
        if self._trace is not None:
            online = [device.online(clock) for device in self._trace]
            return np.array(online)[np.arange(K) % len(online)]
        return self._happens("online", t, self.settings.available)

    def seconds(
        self, clients: Clients, examples: Amount, down: Amount, up: Amount
    ) -> NDArray[np.float64]:
        """(n,) what clients need to receive, to train on so many examples, and to send.

        Args:
            examples: passes over the data count each.
            down, up: bytes.
        """
        k = np.asarray(clients, dtype=np.int64)
        moved: NDArray[np.float64] = down / self.download[k] + up / self.upload[k]
        return moved + examples / self.speed[k]

    def joules(
        self, clients: Clients, examples: Amount, down: Amount, up: Amount
    ) -> NDArray[np.float64]:
        """(n,) energy for the same, in joules."""
        k = np.asarray(clients, dtype=np.int64)
        power = self.settings.power
        radio: NDArray[np.float64] = power.radio * self.seconds(k, 0.0, down, up)
        return radio + power.training * examples / self.speed[k]

    def select(
        self,
        sampled: NDArray[np.int64],
        wanted: int,
        t: int,
        examples: NDArray[np.float64],
        down: float,
        up: float,
    ) -> Selection:
        """Who of a round's sample takes part: the fastest of those that do not fail.

        Args:
            sampled: (n,) clients, ascending.
            wanted: how many the round needs; the slowest beyond them are surplus.
            examples: (n,) that each is expected to train on.
            down, up: bytes that it is expected to receive and to send.
        """
        settings, dropped = self.settings, dict[int, Reason]()
        fails = self._happens("dropout", t, settings.dropout)[sampled]
        dropped |= dict.fromkeys(sampled[fails].tolist(), "dropout")
        planned = self.seconds(sampled, examples, down, up)
        waited = 0.0
        kept = np.array([k not in dropped for k in sampled.tolist()], dtype=bool)
        by_time = np.lexsort((sampled, planned))
        surplus = by_time[kept[by_time]][wanted:]
        dropped |= dict.fromkeys(sampled[surplus].tolist(), "surplus")
        kept[surplus] = False
        if settings.deadline is not None and kept.sum() < wanted and len(dropped):
            waited = settings.deadline  # for those that never come
        lost = self._happens("packet error", t, settings.packet_error)[sampled[kept]]
        return Selection(sampled[kept], dropped, frozenset(sampled[kept][lost].tolist()), waited)

    def allowances(
        self, clients: Sequence[int], left: float, down: Sequence[float]
    ) -> dict[int, Allowance]:
        """What clients can do in the seconds `left`, which receiving `down` bytes shortens."""
        return {
            k: Allowance(
                left - moved / float(self.download[k]), float(self.speed[k]), float(self.upload[k])
            )
            for k, moved in zip(clients, down, strict=True)
        }

    def _happens(self, purpose: str, t: int, chance: float) -> NDArray[np.bool_]:
        """(K,) whether it happens to each client in round t."""
        K = len(self.speed)
        if chance in (0, 1):  # nothing to draw, a million times a round
            return np.full(K, chance == 1)
        return keyed_rng(self.seed, f"devices/{purpose}", t).random(K) < chance


def planned_examples(train: Train, samples: NDArray[np.int64]) -> NDArray[np.float64]:
    """(n,) on how many examples clients with so many train in a round, each pass counted."""
    if train.local_steps is None:
        return samples.astype(np.float64) * train.local_epochs
    return np.minimum(samples, train.batch_size) * float(train.local_steps)


@dataclass(frozen=True)
class Availability:
    """When a device is online, in seconds; it begins again after `period`."""

    active: NDArray[np.float64]
    inactive: NDArray[np.float64]
    period: float

    def online(self, clock: float) -> bool:
        """Whether it is online at that time."""
        now = clock % self.period
        i = int(np.searchsorted(self.active, now, side="right")) - 1
        return i >= 0 and bool(now <= self.inactive[i])


def read_capacities(path: Path) -> NDArray[np.float64]:
    """(n, 2) inference time of an example in ms, and bandwidth in kbit/s, by ascending key."""
    rows = []
    for key, device in _devices(path):
        where = f"{path}: device {key}"
        row = [_number(where, device, name) for name in ("computation", "communication")]
        if not all(map(_is_rate, row)):
            raise DataError(
                f"{where}: computation and communication must be above 0, from {RATES[0]:g} to "
                f"{RATES[1]:g}"
            )
        rows.append(row)
    return np.array(rows, dtype=np.float64)


def read_availability(path: Path) -> list[Availability]:
    """When each device is online, by ascending key."""
    found = []
    for key, device in _devices(path):
        where = f"{path}: device {key}"
        active, inactive = (_times(where, device, name) for name in ("active", "inactive"))
        period = _number(where, device, "finish_time")
        if len(active) != len(inactive):
            raise DataError(
                f"{where}: goes online {len(active)} times and offline {len(inactive)} times; "
                "each needs the other"
            )
        times = np.stack([active, inactive], axis=1).ravel()
        if (np.diff(times) < 0).any() or times[0] < 0:
            raise DataError(f"{where}: times online must ascend, and not overlap")
        if period <= 0 or times[-1] > period:
            raise DataError(f"{where}: finish_time={period:g} comes before the last time online")
        found.append(Availability(active, inactive, period))
    return found


def _devices(path: Path) -> list[tuple[Any, Mapping[str, Any]]]:
    """The devices of a trace file, by ascending key."""
    with reading(path):
        content = path.read_bytes()
        if path.suffix == ".json":
            found = json.loads(content)
        else:
            found = ArrayUnpickler(io.BytesIO(content)).load()
    if not isinstance(found, Mapping) or not found:
        raise DataError(f"{path}: must be a dict of devices by key")
    for key, device in found.items():
        if not isinstance(device, Mapping):
            raise DataError(f"{path}: device {key}: must be a dict, not {type(device).__name__}")
    return sorted(found.items(), key=lambda item: (len(str(item[0])), str(item[0])))


def _number(where: str, device: Mapping[str, Any], name: str) -> float:
    value = device.get(name)
    if value is None:
        raise DataError(f"{where}: has no '{name}'")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and abs(value) <= sys.float_info.max):
        raise DataError(f"{where}: '{name}' must be a finite number, not {value!s:.60}")
    return float(value)


def _times(where: str, device: Mapping[str, Any], name: str) -> NDArray[np.float64]:
    values = device.get(name)
    if not isinstance(values, list | tuple | np.ndarray) or len(values) == 0:
        raise DataError(f"{where}: '{name}' must be a list of seconds")
    return np.array([_number(where, {name: value}, name) for value in values], dtype=np.float64)
