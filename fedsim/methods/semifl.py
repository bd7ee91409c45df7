"""SemiFL: semi-supervised learning with labels on the server and unlabelled images on clients.

Diao, Ding and Tarokh, SemiFL: Semi-Supervised Federated Learning for Unlabeled Clients with
Alternate Training, NeurIPS 2022; the order of a round is that of the authors' code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import update_bn

from fedsim.config.registry import Config
from fedsim.data import ClientSplits, Dataset
from fedsim.data.augment import strong, weak
from fedsim.errors import ExperimentError
from fedsim.federation import Client, Examples, Federation, Update, Vector, client_function
from fedsim.methods.learns import Learns
from fedsim.methods.method import Method, State, methods
from fedsim.methods.shared.images import check_images
from fedsim.objectives import Classification
from fedsim.training import Context, Draw, Hooks, Optimizer, TrainingJob, has_batch_norm, train

BATCH = 250  # images at once in inference


class ServerTraining(Config):
    """The server's training on its labelled examples.

    Its learning rate decays and its gradients are clipped in the same way as the clients'.

    Args:
        epochs: passes over the examples.
        batch_size: examples per step; `auto` is 250 for more than 1,000 examples, and 10
            otherwise.
        optimizer: newly created each round. If given, it replaces all of the paper's settings.
    """

    epochs: int = Field(5, ge=1)
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    optimizer: Optimizer = Optimizer(lr=0.03, momentum=0.9, nesterov=True, weight_decay=5e-4)


@dataclass(frozen=True)
class SemiFLState(State):
    """The server's momentum v, (P,), besides the weights."""

    velocity: Vector


@methods.register
class SemiFL(Method[SemiFLState]):
    """Alternate training on pseudo-labels (clients) and labels (server) (Diao et al. 2022).

    A client labels its images once per round with the model f that it received, ŷ = argmax
    f(α(x)), and keeps those with a probability of τ or more (fix). It pairs each batch of these
    with the same number of images drawn from all of its images with replacement (mix), and
    minimises

        CE(f(A(x_fix)), ŷ_fix) + λ·CE(f(x̄), ŷ_fix) + (1 − λ)·CE(f(x̄), ŷ_mix),
        x̄ = λ·α(x_fix) + (1 − λ)·α(x_mix),  λ ~ Beta(a, a) for each batch,

    with α weak and A strong augmentation, drawn anew each time. The server averages, with equal
    weights, the clients that kept an image (two, with batch norm); v ← β_g·v + (w − mean), w ← w −
    v; and it trains w on its labelled examples, weakly augmented. As long as no client keeps an
    image, because the model is not confident yet, the server only trains.

    The server's labelled examples are its share of the data (`partition.server_fraction`), or
    without one the union of the clients' labelled examples (`partition.labelled_fraction`), which
    is not counted as traffic. A client's images are those whose label it does not know; if there
    are none and the server has a share, all of its training images. No client uses labels.

    Batch norm is static: clients and server train with the statistics of each batch, and the model
    is sent and evaluated with the statistics of the server's labelled examples, from one pass over
    them (the authors' code offers this, or including the images of all clients).

    The paper's local training is configured in `train`: SGD with lr 0.03, Nesterov momentum 0.9
    and weight decay 5e-4, gradients clipped to norm 1, 5 epochs, batches of 10; `lr_decay` takes
    the place of its cosine schedule. The authors' code keeps the clients' momentum from round to
    round; here the local optimiser is newly created.

    Args:
        threshold: τ, least probability of a pseudo-label.
        alpha: a, parameter of the Beta distribution.
        momentum: β_g, server momentum.
        server: the server's training.
    """

    name: str = "semifl"
    learns: ClassVar[Learns] = Learns(
        objectives=(Classification,), task_sequences="no", asks=("weights",)
    )
    needs_labels: ClassVar[bool] = False
    private_by_example: ClassVar[bool] = False  # mix examples are of two
    threshold: float = Field(0.95, ge=0, le=1)
    alpha: float = Field(0.75, gt=0)
    momentum: float = Field(0.5, ge=0, lt=1)
    server: ServerTraining = ServerTraining()

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        check_images(self.name, "augments", dataset)
        labelled = len(splits.server) or len(splits.train.values)
        if labelled < 2 and has_batch_norm(network):
            raise ExperimentError(
                "method.name=semifl: the server holds a single labelled example, and batch norm's "
                "statistics need two; raise partition.server_fraction"
            )
        if len(splits.server) == 0 and len(splits.unlabelled.values) == 0:
            raise ExperimentError(
                "method.name=semifl needs labelled examples for the server and others for the "
                "clients: partition.server_fraction above 0, or partition.labelled_fraction "
                "below 1"
            )

    def init(self, fed: Federation) -> SemiFLState:
        velocity = np.zeros(fed.server.model.num_parameters, dtype=np.float32)
        fed.server.model.load(fed.server.tensor(fed.initial_weights()))
        self.collect_statistics(fed, self.labelled(fed))
        return SemiFLState(weights=fed.server.model.weights(), velocity=velocity)

    def round(self, fed: Federation, state: SemiFLState, t: int) -> SemiFLState:
        P = fed.server.model.num_parameters
        share = len(fed.server.own_data) > 0
        mean = fed.mean(self.local_update, fed.sample(t), weights=state.weights, share=share)
        weights, velocity = state.weights.copy(), state.velocity
        if mean.count:
            velocity = self.momentum * velocity - mean.delta
            weights[:P] -= velocity
        labelled = self.labelled(fed)
        self.train_server(fed, weights, labelled)
        self.collect_statistics(fed, labelled)
        return SemiFLState(weights=fed.server.model.weights(), velocity=velocity)

    def labelled(self, fed: Federation) -> Examples:
        """The server's labelled examples."""
        share = fed.server.own_data
        return share if len(share) else fed.server.labelled_data

    def train_server(self, fed: Federation, weights: Vector, labelled: Examples) -> None:
        """Supervised epochs from `weights`; the result stays in `fed.server.model`."""
        size = self.server.batch_size
        if size == "auto":
            size = 250 if len(labelled) > 1000 else 10
        settings = fed.settings.model_copy(
            update={"batch_size": size, "optimizer": self.server.optimizer}
        )
        rng = fed.rng("augment")

        def draw(x: Tensor, y: Tensor) -> tuple[Context, Context]:
            return {"weak": weak(x, rng)}, {}

        def loss(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
            return cross_entropy(network(context["weak"]), y, reduction="none")

        job = TrainingJob(
            weights=fed.server.tensor(weights),
            x=labelled.x,
            y=labelled.y,
            lr=settings.lr(fed.round),
            epochs=self.server.epochs,
            rng=fed.rng("batches"),
            hooks=Hooks(loss, draw=draw),
        )
        trained = train(fed.server.model, job, settings)
        fed.log(server_loss=trained.loss)

    def collect_statistics(self, fed: Federation, labelled: Examples) -> None:
        """Set batch norm's statistics of `fed.server.model` from the labelled examples."""
        update_bn(_batches(labelled.x), fed.server.model.module)

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor, share: bool) -> Update:
        """(client) w_k − w, trained on its own pseudo-labels."""
        x = client.unlabelled
        if len(x) == 0 and share:
            x = client.data.x
        y, sure = self.pseudo_label(client, weights, x)
        kept = int(sure.sum())
        client.report(pseudo_labels=kept)
        if kept == 0 or (kept == 1 and client.model.has_batch_norm):
            return Update()  # excluded from the mean
        draw = self.draw(x, y, client.rng("augment"))
        data = Examples(x[sure], y[sure])
        trained = client.train(weights, loss=fix_and_mix, draw=draw, data=data)
        return Update(delta=client.parameters(trained - weights))

    @torch.no_grad()
    def pseudo_label(self, client: Client, weights: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """(client) (n,) each: ŷ of n images, and whether the model is confident."""
        client.model.load(weights)
        network = client.model.module.eval()
        batches = _batches(weak(x, client.rng("pseudo-labels")))
        probability, y = torch.cat([network(batch).softmax(dim=1) for batch in batches]).max(dim=1)
        return y, probability >= self.threshold

    def draw(self, images: Tensor, labels: Tensor, rng: np.random.Generator) -> Draw:
        """Augmented `fix` examples, and `mix` examples from the same client's images."""

        def draw(x: Tensor, y: Tensor) -> tuple[Context, Context]:
            drawn: NDArray[np.int64] = rng.integers(len(images), size=len(x))
            others = torch.from_numpy(drawn).to(x.device)
            lam = rng.beta(self.alpha, self.alpha)
            mixed = lam * weak(x, rng) + (1 - lam) * weak(images[others], rng)
            rows = {"mixed": mixed, "strong": strong(x, rng), "others": labels[others]}
            return rows, {"lam": torch.tensor(lam, dtype=torch.float64)}

        return draw


def fix_and_mix(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
    """(B,) CE of `fix` examples, and λ·CE(y) + (1 − λ)·CE(y') of `mix` examples."""
    lam, logits = context["lam"], network(context["mixed"])
    return (
        cross_entropy(network(context["strong"]), y, reduction="none")
        + lam * cross_entropy(logits, y, reduction="none")
        + (1 - lam) * cross_entropy(logits, context["others"], reduction="none")
    )


def _batches(x: Tensor) -> tuple[Tensor, ...]:
    """Batches of about the same size, so that none has a single image if there are two or more."""
    return x.tensor_split(max(1, math.ceil(len(x) / BATCH)))
