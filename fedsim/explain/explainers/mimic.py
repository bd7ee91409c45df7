"""A surrogate tree of a model, and t-SNE of the model's features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from fedsim.data import Dataset
from fedsim.errors import ExperimentError
from fedsim.explain import ExplainedData, ExplainedModel, Explanation
from fedsim.explain.explainer import FeatureExplainer, explainers
from fedsim.explain.explainers.embedding import Embedding, draw_embeddings, embed
from fedsim.explain.groups import by_feature
from fedsim.explain.inputs import Inputs
from fedsim.explain.pictures.canvas import picture, save
from fedsim.explain.pictures.trees import draw_confusion, draw_tree
from fedsim.explain.tree import Conditions, Tree, build_tree, fidelity
from fedsim.models import Classifier
from fedsim.support.rng import keyed_rng
from fedsim.support.words import client_name
from fedsim.training import logits

PERPLEXITY = 30.0  # of t-SNE


@dataclass(frozen=True)
class Mimic:
    """A tree grown on a model's predictions for the first `known` of some images (n, D).

    Args:
        images: (n, D) as the network takes them.
        predicted: (n,) the model's classes.
    """

    tree: Tree
    images: NDArray[np.float32]
    predicted: NDArray[np.int64]
    known: int

    @classmethod
    def of(cls, network: nn.Module, x: Tensor, classes: int, held_out: float) -> Mimic:
        """Grow a tree for a network's inputs (n, ...), of which a share is held out."""
        predicted = logits(network, x).argmax(axis=1)
        images = x.flatten(1).cpu().numpy()
        known = max(1, round((1 - held_out) * len(images)))
        tree = build_tree(images[:known], predicted[:known], classes)
        return cls(tree, images, predicted, known)

    @property
    def fidelity(self) -> float:
        """Agreement of tree and model on the images that it was grown on, as a share."""
        return fidelity(self.tree, self.images[: self.known], self.predicted[: self.known])

    @property
    def held_out_fidelity(self) -> float | None:
        """The same for held-out images; None if there are none."""
        if self.known == len(self.images):
            return None
        return fidelity(self.tree, self.images[self.known :], self.predicted[self.known :])

    @property
    def held_out_majority(self) -> float:
        """The held-out fidelity of a tree of one leaf: always the commonest class of `known`."""
        commonest = np.bincount(self.predicted[: self.known]).argmax()
        return float((self.predicted[self.known :] == commonest).mean())

    def measures(self) -> dict[str, float]:
        """As columns of explanations.parquet."""
        found = {"fidelity": self.fidelity}
        if (unseen := self.held_out_fidelity) is not None:
            found |= {"held_out_fidelity": unseen, "held_out_majority": self.held_out_majority}
        return found | {"depth": self.tree.depth, "leaves": self.tree.leaves}


@torch.no_grad()
def embedded(
    network: Classifier, x: Tensor, perplexity: float, iterations: int, seed: int
) -> Embedding:
    features = network.eval().features(x).flatten(1).cpu().numpy()
    return embed(features, perplexity, iterations, seed)


@explainers.register
class TreeExplainer(FeatureExplainer):
    """A surrogate decision tree of a classifier, together with t-SNE of its features.

    The tree is grown on the model's predictions: for a client's model on those for the client's
    own inputs, for the global model on those for the central test set.

    Args:
        images: largest number of inputs for the tree, and of test inputs for t-SNE.
        held_out: share of the inputs that is not used to grow the tree.
        perplexity: perplexity of t-SNE; by default 30, or a third of its inputs if that is less.
        iterations: iterations of t-SNE.

    The relevance of a pixel or feature is what the tree's conditions on it add to the share of the
    predicted class, on the way from the root to the input's leaf.

    Sources: see `fedsim.explain.tree` and `fedsim.methods.xpfl`; of the relevance
    Saabas, Interpreting random forests (2014).
    """

    name: str = "tree"
    takes_inputs: ClassVar[bool] = False
    images: int = Field(1000, ge=2)
    held_out: float = Field(0.2, gt=0, lt=1)
    perplexity: float | None = Field(None, gt=0)
    iterations: int = Field(1000, ge=300)

    def check(self, model: ExplainedModel, data: ExplainedData) -> None:
        if model.network is None:
            reason = f"model.name={model.section.name} is a {model.section.kind}"
        elif not data.dataset.classes:
            reason = f"the target {data.dataset.target or 'y'} is a number"
        elif data.dataset.words:
            reason = "the inputs are documents"
        else:
            embedded = min(self.images, len(data.dataset.test_y))
            if self.perplexity is not None and self.perplexity >= embedded:
                raise ExperimentError(
                    f"perplexity={self.perplexity:g}: must be below the number of inputs that "
                    f"are embedded, {embedded}"
                )
            return
        raise ExperimentError(f"a tree mimics classifiers of images and tables, and {reason}")

    def explain(
        self, model: ExplainedModel, data: ExplainedData, inputs: Inputs, rng: Generator
    ) -> Explanation:
        assert model.network is not None
        dataset = data.dataset
        mimic = self._mimic(model, data, rng)
        drawn = rng.permutation(len(dataset.test_y))[: self.images]
        test = data.prepare(dataset.test_x[drawn])
        perplexity = self.perplexity
        if perplexity is None:
            perplexity = min(PERPLEXITY, max(1.0, (len(drawn) - 1) / 3))
        name = "global model"
        if model.client is not None:
            name = f"{client_name(model.client, data.clients)}'s"
        embeddings = {
            name: embedded(network, test, perplexity, self.iterations, seed=0)
            for name, network in {**model.beside, name: model.network}.items()
            if isinstance(network, Classifier)  # has features
        }
        return Mimicked(
            *(model.title, model.suffix, dataset, mimic, embeddings, dataset.test_y[drawn])
        )

    def _mimic(self, model: ExplainedModel, data: ExplainedData, rng: Generator) -> Mimic:
        assert model.network is not None
        held = data.dataset.test_x if data.own is None else data.own
        x = data.prepare(held[rng.permutation(len(held))[: self.images]])
        return Mimic.of(model.network, x, len(data.dataset.classes), self.held_out)

    def each(self, *given: Any, **_: Any) -> NDArray[np.float32]:
        """Of all inputs together: what is drawn is for the tree, not for an input."""
        return self.relevances(*given[:5])

    def relevances(
        self, model: ExplainedModel, data: ExplainedData, x: Tensor, y: Tensor, rng: Generator
    ) -> NDArray[np.float32]:
        tree = self._mimic(model, data, rng).tree
        found = tree.contributions(x.flatten(1).cpu().numpy(), y.cpu().numpy())
        relevance = found.astype(np.float32).reshape(tuple(x.shape))
        if x.dim() == 4:
            return relevance.sum(axis=1)
        return by_feature(torch.from_numpy(relevance), data.dataset.parts).numpy()

    def rng(self, seed: int, client: int | None = None) -> Generator:
        return keyed_rng(seed, "explained", 0, client or 0)


@dataclass(frozen=True)
class Mimicked(Explanation):
    """A classifier, a tree that mimics it, and embeddings of m inputs of the central test set.

    `labels` are (m,) their true classes.
    """

    title: str
    suffix: str
    dataset: Dataset
    mimic: Mimic
    embeddings: Mapping[str, Embedding]
    labels: NDArray[np.int64]

    def text(self) -> str:
        mimic = self.mimic
        lines = [
            f"{self.title}: a tree of {mimic.tree.leaves} leaves, {mimic.tree.depth} deep, "
            f"mimics its predictions for {mimic.known} inputs: {mimic.fidelity:.1%} agree"
        ]
        if mimic.tree.leaves == 1:
            lines[0] += "; it predicts one class for all of them, so the tree says nothing"
        if (agree := mimic.held_out_fidelity) is not None:
            unseen = len(mimic.images) - mimic.known
            lines.append(
                f"of {unseen} that it has not seen {agree:.1%} "
                f"({mimic.held_out_majority:.1%} if it always answered the commonest class)"
            )
        for name, embedding in self.embeddings.items():
            lines.append(f"t-SNE, {name}: KL {embedding.divergence:.4f} nats")
        return "\n  ".join(lines)

    def rows(self) -> list[dict[str, float | int | str | None]]:
        found = {f"divergence, {name}": e.divergence for name, e in self.embeddings.items()}
        return [{**self.mimic.measures(), **found}]

    def save(self, folder: Path) -> list[Path]:
        from sklearn.metrics import confusion_matrix  # slow to import

        dataset, mimic, title = self.dataset, self.mimic, f"{self.title}, mimicked by a tree"
        paths = [picture(folder, f"{n}{self.suffix}") for n in ("tree", "confusion", "embedding")]
        shape = dataset.shape if len(dataset.shape) == 3 else None
        words = Conditions(dataset).words
        drawn = draw_tree(mimic.tree, dataset.classes, lambda f, most: words(f, None, most), shape)
        save(drawn, paths[0], title)
        by_tree, labels = mimic.tree.predict(mimic.images), range(len(dataset.classes))
        counts = confusion_matrix(mimic.predicted, by_tree, labels=labels).astype(np.int64)
        save(draw_confusion(counts, dataset.classes), paths[1], title)
        if not self.embeddings:
            return paths[:2]
        title = f"{self.title}: features of the test set, t-SNE"
        draw_embeddings(self.embeddings, self.labels, dataset.classes, paths[2], title)
        return paths
