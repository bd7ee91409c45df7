"""The federation: clients, engines, exact sums and checkpoints."""

from fedsim.cluster.settings import EngineSettings
from fedsim.federation.aggregation import Aggregation, PrivateAggregation
from fedsim.federation.client import Client, client_function
from fedsim.federation.cohort import Cohort, cohort_size, draw_cohort
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
from fedsim.federation.robust import RobustAggregation
from fedsim.federation.secure import SecureAggregation, SecureSettings
from fedsim.federation.wire import NotCounted, PerClient

__all__ = [
    "Aggregation",
    "Client",
    "Cohort",
    "DivergedUpdate",
    "Engine",
    "EngineSettings",
    "Examples",
    "Federation",
    "Gather",
    "InvalidUpdate",
    "LocalEngine",
    "Mean",
    "NotCounted",
    "NothingToReduce",
    "PerClient",
    "PrivateAggregation",
    "Reduction",
    "RobustAggregation",
    "RunSpec",
    "SecureAggregation",
    "SecureSettings",
    "Update",
    "Vector",
    "client_function",
    "cohort_size",
    "draw_cohort",
    "limit_threads",
    "pick_device",
]
