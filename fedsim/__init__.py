"""fedsim: explainable federated learning, simulated on Ray."""

import gc as _gc

from fedsim._torchvision import import_beside_any_torch as _import_beside_any_torch
from fedsim.modules import search_here_last as _search_here_last

_search_here_last()
_import_beside_any_torch()
# Imports, torch's most of all, make many objects and no garbage; collecting takes a tenth of their
# time, in each process of a run.
_collects = _gc.isenabled()
_gc.disable()
try:
    from fedsim.analysis.replay import replay
    from fedsim.data import drift as _drift  # fills the registry, as do the next five
    from fedsim.data import reviews as _reviews
    from fedsim.data import shortcut as _shortcut
    from fedsim.data import sources as _sources
    from fedsim.data import task_sequence as _task_sequence
    from fedsim.data import text_sources as _text_sources
    from fedsim.experiment import Experiment
    from fedsim.federation import Client, Federation, NotCounted, Update
    from fedsim.launch import resume, run
    from fedsim.methods import Method, State
    from fedsim.results.report import report
    from fedsim.results.run import Run, load
finally:
    if _collects:
        _gc.enable()

__all__ = [
    "Client",
    "Experiment",
    "Federation",
    "Method",
    "NotCounted",
    "Run",
    "State",
    "Update",
    "load",
    "replay",
    "report",
    "resume",
    "run",
]
del (
    _drift,
    _import_beside_any_torch,
    _reviews,
    _search_here_last,
    _shortcut,
    _sources,
    _task_sequence,
    _text_sources,
)
