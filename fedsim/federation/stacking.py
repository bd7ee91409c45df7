"""Clients of a stack: each runs up to its training, then all are trained at once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedsim.errors import StackTooLarge, in_one_line
from fedsim.federation.context import WorkerContext
from fedsim.support.rng import generator_state, set_generator_state
from fedsim.training import (
    Trained,
    TrainingJob,
    lacks_memory,
)


class SuspendForStack(BaseException):
    """Raised where a client function trains, to wait for the others of its stack.

    Not an Exception, so that no client function catches it.
    """

    def __init__(self, job: TrainingJob, generator: Tensor) -> None:
        self.job, self.generator = job, generator


class StackedTrainer:
    """Trains one client of a stack.

    Each client's function runs up to its training. Then all are trained at once, and each function
    runs again from its start, with the same inputs and random streams, so that it reaches the same
    point, finds its trained weights and continues.

    Attributes:
        alone: train this client on its own.
        results: results of training, and states of torch's generator, so far.
        seconds: spent on this client in stacks.
    """

    def __init__(self, context: WorkerContext) -> None:
        self.alone = False
        self.seconds = 0.0
        self.results: list[tuple[Trained, Tensor]] = []
        self._context = context
        self._next = 0

    def rewind(self) -> None:
        """The client function starts again."""
        self._next = 0

    def train(self, job: TrainingJob) -> Trained:
        """The client's training if it is done; otherwise suspend its function.

        Raises:
            SuspendForStack: the others of the stack have to reach this point first.
        """
        if self.alone:
            return self._context.train(job)
        if self._next == len(self.results):
            raise SuspendForStack(job, generator_state(self._context.device))
        trained, generator = self.results[self._next]
        self._next += 1
        set_generator_state(generator, self._context.device)
        # Leave the network as training alone would.
        self._context.model.load(trained.weights)
        self._context.model.module.train()
        return replace(trained, weights=trained.weights.clone())


def train_together(
    context: WorkerContext,
    waiting: Mapping[int, SuspendForStack],
    trainers: Mapping[int, StackedTrainer],
) -> str | None:
    """Train the suspended clients of a stack and store the results in their trainers.

    Returns:
        Why they have to be trained one by one instead; None if they were trained.

    Raises:
        StackTooLarge: there is not enough memory.
    """
    jobs = [suspended.job for suspended in waiting.values()]
    started = time.perf_counter()
    reason = context.why_not_stacked or _different(jobs)
    if reason is None:
        lacking = None
        before = generator_state(context.device)
        try:
            trained, generators = context.stack.train(
                jobs, context.spec.train, [each.generator for each in waiting.values()]
            )
        except Exception as error:  # not possible under vmap, or fails for one client as well
            reason = in_one_line(error)
            lacking = reason if lacks_memory(error) else None
        if lacking is not None:
            context.stack.release()
            if context.device.type == "cuda":
                torch.cuda.empty_cache()  # for the next try, also of other processes on the GPU
            raise StackTooLarge(
                f"not enough memory to train {len(jobs)} clients at once ({lacking})"
            )
        if not torch.equal(before, generator_state(context.device)):
            set_generator_state(before, context.device)
            reason = "perturb or prepare draws random numbers"
    if reason is not None:
        for id in waiting:
            trainers[id].alone = True
        return reason
    seconds = (time.perf_counter() - started) / len(jobs)
    for id, result in zip(waiting, zip(trained, generators, strict=True), strict=True):
        trainers[id].results.append(result)
        trainers[id].seconds += seconds
    return None


def _different(jobs: Sequence[TrainingJob]) -> str | None:
    """Why these cannot be trained as one stack; None if they can."""
    first = jobs[0]
    if not all(job.hooks.same_as(first.hooks) for job in jobs):
        return "clients have different functions (loss, perturb) or parts"
    if first.hooks.draw is not None:
        return "the loss draws something for each batch"
    if any(job.dp_sgd is not None for job in jobs):
        return "privacy.level=example takes a gradient of each example"
    if any(job.lr != first.lr for job in jobs):
        return "clients have different learning rates"
    if any(job.context.keys() != first.context.keys() for job in jobs):
        return "the clients' contexts hold different vectors"
    if any(len(job.y) * job.epochs == 0 for job in jobs):
        return "a client has no training examples"
    return None
