"""Searches: hyper-parameters tuned by Optuna, for one objective or several."""

# ruff: noqa: E402  # Optuna, which not every installation has, is asked for before it is imported
from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from fedsim.support.extras import require

require("optuna", "a search")

import optuna
from optuna import Study, samplers
from optuna.exceptions import OptunaError
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch
from sqlalchemy.exc import SQLAlchemyError

from fedsim.config.file import RawConfig
from fedsim.data import load_dataset
from fedsim.errors import Damaged, ExperimentError, RunError
from fedsim.experiment import Experiment
from fedsim.objectives import VALIDATION
from fedsim.results.figures import pareto
from fedsim.results.folder import ResultsFolder, RunFolder, SearchFolder
from fedsim.results.run import Run
from fedsim.results.sweeps import STUDY, Search, storage
from fedsim.support import atomic
from fedsim.sweep.settings import SearchSettings
from fedsim.sweep.sweep import SweepRunner, read_section
from fedsim.sweep.trials import SweepPlan, Trial, data_key, objective_value, searched, trial_status

DIRECTIONS = {"max": StudyDirection.MAXIMIZE, "min": StudyDirection.MINIMIZE}
SAMPLERS: dict[str, Callable[..., samplers.BaseSampler]] = {
    "tpe": samplers.TPESampler,
    "nsga2": samplers.NSGAIISampler,
    "gp": samplers.GPSampler,
    "random": samplers.RandomSampler,
}
AGAIN = "proposed_again"  # attribute of the study: numbers of trials that were proposed again


class SamplerByPlace(samplers.BaseSampler):
    """One of Optuna's samplers, with a separate random stream for each trial.

    The stream depends on the trial's position among all trials except those that were lost and
    proposed again. An interrupted search thus draws the same values as an uninterrupted one.

    Args:
        make: returns a sampler for a seed, which must keep no state besides the study.
        seed: seed of the search.
    """

    def __init__(self, make: Callable[..., samplers.BaseSampler], seed: int) -> None:
        self._make, self._seed = make, seed
        self._go_to(0)

    def _go_to(self, place: int) -> None:
        (key,) = np.random.SeedSequence([self._seed, place]).generate_state(1)
        self._place, self._sampler = place, self._make(seed=int(key))

    def _of(self, study: Study, trial: FrozenTrial) -> samplers.BaseSampler:
        place = trial.number - len(study.user_attrs.get(AGAIN, ()))
        if place != self._place:
            self._go_to(place)
        return self._sampler

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self._of(study, trial).before_trial(study, trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> Any:
        return self._of(study, trial).infer_relative_search_space(study, trial)

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Any) -> Any:
        return self._of(study, trial).sample_relative(study, trial, search_space)

    def sample_independent(self, study: Study, trial: FrozenTrial, *parameter: Any) -> Any:
        return self._of(study, trial).sample_independent(study, trial, *parameter)

    def after_trial(self, study: Study, trial: FrozenTrial, *ended: Any) -> None:
        self._sampler.after_trial(study, trial, *ended)


class SearchSweep(SweepRunner[Search]):
    """The search section of an experiment file, and trials that stand for all of its space."""

    folder_type, results, command = SearchFolder, Search, "tune"

    def __init__(self, config: RawConfig) -> None:
        super().__init__(config)
        search, self._base = read_section(config, "search", SearchSettings)
        self._given, self._config = search, config
        first: dict[str, Any] = {}
        others: list[dict[str, Any]] = []
        for key, given in search.space.items():
            first[key], *rest = given.probe_values()
            others += [{key: value} for value in rest]
        self.probe_trials: list[Trial] = []
        for corner in ({}, *others):
            chosen = {**first, **corner}
            label = ", ".join(f"{key}={v}" for key, v in chosen.items())
            by = f"{config.where(('search', 'space'))}: with {label}"
            experiment = self._base.changed(chosen, by).build(Experiment)
            self.probe_trials.append(Trial.of(label, Path(), experiment))
        self.experiments = [trial.experiment for trial in self.probe_trials]
        self.name = experiment.name
        if search.asha is not None and search.asha.grace >= experiment.train.rounds:
            raise ExperimentError(
                f"{config.where(('search', 'asha'))}: search.asha.grace={search.asha.grace}: "
                f"every trial would run to its end; train.rounds is {experiment.train.rounds}"
            )
        if search.asha is not None and "train.rounds" in search.space:
            raise ExperimentError(
                f"{config.where(('search', 'asha'))}: search.asha: compares trials at the same "
                "round, and search.space has train.rounds; leave out one of them"
            )
        if not experiment.evaluate.clients:
            for name in search.objectives:
                if name.removeprefix("worst_").startswith("client_"):
                    raise ExperimentError(
                        f"{self._place(name)}: needs evaluate.clients=true and "
                        "partition.test_fraction above 0"
                    )

    @cached_property
    def settings(self) -> SearchSettings:
        """The section, with objectives; if it has none, this loads the data.

        Then it is the primary metric, on the validation set if there is one.
        """
        if self._given.objectives:
            return self._given
        experiment = self.probe_trials[0].experiment
        data = self.loaded[data_key(experiment.data)] = load_dataset(experiment.data)
        objective = experiment.objective or experiment.model.objective(data)
        metric = next(metric for metric in objective.metrics(data) if metric.primary)
        column = VALIDATION * bool(experiment.evaluate.validation) + metric.column
        return self._given.model_copy(update={"objectives": {column: metric.best}})

    def _place(self, objective: str) -> str:
        where = self._config.where(("search", "objectives", objective))
        return f"{where}: search.objectives.{objective}"

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "objectives": self.settings.objectives,
            "space": list(self.settings.space),
        }

    def plan(self, path: Path) -> SweepPlan:
        sheet = RawConfig(self._base.content, folder=self._base.folder)
        return SweepPlan(
            trial_of=partial(searched, sheet, list(self.settings.space), path),
            examples=self.probe_trials,
            count=self.settings.trials,
            finished=len(_ended(path)),
            concurrent=self.settings.concurrent,
            objectives={name: self._place(name) for name in self.settings.objectives},
            directions=self.settings.objectives,
            every_round=self.settings.asha is not None,
            contributions=self.settings.contributions,
            where=self._config.where(("search", "contributions")) + ": search.contributions",
        )

    def tuning(self, path: Path, plan: SweepPlan) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of the trials that are missing; the study and the runs' folders tell which."""
        search = self.settings
        optuna.logging.set_verbosity(optuna.logging.CRITICAL)
        logging.getLogger("ray.tune.search").setLevel(logging.CRITICAL)
        try:
            kept = optuna.storages.RDBStorage(storage(path))
            study = optuna.create_study(
                storage=kept,
                study_name=STUDY,
                directions=[DIRECTIONS[way] for way in search.objectives.values()],
                load_if_exists=True,
            )
            _propose_lost_ones_again(study)
        except (OptunaError, SQLAlchemyError) as error:
            raise Damaged(
                f"{path / 'study.db'}: cannot be read: {str(error).strip().partition(chr(10))[0]}"
            ) from error
        names, modes = list(search.objectives), list(search.objectives.values())
        algorithm = OptunaSearch(
            {key: given.distribution() for key, given in search.space.items()},
            # Lists also for one: else a trial that is told again after a crash breaks the search.
            metric=names,
            mode=modes,
            sampler=SamplerByPlace(SAMPLERS[search.sampler], search.seed),
            study_name=STUDY,
            storage=kept,
        )
        scheduler = None
        if search.asha is not None:
            scheduler = ASHAScheduler(
                time_attr="round",
                metric=names[0],
                mode=modes[0],
                max_t=plan.examples[0].experiment.train.rounds,
                grace_period=search.asha.grace,
                reduction_factor=search.asha.reduction,
            )
            for frozen in _ended(path):
                _tell_again(scheduler, plan.trial_of(frozen.params).path, names[0])
        missing = search.trials - plan.finished
        return {}, {"search_alg": algorithm, "scheduler": scheduler, "num_samples": missing}

    def conclude(
        self, folder: ResultsFolder, plan: SweepPlan, errors: Mapping[Path, str]
    ) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
        search = self.settings
        study, known = Search(folder).study(), _trials(folder.path)
        over = sum(frozen.state.is_finished() for frozen in known) >= search.trials
        rows = [_row(folder, search, plan.trial_of(t.params), t, errors) for t in known]
        if not rows:
            raise RunError(f"{folder.path}: no trial was begun")
        trials = pd.DataFrame(rows)
        finished = trials[trials["status"] == "finished"]
        tables = {"trials": trials}
        if len(finished):
            best = finished[pareto.front(finished, search.objectives)]
            tables |= {"pareto": best, "importance": _importance(study, search)}
            name, mode = next(iter(search.objectives.items()))
            first = best.sort_values(name, ascending=mode == "min", kind="stable").iloc[0]
            with folder.writing():
                best_experiment = folder.path / first["folder"] / "experiment.yaml"
                atomic.write(folder.path / "best.yaml", best_experiment.read_bytes())
                if len(search.objectives) > 1:
                    pareto.draw(finished, search.objectives, folder.path / "pareto.png")
        failed = (trials["status"] == "failed").any()
        status = "interrupted" if not over else "failed" if failed else "finished"
        return tables, {"status": status}

    def _run(self, path: Path, begin: Callable[[], None], tell: Callable[[str], None]) -> Search:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return super()._run(path, begin, tell)


def _trials(path: Path) -> list[FrozenTrial]:
    """The trials of the search at `path`, but for those that were proposed again."""
    if not (path / "study.db").exists():
        return []
    study = optuna.load_study(study_name=STUDY, storage=storage(path))
    again = study.user_attrs.get(AGAIN, [])
    return [t for t in study.trials if t.number not in again and t.state != TrialState.WAITING]


def _ended(path: Path) -> list[FrozenTrial]:
    return [t for t in _trials(path) if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]


def _propose_lost_ones_again(study: optuna.Study) -> None:
    """Have trials that failed, or whose process was lost, proposed again with the same values."""
    again = list(study.user_attrs.get(AGAIN, []))
    for frozen in study.trials:
        if frozen.number in again or frozen.state not in (TrialState.RUNNING, TrialState.FAIL):
            continue
        if frozen.state == TrialState.RUNNING:
            study.tell(frozen.number, state=TrialState.FAIL)
        again.append(frozen.number)
        study.set_user_attr(AGAIN, again)
        study.enqueue_trial(frozen.params)


def _tell_again(scheduler: ASHAScheduler, path: Path, objective: str) -> None:
    """Tell the scheduler what an earlier trial came to in each round, to hold others against."""
    trial = SimpleNamespace(trial_id=str(path))
    scheduler.on_trial_add(None, trial)
    for row in Run.open(path).rounds.to_dict("records"):
        if pd.notna(row.get(objective)):
            scheduler.on_trial_result(
                None, trial, {"round": row["round"], objective: objective_value(row, objective)}
            )


def _row(
    folder: ResultsFolder,
    settings: SearchSettings,
    trial: Trial,
    frozen: FrozenTrial,
    errors: Mapping[Path, str],
) -> dict[str, Any]:
    status, error = trial_status(trial.path, errors, settings.contributions)
    row: dict[str, Any] = {"trial": frozen.number, **frozen.params, "status": status}
    try:
        if status == "finished":
            last = dict(Run.open(trial.path).rounds.iloc[-1])
            row |= {name: objective_value(last, name) for name in settings.objectives}
            row["rounds"] = int(last["round"])
        elif status == "stopped":
            last = RunFolder.open(trial.path).manifest["last"]
            row |= {**{name: last[name] for name in settings.objectives}, "rounds": last["round"]}
    except RunError as missing:  # it has no such objective
        row["status"], error = "failed", str(missing)
    return {**row, "error": error, "folder": str(trial.path.relative_to(folder.path))}


def _importance(study: optuna.Study, settings: SearchSettings) -> pd.DataFrame:
    """How much of each objective's variance a hyper-parameter explains (fANOVA), of 1 in all.

    Source: Hutter, Hoos, Leyton-Brown, An Efficient Approach for Assessing Hyperparameter
    Importance, ICML 2014.
    """
    complete = study.get_trials(states=[TrialState.COMPLETE])
    table = pd.DataFrame({"hyper-parameter": list(settings.space)})
    for k, name in enumerate(settings.objectives):
        values = {trial.values[k] for trial in complete}
        if len(values) < 2:  # nothing to explain
            table[name] = float("nan")
            continue
        shares = optuna.importance.get_param_importances(
            study,
            evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0),
            target=lambda trial: float(trial.values[k]),  # noqa: B023  # called at once
        )
        table[name] = [shares.get(key, float("nan")) for key in settings.space]
    return table
