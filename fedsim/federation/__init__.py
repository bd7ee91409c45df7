"""The federation: clients, engines, exact sums, checkpoints."""

from fedsim.federation.client import Client, Update, client_function
from fedsim.federation.context import Examples, RunSpec
from fedsim.federation.engine import (
    Engine,
    EngineSettings,
    LocalEngine,
    limit_threads,
    pick_device,
)
from fedsim.federation.federation import (
    Cohort,
    Federation,
    Mean,
    Vector,
    cohort_size,
    draw_cohort,
)
from fedsim.federation.wire import NotCounted, PerClient

__all__ = [
    "Client",
    "Cohort",
    "Engine",
    "EngineSettings",
    "Examples",
    "Federation",
    "LocalEngine",
    "Mean",
    "NotCounted",
    "PerClient",
    "RunSpec",
    "Update",
    "Vector",
    "client_function",
    "cohort_size",
    "draw_cohort",
    "limit_threads",
    "pick_device",
]
