"""fedsim: explainable federated learning, simulated on Ray."""

import gc
import importlib
from typing import TYPE_CHECKING, Any

from fedsim import errors
from fedsim.config.modules import search_here_last
from fedsim.support.torchvision import import_beside_any_torch
from fedsim.support.version import __version__ as __version__

if TYPE_CHECKING:
    from fedsim.analysis.attacks.audit import audit
    from fedsim.analysis.attacks.report import Audit
    from fedsim.analysis.clusters import Clusters, clusters
    from fedsim.analysis.comparison import Comparison, compare
    from fedsim.analysis.contributions.contributions import Contributions, contributions
    from fedsim.analysis.contributions.influence import Influence, influence
    from fedsim.analysis.drifts import Drifts, drifts
    from fedsim.analysis.explanations import Explanations, explanations
    from fedsim.analysis.predictions import predictions
    from fedsim.analysis.replay import replay
    from fedsim.analysis.unlearning.unlearn import Unlearned, unlearn
    from fedsim.data import Dataset
    from fedsim.experiment import Experiment
    from fedsim.federation import Client, Federation, NotCounted, Update
    from fedsim.launch.extend import extend
    from fedsim.launch.run import run
    from fedsim.launch.without import without
    from fedsim.methods import Method, State
    from fedsim.results.report import report
    from fedsim.results.run import Run
    from fedsim.results.sweeps import Grid, Search, load
    from fedsim.sweep.start import grid, resume, tune
    from fedsim.viewer.view import View, view

__all__ = [
    "Audit",
    "Client",
    "Clusters",
    "Comparison",
    "Contributions",
    "Dataset",
    "Drifts",
    "Experiment",
    "Explanations",
    "Federation",
    "Grid",
    "Influence",
    "Method",
    "NotCounted",
    "Run",
    "Search",
    "State",
    "Unlearned",
    "Update",
    "View",
    "audit",
    "clusters",
    "compare",
    "contributions",
    "drifts",
    "errors",
    "explanations",
    "extend",
    "grid",
    "influence",
    "load",
    "predictions",
    "replay",
    "report",
    "resume",
    "run",
    "tune",
    "unlearn",
    "view",
    "without",
]

# Imported when first asked for, because they bring torch: `fedsim --help` needs none of them.
_MODULES = {
    "fedsim.analysis.attacks.audit": ("audit",),
    "fedsim.analysis.attacks.report": ("Audit",),
    "fedsim.analysis.clusters": ("Clusters", "clusters"),
    "fedsim.analysis.contributions.contributions": ("Contributions", "contributions"),
    "fedsim.analysis.contributions.influence": ("Influence", "influence"),
    "fedsim.analysis.comparison": ("Comparison", "compare"),
    "fedsim.analysis.drifts": ("Drifts", "drifts"),
    "fedsim.analysis.explanations": ("Explanations", "explanations"),
    "fedsim.analysis.predictions": ("predictions",),
    "fedsim.analysis.replay": ("replay",),
    "fedsim.analysis.unlearning.unlearn": ("Unlearned", "unlearn"),
    "fedsim.data": ("Dataset",),
    "fedsim.experiment": ("Experiment",),
    "fedsim.launch.extend": ("extend",),
    "fedsim.federation": ("Client", "Federation", "NotCounted", "Update"),
    "fedsim.launch.run": ("run",),
    "fedsim.launch.without": ("without",),
    "fedsim.methods": ("Method", "State"),
    "fedsim.results.report": ("report",),
    "fedsim.results.run": ("Run",),
    "fedsim.results.sweeps": ("Grid", "Search", "load"),
    "fedsim.sweep.start": ("grid", "resume", "tune"),
    "fedsim.viewer.view": ("View", "view"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

search_here_last()
import_beside_any_torch()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedsim' has no attribute '{name}'")
    # Imports, torch's most of all, make many objects and no garbage; collecting takes a tenth of
    # their time, in each process of a run.
    collects = gc.isenabled()
    gc.disable()
    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    finally:
        if collects:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
