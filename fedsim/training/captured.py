"""Gradients of stacks in CUDA graphs: captured once for each shape, and replayed from then on.

A gradient is some hundred small kernels, and to launch them one by one takes longer than to
compute them. A graph launches them at once, on the memory with which it was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedsim.errors import in_one_line
from fedsim.training.job import Train, TrainingJob

MOST = 64  # graphs for one set of hooks
_pool: Any = None  # of all graphs, whose results are used before the next one is replayed

# Of a batch's tensors, (count, P) gradients and (count,) losses.
Gradient = Callable[..., tuple[Tensor, Tensor]]
# The batch that a graph reads, what it computes, and its replay.
_Graph = tuple[list[Tensor], tuple[Tensor, Tensor], Callable[[], None]]


def available(device: torch.device) -> bool:
    """Whether there are graphs on a device."""
    return device.type == "cuda"


def capture(
    gradient: Callable[[], tuple[Tensor, Tensor]],
) -> tuple[tuple[Tensor, Tensor], Callable[[], None]]:
    """Record the kernels of a gradient.

    Returns:
        What the gradient returns, and a function that computes it into the same memory.
    """
    global _pool
    _pool = _pool or torch.cuda.graph_pool_handle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_pool, check_input_liveness=True):
        found = gradient()
    return found, graph.replay


class Captured:
    """Memory of a stack, and graphs that compute in it.

    A gradient is captured when its shape comes up again, as the first time also sets up what
    libraries need. It is replayed only if the replay has the same bits, so that results do not
    depend on what a process has captured.

    Args:
        jobs: of a stack with as many clients as there is to be memory for.
        settings: the experiment's `train` section.
        num_parameters: P.
    """

    vectors: Tensor  # (V, size) weights
    context: dict[str, Tensor]  # (V, n) the hooks' vectors
    gradients: Tensor  # (V, P)
    why_not: str | None = None  # why no more gradients are captured; None if they are

    def __init__(self, jobs: Sequence[TrainingJob], settings: Train, num_parameters: int) -> None:
        V, first = len(jobs), jobs[0]
        self._hooks, self._settings = first.hooks, settings
        self.vectors = first.weights.new_empty(V, len(first.weights))
        self.context = {name: v.new_empty(V, *v.shape) for name, v in first.context.items()}
        self.gradients = first.weights.new_empty(V, num_parameters)
        self._met: set[Hashable] = set()
        self._graphs = dict[Hashable, _Graph]()

    def is_of(self, job: TrainingJob, settings: Train) -> bool:
        """Whether this is the memory for stacks of such clients."""
        return settings == self._settings and job.hooks.same_as(self._hooks)

    def serves(self, jobs: Sequence[TrainingJob], settings: Train) -> bool:
        """Whether it is large enough for a stack."""
        shapes = {n: v.shape for n, v in jobs[0].context.items()}
        return (
            self.is_of(jobs[0], settings)
            and len(jobs) <= len(self.vectors)
            and shapes == {n: v.shape[1:] for n, v in self.context.items()}
        )

    def gradient(self, eager: Gradient, *batch: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients and losses of a batch, overwritten by the next call.

        `eager` computes them, in this memory; the batch is all else that it reads.
        """
        shape = tuple((*tensor.shape, tensor.dtype) for tensor in batch)
        if shape in self._graphs:
            held, found, replay = self._graphs[shape]
            for tensor, given in zip(held, batch, strict=True):
                tensor.copy_(given)
            replay()
            return found
        found = eager(*batch)
        if shape in self._met and self.why_not is None and len(self._graphs) < MOST:
            g, losses = (tensor.clone() for tensor in found)
            found = g, losses
            after = self.vectors.clone()  # a network may change its buffers
            self._capture(shape, eager, batch, found)
            self.vectors.copy_(after)
        self._met.add(shape)
        return found

    def _capture(
        self,
        shape: Hashable,
        eager: Gradient,
        batch: Sequence[Tensor],
        expected: tuple[Tensor, Tensor],
    ) -> None:
        held = [tensor.clone() for tensor in batch]
        try:
            found, replay = capture(partial(eager, *held))
            replay()
        except Exception as error:  # a user's network or loss may do anything
            self.why_not = in_one_line(error)
            return
        bits = ([tensor.view(torch.uint8) for tensor in of] for of in (found, expected))
        if all(map(torch.equal, *bits)):  # NaN included
            self._graphs[shape] = held, found, replay
        else:
            self.why_not = "a replay has other gradients"
