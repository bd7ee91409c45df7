"""The `contributions` of a grid or a search: what clients contribute to each of its runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from fedsim.analysis.contributions.coalitions import check_alone, check_places, ever_asked
from fedsim.analysis.contributions.contributions import (
    BUDGET,
    ESTIMATES,
    EXACT,
    PERMUTATIONS,
    beginnings,
    check_budget,
    contributions,
    orders_of,
)
from fedsim.analysis.contributions.updates import (
    RoundUpdates,
    averaged,
    check_network,
    check_score,
    places_by_class,
)
from fedsim.analysis.replay import Trained, noting
from fedsim.conditions.explaining import Explanations
from fedsim.config.registry import Config, nearest, refuse_twice
from fedsim.data import ClientSplits, Dataset
from fedsim.data.splits import Ragged
from fedsim.errors import ExperimentError, RunError
from fedsim.experiment import Experiment
from fedsim.federation import LocalEngine, RoundRunner, RunSpec
from fedsim.federation.federation import federation_of
from fedsim.results.folder import RunFolder
from fedsim.results.records import CONTRIBUTIONS, TESTED, WITHOUT_UNIT, new_ledger
from fedsim.results.run import Run
from fedsim.simulate import initial_state, on_record, one_round

WAYS = (*EXACT, *ESTIMATES)
REHEARSED = 2  # rounds, before the start, by which it is told whether estimates are possible
BATCHES = 8  # that the client with most examples has of them then


_Way = Annotated[str, Field(json_schema_extra={"enum": [*WAYS]})]


def _listed(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


class ContributionSettings(Config):
    """What clients contribute to each run, found out at its end as by `fedsim.contributions`.

    Each way adds to the last round of a run `contributions/<how>/lowest`, the least that a client
    contributes, `contributions/<how>/spread`, the standard deviation over clients, and, if there
    are adversaries, `contributions/<how>/auc`, the AUC by which low contributions tell them from
    others (0.5 is guessing). Of a score of which little is good, contributions count with their
    sign changed. Each run's `contributions.parquet` has the values.

    Args:
        how: one way, or several: `shapley`, `permutations` or `leave_one_out`, which play
            federations of some of the clients; or the estimates `multi_rounds`, `gtg_shapley`,
            `shapfed` or `cosine`, which repeat the run once.
        score: a column of the rounds, whose last value counts; by default the primary metric.
        permutations: number of random orders.
        tolerance: leave out the rest of an order once a coalition's score is as close to that of
            all clients.
        budget: most federations that may have to be played for a run.
    """

    how: Annotated[
        tuple[_Way, ...], BeforeValidator(_listed, json_schema_input_type=_Way | tuple[_Way, ...])
    ] = Field(min_length=1)
    score: str | None = None
    permutations: int = Field(PERMUTATIONS, ge=2, le=1_000_000)
    tolerance: float = Field(0.0, ge=0)
    budget: int = Field(BUDGET, ge=1)

    @field_validator("how")
    @classmethod
    def _known_ways(cls, ways: tuple[str, ...]) -> tuple[str, ...]:
        for how in ways:
            if how not in WAYS:
                about = {"how": how, "hint": nearest(how, WAYS)}
                problem = "there is no way '{how}'{hint}"
                raise PydanticCustomError("unknown_name", problem, about)
            refuse_twice(how, ways)
        return ways

    def columns(
        self, experiment: Experiment, prepared: tuple[Dataset, ClientSplits, RunSpec]
    ) -> list[str]:
        """The columns that a run of the experiment gets, of what `prepare` returned for it.

        If clients join by themselves, `auc` may lack where no adversary has arrived.
        """
        _, splits, spec = prepared
        clients = ever_asked(experiment, splits, spec)
        bad = clients.intersection(splits.adversaries)
        figures = ("lowest", "spread", *(["auc"] if bad and bad != clients else []))
        return [f"{CONTRIBUTIONS}{how}/{figure}" for how in self.how for figure in figures]

    def judges(self, columns: Collection[str], tested: Collection[str]) -> bool:
        """Whether one of these columns is of contributions to a score on the test set.

        Args:
            tested: columns of such scores.
        """
        if self.score is not None and self.score not in tested:
            return False
        scored = [how for how in self.how if how not in WITHOUT_UNIT]
        return any(c.startswith(f"{CONTRIBUTIONS}{how}/") for c in columns for how in scored)

    def check(
        self,
        experiment: Experiment,
        prepared: tuple[Dataset, ClientSplits, RunSpec],
        loaded: Dataset,
    ) -> None:
        """Refuse what would only be refused at the end of a run.

        Args:
            prepared: the experiment's, by `prepare`.
            loaded: its data, as loaded.

        Raises:
            BadInput: the experiment is not for one of the ways, or their budget does not suffice.
        """
        estimates = {how: ESTIMATES[how] for how in self.how if how in ESTIMATES}
        if estimates:
            named = f"how={next(iter(estimates))}"
            try:
                check_network(experiment)
                rounds = [
                    _without_numbers(each) for each in rehearsed(experiment, prepared, self.score)
                ]
            except ExperimentError as refusal:
                raise ExperimentError(f"{named}: {refusal}") from None
            for estimate in estimates.values():
                estimate(iter(rounds), lambda _: 0.0, np.random.default_rng(0))
        for how in self.how:
            if how in EXACT:
                self._check_played(how, experiment, prepared, loaded)

    def _check_played(
        self,
        how: str,
        experiment: Experiment,
        prepared: tuple[Dataset, ClientSplits, RunSpec],
        loaded: Dataset,
    ) -> None:
        """Refuse federations of some of the clients that cannot be played, or are too many."""
        _, splits, spec = prepared
        check_places(experiment)
        active = ever_asked(experiment, splits, spec)
        n, few = len(active), sorted(active)
        if how == "leave_one_out":
            count = n
        elif how == "shapley":
            count = 2 ** min(n, 64)
        else:
            count = len(beginnings(orders_of(experiment.seed, few, self.permutations))) - 1
        check_budget(how, n, count, self.budget)
        smallest = active - {few[0]} if how == "leave_one_out" else frozenset(few[:1])
        if smallest:
            check_alone(experiment, smallest, active, loaded)
        if how != "leave_one_out" and self.score is not None and of_clients(self.score):
            raise ExperimentError(
                f"score={self.score}: is a mean or a least over clients, and has no value without "
                f"any, which how={how} needs; take how=leave_one_out"
            )
        of_models = {metric.column for metric in spec.objective.shown(prepared[0])}
        own = self.score is None or self.score in of_models
        if own and how != "leave_one_out" and not experiment.method.has_global_model:
            raise ExperimentError(
                f"how={how}: method.name={experiment.method.name} has no model without any "
                "client, whose score is needed; take how=leave_one_out"
            )

    def add_to(self, run: Run) -> Run:
        """A finished run with the columns added."""
        if not self.wanting(run.manifest):
            return run
        found = dict[str, float]()
        for how in self.how:
            own = contributions(
                run,
                self.score,
                how=how,
                permutations=self.permutations,
                tolerance=self.tolerance,
                budget=self.budget,
                progress=False,
            )
            found |= {f"{CONTRIBUTIONS}{how}/{name}": n for name, n in own.summary.items()}
        folder = RunFolder.open(run.path)
        folder.update(contributions=found)
        return Run(folder)

    def wanting(self, manifest: Any) -> bool:
        """Whether a run with this manifest has yet to get columns."""
        known = manifest.get("contributions", {})
        return any(f"{CONTRIBUTIONS}{how}/lowest" not in known for how in self.how)


def of_clients(score: str) -> bool:
    """Whether a column of the rounds sums up what each client has."""
    return score == "train_loss" or score.startswith(tuple(f"{who}_" for who in TESTED))


def rehearsed(
    experiment: Experiment,
    prepared: tuple[Dataset, ClientSplits, RunSpec],
    score: str | None,
) -> Iterator[RoundUpdates]:
    """The first rounds of an experiment whose clients have few examples each.

    None where these are too few for it.

    Raises:
        ExperimentError: its server does not average what clients train.
        BadInput: there is no such score of a model.
    """
    dataset, splits, spec = prepared
    train = splits.train
    most = train.lengths.max(initial=1)
    share = min(1.0, BATCHES * experiment.train.batch_size / most)
    few = replace(splits, train=Ragged.of([own[: math.ceil(share * len(own))] for own in train]))
    spec = replace(
        spec, conditions=tuple(c for c in spec.conditions if not isinstance(c, Explanations))
    )
    settings = experiment.engine.model_copy(update={"gpus_per_actor": 0.0})
    engine = LocalEngine(settings, spec, dataset, few)
    try:
        runner = RoundRunner(spec, dataset, few, engine, device=engine.server_device())
        ledger, fed = new_ledger(), federation_of(runner)
        runner.use_ledger(ledger)
        state = initial_state(runner, experiment)
        if score is not None:
            check_score(score, fed.evaluate(state.weights))
        by_class = places_by_class(dataset.classes, fed.server.model)
        for t in range(1, min(REHEARSED, experiment.train.rounds) + 1):
            trained, before = Trained(), state.weights
            engine.on_client_done(noting(trained))
            try:
                state = one_round(runner, experiment, state, t)
                on_record(runner, t, ledger)
            except RunError:
                return
            after, name = state.weights, experiment.method.name
            found = averaged(t, before, dict(sorted(trained.items())), after, by_class, name)
            if found is not None:
                yield found
    finally:
        engine.close()


def _without_numbers(round: RoundUpdates) -> RoundUpdates:
    """A round as estimates take it, of a model without any weights."""
    nothing = np.zeros(0, np.float32)
    return replace(
        round,
        before=nothing,
        after=nothing,
        changes=dict.fromkeys(round.changes, np.zeros(0)),
        by_class=dict.fromkeys(round.by_class, np.zeros(0, np.int64)),
    )
