"""Two-dimensional embeddings of a network's features, by t-SNE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from fedsim.errors import ExperimentError
from fedsim.explain.pictures.canvas import class_colours, new_figure, save

BISECTIONS = 100  # for a neighbourhood of the perplexity
ROWS = 500  # of distances in memory at a time


@dataclass(frozen=True)
class Embedding:
    """The result of t-SNE: (n, 2) positions.

    The divergence is KL(P ‖ Q) in nats between neighbourhoods of features and in the plane, 0 or
    more; lower is more faithful.
    """

    places: NDArray[np.float32]
    divergence: float


def embed(features: NDArray[Any], perplexity: float, iterations: int, seed: int) -> Embedding:
    """Embed features with scikit-learn's Barnes-Hut t-SNE, initialised by principal components.

    Args:
        features: (n, D).
        perplexity: effective number of neighbours, below n.
        iterations: iterations of gradient descent, at least 300: the first 250 use early
            exaggeration.

    Returns:
        The embedding; if all features are equal, zeros and a divergence of NaN.

    Raises:
        ExperimentError: perplexity is not below the number of examples.

    Source:
        van der Maaten and Hinton, Visualizing Data using t-SNE (JMLR 2008); the paper of XPFL
        (arXiv 2410.08634, Eq. 27) takes the divergence in bits: this one over ln 2.
    """
    from sklearn.manifold import TSNE  # slow to import

    if perplexity >= len(features):
        raise ExperimentError(
            f"perplexity={perplexity:g}: must be below the number of examples, {len(features)}"
        )
    if np.ptp(features, axis=0).max() == 0:  # t-SNE fails on equal features
        return Embedding(np.zeros((len(features), 2), dtype=np.float32), float("nan"))
    tsne = TSNE(
        n_components=2,
        perplexity=perplexity,
        max_iter=iterations,
        init="pca" if features.shape[1] > 1 else "random",
        learning_rate="auto",
        random_state=seed,
    )
    with threadpool_limits(1):  # sums over several threads differ in the last bits
        places: NDArray[np.float32] = tsne.fit_transform(features)
        return Embedding(places, divergence(features, places, perplexity))


def divergence(features: NDArray[Any], places: NDArray[Any], perplexity: float) -> float:
    """KL(P ‖ Q) in nats of neighbourhoods P of features (n, D) and Q of places (n, 2).

    P is as in Barnes-Hut t-SNE, of the 3·perplexity + 1 nearest neighbours, and Q exact, unlike in
    scikit-learn's value, which leaves out pairs of places that coincide and may be negative.
    """
    from scipy.sparse import csr_array
    from scipy.spatial.distance import cdist
    from scipy.special import xlogy
    from sklearn.neighbors import NearestNeighbors

    n = len(features)
    k = min(n - 1, int(3 * perplexity + 1))
    near = NearestNeighbors(n_neighbors=k).fit(features.astype(np.float64))
    distances, neighbours = near.kneighbors()
    squares = np.square(distances)
    squares -= squares.min(axis=1, keepdims=True)  # the same p, which cannot all vanish
    squares /= squares.mean() or 1
    low, high, beta = np.zeros((n, 1)), np.full((n, 1), np.inf), np.ones((n, 1))
    for _ in range(BISECTIONS):
        p = np.exp(-beta * squares)
        p /= p.sum(axis=1, keepdims=True)
        wide = -xlogy(p, p).sum(axis=1, keepdims=True) > np.log(perplexity)
        low, high = np.where(wide, beta, low), np.where(wide, high, beta)
        beta = np.where(np.isinf(high), 2 * beta, (low + high) / 2)
    P = csr_array((p.ravel(), neighbours.ravel(), np.arange(0, n * k + 1, k)), shape=(n, n))
    P = ((P + P.T) / (2 * n)).tocoo()
    total = -float(n)  # of all pairs of different examples
    for start in range(0, n, ROWS):
        total += (1 / (1 + cdist(places[start : start + ROWS], places, "sqeuclidean"))).sum()
    apart = np.square(places[P.row].astype(np.float64) - places[P.col]).sum(axis=1)
    found = (xlogy(P.data, P.data) + P.data * np.log(total * (1 + apart))).sum()
    return max(float(found), 0.0)  # 0 may be rounded


def draw_embeddings(
    embeddings: Mapping[str, Embedding],
    labels: NDArray[np.integer[Any]],
    class_names: Sequence[str],
    path: Path,
    title: str = "",
) -> None:
    """Draw embeddings of the same examples side by side, coloured by class."""
    figure = new_figure(4.2 * len(embeddings) + 1.4, 4.4, layout="constrained")
    panels = figure.subplots(1, len(embeddings), squeeze=False)[0]
    colours = class_colours(len(class_names))
    for axes, (name, embedding) in zip(panels, embeddings.items(), strict=True):
        for label in np.unique(labels).tolist():
            own = embedding.places[labels == label]
            word = class_names[label] if axes is panels[0] else None
            axes.scatter(*own.T, s=7, color=colours[label], label=word)
        axes.set(xticks=(), yticks=())
        axes.set_title(f"{name}\nKL {embedding.divergence:.3f} nats", fontsize=10)
    figure.legend(loc="outside right center", fontsize=8, frameon=False, markerscale=2)
    save(figure, path, title)
