"""FedDF: the averaged model learns from the ensemble of clients' models by distillation.

Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020,
Algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field

from fedsim.federation import Federation
from fedsim.methods.learns import Learns
from fedsim.methods.method import State, methods
from fedsim.methods.shared.auxiliary import AuxiliaryMethod, distil, draw_batches, ensemble
from fedsim.objectives import Classification, Concepts


@methods.register
class FedDF(AuxiliaryMethod[State]):
    """FedAvg, then min_w KL(softmax(mean_k f(x; w_k)) ‖ softmax(f(x; w))) (Lin et al. 2020).

    x are unlabelled auxiliary inputs on the server, w_k the models of the cohort in eval mode, and
    the student w starts from their average. The paper uses early stopping on labelled validation
    examples on the server; here the number of steps is fixed, and the server needs no labels.

    Args:
        epochs: passes over the auxiliary inputs in each round.
        steps: batches in each round, instead of whole passes; the paper uses at most 10,000.
        batch_size: auxiliary inputs per step.
        lr: learning rate of Adam in the first step of a round.
        final_lr: learning rate that cosine decay approaches within the round; 0 in the paper.
        clip_norm: largest norm of a step's gradient.
    """

    name: str = "feddf"
    learns: ClassVar[Learns] = Learns(
        objectives=(Classification, Concepts), asks=("messages", "sizes"), averages=False
    )
    epochs: int = Field(1, ge=0)
    steps: int | None = Field(None, ge=0)
    batch_size: int = Field(128, ge=2)
    lr: float = Field(1e-3, gt=0)
    final_lr: float = Field(5e-5, ge=0)
    clip_norm: float = Field(5.0, gt=0)

    def init(self, fed: Federation) -> State:
        return State(weights=fed.initial_weights())

    def round(self, fed: Federation, state: State, t: int) -> State:
        sent = fed.gather(self.local_update, fed.sample(t), weights=state.weights)
        models = {k: message["weights"] for k, message in sent.items()}
        mean = fed.server.average(models)
        x = self.inputs(fed)
        rows = torch.arange(len(x), device=fed.server.device)
        batches = draw_batches(fed, rows, self.batch_size, self.epochs, self.steps)
        if not batches:
            return replace(state, weights=mean)
        equal = [torch.ones(len(x), device=fed.server.device)] * len(models)
        used = torch.unique(torch.cat(batches))
        targets = ensemble(fed, list(models.values()), equal, x, used)
        rates = [self.rate(s, len(batches)) for s in range(len(batches))]
        student = distil(fed, mean, x, targets, batches, rates, self.clip_norm)
        return replace(state, weights=student)

    def rate(self, s: int, steps: int) -> float:
        """The learning rate of step s = 0, 1, ... of a round."""
        return self.final_lr + (self.lr - self.final_lr) * (1 + math.cos(math.pi * s / steps)) / 2
