"""What clients do, written out in plain PyTorch: methods are compared with it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments import federation
from fedsim import Experiment
from fedsim.launch.prepare import prepare
from fedsim.simulate import one_round
from fedsim.support.rng import keyed_rng
from fedsim.training import FlatModel

Batch = tuple[Tensor, Tensor]
Change = Callable[[Tensor, Tensor], Tensor]  # (gradient, weights) -> the direction of a step

# Five clients with different numbers of examples of three classes.
LITTLE: dict[str, Any] = {
    "data": {"name": "synthetic", "shape": [6], "classes": 3, "samples": 150, "test_samples": 30},
    "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 5, "min_samples": 6},
    "model": {"name": "mlp", "hidden": [4]},
}
# Five with equally many.
EVEN: dict[str, Any] = {**LITTLE, "partition": {"kind": "iid", "clients": 5}}


def plain(gradient: Tensor, weights: Tensor) -> Tensor:
    """The direction of plain SGD."""
    return gradient


def shapley(worth: Callable[[tuple[int, ...]], float], n: int) -> list[float]:
    """Exact values of n players, over all subsets."""
    found = []
    for i in range(n):
        rest, total = [j for j in range(n) if j != i], 0.0
        for size in range(n):
            for S in itertools.combinations(rest, size):
                with_i = tuple(sorted((*S, i)))
                total += (worth(with_i) - worth(S)) / n / math.comb(n - 1, size)
        found.append(total)
    return found


def close(found: Any, expected: Any, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=atol)


class ByHand:
    """The clients of an experiment. Weights are flat vectors in double precision."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.dataset, self.splits, self.spec = prepare(experiment)
        self.fed = federation(experiment)
        self.n = self.fed.server.num_samples
        self.lr = experiment.train.optimizer.lr
        self.initial = torch.tensor(self.fed.initial_weights()).double()
        self._module = self.spec.build_model().double()

    @property
    def head(self) -> Tensor:
        """Which weights are those of the head."""
        found = torch.zeros(len(self.initial), dtype=torch.bool)
        found[self.fed.server.model.part("head")] = True
        return found

    def data(self, k: int) -> Batch:
        rows = self.splits.train[k]
        return torch.tensor(self.dataset.x)[rows].double(), torch.tensor(self.dataset.y)[rows]

    def batches(
        self,
        t: int,
        k: int,
        purpose: str = "batches",
        epochs: int | None = None,
        function: str = "local_update",
    ) -> list[Batch]:
        """The batches of a client's local epochs in a round."""
        train, (x, y) = self.experiment.train, self.data(k)
        rng = keyed_rng(self.experiment.seed, f"{function}/{purpose}", t, k)
        orders = [
            torch.tensor(rng.permutation(len(y))) for _ in range(epochs or train.local_epochs)
        ]
        return [(x[rows], y[rows]) for order in orders for rows in order.split(train.batch_size)]

    def network(self, w: Any) -> nn.Module:
        """The network with these weights, until the next call."""
        w = torch.as_tensor(w, dtype=torch.float64)
        nn.utils.vector_to_parameters(w.clone(), self._module.parameters())
        return self._module

    def gradient(self, w: Tensor, batch: Batch) -> Tensor:
        network = self.network(w)
        loss = cross_entropy(network(batch[0]), batch[1])
        parts = torch.autograd.grad(loss, list(network.parameters()))
        return torch.cat([part.reshape(-1) for part in parts])

    def loss(self, w: Any, k: int) -> float:
        """F_k(w)."""
        x, y = self.data(k)
        with torch.no_grad():
            return float(cross_entropy(self.network(w)(x), y))

    def sgd(self, w: Tensor, batches: list[Batch], change: Change = plain) -> Tensor:
        for batch in batches:
            w = w - self.lr * change(self.gradient(w, batch), w)
        return w

    def trained(self, w: Any, t: int, k: int, change: Change = plain) -> Tensor:
        """w_k: what local SGD makes of w."""
        w = torch.as_tensor(w, dtype=torch.float64)
        return self.sgd(w, self.batches(t, k), change)

    def mean(self, vectors: list[Tensor], weights: Any = None) -> Tensor:
        return torch.tensor(np.average(torch.stack(vectors).numpy(), axis=0, weights=weights))

    def fedavg(
        self, w: Any, t: int, cohort: list[int] | None = None, change: Change = plain
    ) -> Tensor:
        """The mean of what a cohort, or all clients, make of w."""
        members = range(len(self.n)) if cohort is None else cohort
        own = [self.trained(w, t, k, change) for k in members]
        return self.mean(own, self.n[members])

    def rounds(self) -> Iterator[tuple[int, list[int], Any, dict[int, Any]]]:
        """(t, cohort, the server's state, what clients keep) after each round."""
        runner, state = self.fed.runner, self.experiment.method.init(self.fed)
        for t in range(1, self.experiment.train.rounds + 1):
            state = one_round(runner, self.experiment, state, t)
            kept = {k: runner.fetch(handle) for k, handle in runner.states().items()}
            yield t, self.fed.sample(t).tolist(), state, kept


def load(network: nn.Module, model: FlatModel, weights: Any) -> nn.Module:
    """A network of its own with a flat model's weights."""
    views = model.named(torch.as_tensor(weights, dtype=torch.float32))
    network.load_state_dict({name: view.clone() for name, view in views.items()}, strict=False)
    return network
