"""A sampler of trials that is not affected by interruptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

AGAIN = "proposed_again"  # attribute of the study: numbers of trials that were proposed again


class SamplerByPlace(BaseSampler):
    """One of Optuna's samplers, with a separate random stream for each trial.

    The stream depends on the trial's position among all trials except those that were lost and
    proposed again. An interrupted search thus draws the same values as an uninterrupted one.

    Args:
        make: returns a sampler for a seed, which must keep no state besides the study.
        seed: seed of the search.
    """

    def __init__(self, make: Callable[..., BaseSampler], seed: int) -> None:
        self._make, self._seed = make, seed
        self._go_to(0)

    def _go_to(self, place: int) -> None:
        (key,) = np.random.SeedSequence([self._seed, place]).generate_state(1)
        self._place, self._sampler = place, self._make(seed=int(key))

    def _of(self, study: Study, trial: FrozenTrial) -> BaseSampler:
        place = trial.number - len(study.user_attrs.get(AGAIN, ()))
        if place != self._place:
            self._go_to(place)
        return self._sampler

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self._of(study, trial).before_trial(study, trial)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self._of(study, trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._of(study, trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        sampler = self._of(study, trial)
        return sampler.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        self._sampler.after_trial(study, trial, state, values)
