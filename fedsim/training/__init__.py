"""Local training on a flat vector of weights."""

from fedsim.training.flat import FlatModel, representation
from fedsim.training.local import (
    Context,
    Gradient,
    Hooks,
    Loss,
    Optimizer,
    Train,
    Trained,
    TrainingJob,
    logits,
    train,
)
from fedsim.training.stack import (
    Stack,
    choose_stack_size,
    generator_state,
    in_words,
    lacks_memory,
    set_generator_state,
)

__all__ = [
    "Context",
    "FlatModel",
    "Gradient",
    "Hooks",
    "Loss",
    "Optimizer",
    "Stack",
    "Train",
    "Trained",
    "TrainingJob",
    "choose_stack_size",
    "generator_state",
    "in_words",
    "lacks_memory",
    "logits",
    "representation",
    "set_generator_state",
    "train",
]
