"""Adversaries among the clients: who they are, and what they do."""

from fedsim.conditions.adversaries import on_data as _on_data  # they fill the registry
from fedsim.conditions.adversaries import on_updates as _on_updates
from fedsim.conditions.adversaries.attack import Attack, attacks
from fedsim.conditions.adversaries.section import Adversaries

__all__ = ["Adversaries", "Attack", "attacks"]
del _on_data, _on_updates
