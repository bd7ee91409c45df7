"""xFedAlign: FedAvg with clients' explanations aligned by a global prior.

Explainable Federated Learning via Global–Local Attribution Alignment, ICML 2026. Only the abstract
was available; choices that it leaves open are made here and marked as such.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from fedsim.data import ClientSplits, Dataset
from fedsim.errors import ExperimentError
from fedsim.explain.explainer import Explainer
from fedsim.explain.explainers.prior import PriorExplainer
from fedsim.explain.groups import (
    Groups,
    Matrix,
    check_size,
    explained_variance,
    fit,
    group_parts,
    largest,
    unit,
)
from fedsim.explain.scores.relevance import cosine
from fedsim.federation import Client, Federation, PerClient, Update, Vector, client_function
from fedsim.methods.learns import Learns
from fedsim.methods.method import Method, State, methods
from fedsim.objectives import Classification
from fedsim.support.rng import draw_clients, keyed_rng
from fedsim.training import logits

# A client's artifact: `classes` (m,), the `groups` (m, k) of each, and their `values` (m, k).
Artifact = dict[str, NDArray[Any]]
Decoys = list[list[int]]  # k groups for each class


@dataclass(frozen=True)
class XFedAlignState(State):
    """The Global Explanation Prior α, (C, G), besides the weights; zeros where unknown."""

    prior: Vector


@methods.register
class XFedAlign(Method[XFedAlignState]):
    """FedAvg with class explanations that are aligned to a common prior (ICML 2026).

    The model is trained as in FedAvg, with the same result to the bit. Only explanations are
    aligned, in a space of G groups of input parts: squares of pixels, or the features of a table.
    After local training client k fits a surrogate of its model for each class c among its labels.
    It masks each group with probability 1/2 in examples x of that class (masked values become the
    means of the client's inputs), and explains f, the logit of c minus the mean of all logits, by
    the masks z (so a part that matters but lies above its mean as often as below it is not
    detected):

        β_c = argmin (1/n)·Σ_i (f_i − β·z_i)² + λ·‖β − α_c‖² + 10⁻³·‖β‖²,

    with f and z standardised, and α the prior received with the model (0 at first); the last term
    makes the solution unique. The artifact
    of c consists of the k groups with the largest |β_c| and their values, scaled to unit length.
    The server's new α_c is the elementwise median over clients, where groups that are not sent
    count as 0: a group named by fewer than half of the clients has no effect. A class that no
    client sent keeps its prior.

    From the abstract: "task optimization in parameter space" apart from "explanation coordination
    in a compact group space"; "a lightweight surrogate", "private, per-class top-k attribution
    artifacts", "robustly aggregated by the server into a Global Explanation Prior that softly
    aligns client explanations". Chosen here: the groups, the masking and its values, the ridge
    regression that shrinks towards the prior, the median, Gaussian noise, and all defaults.
    `poisoned` is one possible attack; the abstract does not describe any.

    With `noise`, N(0, σ²) is added to every entry of β_c / ‖β_c‖ before the k largest are chosen:
    for each class and round (ε, δ)-private with a sensitivity of 2 (`fedsim.conditions.gaussian`).
    Which classes a client holds, and its model, are sent as they are. ε of DP-SGD does not cover
    artifacts, so that `privacy` is refused.

    For each of its classes a client sends the class, k group numbers in the smallest integer type
    that fits (1 byte for up to 256), and k float32 values; it receives C·G float32 beside the
    model.

    Recorded for the honest clients: in rounds.parquet `prior_agreement`, the mean cosine of their
    artifacts and the new prior, `artifact_agreement`, the mean cosine of pairs of artifacts, and
    `drift_from_prior`, the mean of 1 − cosine with the prior they received, all averaged over
    classes; in explanations.parquet the same for each class. With a large λ they agree whatever
    their models do; `surrogate_r2` in clients.parquet shows the price, the share of the variance
    of f that surrogates explain, before noise and top-k. The prior itself is also in
    explanations.parquet: its `relevance`, one row for each class and group that is not 0 (groups
    of images are numbered row by row). `fedsim explain` shows it after the last round.

    Args:
        lam: λ; with 0, each client explains on its own.
        size: side of a group in pixels; by default images are cut into 7×7 groups, or slightly
            fewer. For tables each feature is a group.
        top_k: k; by default a fifth of the groups, rounded.
        samples: n, masked examples per class; the client's examples are repeated as needed.
        noise: σ.
        aggregation: `median` of the clients' artifacts, or `mean`, which a few clients can move at
            will.
        poisoned: share of the clients that send wrong artifacts (at least one client if above 0):
            they train honestly, but claim that only k groups matter for each class, on which they
            agree and which are drawn at random once per run.
    """

    name: str = "xfedalign"
    learns: ClassVar[Learns] = Learns(
        objectives=(Classification,), task_sequences="no", asks=("messages",)
    )
    private_by_example: ClassVar[bool] = False
    lam: float = Field(0.5, ge=0)
    size: int | None = Field(None, ge=1)
    top_k: int | None = Field(None, ge=1)
    samples: int = Field(200, ge=2)
    noise: float = Field(0.0, ge=0)
    aggregation: Literal["median", "mean"] = "median"
    poisoned: float = Field(0.0, ge=0, le=1)

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        shape = dataset.shape
        if dataset.words or len(shape) not in (1, 3):
            what = "documents" if dataset.words else f"inputs of shape {shape}"
            raise ExperimentError(
                "method.name=xfedalign masks parts of images (channels, height, width) or "
                f"features of tables, and the data are {what}"
            )
        if self.size is not None and len(shape) == 1:
            raise ExperimentError(
                f"method.size={self.size} is for images, and the data are a table, in which each "
                "feature is a group; leave it out"
            )
        check_size("method.size", shape, self.size)
        if self.top_k is not None and self.top_k > (
            G := len(group_parts(shape, self.size, dataset.parts))
        ):
            raise ExperimentError(f"method.top_k={self.top_k}: inputs have {G} groups")

    def overview(self) -> Explainer | None:
        return PriorExplainer(size=self.size)

    # -- the server ----------------------------------------------------------------------------

    def init(self, fed: Federation) -> XFedAlignState:
        G = len(group_parts(fed.server.shape, self.size, fed.server.parts))
        prior = np.zeros((fed.server.num_classes, G), dtype=np.float32)
        return XFedAlignState(fed.initial_weights(), prior)

    def round(self, fed: Federation, state: XFedAlignState, t: int) -> XFedAlignState:
        decoys = self.decoys(fed)
        mean = fed.mean(
            self.local_update,
            fed.sample(t),
            weights=state.weights,
            prior=state.prior,
            decoys=PerClient(decoys),
        )
        sent = {k: dense(artifact, state.prior.shape) for k, artifact in mean.messages.items()}
        prior = self.aggregate(list(sent.values()), state.prior)
        honest = [own for k, own in sent.items() if k not in decoys]
        put_on_record(fed, honest, state.prior, prior)
        return XFedAlignState(mean.weights, prior)

    def aggregate(self, sent: list[dict[int, Matrix]], before: Vector) -> Vector:
        """(C, G) the new prior of clients' artifacts; see `dense`."""
        center = np.median if self.aggregation == "median" else np.mean
        prior = before.copy()
        for c, rows in by_class(sent).items():
            prior[c] = center(rows, axis=0)
        return prior

    def decoys(self, fed: Federation) -> dict[int, Decoys]:
        """What poisoned clients send, by client: the groups that they agreed on.

        As lists of numbers, which are not counted as traffic: real attackers would not receive
        them.
        """
        if self.poisoned == 0:
            return {}
        G = len(group_parts(fed.server.shape, self.size, fed.server.parts))
        rng = keyed_rng(fed.server.seed, "poisoned")
        clients = draw_clients(rng, fed.num_clients, self.poisoned).tolist()
        drawn = [rng.permutation(G)[: self.k(G)] for _ in range(fed.server.num_classes)]
        agreed = [np.sort(groups).tolist() for groups in drawn]
        return dict.fromkeys(clients, agreed)

    # -- the clients ---------------------------------------------------------------------------

    @client_function("local_update")
    def local_update(
        self, client: Client, weights: Tensor, prior: Tensor, decoys: Decoys | None
    ) -> Update:
        """(client) w_k as in FedAvg, and the artifact that explains its model."""
        trained = client.train(weights)
        client.model.load(trained)
        artifact = self.artifact(client, client.model.module, prior, decoys)
        return Update(weights=trained, weight=client.num_samples, message=artifact)

    @torch.no_grad()
    def artifact(
        self, client: Client, network: nn.Module, prior: Tensor, decoys: Decoys | None
    ) -> Artifact:
        """(client) The k most important groups for each class among the client's labels."""
        groups = group_parts(tuple(client.data.x.shape[1:]), self.size, client.parts)
        G, k = len(groups), self.k(len(groups))
        kept = client.rng("masks").integers(2, size=(self.samples, G), dtype=np.bool_)
        classes, outputs = self.outputs(client, network, groups, kept)
        beta = fit(kept, outputs, prior.cpu().double().numpy()[classes], self.lam)
        r2 = explained_variance(kept, outputs, beta)
        if np.isfinite(r2).any():
            client.report(surrogate_r2=float(np.nanmean(r2)))
        beta = unit(beta) + self.noise * client.rng("noise").standard_normal(beta.shape)
        chosen = largest(beta, k)
        values = unit(np.take_along_axis(beta, chosen, axis=1))
        if decoys is not None:
            chosen = np.array(decoys, dtype=np.int64)[classes]
            values = np.full(chosen.shape, 1 / math.sqrt(k))
        return {
            "classes": classes.astype(np.min_scalar_type(client.num_classes - 1)),
            "groups": chosen.astype(np.min_scalar_type(G - 1)),
            "values": values.astype(np.float32),
        }

    def outputs(
        self, client: Client, network: nn.Module, groups: Groups, kept: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], Matrix]:
        """(client) The classes (m,) of its labels, and f (n, m) of masked examples of each."""
        x, y = client.data.x, client.data.y.cpu().numpy()
        classes, rng = np.unique(y), client.rng("examples")
        outputs = np.empty((len(kept), len(classes)))
        for column, c in enumerate(classes):
            rows = np.resize(rng.permutation(np.flatnonzero(y == c)), len(kept))
            found = logits(network, groups.masked(x[rows], kept, x.mean(dim=0)))
            outputs[:, column] = found[:, c] - found.mean(axis=1, dtype=np.float64)
        return classes, outputs

    def k(self, G: int) -> int:
        """The number of groups of an artifact."""
        return self.top_k or max(1, round(G / 5))


def dense(artifact: Artifact, shape: tuple[int, ...]) -> dict[int, Matrix]:
    """A client's artifact by class, (G,) each of `shape` (C, G), 0 for groups that it lacks."""
    found = np.zeros((len(artifact["classes"]), shape[1]))
    np.put_along_axis(found, artifact["groups"].astype(np.int64), artifact["values"], axis=1)
    return dict(zip(artifact["classes"].tolist(), found, strict=True))


def by_class(sent: list[dict[int, Matrix]]) -> dict[int, Matrix]:
    """(n, G) the artifacts of each class, of the n clients that sent one, by class."""
    classes = sorted(set(itertools.chain.from_iterable(sent)))
    return {c: np.array([own[c] for own in sent if c in own]) for c in classes}


def put_on_record(
    fed: Federation, honest: list[dict[int, Matrix]], before: Vector, prior: Vector
) -> None:
    """Record the agreement of honest clients' artifacts, and the prior; see `XFedAlign`."""
    scores = {c: alike(rows, before[c], prior[c]) for c, rows in by_class(honest).items()}
    fed.explain("xfedalign", ({"class": c, **found} for c, found in scores.items()))
    fed.explain(
        "xfedalign",
        (
            {"class": int(c), "group": int(g), "relevance": float(prior[c, g])}
            for c, g in zip(*np.nonzero(prior), strict=True)
        ),
    )
    for name in ("prior_agreement", "artifact_agreement", "drift_from_prior"):
        defined = [found[name] for found in scores.values() if name in found]
        if defined:
            fed.log(**{name: math.fsum(defined) / len(defined)})


def alike(artifacts: Matrix, before: Vector, prior: Vector) -> Mapping[str, float]:
    """The agreement of the artifacts (n, G) of a class with each other and with priors (G,).

    Without `artifact_agreement` for a single artifact, and `drift_from_prior` without a prior.
    """
    n = len(artifacts)
    found = {"clients": n, "prior_agreement": float(cosine(artifacts, prior[None]).mean())}
    if n > 1:  # for unit vectors u: Σ_{i≠j} ⟨u_i, u_j⟩ = ‖Σ_i u_i‖² − Σ_i ‖u_i‖²
        u = unit(artifacts)
        pairs = np.square(u.sum(axis=0)).sum() - np.square(u).sum()
        found["artifact_agreement"] = float(pairs) / (n * (n - 1))
    if before.any():
        found["drift_from_prior"] = 1 - float(cosine(artifacts, before[None]).mean())
    return found
