"""xFedAlign: FedAvg whose clients agree on what their models look at, by a prior of the server's.

Explainable Federated Learning via Global–Local Attribution Alignment, ICML 2026. Only the abstract
was at hand: what it leaves open is chosen here, and said to be.
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
from fedsim.explain.groups import (
    Groups,
    Matrix,
    explained_variance,
    fit,
    group_parts,
    largest,
    unit,
)
from fedsim.explain.prior import PriorExplainer
from fedsim.explain.scores import cosine
from fedsim.federation import (
    Client,
    Federation,
    MeanAndMessages,
    PerClient,
    Update,
    Vector,
    client_function,
)
from fedsim.methods.learns import Learns
from fedsim.methods.method import Method, State, methods
from fedsim.objectives import Classification
from fedsim.rng import draw_clients, keyed_rng
from fedsim.training import logits

# A client's artifact: `classes` (m,), the `groups` (m, k) of each, and their `values` (m, k).
Artifact = dict[str, NDArray[Any]]
Decoys = list[list[int]]  # of each class, k groups


@dataclass(frozen=True)
class XFedAlignState(State):
    """The Global Explanation Prior beside the weights.

    Attributes:
        prior: (C, G) α: what each group is worth to each class; zeros where nobody has said yet.
    """

    prior: Vector


@methods.register
class XFedAlign(Method[XFedAlignState]):
    """FedAvg, and beside it class explanations that are drawn to a common prior (ICML 2026).

    The model is learnt as FedAvg learns it, to the bit. What is aligned are explanations, in a
    space of G groups of an input's parts: squares of pixels, or the features of a table. After
    local training client k fits a surrogate to its model for each class c among its labels. It
    masks each group with chance 1/2 in examples x of that class (values become the means of the
    client's inputs), and explains the logit of c less the mean of all logits, f, by the masks z
    (so that a part that matters, but above its mean as often as below it, goes unseen):

        β_c = argmin (1/n)·Σ_i (f_i − β·z_i)² + λ·‖β − α_c‖²,

    f and z centred and scaled to a deviation of 1, α the prior that came with the model (0 at
    first). The artifact of c are the k groups of largest |β_c| and their values, scaled to unit
    length; the server's new α_c is the median over clients, entry by entry, groups that are not
    sent being 0: what fewer than half of them name does not enter. A class that nobody sent keeps
    its prior.

    From the abstract: «task optimization in parameter space» apart from «explanation coordination
    in a compact group space»; «a lightweight surrogate», «private, per-class top-k attribution
    artifacts», «robustly aggregated by the server into a Global Explanation Prior that softly
    aligns client explanations». Chosen here: the groups, what is masked and by what, the ridge
    regression and that the prior is where it shrinks to, the median, Gaussian noise, and all
    defaults. Of the attacks on it, which the abstract does not describe, `poisoned` is one.

    With `noise`, N(0, σ²) is added to every entry of β_c / ‖β_c‖ before the k largest are chosen:
    for each class and round (ε, δ)-private with a sensitivity of 2 (`fedsim.privacy.gaussian`).
    Which classes a client holds, and its model, are sent as they are.

    A client sends for each of its classes the class, and k groups, in as few bytes as number them
    (1 of up to 256), and k float32; it receives C·G float32 beside the model.

    On record, of the honest clients: in rounds.parquet `prior_agreement`, the mean cosine of their
    artifacts and the new prior, `artifact_agreement`, that of pairs of them, and
    `drift_from_prior`, the mean of 1 − cosine with the prior they received, all means over
    classes; in explanations.parquet the same of each class. A large λ makes them agree whatever
    their models do: what it costs is seen in `surrogate_r2` of clients.parquet, the share of the
    variance of f that surrogates explain, before noise and top-k. The prior itself is in
    explanations.parquet, too: its `relevance`, a row for each class and group that is not 0
    (groups of images are numbered row by row); `fedsim explain` shows it after the last round.

    Args:
        lam: λ; 0: each client explains by itself, but for a ridge of 10⁻³.
        size: pixels a side of a group; by default images are cut into 7×7, or a few less. Of
            tables each feature is a group.
        top_k: k; by default a fifth of the groups, rounded.
        samples: n, masked examples for each class: those of the client, again and again.
        noise: σ.
        aggregation: `median` of the clients' artifacts, or `mean`, which a few can move at will.
        poisoned: share of the clients that send wrong artifacts, if above 0, one at least: they
            train honestly, and agree on k groups for each class, drawn at random once a run, that
            they claim to be all that matters.
    """

    name: str = "xfedalign"
    learns: ClassVar[Learns] = Learns(
        objectives=(Classification,), task_sequences="no", dp_compatible=False
    )
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
                f"method.size={self.size} is of images, and the data are a table, of which "
                "each feature is a group: leave it out"
            )
        if self.top_k is not None and self.top_k > (G := len(group_parts(shape, self.size))):
            raise ExperimentError(f"method.top_k={self.top_k}: inputs have {G} groups")

    def overview(self) -> Explainer | None:
        return PriorExplainer(size=self.size)

    # -- the server ----------------------------------------------------------------------------

    def init(self, fed: Federation) -> XFedAlignState:
        G = len(group_parts(fed.shape, self.size))
        prior = np.zeros((fed.num_classes, G), dtype=np.float32)
        return XFedAlignState(fed.initial_weights(), prior)

    def round(self, fed: Federation, state: XFedAlignState, t: int) -> XFedAlignState:
        decoys = self.decoys(fed)
        mean, artifacts = fed.reduce(
            self.local_update,
            fed.sample(t),
            MeanAndMessages(),
            weights=state.weights,
            prior=state.prior,
            decoys=PerClient(decoys),
        )
        sent = {k: dense(artifact, state.prior.shape) for k, artifact in artifacts.items()}
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
        """What poisoned clients send, by client: the groups that they have agreed on.

        As lists of numbers, which are not counted: real attackers would not be sent them.
        """
        if self.poisoned == 0:
            return {}
        G, rng = len(group_parts(fed.shape, self.size)), keyed_rng(fed.seed, "poisoned")
        clients = draw_clients(rng, fed.num_clients, self.poisoned).tolist()
        drawn = [rng.permutation(G)[: self.k(G)] for _ in range(fed.num_classes)]
        agreed = [np.sort(groups).tolist() for groups in drawn]
        return dict.fromkeys(clients, agreed)

    # -- the clients ---------------------------------------------------------------------------

    @client_function("local_update")
    def local_update(
        self, client: Client, weights: Tensor, prior: Tensor, decoys: Decoys | None
    ) -> tuple[Update, Artifact]:
        """(client) w_k as in FedAvg, and what its model is explained by."""
        trained = client.train(weights)
        client.model.load(trained)
        artifact = self.artifact(client, client.model.module, prior, decoys)
        return Update(weights=trained, weight=client.num_samples), artifact

    @torch.no_grad()
    def artifact(
        self, client: Client, network: nn.Module, prior: Tensor, decoys: Decoys | None
    ) -> Artifact:
        """(client) The k groups by which the network tells each class of the client's labels."""
        groups = group_parts(tuple(client.data.x.shape[1:]), self.size)
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
        """How many of G groups an artifact names."""
        return self.top_k or max(1, round(G / 5))


def dense(artifact: Artifact, shape: tuple[int, ...]) -> dict[int, Matrix]:
    """A client's artifact by class, (G,) each: groups that are not named are 0.

    Args:
        shape: (C, G).
    """
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
    """What honest clients' artifacts have in common, and the prior; see `XFedAlign`."""
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
    """How alike the artifacts (n, G) of a class are, and how near to its priors (G,).

    Without `artifact_agreement` of a single one, and `drift_from_prior` where there was no prior.
    """
    n = len(artifacts)
    found = {"clients": n, "prior_agreement": float(cosine(artifacts, prior[None]).mean())}
    if n > 1:  # of unit vectors u: Σ_{i≠j} ⟨u_i, u_j⟩ = ‖Σ_i u_i‖² − Σ_i ‖u_i‖²
        u = unit(artifacts)
        pairs = np.square(u.sum(axis=0)).sum() - np.square(u).sum()
        found["artifact_agreement"] = float(pairs) / (n * (n - 1))
    if before.any():
        found["drift_from_prior"] = 1 - float(cosine(artifacts, before[None]).mean())
    return found
