"""The base class of attacks."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedsim.config.registry import Component, Registry
from fedsim.data import Dataset
from fedsim.objectives import Metric

Changes = NDArray[np.float64]  # (n, P)
Mask = NDArray[np.bool_]  # (n,)


class Attack(Component):
    """What adversaries do: a component of `adversaries.attack`.

    An attack overrides `poison`, to train on other examples; `forge`, to send other updates; or
    both.

    Attributes:
        least: fewest adversaries that it takes.
        success: the score of the global model on `triggered` test examples: the share that it
            takes for what the adversaries want.

    Example:
        >>> class Silent(Attack):
        ...     name: str = "my_module:Silent"
        ...     def forge(self, changes, adversary, rng):
        ...         return np.zeros_like(changes[adversary])
        >>> Silent().forges, Silent().poisons
        (True, False)
    """

    name: str
    least: ClassVar[int] = 1
    success: ClassVar[Metric | None] = None

    @property
    def poisons(self) -> bool:
        """Whether adversaries train on other examples than they were dealt."""
        return type(self).poison is not Attack.poison

    @property
    def forges(self) -> bool:
        """Whether adversaries send other updates than they have trained."""
        return type(self).forge is not Attack.forge

    def check(self, data: Dataset) -> None:
        """Reject data that the attack is not for.

        Raises:
            DataError: it is not for them; the message says why.
        """

    def poison(
        self, data: Dataset, rows: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Inputs (n, ...) and labels (n,) that an adversary trains on instead of its own.

        Args:
            data: the data set.
            rows: (n,) its labelled training examples, as indices into `data.x`.
            rng: random stream of this client.
        """
        raise NotImplementedError

    def forge(self, changes: Changes, adversary: Mask, rng: np.random.Generator) -> Changes:
        """(m, P) the changes that the m adversaries of a cohort send, in the order of clients.

        Args:
            changes: (n, P) what each client of the cohort would send for one mean: trained
                parameters minus those that the server sent. Running statistics of batch norm are
                not among them, and are sent unchanged.
            adversary: (n,) which of these clients are adversaries.
            rng: random stream of this round.
        """
        raise NotImplementedError

    def triggered(self, data: Dataset, part: slice) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Inputs (n, ...) of test examples with a trigger, and the class (n,) wanted for each.

        Only called if there is a metric `success`.

        Args:
            part: of the central test set.
        """
        raise NotImplementedError


attacks: Registry[Attack] = Registry("attack", Attack)
