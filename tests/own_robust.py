"""Aggregation rules that return what they should not."""

from __future__ import annotations

import numpy as np

from fedsim.aggregators import Aggregator
from fedsim.aggregators.aggregator import Changes


class Short(Aggregator):
    """Forgets most coordinates."""

    def aggregate(self, changes: Changes, weights: Changes) -> Changes:
        return np.zeros(3)


class Undefined(Aggregator):
    """Divides by zero."""

    def aggregate(self, changes: Changes, weights: Changes) -> Changes:
        return np.full(changes.shape[1], np.nan)
