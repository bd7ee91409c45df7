"""fedsim: explainable federated learning, simulated on Ray."""

from fedsim.data import reviews as _reviews  # fills the registry, as do the next three
from fedsim.data import sources as _sources
from fedsim.data import stream as _stream
from fedsim.data import text_sources as _text_sources
from fedsim.experiment import Experiment
from fedsim.federation import Client, Federation, Unsent, Update
from fedsim.launch import resume, run
from fedsim.methods import Method, State
from fedsim.remade import reopen
from fedsim.results.run import Run, load

__all__ = [
    "Client",
    "Experiment",
    "Federation",
    "Method",
    "Run",
    "State",
    "Unsent",
    "Update",
    "load",
    "reopen",
    "resume",
    "run",
]
del _reviews, _sources, _stream, _text_sources
