"""Aggregation rules that return what they should not."""

from __future__ import annotations

import numpy as np

from fedsim.conditions.aggregators import Aggregator
from fedsim.conditions.aggregators.aggregator import Changes


class Short(Aggregator):
    """Forgets most coordinates."""

    def aggregate(self, changes: Changes, weights: Changes) -> Changes:
        return np.zeros(3)


class Undefined(Aggregator):
    """Divides by zero."""

    def aggregate(self, changes: Changes, weights: Changes) -> Changes:
        return np.full(changes.shape[1], np.nan)
