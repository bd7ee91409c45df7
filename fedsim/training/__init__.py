"""Local training on a flat vector of weights."""

from fedsim.training.flat import FlatModel, WithLoss, representation
from fedsim.training.initial import load_weights
from fedsim.training.local import (
    Context,
    Hooks,
    Loss,
    Optimizer,
    Perturbation,
    Schedule,
    Train,
    Trained,
    TrainingJob,
    epoch_order,
    in_precision,
    logits,
    train,
    with_terms,
)
from fedsim.training.stack import (
    Stack,
    choose_stack_size,
    lacks_memory,
)

__all__ = [
    "Context",
    "FlatModel",
    "Hooks",
    "Loss",
    "Optimizer",
    "Perturbation",
    "Schedule",
    "Stack",
    "Train",
    "Trained",
    "TrainingJob",
    "WithLoss",
    "choose_stack_size",
    "epoch_order",
    "in_precision",
    "lacks_memory",
    "load_weights",
    "logits",
    "representation",
    "train",
    "with_terms",
]
