"""FedSeIT: continual learning with selective transfer of other clients' knowledge.

Chaudhary, Rai, Schubert, Schütze and Gupta, Federated Continual Learning for Text Classification
via Selective Inter-client Transfer, EMNLP Findings 2022.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from threadpoolctl import threadpool_limits

from fedsim.errors import ExperimentError
from fedsim.federation import Client, Federation, client_function
from fedsim.methods.fedweit import FedWeIT, FedWeITState
from fedsim.methods.fedweit.knowledge import Choice, key, place
from fedsim.methods.fedweit.method import text_features
from fedsim.methods.method import methods
from fedsim.models.decomposed import Layout, ProjectedRest, Rest
from fedsim.models.text import TextFeatures
from fedsim.training import Train

MOST_CENTRES = 200  # Q, maximum per task
ALIKE = 0.7  # cosines up to this count as 0 in `rectified`

Centres = NDArray[np.float32]  # (Q, D) of a task's documents
Similarity = Literal["mean", "rectified"]


@methods.register
class FedSeIT(FedWeIT):
    """FedWeIT with separate convolutions for others' weights, which the server selects.

    The A_j of other tasks are used as in `fedsim.models.decomposed.ProjectedRest`: the features
    that they find in a document are projected (W_f) and concatenated with those that θ = B ⊙ σ(m)
    + A finds. W_f and W_c belong to a task; λ₁·‖W_f, W_c‖₁ and w/2·‖W_f, W_c‖² are added to
    FedWeIT's loss.

    Selection (SIT, `top_k`): when a client begins a task, it sends cluster centres of its
    documents, each represented by the mean vector of its words (K-means with 200 clusters; all
    documents if there are fewer, each distinct one once; `centres_bytes` in clients.parquet). The
    server stores them with the A of that task, compares them with those of all finished tasks of
    all clients by the mean cosine over all pairs of centres, and sends the A's of the K most
    similar tasks. Their α are initialised with these scores, divided by the sum of their absolute
    values. Without selection a client gets the A's of all clients' last tasks, as in FedWeIT.

    `top_k: 0` is a control for transfer. No A is sent, up or down; the network, its initial values
    and the loss are those of FedSeIT without selection, with A_j = 0, so that tasks differ from
    FedSeIT's in nothing but what others learnt, and first tasks not at all:

        h = ReLU(W_c·[f(x; θ), ReLU(W_f·0)] + b) = ReLU(W_c·[f(x; θ), 0] + b),

    f the features that θ finds. (Biases before the ReLU start at 0, where it has no gradient, and
    stay there.) FedSeIT's released code has the same inert branch for others; see `Compat.frozen`.

    Args:
        top_k: K; null for no selection, 0 for nothing from other tasks.
        share_dense: +DLS: W_c is decomposed and shared like the convolutions, its A together with
            theirs, without W_f.
        similarity: `mean` cosine of all pairs, as in the paper, or `rectified` as in the released
            code: cosines of 0.7 and less count as 0.
    """

    name: str = "fedseit"
    start: ClassVar[float] = 1 / 5
    rest: ClassVar[type[Rest]] = ProjectedRest
    top_k: int | None = Field(None, ge=0)
    share_dense: bool = False
    similarity: Similarity = "mean"

    def check(self, train: Train) -> None:
        super().check(train)
        if self.dense_layer:
            raise ExperimentError(
                f"method.dense_layer: method.name={self.name} always has dense layers, the option "
                "is for method.name=fedweit; leave it out"
            )

    # -- DLS -----------------------------------------------------------------------------------

    def layout(self, features: TextFeatures, slots: int) -> Layout:
        layout = super().layout(features, slots)
        if not self.share_dense:
            return layout
        return replace(layout, dense=(features.dense.out_features, (slots + 1) * layout.features))

    # -- selection -----------------------------------------------------------------------------

    def slots(self, num_clients: int) -> int:
        return self.top_k or num_clients

    def choose(self, fed: Federation, state: FedWeITState, new: list[int]) -> FedWeITState:
        if not self.top_k:
            return super().choose(fed, state, new)
        centres, chosen = dict(state.centres), dict(state.chosen)
        for k in new:  # discards the previous choice of clients that do not answer
            chosen.pop(str(k), None)
        for k, found in fed.gather(self.centres, new).items():
            centres[key(k, fed.server.splits.task)] = found
            ranked = most_similar(found, state.knowledge, centres, self.similarity)
            chosen[str(k)] = ranked[: self.top_k]
        return replace(state, centres=centres, chosen=chosen)

    def collect(self, fed: Federation, state: FedWeITState) -> FedWeITState:
        # With K = 0 nobody would receive the A's.
        return state if self.top_k == 0 else super().collect(fed, state)

    @torch.no_grad()
    @client_function("centres")
    def centres(self, client: Client) -> Centres:
        """(client) (Q, D) centres of the documents of the new task."""
        reader = text_features(client.model).reader
        vectors: Centres = reader.document_vectors(client.data.x).cpu().numpy()
        if len(vectors) > MOST_CENTRES:
            vectors = clusters(vectors, int(client.rng("centres").integers(2**31)))
        client.report(centres_bytes=vectors.nbytes)
        return vectors

    def start_attention(self, rest: Rest, scores: Sequence[float]) -> None:
        if not self.top_k:
            return
        with torch.no_grad():
            rest.attention.zero_()
            total = sum(abs(score) for score in scores)
            for j, score in enumerate(scores):
                rest.attention[j] = score / total if total else 1 / len(scores)


def clusters(vectors: Centres, seed: int) -> Centres:
    """(Q, D) centres of more than Q vectors (n, D): by K-means; fewer if fewer are distinct."""
    from sklearn.cluster import KMeans

    different: Centres = np.unique(vectors, axis=0)
    if len(different) <= MOST_CENTRES:
        return different
    with threadpool_limits(1):  # more may change the last bits
        found = KMeans(MOST_CENTRES, max_iter=100, n_init=3, random_state=seed).fit(vectors)
    centres: Centres = found.cluster_centers_.astype(np.float32)
    return centres


def most_similar(
    own: Centres, finished: Collection[str], centres: Mapping[str, Centres], kind: Similarity
) -> list[Choice]:
    """Finished tasks ("client/task"), the most similar to `own` first; ties by client and task."""
    scores = [(*place(name), similarity(own, centres[name], kind)) for name in finished]
    return sorted(scores, key=lambda choice: (-choice[2], choice[0], choice[1]))


def similarity(a: Centres, b: Centres, kind: Similarity) -> float:
    """The mean cosine of all pairs of two sets of centres; see `FedSeIT.similarity`."""
    a, b = (
        v / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-12)
        for v in (a.astype(np.float64), b.astype(np.float64))
    )
    if kind == "mean":  # the mean of all cosines is a product of means
        return float(a.mean(axis=0) @ b.mean(axis=0))
    cosines = a @ b.T
    return float(np.where(cosines > ALIKE, cosines, 0).mean())
