"""The `search` section of an experiment file, available without Optuna."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from fedsim.analysis.contributions.settings import ContributionSettings
from fedsim.config.registry import Config, Registry
from fedsim.errors import ExperimentError
from fedsim.results.records import CONTRIBUTIONS

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


class Range(Config):
    """The values that a hyper-parameter can take."""

    type: str

    def distribution(self) -> BaseDistribution:
        """Optuna's distribution of the range.

        Raises:
            ValueError: there are no such values.
        """
        raise NotImplementedError

    def probe_values(self) -> list[Any]:
        """Representative values, which must be valid in the experiment."""
        raise NotImplementedError


ranges: Registry[Range] = Registry("range", Range, key="type")


class _Interval(Range):
    """Numbers between two bounds.

    Args:
        low, high: the bounds, inclusive.
        log: sample on a logarithmic scale.
        step: only the values low, low + step, ...
    """

    low: Any
    high: Any
    log: bool = False
    step: Any = None

    def distribution(self) -> BaseDistribution:
        from optuna import distributions

        kinds = {"float": distributions.FloatDistribution, "int": distributions.IntDistribution}
        return kinds[self.type](self.low, self.high, log=self.log, step=self.step)

    def probe_values(self) -> list[Any]:
        return [self.low, self.high]


@ranges.register
class Float(_Interval):
    """Numbers between two bounds."""

    type: str = "float"
    low: float
    high: float
    step: float | None = Field(None, gt=0)


@ranges.register
class Int(_Interval):
    """Whole numbers between two bounds."""

    type: str = "int"
    low: int
    high: int
    step: int = Field(1, ge=1)


@ranges.register
class Choice(Range):
    """One of several values; a plain list is also a choice.

    Args:
        values: the values to choose from.
    """

    type: str = "choice"
    values: list[str | bool | int | float] = Field(min_length=1)

    def distribution(self) -> BaseDistribution:
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.values)

    def probe_values(self) -> list[Any]:
        return list(self.values)


def _parse_range(given: Any) -> Any:
    return ranges.parse({"type": "choice", "values": given} if isinstance(given, list) else given)


_AnyRange = Annotated[
    SerializeAsAny[Range],
    BeforeValidator(_parse_range, json_schema_input_type=Range | list[str | bool | int | float]),
]


class Asha(Config):
    """Stop trials early that fall behind.

    Li et al., A System for Massively Parallel Hyperparameter Tuning, MLSys 2020.

    Args:
        grace: rounds that every trial gets.
        reduction: η; the best 1/η of the trials at a rung continue to the next rung, which comes
            after η times as many rounds.
    """

    grace: int = Field(5, ge=1)
    reduction: float = Field(3, gt=1)


class SearchSettings(Config):
    """The `search` section: the hyper-parameters to tune and the objectives.

    Args:
        space: for each `section.key` a range, `{type: float, low: 0.001, high: 1, log: true}`,
            `{type: int, low: 1, high: 8}`, or a list of values to choose from.
        objectives: columns that are optimised, each with `max` or `min`: any numeric column of the
            rounds table, or `total_bytes`, sent up and down. The value in a trial's last round
            counts. By default the primary metric, on the validation set if there is one
            (`evaluate.validation`): a choice made on the test set looks better on it than it is.
        trials: how many to try.
        sampler: how the next trial is chosen: by Optuna's TPE, NSGA-II or Gaussian processes, or
            at random.
        seed: seed of the sampler. With concurrent trials, its proposals depend on which trial ends
            first.
        asha: stop trials early that fall behind; only for a single objective.
        contributions: what clients contribute to each trial that is not stopped early, whose
            columns can be objectives; by default not asked.
        concurrent: number of trials run at the same time; `auto` is as many as the cluster can
            hold.
    """

    space: dict[str, _AnyRange] = Field(min_length=1)
    objectives: dict[str, Literal["max", "min"]] = Field({}, min_length=1, validate_default=False)
    trials: int = Field(20, ge=1)
    sampler: Literal["tpe", "nsga2", "gp", "random"] = "tpe"
    seed: int = Field(0, ge=0)
    asha: Asha | None = None
    contributions: ContributionSettings | None = None
    concurrent: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _can_be_carried_out(self) -> SearchSettings:
        for key, given in self.space.items():
            if key.partition(".")[0] == "engine":
                raise ExperimentError(
                    f"search.space.{key}: the engine changes only the last bits of a result, so "
                    "there is nothing to tune"
                )
            try:
                given.distribution()
            except ValueError as error:
                raise ExperimentError(f"search.space.{key}: {error}") from error
        for name in self.objectives if self.asha is not None else ():
            if name.startswith(CONTRIBUTIONS):
                raise ExperimentError(
                    f"search.asha: stops trials by their rounds, and {name} is known at the end "
                    "alone; leave out search.asha"
                )
        if self.asha is not None and len(self.objectives) > 1:
            raise ExperimentError(
                f"search.asha: stops trials by one objective, and there are "
                f"{len(self.objectives)} (a trial that is behind in one may be ahead in another); "
                "leave out search.asha, or all objectives but one"
            )
        return self
