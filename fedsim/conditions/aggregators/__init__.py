"""Robust rules by which the server aggregates clients' updates."""

from fedsim.conditions.aggregators import rules as _rules  # they fill the registry
from fedsim.conditions.aggregators.aggregator import Aggregator, aggregators

__all__ = ["Aggregator", "aggregators"]
del _rules
