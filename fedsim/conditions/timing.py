"""Simulated time: who takes part, who misses the deadline, what is lost on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedsim.conditions.devices import (
    RETRY,
    Allowance,
    Devices,
    Fleet,
    Reason,
    Selection,
    planned_examples,
)
from fedsim.data import ClientSplits
from fedsim.errors import ExperimentError, NobodyAnswers
from fedsim.federation.cohort import Cohort, cohort_size
from fedsim.federation.condition import (
    Condition,
    Exchange,
    Rehearsed,
    Round,
    Runner,
    Withdrawn,
    Work,
    planned_bytes,
    trained_layers,
)
from fedsim.federation.context import RunSpec
from fedsim.federation.reduction import Discard
from fedsim.federation.wire import WAYS
from fedsim.training import FlatModel, TrainingJob, work_of

LATE: Reason = "deadline"


@dataclass(frozen=True)
class Told:
    """What the devices of a round mean for a client's work.

    Attributes:
        allowance: what its device can do before the deadline, if there is one.
        lost: whether its upload is lost.
        share: on how many of how many examples it can train; None for all.
    """

    allowance: Allowance | None
    lost: bool
    share: tuple[int, int] | None = None


@dataclass
class RoundTime:
    """A round so far, in simulated time.

    Attributes:
        began: seconds since the first round began.
        selection: who takes part, if the method has asked.
        elapsed: seconds of the round, if the method sets them.
        ended: seconds of the round when each client's latest call ended.
        withdrawn: examples and bytes down of those that left the round.
        late: whether some of these were too slow, for whom the server waits.
        worked: examples, and bytes down and up, of each client.
    """

    began: float
    selection: Selection | None = None
    elapsed: float | None = None
    ended: dict[int, float] = field(default_factory=dict)
    withdrawn: dict[int, tuple[int, int]] = field(default_factory=dict)
    late: bool = False
    worked: dict[int, NDArray[np.float64]] = field(default_factory=dict)

    def seconds(self, deadline: float | None) -> float:
        """How long the round has taken."""
        if self.elapsed is not None:
            return self.elapsed
        waited = 0.0 if self.selection is None else self.selection.waited
        if self.late:
            waited = deadline or waited
        elif self.selection is not None and not len(self.selection.kept):
            waited = waited or RETRY
        took = max([waited, *self.ended.values()])
        return min(took, deadline or took)

    def start_of(self, cohort: Cohort) -> float:
        """When a call of these clients begins: all wait for each other since their last one."""
        return max((self.ended.get(k, 0.0) for k in cohort.tolist()), default=0.0)


class SimulatedTime(Condition):
    """Clients work as fast as their devices, which fail and go offline."""

    name: str = "devices"
    order: ClassVar[int] = 90  # by what others have made of messages
    columns: ClassVar[tuple[str, ...]] = (
        *("dropped", "simulated_seconds", "energy_joules"),
        *("total_simulated_seconds", "total_energy_joules"),
    )
    client_columns: ClassVar[tuple[str, ...]] = ("simulated_seconds", "energy_joules")
    loses_clients: ClassVar[bool] = True
    settings: Devices

    def check(self, spec: RunSpec, splits: ClientSplits, network: nn.Module) -> None:
        """Refuse devices that cannot be read or drawn, and a deadline that no client can meet."""
        fleet, deadline = Fleet(self.settings, len(splits), spec.seed), self.settings.deadline
        if deadline is None:
            return
        examples = planned_examples(spec.train, splits.train.lengths)
        least, moved = "a round", (0, 0)
        if self.settings.partial_work:
            least, examples = "a single step", np.minimum(examples, spec.train.batch_size)
        # What your own conditions make of messages is known only if they say so.
        own = [type(one) for one in spec.conditions if ":" in one.name]
        told = all(kind.planned is not Condition.planned for kind in own)
        if spec.functions.has_global_model and told:
            model = FlatModel(spec.build_model(), torch.device("cpu"))
            part = spec.functions.sent_part(model)
            size = model.size if part is None else int(part.sum())
            moved = planned_bytes(spec.conditions, spec.seed, size, trained_layers(model, part))
        needed = fleet.seconds(np.arange(len(splits)), examples, *moved)
        if needed.min() > deadline:
            raise ExperimentError(
                f"devices.deadline={deadline:g}: no client meets it; the fastest needs "
                f"{needed.min():.3g} s for {least}"
            )

    # -- on the server -------------------------------------------------------------------------

    def fleet(self, runner: Runner) -> Fleet:
        """The devices of all clients."""
        K, seed = runner.num_clients, runner.seed
        fleet: Fleet = runner.once(self.name, lambda: Fleet(self.settings, K, seed))
        return fleet

    def passed(self, round: Round) -> RoundTime:
        """The round so far."""
        clock = round.runner.ledger(self.name).get("seconds", 0.0)
        passed: RoundTime = round.kept.setdefault(self.name, RoundTime(clock))
        return passed

    def set_clock(self, round: Round) -> None:
        """Advance the clock to the end of the round so far."""
        passed = self.passed(round)
        took = passed.seconds(self.settings.deadline)
        round.runner.ledger(self.name)["seconds"] = passed.began + took

    def clock(self, round: Round) -> DeviceClock:
        return DeviceClock(self, round)

    def sample(self, round: Round) -> Cohort:
        passed = self.passed(round)
        if passed.selection is None:
            passed.selection = self._select(round)
        if round.running:
            self.set_clock(round)
            if not len(passed.selection.kept):
                raise NobodyAnswers(round.t, "no online client finishes before the deadline")
        return passed.selection.kept

    def _select(self, round: Round) -> Selection:
        """The clients of the round, selected by their devices."""
        runner, fleet = round.runner, self.fleet(round.runner)
        online = np.flatnonzero(fleet.online(round.t, self.passed(round).began))
        sampled = runner.draw(round.t, online, self.settings.over_selection)
        wanted = cohort_size(runner.settings.participation, runner.num_clients)
        if runner.independent_draws:
            wanted = len(sampled)
        # As learnt from the round before: examples, as a multiple of plain training, and bytes.
        ratio, *moved = runner.ledger(self.name).get("work", (1.0, *runner.planned_bytes))
        examples = ratio * planned(runner, sampled)
        return fleet.select(sampled, wanted, round.t, examples, *moved)

    def outgoing(self, round: Round, exchange: Exchange) -> Exchange:
        if not round.running:
            return exchange
        passed, cohort = self.passed(round), exchange.cohort
        lost, allowances = self._lost(passed, exchange), dict[int, Allowance]()
        if (deadline := self.settings.deadline) is not None:
            moved = [exchange.bytes_down(k) for k in cohort.tolist()]
            left = deadline - passed.start_of(cohort)
            allowances = self.fleet(round.runner).allowances(cohort.tolist(), left, moved)
        told = {k: Told(allowances.get(k), k in lost) for k in {*allowances, *lost}}
        return exchange.tell(self.name, told) if told else exchange

    def _lost(self, passed: RoundTime, exchange: Exchange) -> frozenset[int]:
        """Clients whose message is lost, if they send any."""
        if passed.selection is None or isinstance(exchange.reduction, Discard):
            return frozenset()
        return passed.selection.lost

    def worked(self, round: Round, exchange: Exchange, work: Work) -> str | None:
        """Adds simulated time and energy to the costs; the slowest client's time passes."""
        if not round.running:
            return None
        passed, fleet = self.passed(round), self.fleet(round.runner)
        for k, (why, examples) in work.withdrawn.items():
            passed.withdrawn[k] = examples, exchange.bytes_down(k)
            passed.late |= why == LATE
        costs = work.costs
        if costs:
            done = [
                np.array([work.examples.get(k, 0) for k in costs]),
                *(np.array([own[f"bytes_{way}"] for own in costs.values()]) for way in WAYS),
            ]
            seconds, joules = fleet.seconds(list(costs), *done), fleet.joules(list(costs), *done)
            for own, took, spent in zip(
                costs.values(), seconds.tolist(), joules.tolist(), strict=True
            ):
                own |= {"simulated_seconds": took, "energy_joules": spent}
            end = passed.start_of(exchange.cohort) + float(seconds.max())
            passed.ended |= dict.fromkeys(exchange.cohort.tolist(), end)
            for k, own_work in zip(costs, np.stack(done, axis=1).astype(np.float64), strict=True):
                passed.worked[k] = passed.worked.get(k, 0.0) + own_work
        self.set_clock(round)
        return self._nobody(passed, exchange, work)

    def _nobody(self, passed: RoundTime, exchange: Exchange, work: Work) -> str | None:
        """Why nobody of those that take part in the round answers; None if somebody does."""
        lost = self._lost(passed, exchange)
        if isinstance(exchange.reduction, Discard) or not work.costs.keys() <= lost:
            return None
        cohort = exchange.cohort
        kept = cohort if passed.selection is None else passed.selection.kept
        if not (lost or work.withdrawn) or not np.isin(kept, [*cohort, *passed.withdrawn]).all():
            return None
        if work.costs:
            return "the uploads of all clients are lost"
        return "no client finishes before the deadline" if passed.late else None

    def close(self, round: Round, ledger: dict[str, Any]) -> dict[str, float]:
        """Adds rows of clients that dropped out; simulated time and energy of the round."""
        runner, passed, fleet = round.runner, self.passed(round), self.fleet(round.runner)
        selection = passed.selection
        dropped: dict[int, str] = {} if selection is None else {**selection.dropped}
        wanted = planned(runner, np.array(list(dropped), dtype=np.int64)).tolist()
        wasted = {k: (n, runner.planned_bytes[0]) for k, n in zip(dropped, wanted, strict=True)}
        for k, (examples, moved) in {**wasted, **passed.withdrawn}.items():
            joules = float(fleet.joules([k], examples, moved, 0)[0])
            costs = {"energy_joules": joules}
            if k not in passed.withdrawn:  # whose traffic is on record
                costs |= {"bytes_up": 0, "bytes_down": moved, "seconds": 0.0}
            row = runner.rows.setdefault(k, {})  # it may have been evaluated
            row |= {name: row.get(name, 0) + cost for name, cost in costs.items()}
        for k, reason in dropped.items():
            runner.rows[k]["dropped"] = reason
        energy = math.fsum(row.get("energy_joules", 0.0) for row in runner.rows.values())
        ledger["joules"] = ledger.get("joules", 0.0) + energy
        if passed.worked:
            done = np.stack(list(passed.worked.values()))
            plain = planned(runner, np.array(list(passed.worked), dtype=np.int64)).sum()
            ratio = float(done[:, 0].sum() / plain) if plain else 0.0
            ledger["work"] = [ratio, *done[:, 1:].mean(axis=0).tolist()]
        return {
            "dropped": sum("dropped" in row for row in runner.rows.values()),
            "simulated_seconds": passed.seconds(self.settings.deadline),
            "total_simulated_seconds": ledger.get("seconds", 0.0),
            "energy_joules": energy,
            "total_energy_joules": ledger["joules"],
        }

    # -- at the client -------------------------------------------------------------------------

    def begin(self, id: int, told: Told, rehearse: Callable[[], Rehearsed]) -> Told:
        """With `partial_work`, how many of how many examples a client can train on.

        What it computes beside training, such as a gradient of all examples, cannot be less.
        """
        if told.allowance is None or not self.settings.partial_work:
            return told
        all_of_it = rehearse()
        visited = all_of_it.trained
        client = all_of_it.client
        left = told.allowance.examples(all_of_it.size) - (client.examples - visited)
        if visited <= max(left, 0):
            return told
        if left < max(1, min(client.settings.batch_size, visited)):
            raise Withdrawn(LATE, client.examples)
        return replace(told, share=(left, visited))

    def training(self, client: Any, job: TrainingJob) -> TrainingJob:
        """With its share of the steps, if the client must hurry."""
        told: Told | None = client.told.get(self.name)
        if told is None or told.allowance is None:
            return job
        _, visits = work_of(client.model, job, client.settings)
        if told.share is None:
            if client.examples + visits > told.allowance.examples():
                raise Withdrawn(LATE, client.examples + visits)
            return job
        allowed, total = told.share
        batch = max(1, min(client.settings.batch_size, len(job.y)))
        steps = max(1, allowed * visits // total // batch)
        return replace(job, most_steps=min(steps, job.most_steps or steps))

    def visited(self, client: Any) -> None:
        told: Told | None = client.told.get(self.name)
        if told is None or told.allowance is None or told.share is not None:
            return
        if client.examples > told.allowance.examples():
            raise Withdrawn(LATE, client.examples)

    def answered(self, client: Any, size: int) -> int:
        told: Told | None = client.told.get(self.name)
        if told is not None:
            # What a client neither trains on nor answers may reach it after the deadline.
            awaited = client.examples > 0 or size > 0
            allowance = told.allowance
            if allowance and awaited and not allowance.covers(client.examples, size):
                raise Withdrawn(LATE, client.examples)
            client.lost = told.lost
        return size


def planned(runner: Runner, clients: Cohort) -> NDArray[np.float64]:
    """(n,) number of examples that clients train on in a round, each pass counted."""
    return planned_examples(runner.settings, runner.num_samples[clients])


class DeviceClock:
    """Simulated time of a round; see `fedsim.federation.condition.Clock`."""

    def __init__(self, condition: SimulatedTime, round: Round) -> None:
        self._condition, self._round = condition, round
        self._fleet = condition.fleet(round.runner)

    @property
    def now(self) -> float:
        return self._condition.passed(self._round).began

    @property
    def present(self) -> NDArray[np.bool_]:
        return self._round.runner.present

    @property
    def loss(self) -> float:
        devices = self._condition.settings
        return 1 - (1 - devices.dropout) * (1 - devices.packet_error)

    @property
    def retry(self) -> float:
        return RETRY

    def online(self, now: float) -> NDArray[np.bool_]:
        return self._fleet.online(self._round.t, now)

    def planned_seconds(self, clients: Sequence[int] | Cohort) -> NDArray[np.float64]:
        runner, k = self._round.runner, np.asarray(clients, dtype=np.int64)
        return self._fleet.seconds(k, planned(runner, k), *runner.planned_bytes)

    def set_round_time(self, seconds: float) -> None:
        self._condition.passed(self._round).elapsed = seconds
        self._condition.set_clock(self._round)
