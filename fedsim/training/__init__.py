"""Local training on a flat vector of weights."""

from fedsim.training.flat import FlatModel, representation
from fedsim.training.local import (
    Context,
    Gradient,
    Hooks,
    Loss,
    Optimizer,
    Task,
    Train,
    Trained,
    cross_entropy,
    default_loss,
    evaluate,
    evaluate_among,
    logits,
    regression_scores,
    scores,
    train,
)
from fedsim.training.stack import (
    Stack,
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
    "Task",
    "Train",
    "Trained",
    "cross_entropy",
    "default_loss",
    "evaluate",
    "evaluate_among",
    "generator_state",
    "in_words",
    "lacks_memory",
    "logits",
    "regression_scores",
    "representation",
    "scores",
    "set_generator_state",
    "train",
]
