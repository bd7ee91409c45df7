"""FedFTG: the averaged model is fine-tuned on generated hard samples.

Zhang, Shen, Ding, Tao and Duan, Fine-tuning Global Model via Data-Free Knowledge Distillation for
Non-IID Federated Learning, CVPR 2022, Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, one_hot

from fedsim.data import ClientSplits, Dataset
from fedsim.federation import Client, Federation, Vector, client_function
from fedsim.methods.fedgen import Counts, diversity, label_counts, label_shares
from fedsim.methods.learns import Learns
from fedsim.methods.method import Method, State, methods
from fedsim.methods.shared.images import check_images
from fedsim.objectives import Classification, Concepts
from fedsim.training import FlatModel

Pixels = Literal["standardised", "unit"]


@dataclass(frozen=True)
class FedFTGState(State):
    """(size of G,) the generator's weights and batch norm statistics, besides the model's."""

    generator: Vector


class ImageGenerator(nn.Module):
    """G(z, y): noise (B, noise) and labels (B,) to images (B, channels, height, width).

    After two upsamplings by 2, sides are multiples of 4; they are cropped to the image's size.
    """

    def __init__(
        self, noise: int, classes: int, width: int, shape: tuple[int, int, int], pixels: Pixels
    ) -> None:
        super().__init__()
        channels, *self.sides = shape
        self.classes = classes
        self.form = (2 * width, *(math.ceil(side / 4) for side in self.sides))
        half = math.prod(self.form) // 2
        self.of_noise, self.of_label = nn.Linear(noise, half), nn.Linear(classes, half)
        self.layers = nn.Sequential(
            nn.BatchNorm2d(2 * width),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, channels, 3, padding=1),
        )
        standardise = nn.Sequential(nn.Tanh(), nn.BatchNorm2d(channels, affine=False))
        self.scale = standardise if pixels == "standardised" else nn.Sigmoid()

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        label = one_hot(y, self.classes).float()
        start = torch.cat([self.of_noise(z), self.of_label(label)], dim=1).view(-1, *self.form)
        height, width = self.sides
        images: Tensor = self.scale(self.layers(start)[..., :height, :width])
        return images


@methods.register
class FedFTG(Method[FedFTGState]):
    """FedAvg followed by data-free distillation from the clients' models (Zhang et al. 2022).

    With w_{y,k} = n_{k,y}/Σ_j n_{j,y} from the label counts that clients send every round, each of
    the `iterations` draws z ~ N(0, 1), and y from the cohort's label distribution. Then, for each
    client k of the cohort S in turn, G takes a step to minimise

        −mean(w_{y,k}·mean_c|s − t_k|) + λ_cls·mean(w_{y,k})·CE(t_k, y) + λ_dis/|S|·diversity

    with s and t_k the logits of the student (initially the average) and of the client's model at x
    = G(z, y): the client should recognise x as class y, and the student should not. Then the
    student takes steps at the same z and y to minimise

        −mean_{b,c}(log softmax(s)·Σ_k w_{y,k}·softmax(t_k)).

    Student and teachers are in evaluation mode while G trains, and G and teachers while the
    student trains. The losses are those of the released code, in which t_k is held fixed in the
    first term. Learning rates decay by `train.lr_decay`. The paper's clients clip gradients:
    `train.clip_norm: 10`.

    Args:
        iterations: server iterations per round; with 0 this is FedAvg.
        student_steps: steps of the student per iteration.
        batch_size: images generated at a time.
        noise_size: length of z; the paper uses 256 for 100 classes.
        width: channels of the generator's last hidden layer; the layers before have twice as many.
        pixels: scale of the images, which should match the data as the model takes them:
            `standardised` is a final batch norm to mean 0 and variance 1 in each channel, as in
            the released code, whose data are normalised in this way; `unit` is 0 to 1.
        generator_lr: learning rate of G's Adam optimiser, newly created each round.
        student_lr: learning rate of the student's SGD.
        student_weight_decay: L2 penalty of the student's SGD.
        cls: λ_cls, weight of the cross-entropy.
        dis: λ_dis, weight of the diversity term.
    """

    name: str = "fedftg"
    learns: ClassVar[Learns] = Learns(
        objectives=(Classification, Concepts), asks=("messages", "sizes"), averages=False
    )
    iterations: int = Field(10, ge=0)
    student_steps: int = Field(5, ge=1)
    batch_size: int = Field(50, ge=2)
    noise_size: int = Field(100, ge=1)
    width: int = Field(64, ge=1)
    pixels: Pixels = "standardised"
    generator_lr: float = Field(0.01, gt=0)
    student_lr: float = Field(0.1, gt=0)
    student_weight_decay: float = Field(1e-3, ge=0)
    cls: float = Field(1.0, ge=0)
    dis: float = Field(1.0, ge=0)

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        check_images(self.name, "generates", dataset)

    def init(self, fed: Federation) -> FedFTGState:
        return FedFTGState(weights=fed.initial_weights(), generator=self.generator(fed).weights())

    def round(self, fed: Federation, state: FedFTGState, t: int) -> FedFTGState:
        sent = fed.gather(self.local_update, fed.sample(t), weights=state.weights)
        models = {k: message["weights"] for k, message in sent.items()}
        averaged = replace(state, weights=fed.server.average(models))
        counts = np.stack([message["counts"] for message in sent.values()])
        return self.fine_tune(fed, averaged, list(models.values()), counts)

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor) -> dict[str, Tensor]:
        """(client) w_k as in FedAvg, and n_{k,y}."""
        return {"weights": client.train(weights), "counts": label_counts(client)}

    def fine_tune(
        self, fed: Federation, state: FedFTGState, models: Sequence[Vector], counts: Counts
    ) -> FedFTGState:
        """The student, starting from the average, and G."""
        student, G = fed.server.model, self.generator(fed)
        student.load(fed.server.tensor(state.weights))
        G.load(fed.server.tensor(state.generator))
        w, v = (nn.Parameter(m.vector[: m.num_parameters]) for m in (student, G))
        decay = fed.settings.lr_factor(fed.round)
        sgd = torch.optim.SGD(
            [w], lr=self.student_lr * decay, weight_decay=self.student_weight_decay
        )
        adam = torch.optim.Adam([v], lr=self.generator_lr * decay)
        teachers = [
            partial(functional_call, student.module, student.named(fed.server.tensor(model)))
            for model in models
        ]
        shares = fed.server.tensor(label_shares(counts))
        of_label = counts.sum(axis=0) / counts.sum()
        rng = fed.rng("generator")
        for _ in range(self.iterations):
            y = fed.server.tensor(rng.choice(len(of_label), self.batch_size, p=of_label))
            z = fed.server.tensor(
                rng.standard_normal((self.batch_size, self.noise_size), dtype=np.float32)
            )
            share = shares[:, y]
            student.module.eval()
            G.module.train()
            for k, teacher in enumerate(teachers):
                x = G.module(z, y)
                loss = self.generator_loss(student.module(x), teacher((x,)), y, share[k])
                v.grad = G.gradient(loss + self.dis / len(teachers) * diversity(z, x))
                adam.step()
            G.module.eval()
            with torch.no_grad():
                x = G.module(z, y)
                opinions = torch.stack([teacher((x,)).softmax(dim=1) for teacher in teachers])
                target = (share[..., None] * opinions).sum(dim=0)
            student.module.train()
            for _ in range(self.student_steps):
                w.grad = student.gradient(-(student.module(x).log_softmax(dim=1) * target).mean())
                sgd.step()
        return FedFTGState(weights=student.weights(), generator=G.weights())

    def generator_loss(self, s: Tensor, t: Tensor, y: Tensor, share: Tensor) -> Tensor:
        """G's loss for one client, without diversity: logits s and t (B, C), w_{y,k} (B,)."""
        discrepancy = ((s - t.detach()).abs().mean(dim=1) * share).mean()
        return self.cls * share.mean() * cross_entropy(t, y) - discrepancy

    def generator(self, fed: Federation) -> FlatModel:
        """The network of G on the server."""
        channels, height, width = fed.server.shape
        shape = (channels, height, width)
        return fed.server.network(
            "generator",
            partial(
                ImageGenerator,
                self.noise_size,
                fed.server.num_classes,
                self.width,
                shape,
                self.pixels,
            ),
        )
