"""The federation: clients, engines, exact sums and checkpoints."""

from fedsim.cluster.settings import EngineSettings
from fedsim.federation.client import Client, client_function
from fedsim.federation.cohort import Cohort, Without, cohort_size, draw_cohort
from fedsim.federation.condition import (
    Asked,
    Clock,
    Condition,
    ConditionFailed,
    Exchange,
    Rehearsed,
    Round,
    Runner,
    Sent,
    Withdrawn,
    Work,
    conditions,
)
from fedsim.federation.context import Examples, RunSpec
from fedsim.federation.engine import (
    Engine,
    LocalEngine,
    limit_threads,
    pick_device,
)
from fedsim.federation.federation import Federation
from fedsim.federation.reduction import (
    DivergedUpdate,
    Gather,
    InvalidUpdate,
    Mean,
    NothingToReduce,
    Reduction,
    Update,
    Vector,
)
from fedsim.federation.runner import RoundRunner
from fedsim.federation.server import Server
from fedsim.federation.wire import NotCounted, PerClient

__all__ = [
    "Asked",
    "Client",
    "Clock",
    "Cohort",
    "Condition",
    "ConditionFailed",
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
    "Rehearsed",
    "Round",
    "RoundRunner",
    "RunSpec",
    "Runner",
    "Sent",
    "Server",
    "Update",
    "Vector",
    "Withdrawn",
    "Without",
    "Work",
    "client_function",
    "cohort_size",
    "conditions",
    "draw_cohort",
    "limit_threads",
    "pick_device",
]
