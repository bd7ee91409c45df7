"""Local training on a flat vector of weights."""

from fedsim.training.flat import FlatModel
from fedsim.training.local import Gradient, Loss, Optimizer, Train, cross_entropy, evaluate, train

__all__ = [
    "FlatModel",
    "Gradient",
    "Loss",
    "Optimizer",
    "Train",
    "cross_entropy",
    "evaluate",
    "train",
]
