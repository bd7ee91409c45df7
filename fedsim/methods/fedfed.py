"""FedFed: clients share the noisy, performance-sensitive part of their images and train on it.

Yang et al., FedFed: Feature Distillation against Data Heterogeneity in Federated Learning,
NeurIPS 2023. Networks, losses and numbers are those of the authors' released code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from fedsim.config.registry import Config
from fedsim.data import ClientSplits, Dataset
from fedsim.data.stored import bounds
from fedsim.errors import ExperimentError
from fedsim.federation import Client, Federation, NotCounted, Update, Vector, client_function
from fedsim.methods.learns import Learns
from fedsim.methods.method import State, check_rounds_left, methods
from fedsim.methods.shared.pool import (
    PoolMethod,
    label_type,
    noise_like,
    pixel_range,
    to_network,
    to_pixels,
)
from fedsim.models.autoencoder import Autoencoder
from fedsim.objectives import Classification
from fedsim.training import Context, Draw, FlatModel, Train

SCARCE = 0.2  # of the mean number of examples; a client with less has few examples
SKEWED = 0.7  # of a client's examples; with more in one class, its labels are skewed
BATCH = 500  # images split at once

Kind = Literal["usual", "scarce", "skewed"]
Factors = tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat, NonNegativeFloat]


class Distillation(Config):
    """How the generator and the classifier are trained together in stage 1.

    Args:
        clients: which clients take part: `all`, or a `sample` as in every other round.
        epochs: local epochs per round, of three passes each.
        batch_size: examples per step of each pass.
        lr, weight_decay: of AdamW, newly created for each client and round.
        alpha: α of the first pass: mix-up with λ ~ Beta(α, α).
        mosaics: number of mosaics that the second pass makes from each batch.
        reconstruction: weight of MSE(G(x), x) in the loss; 50 is 5 in the released code, times 10
            by a curriculum that never advances.
        shared: weight of the cross-entropy of the shared items, CE(x_r + n₁, x_r + n₂).
        kl: weight of KL.
        clean: weight of CE(x).
        adaptive: multiply these four weights once more for clients with few examples or skewed
            labels.
        scarce: factor for a client with less than 20 % of the mean number of examples.
        skewed: factor for any other client with more than 70 % of its examples in one class; such
            a client skips the mosaics.
    """

    clients: Literal["all", "sample"] = "all"
    epochs: int = Field(1, ge=1)
    batch_size: int = Field(32, ge=2)
    lr: float = Field(1e-3, gt=0)
    weight_decay: float = Field(1e-6, ge=0)
    alpha: float = Field(2.0, gt=0)
    mosaics: int = Field(64, ge=2)
    reconstruction: float = Field(50.0, ge=0)
    shared: float = Field(2.0, ge=0)
    kl: float = Field(0.005, ge=0)
    clean: float = Field(0.4, ge=0)
    adaptive: bool = True
    scarce: Factors = (5.0, 1.0, 0.5, 1.0)
    skewed: Factors = (1.0, 5.0, 5.0, 5.0)


@dataclass(frozen=True)
class FedFedState(State):
    """The method's phase, and the server's state besides the weights.

    In stage 1 the weights are those of the classifier that is trained with the generator; stage 3
    starts from the run's initial weights.

    Attributes:
        phase: phase of the next round: `distil`, `share` or `train`.
        generator: the weights of G.
        shared1, shared2: (m, C, H, W) the pool, x_r + N(0, σ1²) and x_r + N(0, σ2²), as sent, for
            images with pixels in [0, 1]. Empty before stage 2.
        labels: (m,) the labels of both.
    """

    phase: str
    generator: Vector
    shared1: NDArray[np.float32]
    shared2: NDArray[np.float32]
    labels: NDArray[np.unsignedinteger[Any]]


@methods.register
class FedFed(PoolMethod[FedFedState]):
    """FedAvg on local data and a pool of distilled, noisy features (Yang et al. 2023).

    An image is split into x = x_r + G(x): a variational autoencoder G reproduces most of x, and
    the remainder x_r holds the features from which a classifier predicts the label. All stages are
    rounds of the run.

    1. `distillation_rounds` rounds train G and a classifier (the run's model) in three passes per
       epoch of each client: mix-up for the classifier; r·MSE + KL on 2×2 mosaics for G; and
       r·MSE(G(x), x) + CE(x_r + n₁, x_r + n₂) + KL + CE(x), with weights, for both. The server
       averages both, weighted by n_k. The classifier is evaluated.
    2. In one round all clients send x_r + N(0, σ1²), x_r + N(0, σ2²) and labels, and receive the
       pool of all clients. The initial model, from which stage 3 starts, is evaluated.
    3. FedAvg. In each epoch a client draws n_k items of the pool for each noise level, balanced
       over classes. A step's batch consists of local examples and as many items of each noise
       level; its loss is the mean cross-entropy of all.

    `train.lr_decay` and `train.schedule` count all rounds; they and `train.clip_norm`, `sampler`,
    `accumulate` and `precision` do not apply to stage 1.

    Without distillation rounds there is no pool, and the method is FedAvg. Images are not
    augmented (the released code crops, flips, and more). G and the pool use pixels in [0, 1]; for
    the model, both images and pool are normalised with the data's mean and standard deviation.

    Args:
        distillation_rounds: number of rounds of stage 1.
        distillation: training settings of stage 1.
        width: d, channels of G.
        latent: length of G's latent vector; `auto` is the length of the encoder's output,
            d·H·W/16, which is 2048 for 32×32 pixels, as in the paper.
        sigma1: σ1, standard deviation of the noise in the first shared copy. The released code's
            YAML file has 0.2.
        sigma2: σ2, the same of the second copy.
        average: clients' weights in stage 3: `samples` (n_k), or `uniform`, which the released
            code amounts to.
    """

    name: str = "fedfed"
    private_by_example: ClassVar[bool] = False
    pooled: ClassVar[tuple[str, ...]] = ("shared1", "shared2", "labels")
    learns: ClassVar[Learns] = Learns(
        objectives=(Classification,), task_sequences="no", asks=("messages", "sizes")
    )
    distillation_rounds: int = Field(15, ge=0)
    distillation: Distillation = Distillation()
    width: int = Field(32, ge=2)
    latent: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    sigma1: float = Field(0.15, ge=0)
    sigma2: float = Field(0.25, ge=0)
    average: Literal["samples", "uniform"] = "samples"

    def check(self, train: Train) -> None:
        if self.distillation_rounds:
            check_rounds_left("distillation_rounds", self.distillation_rounds, train)

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        shape, x = dataset.shape, dataset.x
        if len(shape) != 3 or min(shape[1:]) < 4:
            raise ExperimentError(
                f"method.name={self.name} takes images (channels, height, width) of 4 pixels a "
                f"side or more; the data's inputs have shape {shape}"
            )
        low, high = (0, 1) if x.dtype == np.uint8 else bounds(x)
        if not (low >= 0 and high <= 1):
            raise ExperimentError(
                f"method.name={self.name} takes images with pixels of 0 to 255 (uint8) or of 0 to "
                f"1; the data's are {low:g} to {high:g}"
            )

    # -- the server ----------------------------------------------------------------------------

    def init(self, fed: Federation) -> FedFedState:
        nothing = np.empty((0, *fed.server.shape), dtype=np.float32)
        return FedFedState(
            weights=fed.initial_weights(),
            phase="distil" if self.distillation_rounds else "train",
            generator=fed.server.network("generator", self.build(fed.server.shape)).weights(),
            shared1=nothing,
            shared2=nothing,
            labels=np.empty(0, dtype=label_type(fed.server.num_classes)),
        )

    def round(self, fed: Federation, state: FedFedState, t: int) -> FedFedState:
        fed.log(phase=state.phase)
        if state.phase == "distil":
            return self.distillation_round(fed, state, t)
        if state.phase == "share":
            return self.sharing_round(fed, state)
        mean = fed.mean(
            self.local_update,
            fed.sample(t),
            weights=state.weights,
            shared1=NotCounted(state.shared1),  # clients have the pool since stage 2
            shared2=NotCounted(state.shared2),
            labels=NotCounted(state.labels),
            pixels=NotCounted(pixel_range(fed)),
        )
        return replace(state, weights=mean.weights)

    def distillation_round(self, fed: Federation, state: FedFedState, t: int) -> FedFedState:
        """Stage 1: averages of classifier and generator."""
        everyone = np.arange(fed.num_clients)
        mean = fed.mean(
            self.distil,
            everyone if self.distillation.clients == "all" else fed.sample(t),
            weights=state.weights,
            generator=state.generator,
            pixels=NotCounted(pixel_range(fed)),
            mean_samples=float(fed.server.num_samples.mean()),
        )
        return replace(
            state,
            weights=mean.weights,
            generator=mean.generator,
            phase="distil" if t < self.distillation_rounds else "share",
        )

    def sharing_round(self, fed: Federation, state: FedFedState) -> FedFedState:
        """Stage 2: every client's items, pooled and sent to every client."""
        pool, _ = self.share_all(
            fed, state, generator=state.generator, pixels=NotCounted(pixel_range(fed))
        )
        return replace(state, weights=fed.initial_weights(), phase="train", **pool)

    # -- the clients ---------------------------------------------------------------------------

    @client_function("distil")
    def distil(
        self,
        client: Client,
        weights: Tensor,
        generator: Tensor,
        pixels: Tensor,
        mean_samples: float,
    ) -> Update:
        """(client) Classifier and generator after the three passes of each local epoch."""
        settings = self.distillation
        classifier, vae = client.model, self.vae(client)
        classifier.load(weights)
        vae.load(generator)
        classifier.module.train()
        vae.module.train()
        optimizer = torch.optim.AdamW(
            [*classifier.module.parameters(), *vae.module.parameters()],
            lr=settings.lr,
            weight_decay=settings.weight_decay,
        )
        steps = 0

        def step(loss: Tensor) -> None:
            nonlocal steps
            optimizer.zero_grad()  # to None, which skips unused parameters
            torch.autograd.backward(loss)
            optimizer.step()
            steps += 1

        def network(images: Tensor) -> Tensor:
            logits: Tensor = classifier.module(to_network(images, pixels))
            return logits

        x, y = to_pixels(client.data.x, pixels), client.data.y
        kind = self.kind(y, mean_samples)
        multipliers = torch.tensor(self.multipliers(kind), device=client.device)
        order, mixing = client.rng("batches"), client.rng("mixup")
        total, visited = torch.zeros((), device=client.device), 0
        for _ in range(settings.epochs):
            for images, labels in batches(x, y, settings.batch_size, order):
                lam = mixing.beta(settings.alpha, settings.alpha)
                step(mixup(network, images, labels, lam))
            for images, _ in batches(x, y, settings.batch_size, order):
                if kind != "skewed" and len(images) >= 4:
                    step(self.autoencoding(vae.module, mosaics(images, settings.mosaics)))
            for images, labels in batches(x, y, settings.batch_size, order):
                loss = multipliers @ self.terms(network, vae.module, images, labels)
                step(loss)
                total += loss.detach() * len(labels)
                visited += len(labels)
        client.trained = classifier.vector.clone()
        client.report(steps=steps)
        client.visit(3 * visited)
        if visited:
            client.report(loss=float(total) / visited)
        return Update(
            weights=client.trained, generator=vae.vector.clone(), weight=client.num_samples
        )

    @client_function("share")
    def share(  # type: ignore[override]
        self, client: Client, generator: Tensor, pixels: Tensor
    ) -> Mapping[str, Any]:
        """(client) x_r + N(0, σ1²), x_r + N(0, σ2²) and the labels."""
        vae = self.vae(client)
        vae.load(generator)
        rx = split(vae.module, to_pixels(client.data.x, pixels))
        rng = client.rng("noise")
        return {
            "shared1": rx + self.sigma1 * noise_like(rx, rng),
            "shared2": rx + self.sigma2 * noise_like(rx, rng),
            "labels": client.data.y.cpu().numpy().astype(label_type(client.num_classes)),
        }

    @client_function("local_update")
    def local_update(
        self,
        client: Client,
        weights: Tensor,
        shared1: Tensor,
        shared2: Tensor,
        labels: Tensor,
        pixels: Tensor,
    ) -> Update:
        """(client) As in FedAvg, on local data and the pool."""
        loss, draw = None, None
        if len(labels):
            loss, draw = with_pool, self.mixed(client, (shared1, shared2), labels, pixels)
        trained = client.train(weights, loss=loss, draw=draw)
        weight = client.num_samples if self.average == "samples" else 1
        return Update(weights=trained, weight=weight)

    # -- within --------------------------------------------------------------------------------

    def shared_pairs(
        self, fed: Federation, state: FedFedState, client: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `fedsim.methods.shared.pool`; the pool is in the clients' order."""
        fed.server.replay(self.distillation_rounds + 1)  # the round of sharing
        splits = fed.server.splits
        rows, before = splits.train[client], splits.train.lengths * splits.present
        begin = int(before[:client].sum())
        part = slice(begin, begin + len(rows))
        held = fed.server.prepare(fed.server.data.x[rows], fed.server.data.y[rows])
        items = (fed.server.tensor(pool[part]) for pool in (state.shared1, state.shared2))
        pixels = to_pixels(held.x, fed.server.tensor(pixel_range(fed))).clamp(0, 1)
        return pixels, self.combined(*items), held.y

    def obscured(
        self, fed: Federation, state: FedFedState, x: Tensor, y: Tensor, rng: np.random.Generator
    ) -> Tensor:
        """(n, C, H, W) both shared items of any images, combined into one with the least noise."""
        vae = fed.server.network("generator", self.build(fed.server.shape))
        vae.load(fed.server.tensor(state.generator))
        rx = split(vae.module, to_pixels(x, fed.server.tensor(pixel_range(fed))))
        shared1 = rx + self.sigma1 * noise_like(rx, rng)
        return self.combined(shared1, rx + self.sigma2 * noise_like(rx, rng))

    def combined(self, shared1: Tensor, shared2: Tensor) -> Tensor:
        """The mean of an image's two shared items, weighted by their precisions."""
        if self.sigma1 == self.sigma2:
            return (shared1 + shared2) / 2
        a, b = self.sigma2**2, self.sigma1**2
        return (a * shared1 + b * shared2) / (a + b)

    def build(self, shape: tuple[int, ...]) -> Callable[[], nn.Module]:
        return partial(Autoencoder, shape, self.width, self.latent)

    def vae(self, client: Client) -> FlatModel:
        """G in the client's process."""
        return client.network("generator", self.build(client.data.x.shape[1:]))

    def kind(self, y: Tensor, mean_samples: float) -> Kind:
        """Whether few examples or skewed labels y change a client's multipliers, and which."""
        if self.distillation.adaptive and len(y) < SCARCE * mean_samples:
            return "scarce"
        if self.distillation.adaptive and int(y.bincount().max()) > SKEWED * len(y):
            return "skewed"
        return "usual"

    def multipliers(self, kind: Kind) -> list[float]:
        """A client's weights of the four `terms`."""
        own = self.distillation
        factors = {"usual": (1.0, 1.0, 1.0, 1.0), "scarce": own.scarce, "skewed": own.skewed}[kind]
        usual = (own.reconstruction, own.shared, own.kl, own.clean)
        return [m * f for m, f in zip(usual, factors, strict=True)]

    def terms(
        self, network: Callable[[Tensor], Tensor], generator: nn.Module, x: Tensor, y: Tensor
    ) -> Tensor:
        """(4,) MSE(G(x), x), CE(x_r + n₁, x_r + n₂), KL, and CE(x) of a batch."""
        gx, mean, log_variance = generator(x)
        rx = x - gx
        noisy = [rx + sigma * torch.randn_like(rx) for sigma in (self.sigma1, self.sigma2)]
        logits = network(torch.cat([*noisy, x]))
        of_shared, of_x = logits[: 2 * len(x)], logits[2 * len(x) :]
        return torch.stack(
            [
                mse_loss(gx, x),
                cross_entropy(of_shared, y.repeat(2)),
                divergence(mean, log_variance),
                cross_entropy(of_x, y),
            ]
        )

    def autoencoding(self, generator: nn.Module, x: Tensor) -> Tensor:
        """r·MSE(G(x), x) + KL of a batch, with the usual multipliers."""
        gx, mean, log_variance = generator(x)
        own = self.distillation
        return own.reconstruction * mse_loss(gx, x) + own.kl * divergence(mean, log_variance)

    def mixed(
        self, client: Client, pools: tuple[Tensor, Tensor], labels: Tensor, pixels: Tensor
    ) -> Draw:
        """One item of either pool beside each local example, in an order of the client's own."""
        n, held = client.num_samples, labels.cpu().numpy()
        draws = [balanced(held, n, client.rng(f"pool/{i}")) for i in range(len(pools))]

        def draw(x: Tensor, y: Tensor) -> tuple[Context, Context]:
            found = {}
            for i, (pool, drawn) in enumerate(zip(pools, draws, strict=True), start=1):
                rows = torch.tensor(list(islice(drawn, len(y))), device=x.device)
                found[f"x{i}"] = to_network(pool[rows], pixels)
                found[f"y{i}"] = labels[rows].long()
            return found, {}

        return draw


def with_pool(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
    """(B,) mean cross-entropy of each local example and its two items, in one forward pass."""
    logits = network(torch.cat([x, context["x1"], context["x2"]]))
    targets = torch.cat([y, context["y1"], context["y2"]])
    return cross_entropy(logits, targets, reduction="none").view(3, -1).mean(dim=0)


@torch.no_grad()
def split(generator: nn.Module, x: Tensor) -> Tensor:
    """x_r = x − G(x), in evaluation."""
    generator.eval()
    return torch.cat([part - generator(part)[0] for part in torch.split(x, BATCH)])


def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL(N(mean, variance) ‖ N(0, 1)), summed, over 3·B·z as in the released code."""
    summed = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return summed / (3 * mean.numel())


def batches(
    x: Tensor, y: Tensor, size: int, rng: np.random.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """One pass in a new order, without a last batch of one, which batch norm does not accept."""
    order = torch.from_numpy(rng.permutation(len(y))).to(x.device)
    for rows in torch.split(order, size):
        if len(rows) > 1:
            yield x[rows], y[rows]


def mixup(network: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, lam: float) -> Tensor:
    """λ·CE(x̃, y) + (1 − λ)·CE(x̃, y') of x̃ = λ·x + (1 − λ)·x', x' the shuffled batch."""
    other = torch.randperm(len(y), device=x.device)
    logits = network(lam * x + (1 - lam) * x[other])
    return lam * cross_entropy(logits, y) + (1 - lam) * cross_entropy(logits, y[other])


def mosaics(x: Tensor, count: int) -> Tensor:
    """(count, C, H, W) 2×2 mosaics of the same half-size window of four different images.

    Images and windows are drawn from torch's global generator.
    """
    H, W = x.shape[-2:]
    h, w = -(-H // 2), -(-W // 2)
    windows = x.unfold(2, h, 1).unfold(3, w, 1)  # (B, C, tops, lefts, h, w), a view
    four = torch.rand(count, len(x), device=x.device).argsort(dim=1)[:, :4]
    top = torch.randint(H - h + 1, (count, 1), device=x.device)
    left = torch.randint(W - w + 1, (count, 1), device=x.device)
    parts = windows[four, :, top, left]  # (count, 4, C, h, w)
    upper = torch.cat([parts[:, 0], parts[:, 1]], dim=-1)
    lower = torch.cat([parts[:, 2], parts[:, 3]], dim=-1)
    return torch.cat([upper, lower], dim=-2)[..., :H, :W]


def balanced(
    labels: NDArray[np.unsignedinteger[Any]], n: int, rng: np.random.Generator
) -> Iterator[int]:
    """An endless stream of rows of the pool, balanced over classes in every n.

    The remainder of n is drawn from all classes. Rows of classes with too few repeat.
    """
    classes = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    each, rest = divmod(n, len(classes))
    while True:
        rows = [_take(rows, each, rng) for rows in classes]
        rows.append(_take(np.arange(len(labels)), rest, rng))
        yield from rng.permutation(np.concatenate(rows)).tolist()


def _take(rows: NDArray[np.intp], count: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Draw without replacement, starting again when all have been drawn."""
    times = -(-count // len(rows))
    return np.concatenate([rows[:0], *(rng.permutation(rows) for _ in range(times))])[:count]
