"""The base class of aggregation rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedsim.config.registry import Component, Registry

Changes = NDArray[np.float64]


class Aggregator(Component, ABC):
    """A rule that takes the place of the weighted mean: a component of the `aggregation` section.

    It applies wherever a method calls `Federation.mean`. A client's change is all that it sends
    for one mean in a single vector: each vector minus what the server sent under that name, or the
    vector itself if there is nothing of its size.

    Attributes:
        bound: how many adversaries f among n clients it withstands, in words.
        weighted: whether it withstands adversaries with less than half of the weight, rather than
            a number of them.

    Example:
        >>> class Midrange(Aggregator):
        ...     name: str = "my_module:Midrange"
        ...     bound = "f = 0"
        ...     def max_adversaries(self, n):
        ...         return 0
        ...     def aggregate(self, changes, weights):
        ...         return (changes.min(axis=0) + changes.max(axis=0)) / 2
        >>> Midrange().aggregate(np.array([[1.0, 2.0], [3.0, 8.0]]), np.ones(2)).tolist()
        [2.0, 5.0]
    """

    name: str
    bound: ClassVar[str] = "f < n/2"
    weighted: ClassVar[bool] = False

    @abstractmethod
    def aggregate(self, changes: Changes, weights: NDArray[np.float64]) -> Changes:
        """(P,) the aggregate of clients' changes; a pure function.

        Args:
            changes: (n, P) by client, n ≥ 1.
            weights: (n,) weights of the updates, all above 0.
        """

    def max_adversaries(self, n: int) -> int:
        """The largest number of adversaries among n clients that the rule withstands."""
        return (n - 1) // 2

    def check(self, n: int) -> None:
        """Reject a number of clients that is too small for the rule.

        Raises:
            ValueError: it is; the message says what would be enough.
        """


aggregators: Registry[Aggregator] = Registry("aggregation rule", Aggregator)  # type: ignore[type-abstract]
