"""One run from start to end: the file to read first.

    state = method.init(fed)
    for t in 1 … T:
        state = method.round(fed, state, t)

and around these three lines: records, checkpoints, and a hash of all that was computed.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from fedsim.data import ClientSplits, Dataset
from fedsim.errors import (
    Diverged,
    FedsimError,
    MethodError,
    NobodyAnswers,
    RunError,
    StackTooLarge,
    StateLost,
    in_own_code,
)
from fedsim.experiment import Experiment
from fedsim.federation import Federation, RoundRunner, RunSpec
from fedsim.federation.client import RECORDED
from fedsim.federation.engine import Engine
from fedsim.federation.federation import federation_of
from fedsim.methods import State
from fedsim.objectives import Metric, Objective
from fedsim.results.describe import describe, weights_file
from fedsim.results.folder import FINAL_WEIGHTS, LABELS, REFERENCE, RunFolder
from fedsim.results.manifest import clients_per_step, halved
from fedsim.results.records import (
    chained,
    new_ledger,
    result_hash,
    stopped_early,
    summarise,
    watch_score,
)
from fedsim.results.tables import Table, check_tables
from fedsim.support import atomic
from fedsim.support.rng import keyed_torch_rng

TABLES = ("rounds", "clients", *RECORDED, "maps")

# An event of a run: the record of a finished round, or a line for the user.
Progress = dict[str, Any] | str


def simulate(
    folder: RunFolder, spec: RunSpec, dataset: Dataset, splits: ClientSplits, engine: Engine
) -> Iterator[Progress]:
    """Carry out a run to its end, from its latest checkpoint if it has one.

    Args:
        folder: folder of the run, for records, checkpoints and final weights.
        engine: carries out the clients' work; the result does not depend on which.

    Yields:
        The record of each round, and lines for the user.
    """
    experiment = folder.experiment
    tables = {name: Table(folder.path, name) for name in TABLES}
    atomic.remove_leftovers(folder.path)
    if "result_hash" in folder.manifest and not folder.damage():  # interrupted after its end
        for table in tables.values():
            table.drop_parts()
        return
    folder.forget_result()
    yield from describe(folder, spec, dataset, splits, engine)
    V = clients_per_step(folder.manifest, 1)
    runner = RoundRunner(spec, dataset, splits, engine, V, engine.server_device())
    rounds = Rounds(folder, runner, engine, tables, spec.shown(dataset))
    initial = initial_state(runner, experiment)
    lacking = ""  # about memory for V clients at once
    while True:
        begin, state, ledger = yield from rounds.restore(initial, lacking)
        lacking = ""
        try:
            state = yield from rounds.play(begin, state, ledger)
            break
        except StateLost as lost:
            yield f"{lost}; falling back to the last checkpoint"
        except StackTooLarge as error:
            lacking = str(error)
    rounds.finish(state, ledger)


class Rounds:
    """The rounds of a run: from a checkpoint, one after another, to the final weights.

    Args:
        folder: folder of the run.
        tables: the tables of the run, by name.
        shown: the metrics that it records.
    """

    def __init__(
        self,
        folder: RunFolder,
        runner: RoundRunner,
        engine: Engine,
        tables: Mapping[str, Table],
        shown: Sequence[Metric],
    ) -> None:
        self.folder, self.runner, self.engine = folder, runner, engine
        self.tables, self.shown = tables, shown
        self.experiment = folder.experiment
        self.checkpoints = folder.checkpoints(self.experiment.checkpoint.keep)

    def restore(
        self, initial: State, lacking: str
    ) -> Generator[Progress, None, tuple[int, State, dict[str, Any]]]:
        """The last round with a checkpoint, the server's state after it, and the ledger.

        Args:
            initial: the state before the first round.
            lacking: why fewer clients are trained at once from here on, if they are.
        """
        folder, checkpoints = self.folder, self.checkpoints
        found = checkpoints.latest(initial, self.runner, check=partial(check_tables, folder.path))
        while checkpoints.skipped:
            yield f"{checkpoints.skipped.pop(0)}; skipping this checkpoint"
        if found is None:
            begin, state, ledger = 0, initial, new_ledger()
        else:
            begin, state, ledger = found.round, found.state, found.progress["ledger"]
            yield f"continuing after round {begin}"
        self.runner.use_ledger(ledger)
        if lacking:
            folder.update(**halved(folder.manifest, begin))
            V = clients_per_step(folder.manifest, begin + 1)
            yield f"{lacking}; from round {begin + 1} on {V} are, as the manifest says"
        with folder.writing():
            checkpoints.drop_after(begin)
            for name, table in self.tables.items():
                table.rewind(begin, found.progress["tables"].get(name, "") if found else "")
        return begin, state, ledger

    def play(
        self, begin: int, state: State, ledger: dict[str, Any]
    ) -> Generator[Progress, None, State]:
        """The rounds after a given one; the server's last state."""
        experiment, every = self.experiment, self.experiment.checkpoint.every
        stopping, last = experiment.evaluate.early_stopping, experiment.train.rounds
        manifest, t = self.folder.manifest, begin
        rounds = carry_on(self.runner, experiment, manifest, begin, state, ledger)
        for t, state, rows in rounds:
            (row,) = rows["rounds"]
            for name, added in rows.items():
                self.tables[name].add(added)
            ends = t == last or stopped_early(stopping, self.shown, ledger)
            if ends or (every and t % every == 0):
                self.commit(t, state, ledger)
            undefined = _undefined(row, self.runner.context.spec.objective)
            self.engine.notice([f"warning: {name} is NaN" for name in undefined])
            while self.engine.notices:
                yield self.engine.notices.popleft()
            yield row
        if t < last and (stopped := stopped_early(stopping, self.shown, ledger)):
            self.folder.update(stopped_after=t)
            yield stopped
        return state

    def commit(self, t: int, state: State, ledger: dict[str, Any]) -> None:
        """Write a checkpoint after round t, and the tables up to it."""
        with self.folder.writing():
            for table in self.tables.values():
                table.flush(t)
            chains = {name: table.chain for name, table in self.tables.items()}
            self.checkpoints.save(t, state, self.runner, {"ledger": ledger, "tables": chains})
            self.folder.update(checkpoints=self.checkpoints.kept())
            self.checkpoints.prune()

    def finish(self, state: State, ledger: Mapping[str, Any]) -> None:
        """Write the final weights, whole tables, and the hash of the result."""
        fed, folder = federation_of(self.runner), self.folder
        arrays = self.experiment.method.global_model(fed, state)
        weights = folder.path / FINAL_WEIGHTS
        with folder.writing():
            for table in self.tables.values():
                table.merge()
            atomic.write(weights, weights_file(fed, arrays))
            files = [table.file for table in self.tables.values()]
            files += [folder.path / LABELS, folder.path / REFERENCE, weights]
            written = [f for f in files if f.exists()]
            folder.update(
                result_hash=result_hash(ledger["chain"], state),
                files={str(p.relative_to(folder.path)): atomic.checksum(p) for p in written},
            )
            for table in self.tables.values():
                table.drop_parts()


def carry_on(
    runner: RoundRunner,
    experiment: Experiment,
    manifest: Mapping[str, Any],
    begin: int,
    state: State,
    ledger: dict[str, Any],
) -> Iterator[tuple[int, State, dict[str, list[dict[str, Any]]]]]:
    """The rounds after round `begin` until the last, or until the run is stopped early.

    Args:
        manifest: of the run, which says how many clients are trained at once.
        state, ledger: after round `begin`; the ledger is updated.

    Yields:
        The round, the server's state after it, and its rows by table.
    """
    stopping, context = experiment.evaluate.early_stopping, runner.context
    shown = context.spec.shown(context.dataset)
    for t in range(begin + 1, experiment.train.rounds + 1):
        if stopped_early(stopping, shown, ledger):
            break
        started = time.perf_counter()
        runner.clients_per_step = clients_per_step(manifest, t)
        state = one_round(runner, experiment, state, t)
        evaluate_round(runner, experiment, state, t)
        rows = on_record(runner, t, ledger)
        (row,) = rows["rounds"]
        row["seconds"] = time.perf_counter() - started
        watch_score(stopping, shown, row, ledger)
        yield t, state, rows


def initial_state(runner: RoundRunner, experiment: Experiment) -> State:
    """The server's state before the first round."""
    method, fed = experiment.method, federation_of(runner)
    device = fed.server.device
    with keyed_torch_rng(experiment.seed, "server", 0, device=device), _carrying_out("init"):
        try:
            return _check_state(method.init(fed), "init")
        except StackTooLarge as error:  # there is no checkpoint yet
            raise RunError(f"{error}; lower engine.clients_per_step") from None


def one_round(runner: RoundRunner, experiment: Experiment, state: State, t: int) -> State:
    """Round t; the server's next state."""
    runner.begin(t)
    fed = federation_of(runner)
    # The server's draws from torch's global generator (dropout) depend only on t.
    with (
        keyed_torch_rng(experiment.seed, "server", t, device=fed.server.device),
        _carrying_out(f"round {t}"),
        runner.at_work(),
    ):
        try:
            if not runner.present.any():
                raise NobodyAnswers(t, "no client is left")
            state = _check_state(experiment.method.round(fed, state, t), f"round {t}")
        except NobodyAnswers as nobody:
            runner.notice(str(nobody))
    if not np.isfinite(state.weights).all():
        raise Diverged(t, "the server's weights are no longer finite numbers")
    return state


def evaluate_round(runner: RoundRunner, experiment: Experiment, state: State, t: int) -> None:
    """Record scores of the weights, and in due rounds evaluations and explanations."""
    method, fed = experiment.method, federation_of(runner)
    with _carrying_out(f"round {t}, evaluation"):
        fed.log(
            **fed.server.objective.weight_scores(
                lambda: _flat(fed, method.global_model(fed, state))
            )
        )
        if t % experiment.evaluate.every == 0 or t == experiment.train.rounds:
            method.evaluate(fed, state)
            if experiment.evaluate.clients:
                method.evaluate_clients(fed, state)
        trains = fed.server.learner.builds_network
        model = state.weights if trains else dict(method.global_model(fed, state))
        runner.evaluated(model, lambda: method.for_own_models(fed, state))


def _flat(fed: Federation, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    """The layers of a network that are part of its flat vector, each under one name."""
    if not fed.server.learner.builds_network:
        return arrays
    return {name: array for name, array in arrays.items() if name in fed.server.model.shapes}


def on_record(
    runner: RoundRunner, t: int, ledger: dict[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """The rows of round t by table; updates the ledger."""
    with _carrying_out(f"round {t}, records"):
        record, rows = runner.records()
    context = runner.context
    metrics = context.spec.objective.shown(context.dataset)
    row = summarise(t, record, rows["clients"], ledger, metrics, context.spec.setup_bytes)
    every = [row, *itertools.chain.from_iterable(rows.values())]
    ledger["chain"] = chained(ledger["chain"], every)
    return {"rounds": [row], **rows}


def _undefined(row: Mapping[str, Any], objective: Objective) -> list[str]:
    """The metrics of `evaluate.metrics` without a number in a round."""
    names = [further.shown.column for further in objective.further if further.shown]
    return [name for name in names if math.isnan(row.get(name, 0.0))]


def _check_state(found: Any, what: str) -> State:
    if not isinstance(found, State):
        function = what.partition(" ")[0]
        raise MethodError(f"{what}: {function} must return a State, not {type(found).__name__}")
    return found


@contextmanager
def _carrying_out(what: str) -> Iterator[None]:
    """Context that turns exceptions of the user's own code into one line; see the log."""
    try:
        yield
    except FedsimError:
        raise
    except Exception as error:
        if type(error).__module__.partition(".")[0] == "ray":  # not raised by that code
            raise
        raise MethodError(f"{what}: {in_own_code(error)}") from error
