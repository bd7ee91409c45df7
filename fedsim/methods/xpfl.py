"""XPFL: personalised models distilled from a generative teacher on unlabelled data.

Source: arXiv 2410.08634 (GFed). Where the text and the released code (qiyuqianxai/XPFL on GitHub,
commit ea546a6) differ, the text is followed as far as possible; what the code does instead is an
option for the weighing of the distillation and the fusion.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div, log_softmax

from fedsim.config.registry import Config
from fedsim.data import ClientSplits, Dataset
from fedsim.errors import ExperimentError
from fedsim.explain import Explainer
from fedsim.explain.explainers.mimic import Mimic, TreeExplainer, embedded
from fedsim.federation import Client, Examples, Federation, NotCounted, Update, client_function
from fedsim.methods.learns import Learns
from fedsim.methods.method import State, methods
from fedsim.methods.shared.classifiers import needs_classifier
from fedsim.methods.shared.images import check_images
from fedsim.methods.shared.personal import PersonalModels
from fedsim.models.masked_autoencoder import MaskedAutoencoder
from fedsim.models.model import Classifier, representation_size
from fedsim.objectives import Classification
from fedsim.training import FlatModel, Hooks, Loss, Optimizer, TrainingJob, train

if TYPE_CHECKING:
    import pandas as pd

LEAST_LOSS = 0.05  # of a teacher; limits the weight of distillation to 1 / 0.05 = 20
TINY = 1e-6  # minimum loss of a teacher by which the temperature is divided
SHOWN_WHOLE = 1 / 4  # share of a teacher's batches
MOST_JUDGED = 1000  # random unlabelled images for a teacher's loss


class Teacher(Config):
    """The masked autoencoder that each client trains on its unlabelled images, and keeps.

    Args:
        patch: side of a patch, in pixels.
        width, depth, heads: width, depth and attention heads of the encoder.
        decoder_width, decoder_depth, decoder_heads: the same of the decoder.
        mask_ratio: share of the patches that are masked in training.
        epochs: passes over the unlabelled images per round.
        batch_size: images per step.
        optimizer: newly created each round.
    """

    patch: int = Field(4, ge=1)
    width: int = Field(192, ge=4)
    depth: int = Field(4, ge=1)
    heads: int = Field(3, ge=1)
    decoder_width: int = Field(96, ge=4)
    decoder_depth: int = Field(2, ge=1)
    decoder_heads: int = Field(3, ge=1)
    mask_ratio: float = Field(0.75, ge=0, lt=1)
    epochs: int = Field(1, ge=1)
    batch_size: int = Field(128, ge=1)
    optimizer: Optimizer = Optimizer(name="adamw", lr=1e-3)

    def loss(self, network: MaskedAutoencoder, x: Tensor) -> Tensor:
        """(B,) the training loss: of whole images for a quarter, otherwise of masked patches."""
        whole = math.ceil(SHOWN_WHOLE * len(x))
        return torch.cat([network.loss(x[:whole], 0), network.loss(x[whole:], self.mask_ratio)])

    def build(self, shape: tuple[int, ...]) -> MaskedAutoencoder:
        """Build it, with weights from torch's global generator."""
        sizes = {"patch", "width", "depth", "heads"}
        sizes |= {"decoder_width", "decoder_depth", "decoder_heads"}
        return MaskedAutoencoder(shape, **self.model_dump(include=sizes))


class Xfed(Config):
    """How and how often personal models are explained, which costs the clients time.

    Args:
        every: number of rounds between explanations; the first and the last round are explained as
            well.
        clients: number of clients of the cohort that are explained, starting with the first.
        images: largest number of a client's images for its tree, and of test images for t-SNE.
        held_out: share of a client's images that is not used to grow its tree.
        perplexity: perplexity of t-SNE.
        iterations: iterations of t-SNE.
        chi: χ, weight of the t-SNE term in QoX.
    """

    every: int = Field(10, ge=1)
    clients: int = Field(3, ge=1)
    images: int = Field(1000, ge=2)
    held_out: float = Field(0.2, gt=0, lt=1)
    perplexity: float = Field(30.0, gt=0)
    iterations: int = Field(1000, ge=300)
    chi: float = Field(1.0, ge=0)


class Student(nn.Module):
    """The classifier, and the layer P_k that projects its features to the teacher's size."""

    def __init__(self, classifier: Classifier, projection: nn.Linear) -> None:
        super().__init__()
        self.classifier, self.projection = classifier, projection

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C), and projected features (B, D)."""
        z = self.classifier.features(x)
        return self.classifier.head(z), self.projection(z)


@methods.register
class XPFL(PersonalModels[State]):
    """Students distilled from teachers on unlabelled data, averaged, and personalised.

    A client k in the cohort holds w_k, labelled examples D^L and unlabelled examples D^U, whose
    labels it never uses. In a round

    1. its teacher, a masked autoencoder, is trained on D^U; L^U is its mean squared error per
       (normalised) pixel after training, without a mask, on up to 1,000 images of D^U. A quarter
       of each batch is shown to it unmasked: trained on masked patches alone, it would not learn
       to reproduce visible patches, and L^U would be meaningless;
    2. its student is trained on D^L, starting from w_k: CE + λ·c·τ²·KL(softmax(F^t/τ) ‖
       softmax(P_k·F^s/τ)), with F^t the mean of the teacher's patch tokens, F^s the student's
       features, and the teacher's weight c = 1 / max(L^U, 0.05);
    3. the server averages the students that arrive, w_g, with weights ρ_k·D_k, where ρ_k =
       |D^L|/|D^U| and D_k is all that k holds (ρ_k = |D^L|/D_k for all, if some client has no
       D^U: FedAvg's weights);
    4. and sends each client its own w_k ← ψ_k·w_k + (1 − ψ_k)·w_g, ψ_k = (1 + cos(w_k, w_g))/2.
       (Here clients fuse what they are sent, so that it is the w_k that they have even where the
       upload was lost.)

    Teachers and P_k are kept by their clients and never sent. A client starts with the global
    model of the round in which it first takes part (which is not counted as traffic). Without
    distillation (λ = 0), without unlabelled data, and with ψ = 0 for everyone it is FedAvg, except
    that models are sent down at the end of a round.

    Eq. 14 divides by L^U, so the weight grows without bound as the teacher improves; hence the
    0.05. It has no τ²: the λ of Eq. 14 is λ·τ² here.

    The released code differs. `weigh` and `psi_on` follow it, and `experiments/xpfl` has a class
    with its fault that labels leak. Its teacher is not offered: a convolutional autoencoder (see
    `fedsim.models.masked_autoencoder`), whose L^U is the mean absolute error of its last batch in
    training. After a lost upload it mistakes one client for another, which is not offered either.

    Args:
        lam: λ.
        tau: τ.
        weigh: the term of distillation. `loss`: λ·τ²/max(L^U, 0.05)·KL(softmax(F^t/τ) ‖
            softmax(P_k·F^s/τ)), Eq. 14 with τ² and a bound. `code`, as in the released code:
            λ·KL(softmax(L·F^t/τ) ‖ softmax(L·P_k·F^s/τ)), L = max(L^U, 1e-6): a better teacher
            counts less. Its λ is 1000/D for D features, 1.95 on MNIST.
        psi: ψ of all clients; by default computed from their models.
        psi_on: what ψ_k is computed from. `weights`: w_k and w_g, as above (Eq. 17). `tensors`, as
            in the released code: each parameter tensor, and each statistic of batch norm, is fused
            with its own ψ = cos, between -1 and 1; the column `psi` is the mean over all entries.
            `updates`, in neither paper nor code: ψ_k = (1 + cos(w_k − w, w_g − w))/2, w the global
            model before the round; 1/2 if w_g = w.
        personalise: which clients get a personal model in a round: its `cohort`, or `everyone`.
        teacher: the masked autoencoder.
        xfed: explain personal models by trees (as trained, before fusion) and t-SNE (before and
            after fusion); by default they are not explained. The results are in
            explanations.parquet, one row per client: `fidelity` and `held_out_fidelity`, the
            shares of images for which tree and model agree; `held_out_majority`, the share of the
            held-out ones for which a tree of one leaf would; `depth` and `leaves`;
            `divergence_before` and `divergence_after` fusion, in nats; and the two terms of QoX
            (Eq. 29), with |w| the number of parameters: `qox_tree` = fidelity·D_k/|w|, `qox_tsne`
            = χ·(before − after)·images/|w|.
    """

    name: str = "xpfl"
    # What a client receives depends on its own upload.
    learns: ClassVar[Learns] = Learns(objectives=(Classification,), asks=("messages", "sizes"))
    lam: float = Field(2.0, ge=0)
    tau: float = Field(3.0, gt=0)
    weigh: Literal["loss", "code"] = "loss"
    psi: float | None = Field(None, ge=0, le=1)
    psi_on: Literal["weights", "tensors", "updates"] = "weights"
    personalise: Literal["cohort", "everyone"] = "cohort"
    teacher: Teacher = Teacher()
    xfed: Xfed | None = None

    @model_validator(mode="after")
    def _one_psi(self) -> XPFL:
        if self.psi is not None and self.psi_on != "weights":
            problem = f"give psi, or psi_on={self.psi_on} to compute it, not both"
            raise PydanticCustomError("psi", problem)
        return self

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        if self.xfed is not None:
            needs_classifier(self.name, network)
            images = min(self.xfed.images, len(dataset.test_y))
            if self.xfed.perplexity >= images:
                raise ExperimentError(
                    f"method.xfed.perplexity={self.xfed.perplexity:g}: must be below the number "
                    f"of images that are embedded, {images}"
                )
        if self.lam == 0:
            return
        otherwise = "; set method.lam=0 to do without"
        check_images(self.name, "has teachers for", dataset, otherwise)
        if not len(splits.unlabelled.values):
            raise ExperimentError(
                "method.name=xpfl: no client has unlabelled data for a teacher; set "
                "partition.labelled_fraction below 1, or method.lam=0"
            )
        needs_classifier(self.name, network)
        try:
            self.teacher.build(dataset.shape).visible(self.teacher.mask_ratio)
        except ExperimentError as error:
            raise ExperimentError(f"method.teacher: {error}") from None

    # -- the server ----------------------------------------------------------------------------

    def init(self, fed: Federation) -> State:
        return State(weights=fed.initial_weights())

    def round(self, fed: Federation, state: State, t: int) -> State:
        cohort = fed.sample(t)
        mean = fed.mean(
            self.local_update,
            cohort,
            weights=NotCounted(state.weights),  # received in the last round
            fresh=NotCounted(self.fresh(fed, state)),
            all_unlabelled=bool(fed.server.num_unlabelled.all()),
        )
        weights = mean.weights if mean.count else state.weights
        # Not counted: a real server would fuse before it sends, and has this.
        previous = {"previous": NotCounted(state.weights)} if self.psi_on == "updates" else {}
        if self.xfed and (t in (1, fed.settings.rounds) or t % self.xfed.every == 0):
            found = fed.gather(
                self.explain, cohort[: self.xfed.clients], weights=NotCounted(weights), **previous
            )
            fed.explain("xfed", ({"client": k, **row} for k, row in found.items() if row))
        everyone = np.arange(fed.num_clients)
        receivers = cohort if self.personalise == "cohort" else everyone
        fed.each(self.fuse, receivers, weights=weights, **previous)
        return replace(state, weights=weights)

    def fresh(self, fed: Federation, state: State) -> dict[str, Any]:
        """A client's initial state: w_k, and a teacher and P_k if there is distillation."""
        start: dict[str, Any] = {"weights": state.weights}
        if self.lam:
            P = fed.server.model.num_parameters
            student = fed.server.network(
                "student", partial(self.student, fed.server.model.module, fed.server.shape)
            )
            start["teacher"] = fed.server.network(
                "teacher", partial(self.teacher.build, fed.server.shape)
            ).weights()
            start["projection"] = student.weights()[P : student.num_parameters]
        return start

    # -- the clients ---------------------------------------------------------------------------

    @client_function("local_update")
    def local_update(
        self,
        client: Client,
        fresh: Mapping[str, Tensor],
        all_unlabelled: bool,
        weights: Tensor | None = None,
    ) -> Update:
        """(client) w_k; keeps it, and its teacher and P_k. `uplink` encodes w_k − w_g."""
        for name, vector in fresh.items():
            client.state.setdefault(name, vector)
        data, x = self.examples(client)
        if self.lam and len(x):
            client.state["weights"] = self.distil(client, data, self.learn_images(client, x))
        else:
            client.state["weights"] = client.train(client.state["weights"], data=data)
        client.trained = client.state["weights"]
        labelled, held = client.num_samples, client.num_samples + len(x)
        # ρ_k·D_k, in this order to get exactly |D^L| where they are equal.
        weight = labelled * held / (len(x) if all_unlabelled else held)
        return Update(weights=client.state["weights"], weight=weight)

    def examples(self, client: Client) -> tuple[Examples, Tensor]:
        """(client) D^L and the inputs of D^U in this round."""
        return client.data, client.unlabelled

    def learn_images(self, client: Client, x: Tensor) -> float:
        """(client) Train the teacher on D^U and leave it in the client's network; returns L^U."""
        own = self.teacher
        teacher = self.teacher_of(client)
        settings = client.settings.model_copy(
            update={"optimizer": own.optimizer, "batch_size": own.batch_size, "clip_norm": None}
        )

        def loss(network: nn.Module, x: Tensor, *_: Any) -> Tensor:
            assert isinstance(network, MaskedAutoencoder)
            return own.loss(network, x)

        y = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        rng, start = client.rng("teacher"), client.state["teacher"]
        job = TrainingJob(start, x, y, own.optimizer.lr, own.epochs, rng, Hooks(loss))
        trained = train(teacher, job, settings)
        client.state["teacher"] = trained.weights
        client.visit(trained.visited)
        teacher.load(trained.weights)
        drawn = torch.from_numpy(client.rng("judged").permutation(len(x))[:MOST_JUDGED])
        judged = self.reconstruction_loss(teacher, x[drawn.to(x.device)])
        client.report(teacher_loss=judged)
        return judged

    @client_function("distil")
    def distil(self, client: Client, data: Examples, teacher_loss: float) -> Tensor:
        """(client) w_k and P_k, trained further on D^L with the teacher."""
        model = client.network(
            "student", partial(self.student, client.model.module, client.data.x.shape[1:])
        )
        w, P = client.state["weights"], client.model.num_parameters
        start = torch.cat([w[:P], client.state["projection"], w[P:]])
        rng = client.rng("batches")
        loss = self.loss(self.teacher_of(client).module, teacher_loss)
        settings = client.settings
        job = TrainingJob(
            start,
            data.x,
            data.y,
            client.lr,
            settings.most_epochs,
            rng,
            Hooks(loss),
            most_steps=settings.local_steps,
        )
        trained = train(model, job, settings)
        client.report(loss=trained.loss, steps=trained.steps)
        client.visit(trained.visited)
        client.state["projection"] = trained.weights[P : model.num_parameters]
        return torch.cat([trained.weights[:P], trained.weights[model.num_parameters :]])

    @client_function("fuse")
    def fuse(self, client: Client, weights: Tensor, previous: Tensor | None = None) -> None:
        """(client) w_k ← ψ_k·w_k + (1 − ψ_k)·w_g, from the received w_g."""
        fused, psi = self.fused(client, weights, previous)
        client.report(psi=psi)
        client.state["weights"] = fused

    def explainer(self) -> Explainer | None:
        if self.xfed is None:
            return TreeExplainer()
        return TreeExplainer(**self.xfed.model_dump(exclude={"every", "clients", "chi"}))

    def explained_clients(self, clients: pd.DataFrame) -> list[int]:
        """The first client with a personal model."""
        if "psi" not in clients:
            return []
        return [int(k) for k in sorted(clients.loc[clients["psi"].notna(), "client"])[:1]]

    @property
    def stackable(self) -> bool:  # type: ignore[override]
        return self.lam == 0

    @client_function("explain")
    def explain(
        self, client: Client, weights: Tensor, previous: Tensor | None = None
    ) -> dict[str, float]:
        """(client) A tree that mimics w_k, and t-SNE of its features before and after fusion."""
        assert self.xfed is not None
        own = client.state.get("weights")
        if own is None:  # its training failed
            return {}
        images = torch.cat([client.data.x, client.unlabelled])
        order = client.rng("xfed").permutation(len(images))[: self.xfed.images]
        x = images[torch.from_numpy(order).to(images.device)]
        client.model.load(own)
        tree = Mimic.of(client.model.module, x, client.num_classes, self.xfed.held_out)
        after, _ = self.fused(client, weights, previous)
        rng = client.rng("t-SNE")
        rows = rng.permutation(len(client.central_test))[: self.xfed.images]
        x = client.central_test.x[torch.from_numpy(rows).to(client.device)]
        seed = int(rng.integers(2**31))
        found = []
        for weights in (own, after):
            client.model.load(weights)
            network = needs_classifier(self.name, client.model.module)
            tsne = embedded(network, x, self.xfed.perplexity, self.xfed.iterations, seed)
            found.append(tsne.divergence)
        before, fused = found
        size = client.model.num_parameters
        held = client.num_samples + len(client.unlabelled)
        return {
            **tree.measures(),
            "divergence_before": before,
            "divergence_after": fused,
            "qox_tree": tree.fidelity * held / size,
            "qox_tsne": self.xfed.chi * (before - fused) * len(x) / size,
        }

    @client_function("local_test")
    def local_test(self, client: Client, weights: Tensor) -> None:
        """(client) The personal model on its own test; the global one as `global_accuracy`."""
        client.evaluate(weights)
        if "test_accuracy" in client.row:
            client.report(global_accuracy=client.row["test_accuracy"])
        client.evaluate(self.own_model(client, weights))

    # -- within --------------------------------------------------------------------------------

    def student(self, classifier: nn.Module, shape: tuple[int, ...]) -> Student:
        """A copy of the classifier with P_k."""
        assert isinstance(classifier, Classifier)
        copied = copy.deepcopy(classifier).cpu()
        size = representation_size(copied.features, shape)
        return Student(copied, nn.Linear(size, self.teacher.width))

    def teacher_of(self, client: Client) -> FlatModel:
        """The teacher's network in the client's process."""
        return client.network("teacher", partial(self.teacher.build, client.data.x.shape[1:]))

    @torch.no_grad()
    def reconstruction_loss(self, teacher: FlatModel, x: Tensor) -> float:
        """L^U: the mean squared error per pixel, without a mask."""
        network = teacher.module.eval()
        assert isinstance(network, MaskedAutoencoder)
        parts = [network.loss(part, 0.0) for part in torch.split(x, self.teacher.batch_size)]
        return float(torch.cat(parts).mean())

    def loss(self, teacher: nn.Module, teacher_loss: float) -> Loss:
        """CE + λ·c·τ²·KL(teacher ‖ student) of each example; differs between clients."""
        assert isinstance(teacher, MaskedAutoencoder)
        teacher.eval()
        if self.weigh == "loss":
            temperature = self.tau
            factor = self.lam * self.tau**2 / max(teacher_loss, LEAST_LOSS)
        else:
            temperature, factor = self.tau / max(teacher_loss, TINY), self.lam

        def loss(network: nn.Module, x: Tensor, y: Tensor, *_: Any) -> Tensor:
            logits, features = network(x)
            with torch.no_grad():
                target = log_softmax(teacher.features(x) / temperature, dim=1)
            found = log_softmax(features / temperature, dim=1)
            distance = kl_div(found, target, reduction="none", log_target=True).sum(dim=1)
            return cross_entropy(logits, y, reduction="none") + factor * distance

        return loss

    def fused(
        self, client: Client, weights: Tensor, previous: Tensor | None = None
    ) -> tuple[Tensor, float]:
        """ψ_k·w_k + (1 − ψ_k)·w_g, and ψ_k. A client without a model takes the global one, w_g.

        Updates (`psi_on`) are from `previous`, the global model before the round.
        """
        own = client.state.get("weights")
        if own is None:
            return weights, 0.0
        if self.psi is None and self.psi_on == "tensors":
            cosines = by_tensor(client.model.named(own), client.model.named(weights))
            return cosines * own + (1 - cosines) * weights, float(cosines.mean())
        psi = self.psi
        if psi is None:
            a, b = client.parameters(own).double(), client.parameters(weights).double()
            if self.psi_on == "updates":
                assert previous is not None
                w = client.parameters(previous).double()
                a, b = a - w, b - w
            psi = (1 + float(cosine_similarity(a, b, dim=0))) / 2
        return psi * own + (1 - psi) * weights, psi


def by_tensor(own: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Tensor:
    """(size,) for each entry of a flat vector, the cosine of its tensor with the other one."""
    cosines = []
    for name, tensor in own.items():
        a, b = tensor.flatten().double(), others[name].flatten().double()
        cosines.append(cosine_similarity(a, b, dim=0).float().expand(len(a)))
    return torch.cat(cosines)
