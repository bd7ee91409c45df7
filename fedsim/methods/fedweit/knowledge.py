"""The knowledge base of the server: the A of every finished task, under the key "client/task".

An A is stored in the sparse form in which it is sent; see `sparse`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

Choice = tuple[int, int, float]  # client, task and score of an A sent to another task


def key(client: int, task: int) -> str:
    """The key "client/task"."""
    return f"{client}/{task}"


def place(key: str) -> tuple[int, int]:
    """Client and task of "client/task"."""
    client, task = key.split("/")
    return int(client), int(task)


def of_task(task: int, knowledge: Collection[str], num_clients: int) -> list[Choice]:
    """All A's of one task, by client, without scores: FedWeIT's choice."""
    return [(c, task, 0.0) for c in range(num_clients) if key(c, task) in knowledge]


def selection(
    knowledge: Mapping[str, Mapping[str, NDArray[Any]]], chosen: Sequence[Choice]
) -> dict[str, Any]:
    """What a client receives when its task begins: A's, and their scores (not counted)."""
    return {
        "items": [knowledge[key(c, i)] for c, i, _ in chosen],
        "scores": [score for _, _, score in chosen],
    }


def sparse(vector: Tensor) -> dict[str, Tensor]:
    """A vector in sparse form: a bit for each entry, and the non-zero entries."""
    kept = vector != 0
    return {"kept": kept, "values": vector[kept]}


def dense(message: Mapping[str, Tensor]) -> Tensor:
    """The vector of a `sparse` one."""
    kept = message["kept"]
    vector = torch.zeros(len(kept), device=kept.device)
    vector[kept] = message["values"]
    return vector


def transfers(
    client: int,
    task: int,
    chosen: Sequence[Choice],
    attention: Sequence[float],
    knowledge: Collection[str],
    labels: Sequence[Sequence[Collection[int]]],
) -> list[dict[str, float | int]]:
    """A row for each A of others that a task has received: its origin and how much it was used.

    `of_best_choice` is over all rows of the task: the classes that it shares with the chosen
    tasks, relative to those of the best possible choice among earlier tasks.

    Args:
        chosen: what it received.
        attention: the mean |α| of each.
        knowledge: keys of all tasks that could have been chosen.
        labels: the classes of each client's tasks.
    """
    own = set(labels[client][task])
    shared = {(c, i): len(own.intersection(labels[c][i])) for c, i in map(place, knowledge)}
    best = sum(sorted(shared.values(), reverse=True)[: len(chosen)])
    reached = sum(shared[c, i] for c, i, _ in chosen)
    return [
        {
            "client": client,
            "task": task,
            "from_client": c,
            "from_task": i,
            "score": score,
            "attention": alpha,
            "shared_classes": shared[c, i],
            "of_best_choice": reached / best if best else 1.0,
        }
        for (c, i, score), alpha in zip(chosen, attention, strict=False)
    ]
