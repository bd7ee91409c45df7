"""A client's kept state: the tasks that it has begun."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from fedsim.models.decomposed import Layout


class TaskMemory(TypedDict, total=False):
    """`client.state` of FedWeIT: empty before the first task; n tasks have begun.

    Keys:
        task: the latest task.
        begun: (n) all begun tasks; a client that was not sampled may have missed some.
        base: (P,) B, the client's own.
        adaptive: (n, P) A_i.
        masks: (n, rows) m_i, before the sigmoid.
        before: (n-1, P) θ_i of past tasks when the latest one began; none in the first task.
        rests: (n) the flat weights of each task's `Rest`: biases, α, head.
        foreign: (n) of (K, P), the A_j of other tasks that each task received.
        lr: initial learning rate of the next round.
    """

    task: int
    begun: list[int]
    base: Tensor
    adaptive: Tensor
    masks: Tensor
    before: Tensor
    rests: list[Tensor]
    foreign: list[Tensor]
    lr: float


def begin(
    memory: TaskMemory,
    layout: Layout,
    task: int,
    *,
    A: Tensor,
    m: Tensor,
    rest: Tensor,
    foreign: Tensor,
    lr: float,
) -> None:
    """Add a task, with its initial values; past θ_i are regularised towards what they are now.

    A is (P,), m (rows,), `rest` flat weights, and `foreign` (K, P) the A_j that it received.
    """
    if "task" in memory:
        memory["before"] = thetas(memory, layout)
        memory["adaptive"] = torch.cat([memory["adaptive"], A[None]])
        memory["masks"] = torch.cat([memory["masks"], m[None]])
    else:
        memory["adaptive"], memory["masks"] = A[None], m[None]
    memory["rests"] = [*memory.get("rests", []), rest.clone()]
    memory["foreign"] = [*memory.get("foreign", []), foreign]
    memory["begun"] = [*memory.get("begun", []), task]
    memory["task"], memory["lr"] = task, lr


def thetas(memory: TaskMemory, layout: Layout, prune: float | None = None) -> Tensor:
    """(n, P) θ_i = B ⊙ σ(m_i) + A_i of all tasks; entries of A_i up to `prune` are set to 0."""
    A = memory["adaptive"] if prune is None else pruned(memory["adaptive"], prune)
    return layout.masked(memory["base"], memory["masks"].sigmoid()) + A


def pruned(A: Tensor, threshold: float) -> Tensor:
    """A with entries of absolute value up to `threshold` set to 0."""
    return A.masked_fill(A.abs() <= threshold, 0)
