"""Projected gradient ascent: the client itself unlearns, within a ball around the others' model.

Halimi et al., Federated Unlearning: How to Efficiently Erase a Client in FL?, arXiv 2207.05521,
2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.analysis.unlearning.forgetting import Forgetting, Unlearning, averaged, unlearning
from fedsim.federation import Asked, Client, Federation, Vector, client_function
from fedsim.methods import State
from fedsim.objectives import Objective
from fedsim.support.rng import keyed_torch_rng
from fedsim.training import FlatModel

RANDOM = 10  # models, whose mean distance sets δ


@dataclass(frozen=True)
class Ascent(State):
    """The others' models, and the clients that are to be forgotten."""

    models: Mapping[int, Vector]
    clients: tuple[int, ...]


@unlearning.register
class GradientAscent(Unlearning):
    """w ← P(w + η·∇F_i(w)) at client i, from w = w_ref, where P projects onto ‖w − w_ref‖ ≤ δ.

    w_ref = Σ_{k ≠ i} n_k·w_k / Σ_{k ≠ i} n_k is the mean of the others' models in the last round
    in which they took part; client i would compute it from the global model and its own. A step is
    one of the run's optimiser on a batch of the client's examples, with its loss negated. The
    paper also stops early by a threshold on the distance to the client's own model, which it
    tunes; here it is the number of epochs. Several clients each unlearn, and their models are
    averaged. Then the others continue with rounds of the run's own method.

    Args:
        epochs: passes over the client's examples.
        radius: δ; by default a third of the mean distance from w_ref to ten random models, as in
            the paper.
        rounds: of the others, afterwards.
    """

    name: str = "gradient_ascent"
    asks: ClassVar[tuple[Asked, ...]] = ("messages", "sizes")
    trains_alike: ClassVar[bool] = True
    epochs: int = Field(5, ge=0, le=1_000_000)
    radius: float | None = Field(None, gt=0)
    rounds: int = Field(5, ge=0, le=1_000_000)

    @property
    def further_rounds(self) -> int:
        return 1 + self.rounds

    def forget(self, task: Forgetting) -> Vector:
        _, w, models = next(task.history(task.others_last))
        start = Ascent(w, models, task.clients)
        state = task.play(self, start, [task.last + 1], by_others=False)
        return task.recover(state.weights, self.rounds, after=1)

    def round(self, fed: Federation, state: Ascent, t: int) -> Ascent:
        reference = fed.server.average(state.models)
        radius = self.radius or default_radius(fed, reference)
        sent = fed.gather(self.ascend, state.clients, reference=reference, radius=radius)
        return replace(state, weights=averaged(fed, sent))

    @client_function("unlearning/ascend")
    def ascend(self, client: Client, reference: Tensor, radius: float) -> dict[str, Any]:
        """(client) Its model after ascent."""
        w, P = reference.clone(), client.model.num_parameters
        n, size = client.num_samples, client.settings.batch_size
        loss = partial(negated, client.objective)
        for _ in range(self.epochs):
            order = torch.from_numpy(client.rng("order").permutation(n)).to(w.device)
            for rows in torch.split(order, size):
                if len(rows) == 1 and client.model.has_batch_norm:
                    continue
                batch = client.data.at(rows)
                w = client.train(w, loss=loss, data=batch, epochs=1, on_record=False).clone()
                w[:P] = projected(w[:P], reference[:P], radius)
        return {"weights": w}


def negated(
    objective: Objective, network: nn.Module, x: Tensor, y: Tensor, context: Any
) -> Tensor:
    """(B,) the losses of examples with their sign changed."""
    return -objective.loss(network, x, y, context)


def projected(w: Tensor, reference: Tensor, radius: float) -> Tensor:
    """The point of the ball ‖w − w_ref‖ ≤ δ that is closest to w."""
    away = w - reference
    length = away.norm()
    return w if length <= radius else reference + radius / length * away


def default_radius(fed: Federation, reference: Vector) -> float:
    """δ: a third of the mean distance of random models from the reference."""
    P, total = fed.server.model.num_parameters, 0.0
    center = fed.server.tensor(reference)[:P]
    for draw in range(RANDOM):
        with keyed_torch_rng(fed.server.seed, "unlearning/radius", client=draw):
            random = FlatModel(fed.server.build(), fed.server.device)
        total += float((random.vector[:P] - center).norm())
    return total / RANDOM / 3
