"""Federated methods, a file each."""

from fedsim.methods import fedavg, fedavgm, fedprox, scaffold  # fills the registry
from fedsim.methods.method import Method, State, methods

__all__ = ["Method", "State", "fedavg", "fedavgm", "fedprox", "methods", "scaffold"]
