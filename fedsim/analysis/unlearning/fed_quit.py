"""FedQUIT: the client distils the model from itself, without the true class.

Mora et al., FedQUIT: On-Device Federated Unlearning via a Quasi-Competent Virtual Teacher,
arXiv 2408.07587, 2024.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import kl_div

from fedsim.analysis.unlearning.forgetting import (
    Forgetting,
    Unlearning,
    averaged,
    classifies,
    unlearning,
)
from fedsim.errors import RunFolderError
from fedsim.federation import Asked, Client, Federation, Vector, client_function
from fedsim.methods import State
from fedsim.objectives.objective import EVALUATION_BATCH


@dataclass(frozen=True)
class Quitting(State):
    """The clients that are to be forgotten."""

    clients: tuple[int, ...]


@unlearning.register
class FedQuit(Unlearning):
    """min_w KL(softmax(z̃(x)) ‖ softmax(z(x; w))) over the client's examples (x, y), from w^T.

    z̃ are the logits of the global model w^T in evaluation mode, of which the true class's is
    lowered to the least: z̃_y = min_c z_c. The teacher knows what it knew of other classes, so
    that the model forgets the client's examples and little else. Logits alone are distilled, also
    where training has further terms, such as concepts. Several clients each unlearn, and
    their models are averaged. Then the others continue with rounds of the run's own method.

    Args:
        epochs: passes over the client's examples, with the run's optimiser.
        rounds: of the others, afterwards.
    """

    name: str = "fed_quit"
    asks: ClassVar[tuple[Asked, ...]] = ("messages", "sizes")
    trains_alike: ClassVar[bool] = True
    epochs: int = Field(1, ge=1, le=1_000_000)
    rounds: int = Field(5, ge=0, le=1_000_000)

    @property
    def further_rounds(self) -> int:
        return 1 + self.rounds

    def check(self, task: Forgetting) -> None:
        super().check(task)
        if not classifies(task.again):
            raise RunFolderError(
                f"{task.run.path}: objective.name={task.again.spec.objective.name}: there is no "
                f"logit of a true class; method={self.name} is not for it"
            )

    def forget(self, task: Forgetting) -> Vector:
        start = Quitting(task.weights, task.clients)
        state = task.play(self, start, [task.last + 1], by_others=False)
        return task.recover(state.weights, self.rounds, after=1)

    def round(self, fed: Federation, state: Quitting, t: int) -> Quitting:
        sent = fed.gather(self.distil, state.clients, weights=state.weights)
        return replace(state, weights=averaged(fed, sent))

    @client_function("unlearning/distil")
    def distil(self, client: Client, weights: Tensor) -> dict[str, Any]:
        """(client) Its model after distillation."""
        trained = client.train(
            weights, loss=distillation, prepare=global_logits, epochs=self.epochs
        )
        return {"weights": trained}


def global_logits(network: nn.Module, x: Tensor, context: Any) -> dict[str, Tensor]:
    """Logits (n, C) of the model before it unlearns, in evaluation mode."""
    was_training = network.training
    network.eval()
    found = torch.cat([network(batch) for batch in torch.split(x, EVALUATION_BATCH)])
    network.train(was_training)
    return {"teacher": found}


def distillation(network: nn.Module, x: Tensor, y: Tensor, context: Any) -> Tensor:
    """(B,) KL(softmax(z̃) ‖ softmax(z)) of each example."""
    z = lowered(context["teacher"], y).log_softmax(dim=1)
    student = network(x).log_softmax(dim=1)
    return kl_div(student, z, reduction="none", log_target=True).sum(dim=1)


def lowered(z: Tensor, y: Tensor) -> Tensor:
    """Logits (B, C) with that of the true class y (B,) lowered to the least."""
    return z.scatter(1, y[:, None], z.amin(dim=1, keepdim=True))
