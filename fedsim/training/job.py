"""The settings of local training, and the job of one client."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from fedsim.config.registry import Config, unfit
from fedsim.objectives.objective import Context
from fedsim.training.flat import FlatModel

# (network, inputs (B, ...), labels or targets (B,), context) -> losses (B,), one per example.
Loss = Callable[[nn.Module, Tensor, Tensor, Context], Tensor]
# (inputs (B, ...), labels (B,)) -> what the losses of a batch need: by name, tensors with a row
# for each example, and tensors for the whole batch.
Draw = Callable[[Tensor, Tensor], tuple[Context, Context]]
# (network, inputs (n, ...), context) -> what the losses of all epochs need: by name, tensors with
# a row for each example.
Prepare = Callable[[nn.Module, Tensor, Context], Context]
# (gradient g (P,), parameters w (P,), context) -> ε (P,). It must work over the last axis only, so
# that it also serves a stack of clients (V, P): `g.norm(dim=-1, keepdim=True)`, not `g.norm()`.
Perturbation = Callable[[Tensor, Tensor, Context], Tensor]


class Optimizer(Config):
    """The clients' local optimiser, newly created for each client and round.

    Args:
        name: stochastic gradient descent, Adam, or AdamW.
        lr: learning rate η.
        momentum: momentum of SGD.
        nesterov: use Nesterov momentum in SGD.
        weight_decay: L2 penalty added to the gradient (sgd, adam), or decoupled weight decay
            (adamw).
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
            raise unfit(
                f"momentum and nesterov are for sgd, and {self.name} has betas; leave them out, "
                "or set momentum=0 and nesterov=false"
            )
        if self.nesterov and not self.momentum:
            raise unfit("nesterov needs momentum > 0")
        if self.name == "sgd" and self.lr * self.weight_decay >= self.stable:
            raise unfit(f"steps diverge where lr times weight_decay is {self.stable:g} or more")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise unfit("betas must lie in [0, 1)")
        return self

    @property
    def stable(self) -> float:
        """The least lr·a at which SGD's steps on (a/2)·‖w‖² grow without bound."""
        beta = self.momentum
        return 2 * (1 + beta) / (1 + 2 * beta if self.nesterov else 1)

    def build(self, parameters: Tensor, lr: float) -> torch.optim.Optimizer | Sgd:
        """An optimiser over one tensor, which must hold its gradient, with that lr."""
        if self.name == "sgd":
            return Sgd(self, parameters, lr)
        kind = torch.optim.Adam if self.name == "adam" else torch.optim.AdamW
        return kind([parameters], lr=lr, betas=self.betas, weight_decay=self.weight_decay)


class Sgd:
    """`torch.optim.SGD` without its bookkeeping, a tenth of a small client's time."""

    def __init__(self, settings: Optimizer, parameters: Tensor, lr: float) -> None:
        self.settings, self.parameters, self.lr = settings, parameters, lr
        self.state: dict[Tensor, dict[str, Tensor]] = {parameters: {}}

    @torch.no_grad()
    def step(self) -> None:
        settings, w, g = self.settings, self.parameters, self.parameters.grad
        assert g is not None
        if settings.weight_decay:
            g = g.add(w, alpha=settings.weight_decay)
        if settings.momentum:
            known = self.state[w]
            if known:
                known["momentum"].mul_(settings.momentum).add_(g)
            else:
                known["momentum"] = g.clone()
            v = known["momentum"]
            g = g.add(v, alpha=settings.momentum) if settings.nesterov else v
        w.add_(g, alpha=-self.lr)


class Schedule(Config):
    """How a learning rate changes from round to round: a factor between 0 and 1.

    Args:
        name: `constant`; `cosine`, half a cosine from 1 in the first round towards `floor` after
            the last; or `step`, times `gamma` after every `every` rounds.
        warmup: rounds over which the factor rises linearly to 1 before that.
        floor: smallest factor, of `cosine`.
        gamma: factor of a `step`.
        every: rounds between steps.
    """

    name: Literal["constant", "cosine", "step"] = "constant"
    warmup: int = Field(0, ge=0)
    floor: float = Field(0.0, ge=0, le=1)
    gamma: float = Field(0.1, gt=0, le=1)
    every: int = Field(10, ge=1)

    def factor(self, t: int, rounds: int) -> float:
        """The factor in round t = 1, ..., rounds.

        Example:
            >>> [round(Schedule(name="cosine").factor(t, 4), 3) for t in range(1, 5)]
            [1.0, 0.854, 0.5, 0.146]
            >>> [Schedule(name="step", every=2, warmup=1).factor(t, 5) for t in range(1, 6)]
            [0.5, 1.0, 1.0, 0.1, 0.1]
        """
        if t <= self.warmup:
            return t / (self.warmup + 1)
        after = t - self.warmup - 1
        if self.name == "cosine":
            share = after / (rounds - self.warmup)
            return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * share)) / 2
        return self.gamma ** (after // self.every) if self.name == "step" else 1.0


class Train(Config):
    """Training settings of the federation.

    Args:
        rounds: T, communication rounds.
        participation: share of the clients that is sampled in each round.
        local_epochs: passes over a client's own data in a round.
        local_steps: local steps of every client in a round, whatever its number of examples,
            instead of epochs; it passes over its data as often as that takes.
        batch_size: examples per local step; the last batch of an epoch may be smaller.
        lr_decay: factor by which the learning rate changes from round to round: in round t it is
            lr·lr_decay^(t − 1).
        schedule: a further factor of the learning rate that depends on the round.
        sampler: how an epoch visits a client's examples: `shuffle`, each once in a new order; or
            `balanced`, as many draws with replacement, in which each of the client's classes is
            equally likely.
        accumulate: number of parts in which the gradient of a batch is computed, one after
            another, to save memory; the steps are the same up to rounding, except with batch norm
            and losses over whole batches (`rationales`), which see each part by itself, and with
            networks that draw random numbers, such as dropout's, for each part anew. With batch
            norm, parts have two examples or more.
        checkpoint_activations: keep only the inputs of a network's repeated blocks, and compute
            the rest again for the gradient, in about half as much time again; the steps are the
            same to the bit. Clients are then not trained in stacks.
        precision: `float32`, or `bfloat16` for forward and backward passes in training (weights,
            optimiser and evaluation stay in float32).
        clip_norm: largest L2 norm of a local step's gradient, including the terms that the method
            adds and before weight decay; longer gradients are scaled down to it.
        optimizer: the clients' local optimiser.
        initial_weights: file to start from instead of random weights: safetensors, such as a run's
            `weights/final.safetensors`, or a state dict saved by `torch.save`. Every node reads
            it.
        on_client_error: what happens if a client fails: `stop` ends the run, `skip` leaves the
            client out of the round.
    """

    rounds: int = Field(20, ge=1, le=10_000_000)
    participation: float = Field(1.0, gt=0, le=1)
    local_epochs: int = Field(1, ge=1, le=1_000_000)
    local_steps: int | None = Field(None, ge=1, le=1_000_000)
    batch_size: int = Field(16, ge=1, le=1_000_000_000)
    lr_decay: float = Field(1.0, gt=0, le=1)
    schedule: Schedule = Schedule()
    sampler: Literal["shuffle", "balanced"] = "shuffle"
    accumulate: int = Field(1, ge=1)
    checkpoint_activations: bool = False
    precision: Literal["float32", "bfloat16"] = "float32"
    clip_norm: float | None = Field(None, gt=0)
    optimizer: Optimizer = Optimizer()
    initial_weights: Path | None = None
    on_client_error: Literal["stop", "skip"] = "stop"

    @model_validator(mode="after")
    def _fits(self) -> Train:
        if (warmup := self.schedule.warmup) >= self.rounds:
            raise unfit(f"schedule.warmup={warmup} must be less than rounds={self.rounds}")
        if self.local_steps is not None and self.local_epochs != 1:
            raise unfit(
                f"local_epochs={self.local_epochs} and local_steps={self.local_steps} are both "
                "set; set one of them"
            )
        return self

    @property
    def most_epochs(self) -> int:
        """Passes over a client's data in a round, if `local_steps` does not end them earlier."""
        return self.local_steps or self.local_epochs  # each pass has at least one step

    def lr(self, t: int) -> float:
        """The clients' learning rate η in round t = 1, 2, ..."""
        return self.optimizer.lr * self.lr_factor(t)

    def lr_factor(self, t: int) -> float:
        """η in round t, as a share of `optimizer.lr`."""
        return float(self.lr_decay ** (t - 1)) * self.schedule.factor(t, self.rounds)


@dataclass(frozen=True)
class Hooks:
    """What a method changes about local training. Clients are stacked if theirs are the same."""

    loss: Loss  # of each example; they are averaged over the batch
    # The step's gradient is then taken at w + ε, and the step itself made from w
    # (sharpness-aware minimisation).
    perturb: Perturbation | None = None
    part: slice = field(default_factory=lambda: slice(None))  # of the flat vector that is trained
    # Called once for each batch, however many parts its gradient is computed in: random draws and
    # counts of batches. What it returns is added to the loss's context.
    draw: Draw | None = None
    # Called once before training, with all the client's inputs and the weights from which it
    # starts. The loss finds the rows of its batch in its context.
    prepare: Prepare | None = None

    def same_as(self, other: Hooks) -> bool:
        """Whether these are the same functions, or partials of them with the same arguments."""
        names = ("loss", "perturb", "draw", "prepare")
        pairs = ((getattr(self, name), getattr(other, name)) for name in names)
        return self.part == other.part and all(_alike(a, b) for a, b in pairs)


def _alike(a: Any, b: Any) -> bool:
    """Whether these are the same function, or partials of it with the same arguments."""
    if not (isinstance(a, partial) and isinstance(b, partial)):
        return bool(a == b)
    one, other = (
        [p.func, *p.args, *sorted(p.keywords), *(p.keywords[k] for k in sorted(p.keywords))]
        for p in (a, b)
    )
    return len(one) == len(other) and all(
        x is y or (not (isinstance(x, Tensor) or isinstance(y, Tensor)) and bool(x == y))
        for x, y in zip(one, other, strict=True)
    )


@dataclass(frozen=True)
class TrainingJob:
    """The local training of one client."""

    weights: Tensor  # (size,) initial weights
    x: Tensor  # (n, ...) inputs
    y: Tensor  # (n,) labels or targets
    lr: float  # η
    epochs: int  # passes over the examples
    rng: np.random.Generator  # determines the order of the examples
    hooks: Hooks  # what the method changes
    context: Context = field(default_factory=dict)  # vectors for the hooks
    linear: Tensor | None = None  # v (P,); ⟨v, w⟩ is added to the loss
    quadratic: float = 0.0  # a; (a/2)·‖w‖² is added to the loss
    most_steps: int | None = None  # even within an epoch; None for no limit
    dp_sgd: tuple[float, float] | None = None  # (C, z): clipping norm and noise multiplier
    facts: Context = field(default_factory=dict)  # (n, ...) of the examples, for the loss

    def prepared(self, model: FlatModel) -> Context:
        """What the loss needs of the examples: tensors with a row for each, by name."""
        prepare = self.hooks.prepare
        if prepare is None:
            return self.facts
        with torch.no_grad():
            found = prepare(model.module, model.arranged(self.x), self.context)
        return {**self.facts, **found}


@dataclass(frozen=True)
class Trained:
    """The result of local training."""

    weights: Tensor  # (size,)
    steps: int  # τ
    visited: int  # examples in all steps
    loss: float  # mean over all visited examples, each before its step


@dataclass(frozen=True)
class DrawnBatch:
    """A batch, or a part of one, with what was drawn for it."""

    x: Tensor  # inputs of B examples
    y: Tensor  # their labels or targets
    rows: Context  # tensors with a row for each example
    whole: Context  # tensors for the whole batch, and the job's context

    @classmethod
    def of(
        cls, job: TrainingJob, x: Tensor, y: Tensor, prepared: Context, rows: Tensor
    ) -> DrawnBatch:
        """Draw what the job's losses need for a batch, beside its rows of what they know."""
        own = {name: part[rows] for name, part in prepared.items()}
        if job.hooks.draw is None:
            return cls(x, y, own, job.context)
        drawn, whole = job.hooks.draw(x, y)
        return cls(x, y, {**own, **drawn}, {**job.context, **whole})

    @property
    def context(self) -> Context:
        """What the loss gets."""
        return {**self.whole, **self.rows} if self.rows else self.whole

    def split(self, sizes: Sequence[int]) -> Iterator[DrawnBatch]:
        """The parts of these sizes."""
        start = 0
        for size in sizes:
            part = slice(start, start + size)
            rows = {name: tensor[part] for name, tensor in self.rows.items()}
            yield DrawnBatch(self.x[part], self.y[part], rows, self.whole)
            start += size
