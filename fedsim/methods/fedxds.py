"""FedXDS: clients share the most relevant pixels of their images, with noise, and train on them.

The paper's main text and supplement (ICCV 2025) leave much to the released code; where code and
text differ, the text is followed, and the code is an option.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator
from pydantic_core import PydanticCustomError
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.conditions.gaussian import analytic_sigma, clip, guarantee
from fedsim.data import ClientSplits, Dataset
from fedsim.data.augment import strong, weak
from fedsim.data.splits import take_stratified
from fedsim.errors import ExperimentError
from fedsim.explain.explainer import Explainer, SharedItems
from fedsim.explain.explainers.attribution import Attribution, attributions, heatmap
from fedsim.explain.explainers.lrp import Lrp
from fedsim.explain.explainers.shared_images import SharedImagesExplainer
from fedsim.explain.masking import keep_relevant, scaled
from fedsim.federation import Client, Federation, NotCounted, Update, Vector, client_function
from fedsim.methods.learns import Learns
from fedsim.methods.method import State, check_rounds_left, methods
from fedsim.methods.shared.images import check_images
from fedsim.methods.shared.pool import PoolMethod, label_type, noise_like, pixel_range, to_pixels
from fedsim.objectives import Classification
from fedsim.training import Context, Draw, Train, logits

Pool = NDArray[Any]  # float32, or uint8 levels
AUGMENTATIONS: Mapping[str, Callable[[Tensor, np.random.Generator], Tensor]] = {
    "none": lambda x, rng: x,
    "weak": weak,
    "strong": strong,
}
DELTA = 1e-5  # δ of the reported guarantee if the experiment gives σ


@dataclass(frozen=True)
class FedXDSState(State):
    """The phase of the method, and the pool of shared images.

    Attributes:
        phase: phase of the next round: `warm up`, `share` or `train`.
        shared: (m, C, H, W) the pool, as sent. Empty before sharing.
        labels: (m,) labels of the pool.
        attributor: (size,) the warm-up model that was used to mask the images. Empty before
            sharing.
    """

    phase: str
    shared: Pool
    labels: NDArray[np.unsignedinteger[Any]]
    attributor: Vector


@methods.register
class FedXDS(PoolMethod[FedXDSState]):
    """FedAvg on local data and a pool of attribution-masked, noisy images.

    1. `warmup_rounds` rounds of FedAvg.
    2. In one round each client takes a class-stratified `fraction` of its images, computes the
       relevance h(x) of each pixel for the true class (with the warm-up model), keeps the most
       relevant pixels: f(x) = x ⊙ m, clips f(x) to the L2 norm `clip`, adds N(0, σ²), and sends
       the result and the label. All clients receive the complete pool. Images are normalised as
       the network takes them; a removed pixel is 0 on that scale.
    3. FedAvg from new initial weights. A step's loss is CE(local batch) + CE(batch of the pool),
       in two forward passes; each client cycles through the pool in its own order.

    The noise gives f, for a fixed mask m, (ε, δ)-metric privacy: ε per unit of L2 distance of two
    images (`fedsim.conditions.gaussian.guarantee`). However, the mask depends on the image, and
    nothing is guaranteed for images with different masks: x ↦ x ⊙ m(x) can jump. Labels are shared
    unchanged, and the models of all phases are sent without noise.

    In the round of sharing, `negative_logits` in clients.parquet is the number of shared images
    for whose class the attributing model has a logit below 0.

    With a `fraction` of 0, nothing is shared and the method is FedAvg. The released code differs
    from this in its warm-up (`warmup_clients` all, `warmup_epochs` 10), the model that attributes
    (`attribute_with` local), what is attributed (`attribution.target`), `mask` (soft), `noise_on`
    (all), `augment` (strong), and in weighting clients by their number of batches instead of n_k.

    Args:
        warmup_rounds: number of rounds of phase 1.
        warmup_clients: clients in a round of phase 1: the round's `cohort`, or `all`, as in the
            released code.
        warmup_epochs: local epochs of phase 1; by default those of `train`; 10 in the released
            code.
        attribution: the attribution that computes relevances; see
            `fedsim.explain.explainers.attribution`. The paper's integrated gradients are
            `{name: integrated_gradients, rule: right, steps: 20}`.
        attribute_with: the `global` warm-up model, or a `local` model that each client trains
            further from it, as in the released code.
        removed: s, percentage of each image's pixels that is removed.
        mask: `binary`, which the guarantee requires, or `soft`: retained pixels are multiplied
            with their relevance, scaled from the image's least (0) to its greatest (1), as in the
            released code.
        fraction: share of each client's images that it sends.
        clip: largest L2 norm of an image before noise; null for no clipping.
        sigma: σ; if not given, it is computed from epsilon and delta, for images at unit distance,
            by the analytic Gaussian mechanism.
        epsilon, delta: the guarantee, given instead of σ.
        noise_on: add noise to `retained` pixels, as in the paper, or to `all`, as in the released
            code.
        encoding: encoding of the images sent: `float32`, or `uint8` with 256 levels from the least
            normalised pixel - 3σ to the greatest + 3σ, one of which is 0.
        start: start of phase 3: from `fresh` weights, or `continue` with the warm-up model.
        augment: augmentation of local images in phase 3, not of the pool: `none`, `weak` (shifts,
            and mirroring of colour images), or `strong` (then RandAugment), as in the released
            code; see `fedsim.data.augment`.
    """

    name: str = "fedxds"
    pooled: ClassVar[tuple[str, ...]] = ("shared", "labels")
    private_by_example: ClassVar[bool] = False
    learns: ClassVar[Learns] = Learns(
        objectives=(Classification,), task_sequences="no", asks=("messages",)
    )
    warmup_rounds: int = Field(10, ge=0)
    warmup_clients: Literal["cohort", "all"] = "cohort"
    warmup_epochs: int | None = Field(None, ge=1)
    attribution: Annotated[SerializeAsAny[Attribution], BeforeValidator(attributions.parse)] = (
        Lrp()
    )
    attribute_with: Literal["global", "local"] = "global"
    removed: float = Field(80.0, ge=0, lt=100)
    mask: Literal["binary", "soft"] = "binary"
    fraction: float = Field(1.0, ge=0, le=1)
    clip: float | None = Field(10.0, gt=0)
    sigma: float | None = Field(None, ge=0)
    epsilon: float | None = Field(None, gt=0)
    delta: float | None = Field(None, gt=0, lt=1)
    noise_on: Literal["retained", "all"] = "retained"
    encoding: Literal["float32", "uint8"] = "float32"
    start: Literal["fresh", "continue"] = "fresh"
    augment: Literal["none", "weak", "strong"] = "none"

    @model_validator(mode="after")
    def _one_noise(self) -> FedXDS:
        guarantee = (self.epsilon is not None, self.delta is not None)
        if self.sigma is not None and any(guarantee):
            problem = "give sigma, or epsilon and delta, not both"
            raise PydanticCustomError("noise", problem)
        if guarantee in ((True, False), (False, True)):
            raise PydanticCustomError("noise", "epsilon and delta must be given together")
        return self

    def explainer(self) -> Explainer | None:
        return self.attribution

    def overview(self) -> Explainer | None:
        return SharedImagesExplainer()

    @property
    def noise(self) -> float:
        """σ: as given, or for (ε, δ); 0.15, the released code's, if neither is."""
        if self.sigma is not None:
            return self.sigma
        if self.epsilon is not None and self.delta is not None:
            return analytic_sigma(self.epsilon, self.delta)
        return 0.15

    def check(self, train: Train) -> None:
        if self.fraction:
            check_rounds_left("warmup_rounds", self.warmup_rounds, train)

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        check_images(self.name, "takes", dataset)
        if getattr(self.attribution, "baseline", "zero") != "zero":
            raise ExperimentError(
                "method.attribution.baseline: images are attributed from zero; leave it out"
            )
        try:
            self._check_attribution(dataset, network)
        except ExperimentError as error:
            why = str(error).removeprefix("explainer ")
            raise ExperimentError(f"method.attribution: {why}") from error
        images = int(np.round(self.fraction * splits.train.lengths).sum())
        pool = images * int(np.prod(dataset.shape)) * (1 if self.encoding == "uint8" else 4)
        free = psutil.virtual_memory().available
        if 2 * pool > free:  # one on the server and one on a client
            raise ExperimentError(
                f"method.name={self.name} shares a pool of {images:,} images, {pool / 1e9:.1f} "
                f"GB; two copies must fit into {free / 1e9:.1f} GB of free memory; lower "
                "method.fraction, or set method.encoding=uint8"
            )

    def _check_attribution(self, dataset: Dataset, network: nn.Module) -> None:
        self.attribution.check_network(network)
        self.attribution.check_shape(dataset.shape)
        if self.attribution.differentiates:  # some problems show only in a call
            draws = np.random.default_rng(0)
            x = torch.from_numpy(draws.random((1, *dataset.shape), dtype=np.float32))
            self.attribution.relevance(network, x, torch.zeros(1, dtype=torch.int64), draws)

    # -- the server ----------------------------------------------------------------------------

    def init(self, fed: Federation) -> FedXDSState:
        encoding = np.uint8 if self.encoding == "uint8" else np.float32
        return FedXDSState(
            weights=fed.initial_weights(),
            phase=("warm up" if self.warmup_rounds else "share") if self.fraction else "train",
            shared=np.empty((0, *fed.server.shape), dtype=encoding),
            labels=np.empty(0, dtype=label_type(fed.server.num_classes)),
            attributor=np.empty(0, dtype=np.float32),
        )

    def round(self, fed: Federation, state: FedXDSState, t: int) -> FedXDSState:
        fed.log(phase=state.phase)
        if state.phase == "share":
            return self.sharing_round(fed, state)
        if state.phase == "warm up":
            everyone = np.arange(fed.num_clients)
            cohort = everyone if self.warmup_clients == "all" else fed.sample(t)
            mean = fed.mean(self.warm_up, cohort, weights=state.weights)
            phase = "share" if t == self.warmup_rounds else "warm up"
            return replace(state, weights=mean.weights, phase=phase)
        mean = fed.mean(
            self.local_update,
            fed.sample(t),
            weights=state.weights,
            shared=NotCounted(state.shared),  # clients have the pool since the round of sharing
            labels=NotCounted(state.labels),
            levels=NotCounted(self.levels(fed)),
        )
        return replace(state, weights=mean.weights)

    def sharing_round(self, fed: Federation, state: FedXDSState) -> FedXDSState:
        """Phase 2: every client's masked images, pooled and sent to every client."""
        pool, sent = self.share_all(
            fed, state, weights=state.weights, levels=NotCounted(self.levels(fed))
        )
        fed.log(pool=len(pool["labels"]))
        fed.explain(self.attribution.name, label_table(sent))
        return FedXDSState(
            weights=fed.initial_weights() if self.start == "fresh" else state.weights,
            phase="train",
            shared=pool["shared"],
            labels=pool["labels"],
            attributor=state.weights,
        )

    def levels(self, fed: Federation) -> NDArray[np.float32]:
        """(2,) the width of a uint8 level, and the index of the level 0."""
        x = pixel_range(fed)
        beyond = 3 * self.noise
        low, high = min(float(x.min()), 0.0) - beyond, float(x.max()) + beyond
        width = (high - low) / 255
        return np.array([width, round(-low / width)], dtype=np.float32)

    # -- the clients ---------------------------------------------------------------------------

    @client_function("share")
    def share(  # type: ignore[override]
        self, client: Client, weights: Tensor, levels: Tensor, explained: bool = False
    ) -> Mapping[str, Any]:
        """(client) Its masked images with noise, and their labels.

        If `explained`, also how they were made, which a real client keeps private.
        """
        if self.attribute_with == "local":
            weights = client.train(weights, epochs=self.warmup_epochs)
        client.model.load(weights)
        y = client.data.y.cpu().numpy()
        rows, _ = take_stratified(np.arange(len(y)), y, self.fraction, client.rng("share"))
        x, labels = client.data.x[rows], client.data.y[rows]
        relevance, noise = client.rng("attribution"), client.rng("noise")
        heatmaps, m, f = self.f(client.model.module, x, labels, relevance, noise)
        own = torch.from_numpy(logits(client.model.module, x))
        own = own.gather(1, labels.cpu().long()[:, None])
        client.report(shared=len(rows), negative_logits=int((own < 0).sum()))
        message = {
            "shared": encode(f, levels) if self.encoding == "uint8" else f,
            "labels": y[rows].astype(label_type(client.num_classes)),
        }
        return message | ({"x": x, "heatmaps": heatmaps, "masks": m} if explained else {})

    @client_function("local_update")  # the same draws
    def warm_up(self, client: Client, weights: Tensor) -> Update:
        """(client) As in FedAvg, for `warmup_epochs`."""
        trained = client.train(weights, epochs=self.warmup_epochs)
        return Update(weights=trained, weight=client.num_samples)

    @client_function("local_update")
    def local_update(
        self, client: Client, weights: Tensor, shared: Tensor, labels: Tensor, levels: Tensor
    ) -> Update:
        """(client) As in FedAvg, on local data and the pool."""
        loss, draw = None, None  # the objective's
        if len(labels):
            loss, draw = local_and_pool, self.both(client, shared, labels, levels)
        elif self.augment != "none":
            loss, draw = augmented_loss, self.local(client)
        trained = client.train(weights, loss=loss, draw=draw)
        return Update(weights=trained, weight=client.num_samples)

    # -- within --------------------------------------------------------------------------------

    def shared_items(
        self, fed: Federation, state: FedXDSState, clients: Sequence[int]
    ) -> SharedItems:
        """Recomputes what these clients shared; see `fedsim.explain.explainers.shared_images`."""
        if not len(state.labels):
            raise ExperimentError("nothing was shared (method.fraction=0)")
        images = {
            k: {"held": items["x"], **{n: items[n] for n in items if n != "x"}}
            for k, items in self.share_again(fed, state, clients).items()
        }
        promise = "there is no noise (σ = 0): nothing is guaranteed"
        if self.noise:
            promise = guarantee(self.noise, self.delta or DELTA, self.clip).in_words()
        words = (
            f"the least relevant {self.removed:g} % of each image's pixels (by "
            f"{self.attribution.name}) are removed\n\n{promise}"
        )
        return SharedItems(images, fed.num_clients, words)

    def shared_pairs(
        self, fed: Federation, state: FedXDSState, client: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `fedsim.methods.shared.pool`."""
        sent = self.share_again(fed, state, [client])[client]
        held, shared, labels = (fed.server.tensor(sent[n]) for n in ("x", "shared", "labels"))
        return held, shared, labels.long()

    def share_again(
        self, fed: Federation, state: FedXDSState, clients: Sequence[int]
    ) -> dict[int, dict[str, Any]]:
        """Clients' images and what they shared of them, recomputed after the run, in pixels."""
        fed.server.replay(self.warmup_rounds + 1)
        levels = self.levels(fed)
        sent = fed.gather(
            self.share,
            clients,
            weights=state.attributor,
            levels=NotCounted(levels),
            explained=True,
        )
        pixels = torch.tensor(pixel_range(fed))
        for items in sent.values():
            f = decode(torch.tensor(items["shared"]), torch.tensor(levels))
            for name, images in (("x", torch.tensor(items["x"])), ("shared", f)):
                items[name] = to_pixels(images, pixels).numpy()
        return sent

    def obscured(
        self, fed: Federation, state: FedXDSState, x: Tensor, y: Tensor, rng: np.random.Generator
    ) -> Tensor:
        """(n, C, H, W) f of any images, in pixels, as an attacker of the pool can compute it."""
        fed.server.model.load(fed.server.tensor(state.attributor))
        _, _, f = self.f(fed.server.model.module, x, y, rng, rng)
        if self.encoding == "uint8":
            levels = fed.server.tensor(self.levels(fed))
            f = decode(encode(f, levels), levels)
        return to_pixels(f, fed.server.tensor(pixel_range(fed)))

    def f(
        self,
        network: nn.Module,
        x: Tensor,
        y: Tensor,
        relevance: np.random.Generator,
        noise: np.random.Generator,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Heatmaps h, masks m, and f(x) = clip(x ⊙ m) + N(0, σ²) of images (B, C, H, W)."""
        h = heatmap(self.attribution.relevance(network, x, y, relevance))
        m = self.masks(h)
        f = x * m[:, None]
        if self.clip is not None:
            f = clip(f, self.clip)
        n = self.noise * noise_like(f, noise)
        return h, m, f + (n * (m > 0)[:, None] if self.noise_on == "retained" else n)

    def masks(self, heatmaps: Tensor) -> Tensor:
        """(B, H, W) factors of the pixels: 0 and 1, or relevances between them."""
        kept = keep_relevant(heatmaps, self.removed)
        return kept * scaled(heatmaps) if self.mask == "soft" else kept.to(heatmaps.dtype)

    def both(self, client: Client, shared: Tensor, labels: Tensor, levels: Tensor) -> Draw:
        """A batch of the pool beside each local one; each client has its own order of the pool."""
        rows = cycle(len(labels), client.rng("pool"))
        size = min(client.settings.batch_size, len(labels))
        local = self.local(client)

        def draw(x: Tensor, y: Tensor) -> tuple[Context, Context]:
            drawn = torch.tensor(list(islice(rows, size)), device=x.device)
            pool = {"pool": decode(shared[drawn], levels), "labels": labels[drawn].long()}
            return local(x, y)[0], pool

        return draw

    def local(self, client: Client) -> Draw:
        """Local images, augmented anew in each batch."""
        augmented, rng = AUGMENTATIONS[self.augment], client.rng("augment")
        return lambda x, y: ({"x": augmented(x, rng)}, {})


def augmented_loss(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
    """(B,) cross-entropy of augmented images."""
    return cross_entropy(network(context["x"]), y, reduction="none")


def local_and_pool(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
    """(B,) cross-entropy of each local example, plus the mean of a batch of the pool."""
    of_pool = cross_entropy(network(context["pool"]), context["labels"])
    return augmented_loss(network, x, y, context) + of_pool


def label_table(sent: Mapping[int, Mapping[str, Any]]) -> list[dict[str, int]]:
    """Number of images of each class that each client shared, without zeros."""
    return [
        {"client": k, "class": int(c), "images": int(images)}
        for k, items in sent.items()
        for c, images in zip(*np.unique(items["labels"], return_counts=True), strict=True)
    ]


def cycle(count: int, rng: np.random.Generator) -> Iterator[int]:
    """Rows 0 to count - 1 in one random order, repeated endlessly."""
    order = rng.permutation(count).tolist()
    while True:
        yield from order


def encode(x: Tensor, levels: Tensor) -> Tensor:
    """Images as the nearest of 256 levels, one of which is 0."""
    return torch.clamp(torch.round(x / levels[0]) + levels[1], 0, 255).to(torch.uint8)


def decode(x: Tensor, levels: Tensor) -> Tensor:
    """Images of the pool as network inputs."""
    return (x.float() - levels[1]) * levels[0] if x.dtype == torch.uint8 else x
