"""Data sets, and partitions of them among clients."""

from fedsim.data import drift as _drift  # they fill the registries
from fedsim.data import task_sequence as _task_sequence
from fedsim.data.dataset import Dataset, DataSpec, Source, datasets, load_dataset
from fedsim.data.partition import ClientSplits, Partition, Ragged, TaskSequence, partitions
from fedsim.data.sources import from_python as _from_python
from fedsim.data.sources import reviews as _reviews
from fedsim.data.sources import shortcut as _shortcut
from fedsim.data.sources import standard as _sources
from fedsim.data.sources import text as _text_sources

__all__ = [
    "ClientSplits",
    "DataSpec",
    "Dataset",
    "Partition",
    "Ragged",
    "Source",
    "TaskSequence",
    "datasets",
    "load_dataset",
    "partitions",
]
del _drift, _from_python, _reviews, _shortcut, _sources, _task_sequence, _text_sources
