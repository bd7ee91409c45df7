"""Local training and evaluation of one client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from torch import Tensor, nn

from fedsim.component import Section
from fedsim.training.flat import FlatModel

# (network, inputs (B, ...), labels (B,)) -> losses (B,), one for each example.
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
# (gradient g (P,), parameters w (P,), the method's own vectors) -> gradient (P,). Element by
# element over the last axis, so that it serves a stack of clients (V, P) as well.
Gradient = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]

EVALUATION_BATCH = 500


class Optimizer(Section):
    """The clients' local optimiser, made anew for each client and round.

    Args:
        lr: learning rate η.
        momentum: of SGD.
        nesterov: Nesterov's form of SGD's momentum.
        weight_decay: L2 penalty added to the gradient (sgd, adam), or decoupled (adamw).
        betas: decay rates of Adam's two moments.
    """

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = Field(0.1, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    nesterov: bool = False
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)

    @model_validator(mode="after")
    def _fits(self) -> Optimizer:
        if self.name != "sgd" and (self.momentum or self.nesterov):
            raise PydanticCustomError(
                "optimizer",
                "momentum and nesterov belong to sgd; {name} has betas",
                {"name": self.name},
            )
        if self.nesterov and not self.momentum:
            raise PydanticCustomError("optimizer", "nesterov needs a momentum above 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise PydanticCustomError("optimizer", "betas must lie in [0, 1)")
        return self

    def build(self, parameters: Tensor) -> torch.optim.Optimizer:
        """PyTorch's optimiser over one flat tensor, which must hold its gradient."""
        if self.name == "sgd":
            return torch.optim.SGD(
                [parameters],
                lr=self.lr,
                momentum=self.momentum,
                nesterov=self.nesterov,
                weight_decay=self.weight_decay,
            )
        kind = torch.optim.Adam if self.name == "adam" else torch.optim.AdamW
        return kind([parameters], lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)


class Train(Section):
    """How the federation trains.

    Args:
        rounds: T, communication rounds.
        participation: share of the clients sampled each round.
        local_epochs: passes over the client's own data in a round.
        batch_size: examples a local step; the last batch of an epoch may be smaller.
        on_client_error: what a client that fails does to the run: `stop` ends it, `skip` leaves
            the client out of the round.
    """

    rounds: int = Field(20, ge=1)
    participation: float = Field(1.0, gt=0, le=1)
    local_epochs: int = Field(1, ge=1)
    batch_size: int = Field(16, ge=1)
    optimizer: Optimizer = Optimizer()
    on_client_error: Literal["stop", "skip"] = "stop"


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of each example: (B,)."""
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def train(
    model: FlatModel,
    x: Tensor,
    y: Tensor,
    settings: Train,
    rng: np.random.Generator,
    loss: Loss = cross_entropy,
    gradient: Gradient | None = None,
    context: Mapping[str, Tensor] | None = None,
) -> tuple[int, float]:
    """Train the model's weights where they lie, on n examples.

    Each epoch visits the examples in a new order drawn from `rng`, in batches of
    `settings.batch_size`. Where the model has batch norm, a last batch of a single example, on
    which batch statistics are undefined, is left out.

    Args:
        x: (n, ...) inputs.
        y: (n,) labels.
        loss: per-example losses, averaged over the batch.
        gradient: changes each step's gradient, e.g. adds a proximal term.
        context: vectors that `gradient` needs, (P,) each.

    Raises:
        ValueError: no step can be made, because there is one example and batch norm.

    Returns:
        The number of local steps τ, and the mean loss over all examples visited.
    """
    module, grad = model.module, model.gradient
    module.train()
    parameters = nn.Parameter(model.vector[: model.num_parameters])
    optimizer = settings.optimizer.build(parameters)
    steps, visited = 0, 0
    total = torch.zeros((), device=model.device)
    n, size = len(y), settings.batch_size
    end = n - 1 if model.has_batch_norm and n % size == 1 else n
    for _ in range(settings.local_epochs):
        order = torch.from_numpy(rng.permutation(n)).to(model.device)
        x_epoch, y_epoch = x[order], y[order]
        for start in range(0, end, size):
            stop = min(start + size, end)
            losses = loss(module, x_epoch[start:stop], y_epoch[start:stop])
            grad.zero_()
            torch.autograd.backward(losses.mean())
            with torch.no_grad():
                total += losses.sum()
                if gradient is None:
                    parameters.grad = grad
                else:
                    parameters.grad = gradient(grad, parameters.detach(), context or {})
            optimizer.step()
            steps += 1
            visited += stop - start
    if steps == 0:
        raise ValueError(
            "a single training example, and the model has batch norm, whose statistics need two; "
            "raise partition.min_samples"
        )
    return steps, float(total) / visited


@torch.no_grad()
def evaluate(model: FlatModel, x: Tensor, y: Tensor) -> tuple[float, int]:
    """Summed cross-entropy and the number of right answers of the model on n examples.

    In batches of a fixed size, so that the figures do not depend on who evaluates.
    """
    model.module.eval()
    loss, right = 0.0, 0
    for start in range(0, len(y), EVALUATION_BATCH):
        logits = model.module(x[start : start + EVALUATION_BATCH])
        labels = y[start : start + EVALUATION_BATCH]
        loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
        right += int((logits.argmax(dim=1) == labels).sum())
    return loss, right
