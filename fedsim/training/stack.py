"""Local training of V clients at once.

The vectors of a stack have shape (V, size). One `vmap` over the clients computes all forward
passes, one backward pass all gradients, and the optimiser steps on the whole stack. The loop of
`fedsim.training.local.train` is the reference: a stack makes the same steps with the same random
numbers, and differs only by rounding.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedsim.objectives.objective import Context
from fedsim.support.rng import generator_state
from fedsim.training import captured
from fedsim.training.captured import Captured
from fedsim.training.dropout import Draws, Dropout, drawing
from fedsim.training.flat import FlatModel, WithLoss, lacks_memory, named
from fedsim.training.job import Hooks, Loss, Sgd, Train, Trained, TrainingJob
from fedsim.training.local import epoch_order, in_precision, train, with_terms

KEPT = 4  # memories of stacks: those of the latest hooks
TOLERANCE = 1e-3  # relative difference allowed between first steps in a stack and in the loop


@dataclass(frozen=True)
class _Active:
    """Views of the first `count` clients of a stack, which have steps left."""

    count: int
    w: Tensor  # (count, P)
    buffers: Tensor  # (count, size − P)
    leaves: dict[str, Tensor]  # both, by layer
    context: dict[str, Tensor]  # (count, n) each
    linear: Tensor | None  # (count, P)
    quadratic: Tensor | None  # (count, 1)


class Stack:
    """A copy of a network that trains several clients at once."""

    def __init__(self, model: FlatModel) -> None:
        self._model = model
        frozen = {id(p): p for p in model.module.parameters() if not p.requires_grad}
        self._bundle = WithLoss(copy.deepcopy(model.module, memo=frozen).train())
        # Dropout draws from the clients' generators, which graphs do not know.
        self._captures = captured.available(model.device) and not any(
            isinstance(module, Dropout) for module in model.module.modules()
        )
        self._captured: list[Captured] = []

    @property
    def notices(self) -> set[str]:
        """What the user should know of its steps."""
        reasons = {known.why_not for known in self._captured} - {None}
        return {f"steps of stacks are not captured in CUDA graphs: {why}" for why in reasons}

    def why_not(
        self, x: Tensor, y: Tensor, settings: Train, loss: Loss, facts: Context | None = None
    ) -> str | None:
        """Why the network cannot be stacked, for the log; None if it can.

        Compares a stack with the loop on five examples.
        """
        if settings.accumulate > 1:
            return "train.accumulate computes gradients in parts"
        if settings.checkpoint_activations:
            return "train.checkpoint_activations computes blocks again"
        for name, module in self._bundle.network.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) or (
                getattr(module, "running_mean", None) is not None
            ):
                kind = type(module).__name__
                return f"layer '{name}' ({kind}) mixes examples or keeps running statistics"
        settings = settings.model_copy(update={"batch_size": 4})
        start = self._model.vector.clone()
        device = self._model.device

        def job(k: int) -> TrainingJob:  # so that the second client's batch is padded
            part = slice(0, 5) if k == 0 else slice(1, 4)
            rng, lr = np.random.default_rng(k), settings.optimizer.lr
            own = {name: fact[part] for name, fact in (facts or {}).items()}
            return TrainingJob(start, x[part], y[part], lr, 1, rng, Hooks(loss), facts=own)

        alone, states = [], []
        for k in (0, 1):
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(k)
                states.append(generator_state(device))
                alone.append(train(self._model, job(k), settings))
        self._model.load(start)
        together, _ = self.train([job(0), job(1)], settings, states)
        for one, other in zip(alone, together, strict=True):
            step = float((one.weights - start).abs().max())
            if not float((one.weights - other.weights).abs().max()) <= TOLERANCE * step + 1e-6:
                return "training in a stack gives other weights than training alone"
        return None

    def train(
        self, jobs: Sequence[TrainingJob], settings: Train, states: Sequence[Tensor]
    ) -> tuple[list[Trained], list[Tensor]]:
        """Local training of V clients with the same hooks; their numbers of examples may differ.

        `states` are those of the generators of clients' dropout.

        Raises:
            RuntimeError: the hooks do not run under vmap.

        Returns:
            Each client's result, and the generators' states afterwards.
        """
        device, hooks = self._model.device, jobs[0].hooks
        batches = _all_batches(jobs, settings)
        # Sorted by number of steps, so that active clients are a leading slice.
        order = sorted(range(len(jobs)), key=lambda k: -len(batches[k]))
        rows, counts = _table([batches[k] for k in order], settings.batch_size)
        steps = (counts > 0).sum(axis=0)
        index = torch.from_numpy(rows).to(device)
        scales = _scales(counts, settings.batch_size, device)
        x, y = torch.cat([job.x for job in jobs]), torch.cat([job.y for job in jobs])
        prepared = [self._prepared(job) for job in jobs]
        of_rows = {name: torch.cat([own[name] for own in prepared]) for name in prepared[0]}
        memory, V = self._memory(jobs, settings), len(jobs)
        held = {} if memory is None else {n: v[:V] for n, v in memory.context.items()}
        vectors = torch.stack(
            [jobs[k].weights for k in order], out=None if memory is None else memory.vectors[:V]
        )
        context = {
            name: torch.stack([jobs[k].context[name] for k in order], out=held.get(name))
            for name in jobs[0].context
        }
        linear = _stacked_terms([jobs[k].linear for k in order])
        quadratic = None
        if any(job.quadratic for job in jobs):
            quadratic = torch.tensor([[jobs[k].quadratic] for k in order], device=device)
        gradients = (
            torch.empty(V, self._model.num_parameters, device=device)
            if memory is None
            else memory.gradients
        )
        total = torch.zeros(V, device=device)
        generators = [_generator(states[k], device) for k in order]
        draws = Draws(generators, ())
        active: _Active | None = None
        optimizer: torch.optim.Optimizer | Sgd | None = None
        with drawing(draws):
            for s in range(len(rows)):
                count, width = int((counts[s] > 0).sum()), int(counts[s].max())
                if active is None or count < active.count:
                    active = self._view(vectors[:count], context, linear, quadratic)
                    trained = nn.Parameter(active.w[:, hooks.part])
                    optimizer = _carried_on(optimizer, trained, jobs[0].lr, settings)
                    gradient = partial(
                        self._gradient, hooks, active, gradients, settings, [*of_rows]
                    )
                    if memory is not None:
                        gradient = partial(memory.gradient, gradient)
                assert optimizer is not None
                here = index[s, :count, :width]
                scale = scales[s, :count, :width]
                batch = x[here], y[here], scale, *(part[here] for part in of_rows.values())
                draws.counts = counts[s].tolist()
                g, losses = gradient(*batch)
                total[:count] += losses
                if hooks.perturb is not None:
                    origin, statistics = active.w.clone(), active.buffers.clone()
                    active.w.add_(hooks.perturb(g, active.w, active.context))
                    g, _ = gradient(*batch)
                    active.w.copy_(origin)
                    active.buffers.copy_(statistics)
                terms = active.linear, active.quadratic
                trained.grad = with_terms(g, active.w, *terms, settings, hooks.part)
                optimizer.step()
        visited = torch.from_numpy(counts.sum(axis=0)).to(device)
        losses_of = (total / visited).tolist()
        place = {k: v for v, k in enumerate(order)}
        vectors = vectors if memory is None else vectors.clone()
        results = [
            Trained(vectors[v], int(steps[v]), int(counts[:, v].sum()), losses_of[v])
            for v in (place[k] for k in range(len(jobs)))
        ]
        return results, [generators[place[k]].get_state() for k in range(len(jobs))]

    def _prepared(self, job: TrainingJob) -> Context:
        """What a client's losses need of its examples, at the weights from which it starts."""
        if job.hooks.prepare is None:
            return job.facts
        before = self._model.vector.clone()
        self._model.load(job.weights)
        self._model.train()
        found = job.prepared(self._model)
        self._model.vector.copy_(before)
        return found

    def _memory(self, jobs: Sequence[TrainingJob], settings: Train) -> Captured | None:
        """Memory whose gradients are captured in graphs; None where there are none."""
        if not self._captures:
            return None
        of_others = [c for c in self._captured if not c.is_of(jobs[0], settings)]
        known = next((c for c in self._captured if c.serves(jobs, settings)), None)
        memory = known or Captured(jobs, settings, self._model.num_parameters)
        self._captured = [*of_others, memory][-KEPT:]
        return memory

    def release(self) -> None:
        """Free the memory of earlier stacks."""
        self._captured.clear()

    def _view(
        self,
        vectors: Tensor,
        context: dict[str, Tensor],
        linear: Tensor | None,
        quadratic: Tensor | None,
    ) -> _Active:
        count, P = len(vectors), self._model.num_parameters
        views = named(self._model.shapes, vectors)
        leaves = {f"network.{name}": view.detach() for name, view in views.items()}
        for leaf in list(leaves.values())[: len(self._model.leaves)]:
            leaf.requires_grad_()
        return _Active(
            count,
            vectors[:, :P],
            vectors[:, P:],
            leaves,
            {name: vector[:count] for name, vector in context.items()},
            None if linear is None else linear[:count],
            None if quadratic is None else quadratic[:count],
        )

    def _gradient(
        self,
        hooks: Hooks,
        active: _Active,
        out: Tensor,
        settings: Train,
        names: Sequence[str],
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        *rows: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(count, P) gradients, overwritten by the next call, and (count,) summed losses."""

        def losses_of_one(
            leaves: dict[str, Tensor], x: Tensor, y: Tensor, rows: Context, context: Context
        ) -> Tensor:
            arguments = (hooks.loss, x, y, {**context, **rows})
            return functional_call(self._bundle, leaves, arguments)

        with in_precision(settings, x.device):
            each = vmap(losses_of_one, randomness="error")
            losses = each(active.leaves, x, y, dict(zip(names, rows, strict=True)), active.context)
        parameters = [leaf for leaf in active.leaves.values() if leaf.requires_grad]
        parts = torch.autograd.grad((losses * scale).sum(), parameters, materialize_grads=True)
        g = torch.cat(
            [part.reshape(active.count, -1) for part in parts], dim=1, out=out[: active.count]
        )
        return g, (losses.detach() * (scale > 0)).sum(dim=1)


def choose_stack_size(
    stack: Stack,
    model: FlatModel,
    examples: Callable[[int], tuple[Tensor, Tensor, Context]],
    settings: Train,
    loss: Loss,
    most: int,
) -> tuple[int, str]:
    """V, how many clients to train at once, and the reason for the log.

    Plain local training of the v-th client's examples is timed, alone and in stacks of 2, 4, 8 ...
    up to `most`, one epoch each. A stack must be a tenth faster to be chosen. The weights of both
    networks are restored.
    """
    device, start = model.device, model.vector.clone()
    generator = generator_state(device)

    def finish() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def seconds(V: int) -> float:  # of one client
        jobs = []
        for v in range(V):
            rng = np.random.default_rng(v)
            x, y, facts = examples(v)
            lr, hooks = settings.optimizer.lr, Hooks(loss)
            jobs.append(TrainingJob(start, x, y, lr, 1, rng, hooks, facts=facts))
        before = finish()
        if V == 1:
            train(model, jobs[0], settings)
        else:
            stack.train(jobs, settings, [generator] * V)
        return (finish() - before) / V

    times: dict[int, float] = {}
    for V in (2**i for i in range(most.bit_length())):
        try:
            times[V] = min(seconds(V) for _ in range(4))
        except Exception as error:
            if V == 1 or not lacks_memory(error):
                raise
            break
        if times[V] > 2 * min(times.values()):
            break
    model.load(start)
    best = min(times, key=lambda V: times[V])
    chosen = best if times[best] < 0.9 * times[1] else 1
    measured = ", ".join(f"{V}: {1000 * t:.2f} ms" for V, t in times.items())
    return chosen, f"clients trained at once: {chosen}, as measured (a client in {measured})"


def _stacked_terms(linear: Sequence[Tensor | None]) -> Tensor | None:
    """(V, P) the linear terms of all clients; zeros for clients without, None if none has any."""
    some = next((v for v in linear if v is not None), None)
    if some is None:
        return None
    return torch.stack([torch.zeros_like(some) if v is None else v for v in linear])


def _all_batches(jobs: Sequence[TrainingJob], settings: Train) -> list[list[NDArray[np.int64]]]:
    """Each client's batches, in order, as row indices into all clients' concatenated examples."""
    first, found = 0, []
    for job in jobs:
        own: list[NDArray[np.int64]] = []
        for _ in range(job.epochs):
            if job.most_steps is not None and len(own) >= job.most_steps:
                break
            order = first + epoch_order(job.y, job.rng, settings)
            cuts = range(settings.batch_size, len(order), settings.batch_size)
            own += np.split(order, cuts)
        found.append(own[: job.most_steps])
        first += len(job.y)
    return found


def _table(
    batches: Sequence[Sequence[NDArray[np.int64]]], size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(S, V, size) rows of each step and client, and (S, V) how many are not padding.

    Padding repeats one of the client's rows, whose loss is finite if any is.
    """
    steps = max(len(own) for own in batches)
    rows = np.zeros((steps, len(batches), size), dtype=np.int64)
    counts = np.zeros((steps, len(batches)), dtype=np.int64)
    for v, own in enumerate(batches):
        for s, batch in enumerate(own):
            rows[s, v, : len(batch)], rows[s, v, len(batch) :] = batch, batch[0]
            counts[s, v] = len(batch)
    return rows, counts


def _scales(counts: NDArray[np.int64], size: int, device: torch.device) -> Tensor:
    """(S, V, size) each row's weight in its batch's mean: 1/count, or 0 for padding."""
    counts_ = torch.from_numpy(counts).to(device)[..., None]
    counting = torch.arange(size, device=device) < counts_
    return counting / counts_.clamp(min=1)


def _carried_on(
    before: torch.optim.Optimizer | Sgd | None, trained: nn.Parameter, lr: float, settings: Train
) -> torch.optim.Optimizer | Sgd:
    """An optimiser for the remaining clients, with their part of its state."""
    optimizer = settings.optimizer.build(trained, lr)
    if before is not None:
        for known in before.state.values():
            for name, value in known.items():
                per_client = isinstance(value, Tensor) and value.dim() == 2
                optimizer.state.setdefault(trained, {})[name] = (
                    value[: len(trained)] if per_client else value
                )
    return optimizer


def _generator(state: Tensor, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(state)
    return generator
