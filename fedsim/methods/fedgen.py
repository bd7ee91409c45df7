"""FedGen: a generator trained on the clients' heads teaches the clients.

Zhu, Hong and Zhou, Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML
2021, Algorithm 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy, kl_div, one_hot

from fedsim.data import ClientSplits, Dataset
from fedsim.federation import Client, Federation, Vector, client_function
from fedsim.methods.learns import Learns
from fedsim.methods.method import Method, State, methods
from fedsim.methods.shared.classifiers import classification, needs_classifier
from fedsim.models import Classifier
from fedsim.objectives import Classification
from fedsim.training import Context, Draw, FlatModel, Loss, usable

Noise = Literal["uniform", "gaussian"]
Counts = NDArray[np.int32]
Heads = Callable[[Tensor], Tensor]

FLOOR = 1e-4  # lower limit of a_t and b_t


@dataclass(frozen=True)
class FedGenState(State):
    """The generator and its optimiser's state, besides the weights.

    Attributes:
        generator: (size of G,) its weights and batch norm statistics.
        first_moment: (parameters of G,) Adam's m.
        second_moment: (parameters of G,) Adam's v.
        classes: (C,) which classes the latest cohort held.
    """

    generator: Vector
    first_moment: Vector
    second_moment: Vector
    classes: NDArray[np.bool_]


class Generator(nn.Module):
    """G(ε, y): noise (B, noise) and labels (B,) to representations (B, size)."""

    def __init__(self, noise: int, classes: int, hidden: int, size: int) -> None:
        super().__init__()
        self.classes = classes
        self.layers = nn.Sequential(
            nn.Linear(noise + classes, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, size),
        )

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        z: Tensor = self.layers(torch.cat([noise, one_hot(y, self.classes)], dim=1))
        return z


@methods.register
class FedGen(Method[FedGenState]):
    """FedAvg whose clients also learn from a generator of representations (Zhu et al. 2021).

    The server trains G on the heads h_k of the cohort: Σ_k mean(w_{y,k}·CE(h_k(G(ε, y)), y))
    + η·diversity is minimised, with w_{y,k} = n_{k,y}/Σ_j n_{j,y} and y uniform over the classes
    that the cohort holds. From round 2 on clients receive G and these classes, and minimise

        CE + a_t·(B_g/B)·CE(h(G(ε, ỹ)), ỹ) + b_t·KL(h(G(ε, y)) ‖ model(x)),

    where ỹ is uniform over the classes, B is the batch size, h(G(ε, y)) is held fixed in the last
    term, and a_t = max(a·decay^(t − 1), 10⁻⁴), b_t likewise (0 stays 0). The last term, the decay,
    and uniform labels (over all classes that occur) follow the released code; as there, G is in
    evaluation mode on clients, and its Adam state is kept from round to round. Clients send their
    label counts every round. Because the defaults for a and b are large, local steps have to be
    small: the released code uses a learning rate of 0.01.

    Args:
        a: a_0, weight of the cross-entropy of generated representations.
        b: b_0, weight of the divergence from the head's predictions for generated representations.
        decay: factor of a_t, b_t and the learning rate of G from round to round.
        teaching_epochs: local epochs of a round in which G teaches; later epochs are without G.
        noise: distribution of ε: uniform on [0, 1) in each dimension, or standard normal as in the
            paper.
        noise_size: length of ε.
        hidden: width of the hidden layer of G.
        generator_batch_size: B_g, representations generated per step, on server and clients.
        generator_steps: the server's steps per round (10 times 5 in the released code).
        generator_lr: learning rate of the server's Adam.
        generator_weight_decay: L2 penalty of the server's Adam.
        diversity: η, weight of the diversity term.
    """

    name: str = "fedgen"
    learns: ClassVar[Learns] = Learns(
        objectives=(Classification,),
        task_sequences="no",
        asks=("messages", "sizes"),
        averages=False,
    )
    a: float = Field(10.0, ge=0)
    b: float = Field(10.0, ge=0)
    decay: float = Field(0.98, gt=0, le=1)
    teaching_epochs: int = Field(20, ge=0)
    noise: Noise = "uniform"
    noise_size: int = Field(64, ge=1)
    hidden: int = Field(512, ge=1)
    generator_batch_size: int = Field(32, ge=2)
    generator_steps: int = Field(50, ge=0)
    generator_lr: float = Field(3e-4, gt=0)
    generator_weight_decay: float = Field(1e-2, ge=0)
    diversity: float = Field(1.0, ge=0)

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        needs_classifier(self.name, network)

    def init(self, fed: Federation) -> FedGenState:
        G = fed.server.network("generator", self.build(fed.server.model))
        return FedGenState(
            weights=fed.initial_weights(),
            generator=G.weights(),
            first_moment=np.zeros(G.num_parameters, dtype=np.float32),
            second_moment=np.zeros(G.num_parameters, dtype=np.float32),
            classes=np.zeros(fed.server.num_classes, dtype=np.bool_),
        )

    def round(self, fed: Federation, state: FedGenState, t: int) -> FedGenState:
        trained = bool(state.classes.any())  # not before a first round
        sent = fed.gather(
            self.local_update,
            fed.sample(t),
            weights=state.weights,
            generator=state.generator if trained else None,
            classes=state.classes if trained else None,
        )
        models = {k: message["weights"] for k, message in sent.items()}
        averaged = replace(state, weights=fed.server.average(models))
        counts = np.stack([message["counts"] for message in sent.values()])
        return self.train_generator(fed, averaged, list(models.values()), counts)

    @client_function("local_update")
    def local_update(
        self, client: Client, weights: Tensor, generator: Tensor | None, classes: Tensor | None
    ) -> dict[str, Tensor]:
        """(client) w_k and n_{k,y}; G takes part in training from round 2 on."""
        loss, draw = None, None
        if generator is not None and classes is not None:
            loss, draw = self.taught(client, generator, classes)
        trained = client.train(weights, loss=loss, draw=draw)
        return {"weights": trained, "counts": label_counts(client)}

    def taught(self, client: Client, generator: Tensor, classes: Tensor) -> tuple[Loss, Draw]:
        """(client) The loss of each example, with G's two terms, and what these draw."""
        G = client.network("generator", self.build(client.model))
        G.load(generator)
        G.module.eval()
        a, b = (
            max(first * self.decay ** (client.round - 1), FLOOR) if first else 0.0
            for first in (self.a, self.b)
        )
        held = np.flatnonzero(classes.cpu().numpy())
        rng = client.rng("generator")
        n, B = client.num_samples, client.settings.batch_size
        taught_steps = self.teaching_epochs * math.ceil(usable(client.model, n, B) / B)
        step, objective = itertools.count(), classification(client)

        @torch.no_grad()
        def draw(x: Tensor, y: Tensor) -> tuple[Context, Context]:
            if next(step) >= taught_steps:
                return {}, {}
            drawn = torch.from_numpy(rng.choice(held, self.generator_batch_size)).to(y.device)
            labels = torch.cat([y, drawn])
            z = G.module(self.draw_noise(rng, len(labels), y.device), labels)
            return {"z": z[: len(y)]}, {"free": z[len(y) :], "drawn": drawn}

        def loss(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
            assert isinstance(network, Classifier)
            losses, _, logits = objective.forward(network, x, y)
            if "drawn" not in context:
                return losses
            drawn = context["drawn"]
            generated = head(network)(torch.cat([context["z"], context["free"]]))
            target, free = generated[: len(y)].detach(), generated[len(y) :]
            p = logits.log_softmax(dim=1), target.log_softmax(dim=1)
            divergence = kl_div(*p, reduction="none", log_target=True).sum(dim=1)
            ratio = self.generator_batch_size / B
            return losses + a * ratio * cross_entropy(free, drawn) + b * divergence

        return loss, draw

    def train_generator(
        self, fed: Federation, state: FedGenState, models: Sequence[Vector], counts: Counts
    ) -> FedGenState:
        """The state after a round's steps of G on the heads of the cohort's models."""
        G = fed.server.network("generator", self.build(fed.server.model))
        G.load(fed.server.tensor(state.generator))
        G.module.train()
        parameters = nn.Parameter(G.vector[: G.num_parameters])
        adam = torch.optim.Adam(
            [parameters],
            lr=self.generator_lr * self.decay ** (fed.round - 1),
            weight_decay=self.generator_weight_decay,
        )
        adam.state[parameters] = {
            "step": torch.tensor(float(self.generator_steps * (fed.round - 1))),
            "exp_avg": fed.server.tensor(state.first_moment),
            "exp_avg_sq": fed.server.tensor(state.second_moment),
        }
        heads = joined_heads(fed.server.model, [fed.server.tensor(model) for model in models])
        shares = fed.server.tensor(label_shares(counts))
        classes = counts.sum(axis=0) > 0
        rng = fed.rng("generator")
        for _ in range(self.generator_steps):
            y = fed.server.tensor(rng.choice(np.flatnonzero(classes), self.generator_batch_size))
            noise = self.draw_noise(rng, len(y), fed.server.device)
            parameters.grad = G.gradient(self.generator_loss(G.module, heads, shares, noise, y))
            adam.step()
        kept = adam.state[parameters]
        return replace(
            state,
            generator=G.weights(),
            first_moment=kept["exp_avg"].cpu().numpy(),
            second_moment=kept["exp_avg_sq"].cpu().numpy(),
            classes=classes,
        )

    def generator_loss(
        self, G: nn.Module, heads: Heads, shares: Tensor, noise: Tensor, y: Tensor
    ) -> Tensor:
        """Σ_k mean(w_{y,k}·CE(h_k(G(ε, y)), y)) + η·diversity.

        Args:
            G: the generator.
            heads: representations (B, D) to logits (cohort, B, C).
            shares: (cohort, C) w_{y,k}.
            noise: (B, noise_size) ε.
            y: (B,).
        """
        z = G(noise, y)
        log_p = heads(z).log_softmax(dim=2)
        losses = -log_p[:, torch.arange(len(y), device=y.device), y]
        return (shares[:, y] * losses).mean(dim=1).sum() + self.diversity * diversity(noise, z)

    def build(self, model: FlatModel) -> partial[Generator]:
        """Builds a generator of representations for a model."""
        last = head(model.module)
        return partial(
            Generator, self.noise_size, last.out_features, self.hidden, last.in_features
        )

    def draw_noise(self, rng: np.random.Generator, n: int, device: torch.device) -> Tensor:
        """(n, noise_size) ε."""
        shape = (n, self.noise_size)
        uniform = self.noise == "uniform"
        drawn = (rng.random if uniform else rng.standard_normal)(shape, dtype=np.float32)
        return torch.from_numpy(drawn).to(device)


def head(network: nn.Module) -> nn.Linear:
    """A classifier's head."""
    assert isinstance(network, Classifier)
    return network.head


def joined_heads(model: FlatModel, all_weights: Sequence[Tensor]) -> Heads:
    """The heads of K models as one function: representations (B, D) to logits (K, B, C)."""
    layers = [model.named(weights) for weights in all_weights]
    names = [name for name in model.shapes if name.startswith("head.")]
    stacked = {n.removeprefix("head."): torch.stack([own[n] for own in layers]) for n in names}
    one = partial(functional_call, head(model.module))
    return lambda z: vmap(one, in_dims=(0, None))(stacked, (z,))


def label_counts(client: Client) -> Tensor:
    """(client) n_{k,y}, its number of examples of each class: (C,) int32."""
    return client.data.y.bincount(minlength=client.num_classes).int()


def label_shares(counts: Counts) -> NDArray[np.float32]:
    """w_{y,k} = n_{k,y}/Σ_j n_{j,y}, 0 for classes that nobody holds; (cohort, C)."""
    shares: NDArray[np.float32] = (counts / np.maximum(counts.sum(axis=0), 1)).astype(np.float32)
    return shares


def diversity(noise: Tensor, outputs: Tensor) -> Tensor:
    """exp(−mean_{i,j} d₂(ε_i, ε_j)·d₁(z_i, z_j)): small if the outputs vary with the noise.

    d₂ is the mean square and d₁ the mean absolute difference of the entries.

    Args:
        noise: (B, n) ε.
        outputs: (B, ...) z.
    """
    flat = outputs.flatten(start_dim=1)
    of_outputs = torch.cdist(flat, flat, p=1) / flat.shape[1]
    of_noise = (noise[:, None] - noise).square().mean(dim=2)
    return torch.exp(-(of_noise * of_outputs).mean())
