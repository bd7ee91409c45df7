"""What becomes of a run's federation for each of many coalitions of its clients.

Clients first take part in some round of the run. Two coalitions that differ in clients who have
not yet done so share all rounds before, so coalitions are computed in the order of a tree: each
begins with the longest beginning that it shares with the one before.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedsim.cluster.connection import planned_actors
from fedsim.config.modules import enter
from fedsim.data import ClientSplits, Dataset, load_dataset
from fedsim.errors import (
    BadInput,
    Damaged,
    ExperimentError,
    FedsimError,
    RunError,
    RunFolderError,
)
from fedsim.experiment import Experiment
from fedsim.federation import LocalEngine, RoundRunner, RunSpec, Without
from fedsim.launch.prepare import prepare
from fedsim.launch.reference import kept
from fedsim.launch.run import same_data
from fedsim.launch.without import asked, cohorts, experiment_without, joins_by_cohort
from fedsim.methods import State
from fedsim.results.folder import RunFolder, alone
from fedsim.results.manifest import clients_per_step
from fedsim.results.records import is_of_result, new_ledger, result_hash
from fedsim.results.run import Run
from fedsim.simulate import carry_on, initial_state
from fedsim.support import atomic
from fedsim.support.words import in_short

Coalition = frozenset[int]
Outcome = dict[str, Any]  # the numbers of the last row of rounds.parquet, and `result_hash`

FILE = "coalitions.parquet"
PIECE = 8  # coalitions that a worker computes one after another
RETRIES = 5  # of a piece whose worker was lost
_RUN = b"fedsim.run"  # key of the file's metadata


class Coalitions:
    """The outcomes of a run's federation for coalitions of its clients.

    They are computed once, and kept in the run's folder as they come, so that what is interrupted
    continues where it was. An outcome is that of `fedsim.without` for all others, to the bit.

    Args:
        run: a finished run.
        tell: called with lines about the progress.

    Attributes:
        clients: those whose coalitions these are.
        active: the clients that take part in any round at all; others change nothing.

    Raises:
        BadInput: the run is not finished, its data have changed, or it fills the places of
            clients that are left out.
    """

    def __init__(self, run: Run, tell: Callable[[str], None] = lambda _: None) -> None:
        run.result_hash  # noqa: B018  # raises if it is not finished
        experiment = run.experiment
        try:
            check_places(experiment)
        except ExperimentError as refusal:
            raise RunFolderError(f"{run.path}: {refusal}") from None
        self.run, self._tell = run, tell
        self._loaded = load_dataset(experiment.data)
        dataset, splits, spec = prepare(experiment, self._loaded, begun=True)
        folder, first = RunFolder.open(run.path), first_rounds(run, splits, spec)
        same_data(folder, dataset, splits)
        prepared = dataset, splits, kept(folder, spec)
        self._player = Player(experiment, run.manifest, prepared, first)
        self.clients = tuple(run.client_ids)
        self.active = frozenset(self._player.first)
        self._file = run.path / FILE
        self._known = _read(self._file, run.result_hash)
        if "continues" not in run.manifest:  # otherwise it may have begun under other settings
            everybody = _numbers(run.rounds.iloc[-1].to_dict())
            self._known.setdefault(self.active, {**everybody, "result_hash": run.result_hash})

    def __getitem__(self, coalition: Iterable[int]) -> Outcome:
        """The outcome for a coalition, computed if it is not known yet."""
        self.compute([coalition := frozenset(coalition)])
        return self._known[self.alike(coalition)]

    def alike(self, coalition: Iterable[int]) -> Coalition:
        """The coalition without those that never take part, which has the same outcome."""
        return self.active.intersection(coalition)

    def missing(self, coalitions: Iterable[Iterable[int]]) -> list[Coalition]:
        """Those coalitions whose outcomes have yet to be computed."""
        wanted = dict.fromkeys(map(self.alike, coalitions))
        return [each for each in wanted if each not in self._known]

    def compute(self, coalitions: Iterable[Iterable[int]]) -> None:
        """Compute the outcomes for coalitions, as far as they are not known.

        With `engine.kind=ray` by as many workers at once as the cluster holds.

        Raises:
            BadInput: the experiment cannot do without the others of a coalition.
            RunError: a coalition's run fails.
        """
        missing = self._player.in_order(self.missing(coalitions))
        if not missing:
            return
        smallest = min(filter(None, missing), key=len, default=self.active)
        check_alone(self.run.experiment, smallest, self.active, self._loaded)
        pieces = [missing[i : i + PIECE] for i in range(0, len(missing), PIECE)]
        with alone(self.run.path, "another process computes outcomes of this run"):
            done = 0
            for piece, outcomes in self._computed(pieces):
                self._known.update(zip(piece, outcomes, strict=True))
                _write(self._file, self._known, self.run.result_hash)
                done += len(piece)
                self._tell(f"[{done}/{len(missing)}] coalitions")

    def _computed(
        self, pieces: Sequence[Sequence[Coalition]]
    ) -> Iterator[tuple[Sequence[Coalition], list[Outcome]]]:
        spec, engine = self._player.prepared[2], self.run.experiment.engine
        if engine.kind == "local":
            for piece in pieces:
                yield piece, self._player.outcomes(piece)
            return
        import ray

        each = spec.worker_bytes(engine.clients_per_step) + spec.node_bytes
        with planned_actors(engine, each, len(pieces), self._tell) as most:
            task = ray.remote(_outcomes).options(
                num_cpus=engine.cpus_per_actor,
                num_gpus=engine.gpus_per_actor,
                max_retries=RETRIES,
            )
            given, waiting = (ray.put(self._player), os.getcwd()), [*pieces]
            running = dict[Any, Sequence[Coalition]]()
            try:
                while waiting or running:
                    while waiting and len(running) < most:
                        piece = waiting.pop(0)
                        running[task.remote(piece, *given)] = piece
                    (ready, *_), _ = ray.wait(list(running))
                    piece = running.pop(ready)
                    yield piece, _found(ready, piece)
            finally:
                for reference in running:
                    ray.cancel(reference, force=True)


def check_places(experiment: Experiment) -> None:
    """Refuse an experiment in which others take the places of who is left out."""
    if experiment.without is not None and experiment.without.replace:
        raise ExperimentError(
            "without.replace=true: the others of a coalition would take the places of those that "
            "are left out; take a run whose places stay empty"
        )


def check_alone(
    experiment: Experiment, coalition: Coalition, everybody: Coalition, loaded: Dataset
) -> None:
    """Refuse an experiment that cannot do without the others of a coalition."""
    if others := sorted(everybody - coalition):
        try:
            prepare(experiment_without(experiment, others), loaded, begun=True)
        except BadInput as refusal:
            raise type(refusal)(f"{_named(coalition)}: {refusal}") from None


def _found(ready: Any, piece: Sequence[Coalition]) -> list[Outcome]:
    """A worker's outcomes, or the error that it met."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    from fedsim.cluster.faults import first_line

    try:
        found: list[Outcome] = ray.get(ready)
        return found
    except RayTaskError as error:
        if isinstance(error.cause, FedsimError):
            raise error.cause from None
        raise
    except RayError as error:
        raise RunError(f"{_named(piece[0])}: the worker was lost: {first_line(error)}") from error


def _outcomes(coalitions: Sequence[Coalition], player: Player, folder: str) -> list[Outcome]:
    """What a worker on Ray does."""
    enter(folder)
    return player.outcomes(coalitions)


@dataclass(frozen=True)
class Snapshot:
    """A federation after a round: the server's state, clients' kept states, and the ledger."""

    round: int
    state: State
    kept: Mapping[int, Mapping[str, Any]]
    ledger: dict[str, Any]
    last: Outcome


@dataclass(frozen=True)
class Player:
    """Plays an experiment with coalitions of its clients.

    Attributes:
        manifest: of the run with all clients.
        prepared: what `prepare` returns; nothing but who is asked depends on who is left out.
        first: the round in which each client first takes part; others never do.
    """

    experiment: Experiment
    manifest: Mapping[str, Any]
    prepared: tuple[Dataset, ClientSplits, RunSpec]
    first: Mapping[int, int]

    def in_order(self, coalitions: Iterable[Coalition]) -> list[Coalition]:
        """Coalitions one after another that share long beginnings."""
        clients = sorted(self.first, key=lambda k: (self.first[k], k))
        return sorted(coalitions, key=lambda own: [k in own for k in clients])

    def outcomes(self, coalitions: Iterable[Coalition]) -> list[Outcome]:
        """The outcome of each coalition."""
        shares = joins_by_cohort(self.experiment, self.prepared[2])
        found, path, before = [], list[Snapshot](), frozenset[int]()
        for own in coalitions:
            differ = min((self.first[k] for k in own ^ before), default=math.inf)
            path = [at for at in path if at.round < differ and shares]
            try:
                found.append(self._outcome(own, path))
            except RunError as error:
                raise RunError(f"{_named(own)}: {error}") from error
            before = own
        return found

    def _outcome(self, coalition: Coalition, path: list[Snapshot]) -> Outcome:
        """The outcome of a coalition; adds to `path` what the next one may begin with."""
        dataset, splits, spec = self.prepared
        if others := self.first.keys() - coalition:
            splits = splits.leaving_out({*splits.absent, *others})
            spec = replace(spec, without=Without(clients=splits.absent))
        engine = LocalEngine(self.experiment.engine, spec, dataset, splits)
        try:
            runner = RoundRunner(spec, dataset, splits, engine, device=engine.server_device())
            runner.clients_per_step = clients_per_step(self.manifest, 1)
            branches = {t - 1 for t in self.first.values()}
            if not path:
                initial = initial_state(runner, self.experiment)
                path.append(Snapshot(0, initial, {}, new_ledger(), {}))
            at = path[-1]
            runner.restore(at.kept)
            ledger, state, last = copy.deepcopy(at.ledger), at.state, at.last
            runner.use_ledger(ledger)
            rounds = carry_on(runner, self.experiment, self.manifest, at.round, state, ledger)
            for t, state, rows in rounds:
                last = _numbers(rows["rounds"][0])
                if t in branches:
                    kept = {k: engine.fetch(handle) for k, handle in runner.states().items()}
                    path.append(Snapshot(t, state, kept, copy.deepcopy(ledger), last))
            return {**last, "result_hash": result_hash(ledger["chain"], state)}
        finally:
            engine.close()


def first_rounds(run: Run, splits: ClientSplits, spec: RunSpec) -> dict[int, int]:
    """The round in which each client first takes part, of those that ever do."""
    present = np.flatnonzero(splits.present).tolist()
    if not joins_by_cohort(run.experiment, spec):
        return dict.fromkeys(present, 1)
    found: dict[int, int] = {}
    for t, cohort, others in asked(run, splits, spec, spec.without):
        for k in present if others else cohort:  # where others are asked, everybody may be
            found.setdefault(k, t)
    return found


def ever_asked(experiment: Experiment, splits: ClientSplits, spec: RunSpec) -> Coalition:
    """The clients that may take part in any round, as far as it is known before the first."""
    if not joins_by_cohort(experiment, spec):
        return frozenset(np.flatnonzero(splits.present).tolist())
    return frozenset(k for _, cohort in cohorts(splits, spec, spec.without) for k in cohort)


def _numbers(row: Mapping[Any, Any]) -> Outcome:
    """The numbers of a round's record, but for durations and what was found out afterwards."""
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, Real) and not math.isnan(value) and is_of_result(name)
    }


def _named(coalition: Collection[int]) -> str:
    if not coalition:
        return "without any client"
    return f"clients {in_short(list(map(str, sorted(coalition))))} alone"


def _read(file: Path, run: str) -> dict[Coalition, Outcome]:
    """Outcomes by coalition, which a file holds of a run with this hash."""
    if not file.exists():
        return {}
    try:
        table = pq.read_table(file)
        rows: list[Outcome] = table.to_pylist()
        whose = (table.schema.metadata or {})[_RUN].decode()
        found = {
            frozenset(map(int, filter(None, row.pop("coalition").split("-")))): {
                name: value for name, value in row.items() if value is not None
            }
            for row in rows
        }
    except (OSError, ValueError, KeyError, AttributeError, pa.ArrowException) as error:
        raise Damaged(f"{file}: is damaged; remove it to compute it again: {error}") from error
    if whose != run:
        raise Damaged(f"{file}: is of another run; remove it")
    return found


def _write(file: Path, outcomes: Mapping[Coalition, Outcome], run: str) -> None:
    rows = [
        {"coalition": "-".join(map(str, sorted(own))), **outcomes[own]}
        for own in sorted(outcomes, key=lambda own: (len(own), sorted(own)))
    ]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: [row.get(name) for row in rows] for name in columns})
    with atomic.replacing(file) as aside:
        pq.write_table(table.replace_schema_metadata({_RUN: run}), aside)
