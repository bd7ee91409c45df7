"""The federation: clients, engines, exact sums, checkpoints."""

from fedsim.federation.client import Client, Examples, Update
from fedsim.federation.engine import Engine, EngineSettings, LocalEngine
from fedsim.federation.federation import Cohort, Federation, Mean, Vector, cohort_size
from fedsim.federation.wire import Unsent
from fedsim.federation.worker import Setup

__all__ = [
    "Client",
    "Cohort",
    "Engine",
    "EngineSettings",
    "Examples",
    "Federation",
    "LocalEngine",
    "Mean",
    "Setup",
    "Unsent",
    "Update",
    "Vector",
    "cohort_size",
]
