"""Local training of one client."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.objectives.objective import EVALUATION_BATCH, Objective, OutputGradient
from fedsim.training.dp_sgd import PerExample, draw_batch, noise, sampling_rate
from fedsim.training.flat import FlatModel
from fedsim.training.job import DrawnBatch, Loss, Train, Trained, TrainingJob
from fedsim.training.layerwise import LayerwiseSgd
from fedsim.training.recomputing import recomputed

_layerwise: WeakKeyDictionary[FlatModel, LayerwiseSgd] = WeakKeyDictionary()


def usable(model: FlatModel, n: int, size: int) -> int:
    """How many of n examples an epoch visits: batch norm leaves out a last batch of one."""
    return n - 1 if model.has_batch_norm and n % size == 1 else n


def work_of(model: FlatModel, job: TrainingJob, settings: Train) -> tuple[int, int]:
    """τ, the number of steps of a job, and the number of examples in all of them.

    With DP-SGD, whose batches vary, the expected number.
    """
    n, size = len(job.y), settings.batch_size
    end = usable(model, n, size)
    per_epoch = -(-end // size)
    steps = job.epochs * per_epoch
    if job.most_steps is not None:
        steps = min(steps, job.most_steps)
    if job.dp_sgd is not None:
        return steps, steps * min(n, size)
    epochs, rest = divmod(steps, max(1, per_epoch))
    return steps, epochs * end + rest * size


def train(model: FlatModel, job: TrainingJob, settings: Train) -> Trained:
    """Local training of one client.

    Each epoch visits the `usable` examples in a new order, in batches of `settings.batch_size`.

    Raises:
        ValueError: no step can be made: there are no examples, or one and batch norm.
    """
    model.load(job.weights)
    model.train()
    trained = _train_plainly if job.dp_sgd is None else _train_privately
    if not settings.checkpoint_activations:
        return trained(model, job, settings)
    with recomputed(model.module):
        return trained(model, job, settings)


def _train_plainly(model: FlatModel, job: TrainingJob, settings: Train) -> Trained:
    n, size = len(job.y), settings.batch_size
    if work_of(model, job, settings)[0] == 0:
        raise ValueError(
            "no training example to make a step with"
            if n == 0
            else "batch norm needs two training examples, and the client has one; raise "
            "partition.min_samples"
        )
    total = torch.zeros((), device=model.device)
    steps, visited = 0, 0
    end, step = usable(model, n, size), _step_of(model, job, settings)
    for _ in range(job.epochs):
        if steps == job.most_steps:
            break
        order = torch.from_numpy(epoch_order(job.y, job.rng, settings)[:end]).to(model.device)
        x, y = model.arranged(job.x[order]), job.y[order]
        batches = torch.split(x, size), torch.split(y, size), torch.split(order, size)
        for batch in zip(*batches, strict=True):
            if steps == job.most_steps:
                break
            total += step(*batch).sum()
            steps += 1
            visited += len(batch[1])
    return Trained(model.vector.clone(), steps, visited, float(total) / visited)


def _train_privately(model: FlatModel, job: TrainingJob, settings: Train) -> Trained:
    """DP-SGD: g = (Σ_i clip(g_i) + z·C·N(0, I)) / B, over Poisson-sampled batches."""
    assert job.dp_sgd is not None
    (clip, z), B, n = job.dp_sgd, settings.batch_size, len(job.y)
    if n == 0:
        raise ValueError("no training example to make a step with")
    if job.hooks.perturb is not None:
        raise ValueError(
            "privacy.level=example does not cover `perturb`, which gets gradients that are not "
            "private"
        )
    examples, prepared = PerExample(model, clip), job.prepared(model)
    step = _optimizer_step(model, job, settings)
    total, visited = torch.zeros((), device=model.device), 0
    steps, planned = work_of(model, job, settings)
    for _ in range(steps):
        rows = draw_batch(job, B)
        g = z * clip * noise(job, model.num_parameters, model.device)
        if len(rows):
            batch = DrawnBatch.of(job, job.x[rows], job.y[rows], prepared, rows)
            found, losses = examples.clipped_sum(job.hooks.loss, batch)
            g += found
            total += losses.sum()
            visited += len(rows)
        step(g / (sampling_rate(n, B) * n))
    loss = float(total) / max(1, visited)
    # The planned number: by whom a deadline is met does not depend on chance.
    return Trained(model.vector.clone(), steps, planned, loss)


def epoch_order(y: Tensor, rng: np.random.Generator, settings: Train) -> NDArray[np.int64]:
    """(n,) the examples that an epoch visits, in this order, by their labels (n,)."""
    n = len(y)
    if settings.sampler == "shuffle" or n == 0:
        return rng.permutation(n)
    _, labels, counts = np.unique(y.cpu().numpy(), return_inverse=True, return_counts=True)
    chances = 1 / (len(counts) * counts[labels])
    return rng.choice(n, size=n, p=chances)


# Makes a step from a batch and its rows among the examples; returns (B,) the losses before it.
_Step = Callable[[Tensor, Tensor, Tensor], Tensor]


def _step_of(model: FlatModel, job: TrainingJob, settings: Train) -> _Step:
    """The function that makes the job's steps: layer by layer where possible, which is faster."""
    hooks, optimizer = job.hooks, settings.optimizer
    decay = optimizer.weight_decay + job.quadratic
    by_layers = (
        (optimizer.name, optimizer.momentum, settings.clip_norm) == ("sgd", 0, None)
        and hooks.perturb is None
        and hooks.part == slice(None)
        and (settings.accumulate, settings.precision) == (1, "float32")
    )
    if by_layers and model not in _layerwise:
        _layerwise[model] = LayerwiseSgd(model)
    output_gradient = _output_gradient(hooks.loss)
    if by_layers and output_gradient is not None and _layerwise[model].runs_as_built():
        step_to = _layerwise[model].step_to
        return lambda x, y, _: step_to(x, y, output_gradient, job.lr, decay, job.linear)
    flat_step: Callable[[Tensor], None] | None = None
    prepared = job.prepared(model)

    def step(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        nonlocal by_layers, flat_step
        g: Tensor | None
        batch = DrawnBatch.of(job, x, y, prepared, rows)
        if by_layers:
            loss = partial(hooks.loss, model.module, x, y, batch.context)
            losses, g = _layerwise[model].step(loss, job.lr, decay, job.linear)
        else:
            losses, g = _gradient(model, job, settings, batch)
        if g is not None:
            by_layers = False
            flat_step = flat_step or _optimizer_step(model, job, settings)
            flat_step(_perturbed(model, job, settings, batch, g))
        return losses.detach()

    return step


def _output_gradient(loss: Loss) -> OutputGradient | None:
    """The explicit gradient of an objective's loss at the outputs, if it has one."""
    objective = getattr(loss, "__self__", None)
    if not isinstance(objective, Objective) or loss != objective.loss:
        return None
    return objective.output_gradient()


def _gradient(
    model: FlatModel, job: TrainingJob, settings: Train, batch: DrawnBatch
) -> tuple[Tensor, Tensor]:
    """The losses (B,) of a batch, and the gradient (P,) of their mean."""

    def of_part(part: DrawnBatch, share: float = 1.0) -> tuple[Tensor, Tensor]:
        with in_precision(settings, model.device):
            losses = job.hooks.loss(model.module, part.x, part.y, part.context)
        return losses.detach(), model.gradient(losses.mean() * share)

    if settings.accumulate == 1:
        return of_part(batch)
    total, found = torch.zeros(model.num_parameters, device=model.device), []
    n = len(batch.y)
    for part in batch.split(part_sizes(model, n, settings.accumulate)):
        losses, g = of_part(part, share=len(part.y) / n)
        total += g
        found.append(losses)
    return torch.cat(found), total


def part_sizes(model: FlatModel, n: int, parts: int, most: int | None = None) -> list[int]:
    """Sizes of the parts in which a gradient of n examples is computed, `most` each.

    With batch norm, which takes two examples, no part has one unless n is 1.
    """
    size = max(1, min(-(-n // parts), most or n))
    count = -(-n // size)
    if model.has_batch_norm and (size == 1 or n % size == 1):
        count = max(1, min(count, n // 2))
        return [n // count + (i < n % count) for i in range(count)]
    return [min(size, n - start) for start in range(0, n, size)]


def in_precision(settings: Train, device: torch.device) -> AbstractContextManager[object]:
    """The context of forward passes in training."""
    if settings.precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def _perturbed(
    model: FlatModel, job: TrainingJob, settings: Train, batch: DrawnBatch, g: Tensor
) -> Tensor:
    """The gradient of a batch at w + ε, if the method perturbs w; otherwise g."""
    if job.hooks.perturb is None:
        return g
    before = model.vector.clone()
    w = model.vector[: model.num_parameters]
    w.add_(job.hooks.perturb(g, w, batch.whole))
    g = _gradient(model, job, settings, batch)[1]
    model.vector.copy_(before)  # buffers were updated by this batch already
    return g


def _optimizer_step(
    model: FlatModel, job: TrainingJob, settings: Train
) -> Callable[[Tensor], None]:
    """Makes a step from the gradient (P,) of the loss."""
    w, part = model.vector[: model.num_parameters], job.hooks.part
    trained = nn.Parameter(w[part])
    optimizer = settings.optimizer.build(trained, job.lr)

    def step(g: Tensor) -> None:
        trained.grad = with_terms(g, w, job.linear, job.quadratic or None, settings, part)
        optimizer.step()

    return step


def with_terms(
    g: Tensor,
    w: Tensor,
    linear: Tensor | None,
    quadratic: float | Tensor | None,
    settings: Train,
    part: slice = slice(None),
) -> Tensor:
    """The gradient of the loss plus the job's terms, after clipping, of the parameters in `part`.

    g, w and linear are (..., P); quadratic is (..., 1) for a stack, None if it is 0.
    """
    g = g[..., part]
    if quadratic is not None:
        g = g + quadratic * w[..., part]
    if linear is not None:
        g = g + linear[..., part]
    if settings.clip_norm is not None:
        norm = g.norm(dim=-1, keepdim=True)
        g = g * (settings.clip_norm / norm.clamp(min=settings.clip_norm))
    return g


@torch.no_grad()
def logits(network: nn.Module, x: Tensor) -> NDArray[np.float32]:
    """(n, C) of inputs (n, ...), in evaluation mode; the network stays in it."""
    network.eval()
    parts = [network(batch) for batch in torch.split(x, EVALUATION_BATCH)]
    return torch.cat(parts).cpu().numpy()
