"""Clusters of relevance maps over clients: whose examples does a model decide for other reasons?

Spectral relevance analysis (SpRAy; Lapuschkin et al., Unmasking Clever Hans predictors, Nature
Communications 2019) clusters the relevance maps of one class's training examples. Here the
examples are those of all clients: a cluster that holds the maps of few clients is a strategy that
the model uses for them alone, such as a scanner's mark. An analysis within the simulator: clients
would have to send their maps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from fedsim.analysis.explanations import Wanted, drawn_to, explainer_of
from fedsim.analysis.replay import ModelSnapshot, Whose, as_errors
from fedsim.config.arguments import checked
from fedsim.data import Dataset, load_dataset
from fedsim.errors import BadInput
from fedsim.explain.explainer import FeatureExplainer, refuse_unfit
from fedsim.explain.explainers.embedding import embed
from fedsim.explain.pictures.clusters import Panel, draw_clusters
from fedsim.explain.pictures.images import as_pixels
from fedsim.explain.scores.measure import relevances_of
from fedsim.explain.section import map_shape
from fedsim.launch.progress import LineProgress
from fedsim.results.run import Run
from fedsim.support.rng import keyed_rng
from fedsim.support.words import client_name, in_short, short

if TYPE_CHECKING:
    import pandas as pd

Maps = NDArray[np.float64]

LEVEL = 0.01  # of the test by which a client is over-represented, for all tests together
FEW = 0.8  # a cluster is of few clients if at most half of them have this share of its maps
FEWEST = 8  # maps of a class, so that clusters of it mean something
SIDE = 32  # pixels, to which maps of images are averaged
MOST_DRAWN = 6  # classes in a picture
_ITERATIONS = 500  # of t-SNE


@dataclass(frozen=True)
class Clusters:
    """Relevance maps of clients' training examples, clustered within each class.

    Attributes:
        run: the run.
        title: whose model explained what, in words.
        maps: a row per map: `label` (the class), `client`, `example` (its index in the training
            data), `cluster` (counted from 0 within the class, the largest first), and for data
            with planted truth `planted` (whether the example has what was planted).
        classes: a row per class: `label`, `maps`, `clusters`, `eigengap` (the gap after as many
            eigenvalues of the graph's Laplacian; at most 1), and for data with planted truth
            `rand_index` (adjusted Rand index of clusters and `planted`; missing if all or no
            examples of the class have it).
        members: a row per cluster and client: `label`, `cluster`, `client`, `maps`, `expected`
            (if clients were spread evenly), `p_value` (hypergeometric: of as many or more), and
            `few` (whether at most half of the clients have most of the cluster).
        relevance: (n, ...) the maps, in the order of `maps`.
        vectors: (n, D) what was clustered: the maps with norm 1; of images averaged to at most
            32 pixels a side, of documents summed by word.
        dataset: the data as clients hold them.
        names: the clients' names; empty if the data name none.
        planted: the name of what was planted; empty if nothing was.
        file: the picture's name, without its ending.
    """

    run: Run
    title: str
    maps: pd.DataFrame
    classes: pd.DataFrame
    members: pd.DataFrame
    relevance: Maps
    vectors: Maps
    dataset: Dataset
    names: Sequence[str] = ()
    planted: str = ""
    file: str = "clusters"

    @cached_property
    def apart(self) -> pd.DataFrame:
        """The rows of `members` whose clients are over-represented in a cluster of few clients.

        By p-value, at a level of 1 % for all rows together (Bonferroni).
        """
        few = self.members[self.members["few"]]
        found = few[few["p_value"] * len(self.members) < LEVEL]
        return found.sort_values("p_value", kind="stable")

    @property
    def named(self) -> list[int]:
        """The clients in `apart`, in ascending order."""
        return sorted(self.apart["client"].unique().tolist())

    @property
    def holders(self) -> list[int]:
        """The clients with an example that has what was planted, in ascending order."""
        if not self.planted:
            return []
        return sorted(self.maps["client"][self.maps["planted"]].unique().tolist())

    @cached_property
    def scores(self) -> dict[str, float]:
        """How well planted truth was found; empty if nothing was planted.

        `rand_index`, the mean of the classes; `precision` and `recall` of the clients named,
        among those with an example that has what was planted (missing where there is none).
        """
        if not self.planted:
            return {}
        truth, named = {*self.holders}, {*self.named}
        hits = len(truth & named)
        return {
            "rand_index": float(self.classes["rand_index"].mean()),
            "precision": hits / len(named) if named else float("nan"),
            "recall": hits / len(truth) if truth else float("nan"),
        }

    def text(self) -> str:
        """What was found, as `fedsim clusters` prints it."""
        lines = [f"{self.title}: {len(self.maps)} maps of {len(self.classes)} classes"]
        if not self.dataset.classes:
            lines = [f"{self.title}: {len(self.maps)} maps"]
        classes = self.classes.set_index("label")
        for label in sorted(set(self.apart["label"].tolist())):
            own = self.apart[self.apart["label"] == label]
            gap = f"{classes['clusters'][label]} clusters of {classes['maps'][label]} maps"
            lines.append(f"\n{self._class(label)}: {gap}")
            lines[-1] += f", eigengap {classes['eigengap'][label]:.2f}"
            for cluster in sorted(set(own["cluster"].tolist())):
                same = self.members[["label", "cluster"]].eq([label, cluster]).all(axis=1)
                size = self.members["maps"][same].sum()
                told = [
                    f"{each['maps']} of {self._client(each['client'])}"
                    f" ({each['expected']:.1f} expected, p = {each['p_value']:.1g})"
                    for each in own[own["cluster"] == cluster].to_dict("records")
                ]
                lines.append(f"  cluster {cluster}: {size} maps, {in_short(told)}")
        if not self.named:
            lines.append("\nno client's maps are apart from the others'")
        else:
            apart = in_short([self._client(k) for k in self.named])
            lines.append(f"\nclients whose maps are apart from the others': {apart}")
            lines.append("  look at the picture: other inputs, or a shortcut, may be the reason")
        if self.scores:
            holders = in_short([self._client(k) for k in self.holders]) or "nobody"
            values = ", ".join(
                f"{name.replace('_', ' ')} {value:.2f}" for name, value in self.scores.items()
            )
            lines.append(f"planted ({self.planted}): {holders}; {values}")
        return "\n".join(lines)

    def save(self, folder: str | Path | None = None) -> list[Path]:
        """Draw the classes with the clearest clusters of few clients.

        Args:
            folder: where to, created if missing, or a file (.png, .pdf, .svg, .jpg, …); by
                default `explanations` in the run's folder, whose pictures `fedsim report` shows.

        Returns:
            The path of the picture.

        Raises:
            OSError: it cannot be written.
        """
        labels = list(dict.fromkeys(self.apart["label"]))
        by_gap = self.classes.sort_values("eigengap", ascending=False, kind="stable")
        labels = (labels or by_gap["label"].tolist()[:1])[:MOST_DRAWN]
        path = drawn_to(self.run, folder, self.file)
        draw_clusters([self._panel(label) for label in labels], path, self.title)
        return [path]

    def _panel(self, label: int) -> Panel:
        which = (self.maps["label"] == label).to_numpy()
        own = self.maps[which]
        x = self.dataset.x[own["example"].to_numpy()]
        images = len(self.dataset.shape) == 3
        parts: tuple[str, ...] = ()
        relevance = self.relevance[which]
        if self.dataset.words:
            relevance, used = _by_word(x, relevance)
            parts = tuple(self.dataset.words[i] for i in used)
        elif not images:
            relevance = relevance.reshape(len(relevance), -1)
            parts = self.dataset.feature_names or tuple(map(str, range(relevance.shape[1])))
        near = min(30, (len(own) - 1) // 3)
        return Panel(
            title=f"class {self._class(label)}" if self.dataset.classes else "all examples",
            places=embed(self.vectors[which], near, _ITERATIONS, seed=0).places.astype(float),
            clusters=own["cluster"].to_numpy(),
            clients=own["client"].to_numpy(),
            relevance=relevance,
            images=as_pixels(x, self.dataset) if images else None,
            parts=parts,
            names=[client_name(k, self.names) for k in range(self.run.manifest["clients"])],
        )

    def _class(self, label: int) -> str:
        return self.dataset.classes[label] if self.dataset.classes else "all examples"

    def _client(self, k: int) -> str:
        return client_name(int(k), self.names)

    def __repr__(self) -> str:
        return f"<clusters of {len(self.maps)} maps of {short(self.run.path)}>"


@checked
def clusters(
    run: Run | str | Path,
    explainer: Wanted | None = None,
    *,
    after: int | None = None,
    of: Whose | None = None,
    inputs: int = 16,
    most: int = 8,
    progress: bool | Callable[[str], None] = True,
) -> Clusters:
    """Cluster the relevance maps of clients' training examples, class by class (SpRAy).

    The maps, with Euclidean norm 1, are nodes of a graph whose edges join each to its ⌈2 ln n⌉
    nearest; the number of clusters is where the eigenvalues of the graph's normalised Laplacian
    have their largest gap, and k-means divides the rows of as many eigenvectors (Ng et al. 2001).
    A client is named if it has more maps in a cluster of few clients than chance explains.

    Args:
        run: a finished run, or its folder.
        explainer: as of `fedsim.explanations`; one that assigns a number to each part of an input.
        after: the round after which the model is taken; by default the last.
        of: explain each client's examples by its own `cohort` or `personal` model, whose maps also
            differ for other reasons; by default by the global model, or by personal models if
            there is none.
        inputs: most training examples of a client for each class.
        most: most clusters of a class.
        progress: as of `fedsim.explanations`.

    Raises:
        BadInput: the run is not finished, its data have several targets, no class has 8 maps, or
            as for `fedsim.explanations`.

    Example:
        >>> import fedsim
        >>> found = fedsim.clusters(folder, "gradient", inputs=4)
        >>> len(found.maps), found.maps.columns[:4].tolist()
        (80, ['label', 'client', 'example', 'cluster'])
    """
    import pandas as pd

    run = Run.of(run)
    for name, value, least in (("inputs", inputs, 1), ("most", most, 2)):
        if value < least:
            raise BadInput(f"{name}={value}: must be at least {least}")
    chosen = explainer_of(run, explainer)
    if not isinstance(chosen, FeatureExplainer):
        raise BadInput(
            f"explainer {chosen.label} does not assign a number to each part of an input, so its "
            "explanations cannot be clustered"
        )
    run.result_hash  # noqa: B018  # raises if it is not finished
    snapshots = _snapshots(run, after, of, progress)
    first = next(iter(snapshots.values()))
    data, splits = first.dataset, first.again.splits.held(first.again.after)
    if data.y.ndim > 1:
        raise BadInput(f"clusters are of maps for one class; the data have {data.y.shape[1]}")
    rows = [
        _examples(data, own if splits.present[k] else own[:0], inputs, run.experiment.seed, k)
        for k, own in enumerate(splits.train)
    ]
    found: list[Maps] = []
    for k, own in enumerate(rows):
        snapshot = snapshots[None if None in snapshots else k]
        if not len(own):
            continue
        model, about = snapshot.explained(), snapshot.data()
        if not found:
            refuse_unfit(chosen, model, about)
        y = torch.from_numpy(data.y[own] if data.classes else np.zeros(len(own))).long()
        rng = keyed_rng(model.seed, f"clusters/{chosen.label}", client=k)
        with as_errors(chosen):
            maps_of = relevances_of(chosen, model, about, about.prepare(data.x[own]), y, rng)
        if not np.isfinite(maps_of).all():
            raise BadInput(
                f"explainer {chosen.label}: relevances of client {k}'s examples are not finite"
            )
        found.append(maps_of)
    examples = np.concatenate(rows)
    relevance = np.concatenate(found).reshape(len(examples), *map_shape(data))
    maps = pd.DataFrame(
        {
            "label": data.y[examples] if data.classes else 0,
            "client": np.repeat(np.arange(len(rows)), [len(own) for own in rows]),
            "example": examples,
        }
    )
    planted = next((name for name in data.truth if name in data.columns), "")
    if planted:
        maps["planted"] = np.asarray(data.columns[planted][examples], np.bool_)
    vectors = _vectors(data, examples, relevance)
    counts = maps["label"].value_counts()
    enough = maps["label"].isin(counts.index[counts >= FEWEST]).to_numpy()
    if not enough.any():
        raise BadInput(f"no class has {FEWEST} maps: they would mean nothing; explain more inputs")
    maps, relevance, vectors = maps[enough], relevance[enough], vectors[enough]
    maps, classes = _clustered(maps.reset_index(drop=True), vectors, most)
    whose = first.title if None in snapshots else "their own models"
    title = f"clients' training examples explained by {whose}, {chosen.label}"
    suffix = f"-{of or 'personal'}" if None not in snapshots else ""
    return Clusters(
        run=run,
        title=title,
        maps=maps,
        classes=classes,
        members=_members(maps, len(rows)),
        relevance=relevance,
        vectors=vectors,
        dataset=data,
        names=first.again.splits.names,
        planted=planted,
        file=f"clusters-{chosen.label}{suffix}-round-{first.again.after}",
    )


def _snapshots(
    run: Run, after: int | None, of: Whose | None, progress: bool | Callable[[str], None]
) -> dict[int | None, ModelSnapshot]:
    """The models that explain, by client; of None alone if it is the global one."""
    dataset, ids = load_dataset(run.experiment.data), run.client_ids
    with LineProgress(progress) as tell:

        def on_round(t: int) -> None:
            tell(f"recomputing round {t}")

        if of is None and not run.experiment.method.has_global_model:
            of = "personal"
        if of is None:
            return {None: ModelSnapshot.of(run, None, after, on_round, dataset)}
        models = ModelSnapshot.of_clients(run, ids, after, on_round, dataset, of)
        return dict(zip(ids, models, strict=True))


def _examples(
    data: Dataset, held: NDArray[np.int64], most: int, seed: int, client: int
) -> NDArray[np.int64]:
    """At most so many training examples of a client for each class."""
    order = keyed_rng(seed, "clusters/inputs", client=client).permutation(held)
    labels = data.y[order] if data.classes else np.zeros(len(order))
    own = [order[labels == label][:most] for label in np.unique(labels)]
    return np.concatenate(own) if own else order


def _vectors(data: Dataset, examples: NDArray[np.int64], relevance: Maps) -> Maps:
    """(n, D) maps of norm 1: images at most SIDE pixels wide, documents by word."""
    if data.words:
        found, _ = _by_word(data.x[examples], relevance)
    elif len(data.shape) == 3:
        sides = min(SIDE, relevance.shape[1]), min(SIDE, relevance.shape[2])
        maps = torch.from_numpy(relevance)[:, None]
        found = torch.nn.functional.adaptive_avg_pool2d(maps, sides).numpy()
    else:
        found = relevance
    found = found.reshape(len(found), -1).astype(np.float64)
    size = np.linalg.norm(found, axis=1, keepdims=True)
    return found / np.where(size > 0, size, 1)


def _by_word(x: NDArray[Any], relevance: Maps) -> tuple[Maps, NDArray[np.int64]]:
    """(n, V) the relevances of documents (n, L) by word, and (V,) which words these are."""
    used, place = np.unique(x, return_inverse=True)
    place = place.reshape(x.shape)
    found = np.zeros((len(x), len(used)))
    for k, own in enumerate(place):
        np.add.at(found[k], own, np.where(x[k] == 0, 0, relevance[k]))
    return found[:, used != 0], used[used != 0]


def _clustered(maps: pd.DataFrame, vectors: Maps, most: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    import pandas as pd
    from sklearn.metrics import adjusted_rand_score

    cluster = np.zeros(len(maps), np.int64)
    about = []
    for label, own in maps.groupby("label").indices.items():
        cluster[own], gap = spectral(vectors[own], most)
        count = int(cluster[own].max()) + 1
        about.append({"label": label, "maps": len(own), "clusters": count, "eigengap": gap})
        if "planted" in maps:
            has = maps["planted"].to_numpy()[own]
            told = adjusted_rand_score(has, cluster[own]) if 0 < has.sum() < len(has) else np.nan
            about[-1]["rand_index"] = told
    return maps.assign(cluster=cluster), pd.DataFrame(about)


def spectral(vectors: Maps, most: int) -> tuple[NDArray[np.int64], float]:
    """Clusters (n,) of vectors (n, D), the largest first, and the eigengap.

    Args:
        vectors: n at least 3.
        most: most clusters; fewer if there are few vectors.
    """
    from scipy.sparse.csgraph import laplacian
    from sklearn.cluster import KMeans
    from sklearn.neighbors import kneighbors_graph

    n = len(vectors)
    with threadpool_limits(1):  # sums over several threads differ in the last bits
        graph = kneighbors_graph(vectors, min(n - 1, int(np.ceil(2 * np.log(n)))))
        near = (graph + graph.T).toarray() / 2
        values, bases = np.linalg.eigh(laplacian(near, normed=True))
        gaps = np.diff(values[: min(most, n - 1) + 1])
        count = int(gaps.argmax()) + 1
        if count == 1:
            return np.zeros(n, np.int64), float(gaps[0])
        rows = bases[:, :count]
        rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        found = KMeans(count, n_init=10, random_state=0).fit_predict(rows)
    order = np.argsort(-np.bincount(found, minlength=count), kind="stable")
    return np.argsort(order)[found], float(gaps[count - 1])


def _members(maps: pd.DataFrame, clients: int) -> pd.DataFrame:
    import pandas as pd
    from scipy.stats import hypergeom

    found = []
    for label, own in maps.groupby("label"):
        counts = pd.crosstab(own["cluster"], own["client"])
        table, n = counts.to_numpy(), len(own)
        of_client = table.sum(axis=0)
        for cluster, of in enumerate(table):
            size = of.sum()
            largest = np.sort(of)[::-1][: max(1, clients // 2)].sum()
            few = len(table) > 1 and largest >= FEW * size
            for k, count, whole in zip(counts.columns, of, of_client, strict=True):
                row = {"label": label, "cluster": cluster, "client": k, "maps": count}
                p = hypergeom.sf(count - 1, n, whole, size)
                found.append({**row, "expected": size * whole / n, "p_value": p, "few": few})
    return pd.DataFrame(found)
