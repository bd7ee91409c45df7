"""Data sets, and partitions of them among clients."""

# ruff: noqa: F401  (modules that are not used here fill the registries)

from fedsim.data import drift as _drift
from fedsim.data import task_sequence as _task_sequence
from fedsim.data.dataset import Dataset, DataSpec
from fedsim.data.partition import Partition, partitions
from fedsim.data.source import Source, datasets, load_dataset
from fedsim.data.sources import arrays as _arrays
from fedsim.data.sources import generated as _generated
from fedsim.data.sources import huggingface as _huggingface
from fedsim.data.sources import images as _images
from fedsim.data.sources import keel as _keel
from fedsim.data.sources import reviews as _reviews
from fedsim.data.sources import shortcut as _shortcut
from fedsim.data.sources import tables as _tables
from fedsim.data.sources import text as _text
from fedsim.data.splits import ClientSplits, Ragged, TaskSequence

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
