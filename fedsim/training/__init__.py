"""Local training on a flat vector of weights."""

from fedsim.objectives.objective import Context
from fedsim.training.flat import FlatModel, WithLoss, has_batch_norm, lacks_memory, representation
from fedsim.training.initial import load_weights
from fedsim.training.job import (
    Draw,
    Hooks,
    Loss,
    Optimizer,
    Perturbation,
    Prepare,
    Schedule,
    Train,
    Trained,
    TrainingJob,
)
from fedsim.training.local import (
    epoch_order,
    in_precision,
    logits,
    part_sizes,
    train,
    usable,
    with_terms,
    work_of,
)
from fedsim.training.recomputing import blocks_of
from fedsim.training.stack import Stack, choose_stack_size

__all__ = [
    "Context",
    "Draw",
    "FlatModel",
    "Hooks",
    "Loss",
    "Optimizer",
    "Perturbation",
    "Prepare",
    "Schedule",
    "Stack",
    "Train",
    "Trained",
    "TrainingJob",
    "WithLoss",
    "blocks_of",
    "choose_stack_size",
    "epoch_order",
    "has_batch_norm",
    "in_precision",
    "lacks_memory",
    "load_weights",
    "logits",
    "part_sizes",
    "representation",
    "train",
    "usable",
    "with_terms",
    "work_of",
]
