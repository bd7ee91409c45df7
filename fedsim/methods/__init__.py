"""Federated methods, a file each."""

from fedsim.methods import (  # fills the registry
    centralised,
    fedaux,
    fedavg,
    fedavgm,
    fedbabu,
    feddf,
    feddisco,
    feddyn,
    fedfed,
    fedftg,
    fedgen,
    fedprox,
    fedsam,
    moon,
    scaffold,
    semifl,
)
from fedsim.methods.method import Method, State, methods

__all__ = [
    "Method",
    "State",
    "centralised",
    "fedaux",
    "fedavg",
    "fedavgm",
    "fedbabu",
    "feddf",
    "feddisco",
    "feddyn",
    "fedfed",
    "fedftg",
    "fedgen",
    "fedprox",
    "fedsam",
    "methods",
    "moon",
    "scaffold",
    "semifl",
]
