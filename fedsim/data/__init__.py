"""Data sets, and partitions of them among clients."""

from fedsim.data.dataset import Dataset, Source, datasets
from fedsim.data.partition import Holdings, Partition, Ragged, Stream, partitions

__all__ = [
    "Dataset",
    "Holdings",
    "Partition",
    "Ragged",
    "Source",
    "Stream",
    "datasets",
    "partitions",
]
