"""The federation: clients, engines, exact sums and checkpoints."""

from fedsim.cluster.settings import EngineSettings
from fedsim.federation.client import Client, client_function
from fedsim.federation.cohort import Cohort, cohort_size, draw_cohort
from fedsim.federation.condition import Asked, Condition, Exchange, Round, Sent, conditions
from fedsim.federation.context import Examples, RunSpec
from fedsim.federation.engine import (
    Engine,
    LocalEngine,
    limit_threads,
    pick_device,
)
from fedsim.federation.federation import Federation, Vector
from fedsim.federation.reduction import (
    DivergedUpdate,
    Gather,
    InvalidUpdate,
    Mean,
    NothingToReduce,
    Reduction,
    Update,
)
from fedsim.federation.wire import NotCounted, PerClient

__all__ = [
    "Asked",
    "Client",
    "Cohort",
    "Condition",
    "DivergedUpdate",
    "Engine",
    "EngineSettings",
    "Examples",
    "Exchange",
    "Federation",
    "Gather",
    "InvalidUpdate",
    "LocalEngine",
    "Mean",
    "NotCounted",
    "NothingToReduce",
    "PerClient",
    "Reduction",
    "Round",
    "RunSpec",
    "Sent",
    "Update",
    "Vector",
    "client_function",
    "cohort_size",
    "conditions",
    "draw_cohort",
    "limit_threads",
    "pick_device",
]
