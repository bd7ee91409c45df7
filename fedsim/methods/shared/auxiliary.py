"""Training on unlabelled auxiliary inputs on the server.

Distillation as in Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning,
NeurIPS 2020; pretraining as in Chen et al., A Simple Framework for Contrastive Learning of Visual
Representations, ICML 2020 (SimCLR).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Generic

import numpy as np
import torch
from pydantic import BeforeValidator, SerializeAsAny
from torch import Tensor, nn

from fedsim.data import ClientSplits, Dataset, Source, datasets, load_dataset
from fedsim.data.augment import weak
from fedsim.data.dataset import fitted
from fedsim.data.stored import AnyArray
from fedsim.errors import ExperimentError
from fedsim.federation import Client, Federation, Vector, client_function
from fedsim.methods.method import Method, S
from fedsim.models import Classifier
from fedsim.objectives.objective import EVALUATION_BATCH
from fedsim.training import usable

MOST_IN_COMMON = 0.01  # largest share of auxiliary inputs that clients train on as well
FEWEST = 5  # auxiliary inputs; FedAUX uses a fifth of them as negatives

PRETRAINING_LR = 1e-3  # of Adam
TEMPERATURE = 0.5  # of SimCLR on CIFAR-10
PROJECTION_SIZE = 128


class AuxiliaryMethod(Method[S], Generic[S]):
    """A method whose server holds unlabelled inputs that belong to no client.

    Args:
        auxiliary: a data set (a `data` section) whose training inputs are used without their
            labels, and of which clients train on one in a hundred at most; by default the inputs
            of the server's share (`partition.server_fraction`).
    """

    auxiliary: Annotated[SerializeAsAny[Source], BeforeValidator(datasets.parse)] | None = None

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        if self.auxiliary is None:
            count, shape = len(splits.server), dataset.shape
        else:
            found = fitted(load_dataset(self.auxiliary))[0]
            count, shape = len(found.x), found.shape
        if self.auxiliary is None and count == 0:
            raise ExperimentError(
                f"method.name={self.name} needs unlabelled auxiliary inputs on the server: name "
                "a data set in method.auxiliary, or set partition.server_fraction above 0"
            )
        if shape != dataset.shape:
            raise ExperimentError(
                f"method.auxiliary: inputs of shape {shape} do not fit the run's data, whose "
                f"inputs have shape {dataset.shape}"
            )
        if self.auxiliary is not None:
            rows = np.concatenate([splits.train.values, splits.unlabelled.values])
            own: Counter[int] = Counter(dataset.hashes(np.unique(rows)))
            common = sum(each in own for each in found.hashes(np.arange(count)))
            # Rows of a table with few values recur by chance, among the clients' own as well.
            by_chance = 2 * sum(n for n in own.values() if n > 1) / max(1, own.total())
            if common > max(1, count * max(MOST_IN_COMMON, by_chance)):
                raise ExperimentError(
                    f"method.auxiliary: {common} of its {count} inputs are the clients' own; name "
                    "another data set, or leave it out and set partition.server_fraction above 0"
                )
        if count < FEWEST:
            raise ExperimentError(
                f"method.name={self.name}: {count} auxiliary inputs are too few; {FEWEST} or more "
                "are needed"
            )

    def extra_hash_inputs(self) -> list[AnyArray]:
        return [] if self.auxiliary is None else [fitted(load_dataset(self.auxiliary))[0].x]

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor) -> dict[str, Tensor]:
        """(client) w_k, as in FedAvg."""
        return {"weights": client.train(weights)}

    def inputs(self, fed: Federation) -> Tensor:
        """(n, ...) the auxiliary inputs, scaled and normalised like the run's data."""

        def load() -> Tensor:
            if self.auxiliary is None:
                return fed.server.own_data.x
            found = fitted(load_dataset(self.auxiliary))[0]
            return fed.server.prepare(np.asarray(found.x), found.y).x

        return fed.server.once("auxiliary inputs", load)


def draw_batches(
    fed: Federation, rows: Tensor, batch_size: int, epochs: int, steps: int | None = None
) -> list[Tensor]:
    """Batches of `usable` row indices, in a new order each epoch; `steps` of them, if given."""
    per_epoch = math.ceil(usable(fed.server.model, len(rows), batch_size) / batch_size)
    count = epochs * per_epoch if steps is None else steps
    rng = fed.rng("distillation")
    batches: list[Tensor] = []
    while len(batches) < count:
        order = torch.from_numpy(rng.permutation(len(rows))).to(rows.device)
        batches += torch.split(rows[order], batch_size)[:per_epoch]
    return batches[:count]


@torch.no_grad()
def in_batches(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function to inputs in batches of a fixed size, for reproducible bits."""
    return torch.cat([function(part) for part in torch.split(x, EVALUATION_BATCH)])


@torch.no_grad()
def ensemble(
    fed: Federation, models: Sequence[Vector], scores: Sequence[Tensor], x: Tensor, rows: Tensor
) -> Tensor:
    """softmax(Σ_k s_k(x)·logits_k(x) / Σ_k s_k(x)), with teachers k in eval mode.

    The teachers use the server's network one after another.

    Args:
        models: (size,) w_k of each teacher.
        scores: (n,) s_k of each teacher.
        x: (n, ...) auxiliary inputs.
        rows: rows of `x` whose targets are needed.

    Returns:
        (n, C) targets; other rows are zero.
    """
    total = weight = torch.zeros((), device=fed.server.device)
    for w, s in zip(models, scores, strict=True):
        fed.server.model.load(torch.tensor(w))
        network = fed.server.model.module.eval()
        found = torch.cat([network(x[part]) for part in torch.split(rows, EVALUATION_BATCH)])
        total = total + s[rows, None] * found
        weight = weight + s[rows, None]
    targets = total.new_zeros(len(x), total.shape[1])
    targets[rows] = (total / weight).softmax(dim=1)
    return targets


def distil(
    fed: Federation,
    weights: Vector,
    x: Tensor,
    targets: Tensor,
    batches: Sequence[Tensor],
    rates: Sequence[float],
    clip_norm: float = math.inf,
) -> Vector:
    """Minimise KL(targets ‖ softmax(student)) from `weights`, with a step of Adam per batch.

    The student is in training mode, so batch norm's statistics are updated, starting from their
    average. The mean loss is recorded as `distillation_loss`.

    Args:
        targets: (n, C) probabilities for each row of `x`.
        batches: row indices.
        rates: the learning rate of each step.
        clip_norm: largest norm of a step's gradient; longer ones are scaled down to it.

    Returns:
        (size,) the student's weights.
    """
    fed.server.model.load(torch.tensor(weights))
    network = fed.server.model.module.train()
    student = nn.Parameter(fed.server.model.vector[: fed.server.model.num_parameters])
    adam = torch.optim.Adam([student])
    total = torch.zeros((), device=fed.server.device)
    for batch, rate in zip(batches, rates, strict=True):
        found = network(x[batch]).log_softmax(dim=1)
        loss = nn.functional.kl_div(found, targets[batch], reduction="batchmean")
        total += loss.detach()
        g = fed.server.model.gradient(loss)
        if clip_norm < math.inf:
            g *= clip_norm / g.norm().clamp(min=clip_norm)
        student.grad = g
        adam.param_groups[0]["lr"] = rate
        adam.step()
    fed.log(distillation_loss=float(total) / len(batches))
    return fed.server.model.weights()


def pretrain(fed: Federation, weights: Vector, x: Tensor, epochs: int, batch_size: int) -> Vector:
    """SimCLR: features that distinguish an image's two augmentations from those of other images.

    A two-layer projection on top of the features is trained with them and then dropped; the head
    is unchanged.

    Args:
        x: (n, channels, height, width) images.

    Returns:
        (size,) the weights with trained features.
    """
    fed.server.model.load(torch.tensor(weights))
    network = fed.server.model.module.train()
    assert isinstance(network, Classifier)
    rng, D = fed.rng("pretraining"), network.head.in_features
    projection = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, PROJECTION_SIZE))
    projection.to(fed.server.device)
    trained = [*network.features.parameters(), *projection.parameters()]
    adam = torch.optim.Adam(trained, lr=PRETRAINING_LR)
    for _ in range(epochs):
        order = torch.from_numpy(rng.permutation(len(x))).to(fed.server.device)
        for batch in torch.split(order, batch_size):
            views = torch.cat([augment(x[batch], rng), augment(x[batch], rng)])
            adam.zero_grad()
            contrast(projection(network.features(views))).backward()  # type: ignore[no-untyped-call]
            adam.step()
    adam.zero_grad()
    return fed.server.model.weights()


def contrast(z: Tensor) -> Tensor:
    """NT-Xent: mean_i −log(exp(sim(z_i, z_j)/τ) / Σ_{k≠i} exp(sim(z_i, z_k)/τ)).

    Args:
        z: (2B, d); rows i and j = i ± B belong to the same image.
    """
    z = nn.functional.normalize(z)
    own = torch.eye(len(z), dtype=torch.bool, device=z.device)
    similarity = (z @ z.T / TEMPERATURE).masked_fill(own, -math.inf)
    partner = torch.arange(len(z), device=z.device).roll(len(z) // 2)
    return nn.functional.cross_entropy(similarity, partner)


def augment(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Images shifted slightly, with each channel scaled by its own factor, and with noise.

    Args:
        x: (B, channels, height, width), normalised or not.
    """
    x = weak(x, rng)
    factor = torch.from_numpy(rng.uniform(0.6, 1.4, (*x.shape[:2], 1, 1))).to(x)
    noise = torch.from_numpy(rng.standard_normal(x.shape, dtype=np.float32)).to(x)
    return factor * x + 0.1 * noise
