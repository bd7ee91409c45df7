"""Data sets, and partitions of them among clients."""

from fedsim.data.dataset import Dataset, DataSpec, Source, datasets, load_dataset
from fedsim.data.partition import ClientSplits, Partition, Ragged, TaskSequence, partitions

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
