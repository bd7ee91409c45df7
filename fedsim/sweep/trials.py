"""Runs as trials of Ray Tune: each a driver with its client actors in one placement group.

The state of a trial is in its run folder, not in Tune: a trial that is started again, after a
crash or by a resumption, continues from its folder, or is done at once.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import ray
from ray import tune
from ray.tune.error import TuneError

from fedsim.analysis.contributions.settings import ContributionSettings
from fedsim.cluster.connection import connected
from fedsim.cluster.placement import ACTOR_BYTES
from fedsim.cluster.private import environment, scratch
from fedsim.config.file import RawConfig
from fedsim.config.modules import enter
from fedsim.data import Dataset, Source, load_dataset
from fedsim.errors import (
    BadInput,
    DataError,
    ExperimentError,
    FedsimError,
    RunError,
    UnknownObjective,
    in_one_line,
)
from fedsim.experiment import Experiment
from fedsim.federation import EngineSettings
from fedsim.launch.loggers import environment as loggers_environment
from fedsim.launch.prepare import defined_here, prepare
from fedsim.launch.run import check_disk, drive
from fedsim.objectives import VALIDATION
from fedsim.results.folder import RunFolder, alone
from fedsim.results.manifest import is_at
from fedsim.results.records import CONTRIBUTIONS, known_columns
from fedsim.results.run import Run
from fedsim.results.summary import digits
from fedsim.simulate import Progress
from fedsim.sweep.preflight import Allocation, Watchdog, allocate, cluster, placement

SLIP = 0.85  # similarity to a known name from which a name counts as misspelt
MAX_FAILURES = 2  # restarts of a trial whose process was lost


@dataclass(frozen=True)
class Trial:
    """One run of a grid or a search, with a readable name; building its experiment may fail."""

    label: str
    path: Path
    build: Callable[[], Experiment]

    @classmethod
    def of(cls, label: str, path: Path, experiment: Experiment) -> Trial:
        return cls(label, path, lambda: experiment)

    @property
    def experiment(self) -> Experiment:
        return self.build()


def searched(
    sheet: RawConfig, space: Sequence[str], path: Path, config: Mapping[str, Any]
) -> Trial:
    """The trial of values, by `config`, of the keys in a search's space.

    It lies here, because processes of trials need no Optuna.
    """
    chosen = {key: config[key] for key in space}
    words = json.dumps(chosen, sort_keys=True).encode()
    label = ", ".join(
        f"{key}={v:.4g}" if isinstance(v, float) else f"{key}={v}" for key, v in chosen.items()
    )
    changed = sheet.changed(chosen, f"trial {label}")
    # Named by its values: if they are proposed again, after a crash or because there are few
    # choices, the trial reuses its run.
    folder = hashlib.sha256(words).hexdigest()[:12]
    return Trial(label, path / "trials" / folder, partial(changed.build, Experiment))


TOTAL_BYTES = "total_bytes"  # an objective: bytes sent up and down


def objective_value(row: Mapping[Any, Any], objective: str) -> float:
    """The value of an objective in a round's record; `total_bytes` counts both directions.

    Raises:
        UnknownObjective: there is no such column.
        RunError: it has no number in it.
    """
    if objective == TOTAL_BYTES:
        return float(row["total_bytes_up"] + row["total_bytes_down"])
    found = row.get(objective)
    if isinstance(found, Real) and not math.isnan(found):
        return float(found)
    known = sorted(k for k, v in row.items() if isinstance(v, Real) and not math.isnan(v))
    there = f"this experiment's rounds report {', '.join(known)} and {TOTAL_BYTES}"
    if objective not in row:
        raise UnknownObjective(
            f"search.objectives.{objective}: is not recorded in round {row['round']}; {there}"
        )
    raise RunError(
        f"search.objectives.{objective}: is not a number in round {row['round']}; {there}"
    )


@dataclass(frozen=True)
class SweepPlan:
    """The trials of a grid or a search."""

    trial_of: Callable[[Mapping[str, Any]], Trial]  # of a configuration of Tune; it is pickled
    examples: Sequence[Trial]  # representative ones, which are checked before any starts
    count: int
    finished: int = 0  # in an earlier session; they are not run again
    concurrent: int | Literal["auto"] = "auto"
    # What each trial reports of its last round, and where each is requested.
    objectives: Mapping[str, str] = field(default_factory=dict)
    directions: Mapping[str, Literal["max", "min"]] = field(default_factory=dict)
    every_round: bool = False  # report objectives of every evaluated round, for a scheduler
    contributions: ContributionSettings | None = None  # asked of each run at its end
    where: str = ""  # that stands in the experiment file

    @property
    def reuse_processes(self) -> bool:
        """Whether trials can reuse processes: none has client actors or is stopped early."""
        return not self.every_round and all(
            example.experiment.engine.kind == "local" for example in self.examples
        )


def run_trials(
    plan: SweepPlan,
    path: Path,
    begin: Callable[[], None],
    tuning: Callable[[], tuple[dict[str, Any], dict[str, Any]]],
    tell: Callable[[str], None],
    loaded: Mapping[str, Dataset],
) -> dict[Path, str]:
    """Run the trials of a sweep, after all checks; returns the errors of failed ones, by path.

    Args:
        begin: is called when all checks are passed, before anything is started.
        tuning: returns the space of missing trials, and further settings of Tune.
        loaded: data that is loaded already, by `data_key`.
    """
    datasets, sizes, tested = _load_data(plan, path, loaded)
    engines = [example.experiment.engine for example in plan.examples]
    largest = max(engines, key=lambda e: 0 if e.actors == "auto" else e.actors * e.cpus_per_actor)
    with connected(largest, tell):
        nodes, here, pin = cluster()
        allocations = {
            _resource_key(engine): allocate(
                engine, nodes, here, plan.count, plan.concurrent, sizes[_resource_key(engine)]
            )
            for engine in engines
        }
        concurrent = max(each.concurrent for each in allocations.values())
        # In lists, because Ray does not resolve references in lists.
        data = {key: [ray.put(dataset)] for key, dataset in datasets.items()}

        def place(config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
            try:
                engine = plan.trial_of(config).experiment.engine
            except ExperimentError:  # reported by the trial
                engine = engines[0]
            return placement(engine, allocations[_resource_key(engine)].actors, pin)

        trainable = tune.with_resources(
            tune.with_parameters(
                _trial,
                plan=plan,
                allocations=allocations,
                data=data,
                session=secrets.token_hex(4),
                variables=loggers_environment(),
                folder=os.getcwd(),
            ),
            place,
        )
        os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
        os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # otherwise it prints a banner
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # errors are reported here
        begin()
        actors = max(each.actors for each in allocations.values())
        each = f"with {actors} client actor(s) each" if actors else "each in one process"
        tell(f"{plan.count - plan.finished} runs, {concurrent} at a time, {each}")
        if by_test_set := [name for name in plan.objectives if name in tested]:
            tell(_about_test_set(plan, by_test_set))
        if plan.contributions is not None and plan.contributions.judges(plan.objectives, tested):
            tell(
                "warning: the search chooses by contributions to a score on the test set. To "
                "choose by a validation set instead: evaluate.validation=0.1, and as "
                f"search.contributions.score a column that begins with {VALIDATION}"
            )
        with (
            scratch("fstune-") as state,  # pickles of Tune's, which are no part of the results
            environment({"RAY_IGNORE_UNHANDLED_ERRORS": "1"}),  # of stopped trials
            Watchdog(tell) as watchdog,
            TrialReporter.reporting(plan, watchdog, tell) as errors,
        ):
            try:
                space, settings = tuning()
                tune.Tuner(
                    trainable,
                    param_space=space,
                    tune_config=tune.TuneConfig(
                        max_concurrent_trials=concurrent,
                        reuse_actors=plan.reuse_processes,
                        **settings,
                    ),
                    run_config=tune.RunConfig(
                        name="tune",
                        storage_path=str(state),
                        failure_config=tune.FailureConfig(max_failures=MAX_FAILURES),
                        callbacks=[TrialReporter()],
                        stop=_OnceHopeless(),
                        verbose=0,
                    ),
                ).fit()
            except (TuneError, OSError) as error:
                first = str(error).strip().partition("\n")[0] or type(error).__name__
                raise RunError(f"{path}: Ray Tune failed: {first}") from error
        return errors


def _about_test_set(plan: SweepPlan, by_test_set: Sequence[str]) -> str:
    instead = ", ".join(
        f"{VALIDATION if name in by_test_set else ''}{name}: {direction}"
        for name, direction in plan.directions.items()
    )
    held_out = all(trial.experiment.evaluate.validation for trial in plan.examples)
    holding_out = "" if held_out else "evaluate.validation=0.1 "
    return (
        f"warning: the search chooses by {' and '.join(by_test_set)} on the test set. To choose "
        f"by a validation set instead: {holding_out}'search.objectives={{{instead}}}'"
    )


def trial_status(
    path: Path, errors: Mapping[Path, str], contributions: ContributionSettings | None
) -> tuple[str, str | None]:
    """How a trial ended: finished, failed (and why), stopped (early), or missing."""
    manifest = RunFolder.open(path).manifest if is_at(path) else {"status": "missing"}
    status = manifest["status"]
    if status == "finished" and contributions is not None and contributions.wanting(manifest):
        status = "missing"
    if path in errors and status != "finished":
        return "failed", errors[path]
    if status in ("finished", "stopped", "failed"):
        return status, manifest.get("error")
    return "missing", None


def _resource_key(engine: EngineSettings) -> tuple[Any, ...]:
    return engine.kind, engine.actors, engine.cpus_per_actor, engine.gpus_per_actor


def _load_data(
    plan: SweepPlan, path: Path, loaded: Mapping[str, Dataset]
) -> tuple[dict[str, Dataset], dict[tuple[Any, ...], float], set[str]]:
    """Check the plan's examples and load their data, beyond what is loaded already.

    Returns:
        All data by `data_key`; the memory of a client actor by resource key; the columns of scores
        on the test set.
    """
    datasets = dict(loaded)
    sizes: dict[tuple[Any, ...], float] = {}
    tested: set[str] = set()
    for trial in plan.examples:
        if found := defined_here(trial.experiment):
            raise ExperimentError(
                f"{found} is defined in a notebook or in the running script, which the processes "
                "of trials cannot import; put it into a separate file"
            )
        try:
            key = data_key(trial.experiment.data)
            if key not in datasets:
                datasets[key] = load_dataset(trial.experiment.data)
            dataset, splits, spec = prepare(trial.experiment, datasets[key])
            tested |= {metric.column for metric in spec.objective.shown(dataset)}
            check_disk(trial.experiment, spec, path)
            engine = trial.experiment.engine
            place, each = _resource_key(engine), spec.worker_bytes(engine.clients_per_step)
            each += spec.node_bytes  # each trial has its own
            sizes[place] = max(sizes.get(place, 0), ACTOR_BYTES + each)
        except BadInput as error:
            raise type(error)(f"{trial.label}: {error}") from error
        tests_clients = trial.experiment.evaluate.clients
        known = [*known_columns(dataset, splits, spec, tests_clients), TOTAL_BYTES]
        asked = plan.contributions
        if asked is not None:
            if asked.score is not None:
                _check_spelt(f"{plan.where}.score={asked.score}", asked.score, known, "It")
            try:
                asked.check(trial.experiment, (dataset, splits, spec), datasets[key])
            except BadInput as error:
                raise type(error)(f"{plan.where}: {trial.label}: {error}") from None
            known += asked.columns(trial.experiment, (dataset, splits, spec))
        for name, where in plan.objectives.items():
            _check_spelt(where, name, known, "An objective")
    return datasets, sizes, tested


def _check_spelt(where: str, name: str, known: Sequence[str], what: str) -> None:
    """Refuse a misspelt column; the method may record others than those that are known."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=SLIP)
    if name not in known and (close or name.startswith(CONTRIBUTIONS)):
        hint = f"; did you mean '{close[0]}'?" if close else "."
        raise ExperimentError(
            f"{where}: is not recorded{hint} {what} can be {', '.join(known)}, or a column of the "
            "method"
        )


def data_key(source: Source) -> str:
    return json.dumps(source.model_dump(mode="json"), sort_keys=True)


@cache
def _metrics(path: Path, kind: str) -> tuple[str, ...]:
    return tuple(metric["column"] for metric in RunFolder.open(path).manifest.get(kind, ()))


def _judged(row: Mapping[Any, Any], path: Path, objectives: Iterable[str]) -> bool:
    """Whether a round of the run at `path` has values of the objectives.

    The model was evaluated in it, and explained if objectives are scores of explanations.
    """
    awaited = set(objectives) & set(_metrics(path, "explained"))
    tested = any(pd.notna(row.get(column)) for column in _metrics(path, "metrics"))
    return tested and all(pd.notna(row.get(column)) for column in awaited)


def _trial(
    config: Mapping[str, Any],
    plan: SweepPlan,
    allocations: Mapping[tuple[Any, ...], Allocation],
    data: Mapping[str, list[Any]],
    session: str,
    variables: Mapping[str, str],
    folder: str,
) -> None:
    enter(folder)
    os.environ.update(variables)
    trial = plan.trial_of(config)
    try:
        _carry_out(trial, plan, allocations, data, session)
    except BadInput as error:
        error.hopeless = True
        with suppress(BadInput):  # or is so a trial that was accepted before the start?
            accepted = plan.examples[0].experiment
            (loaded,) = data[data_key(accepted.data)]
            prepare(accepted, None if isinstance(error, DataError) else ray.get(loaded))
            error.hopeless = False
        raise


def _carry_out(
    trial: Trial,
    plan: SweepPlan,
    allocations: Mapping[tuple[Any, ...], Allocation],
    data: Mapping[str, list[Any]],
    session: str,
) -> None:
    experiment = trial.experiment  # raises for invalid combinations of values
    if begun := is_at(trial.path):
        before = RunFolder.open(trial.path).manifest
        # A trial continues after its process was lost. After an error it would only fail again,
        # unless the user has fixed something.
        if before["status"] == "failed" and before.get("session") == session:
            raise RunError(before["error"])

    def report(row: Mapping[Any, Any]) -> None:
        values = {name: objective_value(row, name) for name in plan.objectives}
        tune.report({**values, "round": int(row["round"])})

    def follow(event: Progress) -> None:
        if isinstance(event, str) or not _judged(event, trial.path, plan.objectives):
            return
        for name in plan.objectives:  # to fail now rather than at the end
            if not name.startswith(CONTRIBUTIONS):
                objective_value(event, name)
        # Not the last round, where a scheduler could stop the run before its end.
        if plan.every_round and event["round"] < experiment.train.rounds:
            report(event)

    if plan.every_round and begun:  # repeat reports for Tune
        for row in Run.open(trial.path).rounds.to_dict("records"):
            judged = _judged(row, trial.path, plan.objectives)
            if judged and row["round"] < experiment.train.rounds:
                report(row)
    (reference,) = data.get(data_key(experiment.data)) or [ray.put(load_dataset(experiment.data))]
    actors = allocations[_resource_key(experiment.engine)].actors
    try:
        run = drive(experiment, trial.path, actors, reference, follow)
        if plan.contributions is not None:
            run = _with_contributions(run, plan.contributions)
    except Exception:
        if is_at(trial.path):
            with alone(trial.path):
                RunFolder.open(trial.path).update(session=session)
        raise
    report(dict(run.rounds.iloc[-1]))


def _with_contributions(run: Run, asked: ContributionSettings) -> Run:
    """A finished run with clients' contributions, without which it has failed as a trial."""
    try:
        return asked.add_to(run)
    except FedsimError as error:
        RunFolder.open(run.path).update(status="failed", error=f"contributions: {error}")
        raise


class _OnceHopeless(tune.Stopper):  # type: ignore[misc]
    """Stops all trials as soon as one shows that none can succeed."""

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return bool(TrialReporter.broken)


class TrialReporter(tune.Callback):  # type: ignore[misc]
    """Reports ended trials to the user, and any news to the watchdog.

    Tune pickles callbacks, so what belongs to this process is stored in the class.
    """

    plan: SweepPlan
    watchdog: Watchdog
    tell: Callable[[str], None]
    errors: dict[Path, str]
    broken: list[Exception]

    @classmethod
    @contextmanager
    def reporting(
        cls, plan: SweepPlan, watchdog: Watchdog, tell: Callable[[str], None]
    ) -> Iterator[dict[Path, str]]:
        cls.plan, cls.watchdog, cls.tell = plan, watchdog, staticmethod(tell)
        cls.errors, cls.broken = {}, []
        yield cls.errors
        if cls.broken:
            first = cls.broken[0]
            if isinstance(first, BadInput):  # but something has been started
                raise RunError(str(first)) from first
            raise first

    def on_trial_start(self, **_: Any) -> None:
        self.watchdog.heard()

    on_trial_result = on_trial_start

    def on_trial_complete(self, trials: list[Any], trial: Any, **_: Any) -> None:
        self._end(trials, trial, self._completed)

    def on_trial_recover(self, trial: Any, **_: Any) -> None:
        error = _error_of(trial)
        if isinstance(error, FedsimError) and error.hopeless:
            self.broken.append(error)

    def on_trial_error(self, trials: list[Any], trial: Any, **_: Any) -> None:
        self._end(trials, trial, self._failed)

    def _end(self, trials: list[Any], tune_trial: Any, how: Callable[[Trial, Any], str]) -> None:
        self.watchdog.heard()
        try:
            trial = self.plan.trial_of(tune_trial.config)
            words = how(trial, tune_trial)
            ended = {tune_trial.trial_id, *(t.trial_id for t in trials if t.is_finished())}
            number = self.plan.finished + len(ended)
            self.tell(f"[{number}/{self.plan.count}] {trial.label}: {words}")
        except Exception as error:  # Tune would only log it
            self.broken.append(error)

    def _completed(self, trial: Trial, tune_trial: Any) -> str:
        folder = RunFolder.open(trial.path)
        if folder.manifest["status"] == "finished":
            run = Run.open(trial.path)
            rounds = run.rounds
            after = f"after round {rounds['round'].iloc[-1]}"
            if self.plan.objectives:
                last = rounds.iloc[-1].to_dict()
                values = {name: objective_value(last, name) for name in self.plan.objectives}
                return f"{', '.join(f'{name} {v:.4g}' for name, v in values.items())} {after}"
            metric = run.primary_metric
            scores = rounds.get(metric.column, pd.Series(dtype=float)).dropna()
            return f"{metric.label} {digits(scores.iloc[-1])} {after}" if len(scores) else after
        # The scheduler's view; the run itself may end at an earlier checkpoint.
        last = {name: tune_trial.last_result[name] for name in (*self.plan.objectives, "round")}
        folder.update(status="stopped", last=last)
        words = ", ".join(f"{name} {last[name]:.4g}" for name in self.plan.objectives)
        return f"stopped early, {words} after round {last['round']}"

    def _failed(self, trial: Trial, tune_trial: Any) -> str:
        path = trial.path
        known = RunFolder.open(path).manifest.get("error") if is_at(path) else None
        error = _error_of(tune_trial)
        words = str(error) if isinstance(error, FedsimError) else in_one_line(error)
        self.errors[path] = str(known or words).partition("\n")[0]
        return f"failed: {self.errors[path]}"


def _error_of(trial: Any) -> BaseException:
    """The last error of a trial of Tune.

    Tune writes it to a folder of its own, and copies it later to where `Trial.get_error` looks.
    """
    try:
        error = ray.cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    except Exception as unknown:  # of a class that cannot be unpickled here, or Tune's own
        return unknown
    cause: BaseException = getattr(error, "cause", None) or error
    return cause
