"""A task's documents, its network and evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.federation import Examples
from fedsim.methods.fedweit.compat import digest
from fedsim.models.decomposed import Rest
from fedsim.models.text import Reader

BATCH = 100  # documents at once, in evaluation


@dataclass(frozen=True)
class Documents:
    """Documents (n, L), their classes (n,) within the task, and results of `Rest.digest`."""

    x: Tensor
    y: Tensor
    digested: Tensor

    def part(self, rows: Tensor) -> Documents:
        return Documents(self.x[rows], self.y[rows], self.digested[rows])


@torch.no_grad()
def read_documents(
    rest: Rest, reader: Reader, examples: Examples, labels: tuple[int, ...], frozen: bool
) -> Documents:
    """Documents with their classes numbered within the task; `labels` are these, ascending."""
    known = torch.tensor(labels, device=examples.y.device)
    digested = digest(rest, reader, examples.x, frozen)
    return Documents(examples.x, torch.searchsorted(known, examples.y), digested)


@torch.no_grad()
def evaluate(
    rest: Rest,
    reader: Reader,
    theta: Tensor,
    test: Examples,
    labels: tuple[int, ...],
    frozen: bool,
) -> dict[str, float]:
    """Mean loss and accuracy on a task's test examples, among its classes; see `TaskNetwork`."""
    rest.eval()
    # Sorted by length, to minimise padding.
    order = (test.x != 0).sum(dim=1).argsort(stable=True)
    loss, right = 0.0, 0
    for rows in torch.split(order, BATCH):
        some = Examples(test.x[rows], test.y[rows])
        part = read_documents(rest, reader, some, labels, frozen)
        logits = rest(reader(part.x), theta, part.digested)
        loss += float(cross_entropy(logits, part.y, reduction="sum"))
        right += int((logits.argmax(dim=1) == part.y).sum())
    return {"loss": loss / len(test), "accuracy": right / len(test)}


class TaskNetwork(nn.Module):
    """A client's network for one task: documents (B, L) to logits (B, C), −∞ for other classes.

    Args:
        rest: the task's own parameters.
        theta: (P,) B ⊙ σ(m) + A.
        labels: the task's classes.
        classes: C.
        frozen: see `Compat`.
    """

    theta: Tensor

    def __init__(
        self,
        rest: Rest,
        reader: Reader,
        theta: Tensor,
        labels: tuple[int, ...],
        classes: int,
        frozen: bool,
    ) -> None:
        super().__init__()
        self.rest, self.reader = rest, reader
        self.register_buffer("theta", theta)
        self.labels, self.classes, self.frozen = labels, classes, frozen

    def forward(self, x: Tensor) -> Tensor:
        digested = digest(self.rest, self.reader, x, self.frozen)
        found = torch.full((len(x), self.classes), -math.inf, device=x.device)
        found[:, list(self.labels)] = self.rest(self.reader(x), self.theta, digested)
        return found
