"""What a run explains, with the data to explain it on.

run = fedsim.load(path)
client = ModelSnapshot.of(run, client=3, after=7)             # its model after round 7, re-made
inputs = Inputs.of_rows(client.dataset, [0, 1])
Attributed.of(client, IntegratedGradients(), inputs).draw(folder)
Mimicked.of(client).in_words()                          # a tree that mimics it

RuleBase.of(ModelSnapshot.of(run)).why(inputs)                # of a run of rules
Rationales.of(ModelSnapshot.of(run)).explain(inputs)          # of a model that chooses words
SharedImages.of(run, clients=[0, 1]).draw(folder)       # of a run of FedXDS
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.analysis.replay import ModelSnapshot, insist_on_client, replay
from fedsim.data import Dataset
from fedsim.data.labels import draw_labels
from fedsim.errors import RunFolderError
from fedsim.explain.attribution import Attribution, heatmap
from fedsim.explain.embedding import Embedding, draw_embeddings
from fedsim.explain.figures import draw_activations, draw_bars, draw_partitions, draw_rules
from fedsim.explain.highlight import (
    Chosen,
    Weighed,
    draw_rationales,
    draw_weighed,
    in_short,
)
from fedsim.explain.images import Example, draw_relevances, draw_shared
from fedsim.explain.inputs import Inputs
from fedsim.explain.rules import (
    LocalExplanation,
    global_explanation,
    local_explanation,
    measures,
)
from fedsim.explain.tree import confusion, draw_confusion, draw_tree
from fedsim.methods.fedxds import FedXDS, FedXDSState
from fedsim.methods.openfl_xai import RuleState
from fedsim.methods.xpfl import XPFL, Mimic, Xfed, embedded
from fedsim.models import Classifier, RuleModel, Rules
from fedsim.models.rationale import RationaleClassifier
from fedsim.models.rules import Array, Prediction, Rule, count, feature_names
from fedsim.results.run import Run
from fedsim.rng import keyed_rng, keyed_torch_rng
from fedsim.training import logits

MOST_DRAWN = 24  # inputs in a picture


@dataclass(frozen=True)
class RuleBase:
    """Rules, the global ones or a client's.

    Args:
        subject: whose.
        rules: R of them.
        sources: (R,) how many clients' bases each comes from.
    """

    subject: ModelSnapshot
    rules: Rules
    sources: NDArray[np.int64]

    @classmethod
    def of(cls, subject: ModelSnapshot) -> RuleBase:
        """Of a model of a run.

        Raises:
            BadInput: it is a network.
        """
        rules, state = subject.rules(), subject.again.state
        assert isinstance(state, RuleState)
        sources = np.ones(count(rules), np.int64) if subject.client is not None else state.sources
        return cls(subject, rules, sources)

    @property
    def model(self) -> RuleModel:
        """What kind of rules they are."""
        model = self.subject.again.spec.model
        assert isinstance(model, RuleModel)
        return model

    @property
    def dataset(self) -> Dataset:
        """What they were learnt from."""
        return self.subject.dataset

    @property
    def names(self) -> tuple[str, ...]:
        """Of the features."""
        return feature_names(self.dataset.shape[0], self.dataset.features)

    @property
    def target(self) -> str:
        """The name of what is predicted."""
        return self.dataset.target or "y"

    @property
    def test_x(self) -> Array:
        """(M, F) the inputs of the central test set."""
        return self.dataset.test_x.astype(np.float64)

    @cached_property
    def prediction(self) -> Prediction:
        """What the rules make of the central test set."""
        return self.model.predict(self.rules, self.test_x)

    @cached_property
    def readable(self) -> list[Rule]:
        """The rules as a person reads them, in their order."""
        return self.model.explain(self.rules, self.names)

    def table(self) -> list[dict[str, Any]]:
        """The rules in words, the weightiest first: see `global_explanation`."""
        return global_explanation(
            *(self.readable, self.prediction, self.dataset.test_y),
            *(self.sources, self.names, self.target),
        )

    def measures(self) -> dict[str, float]:
        """How readable they are, on the central test set."""
        return measures(self.readable, self.prediction, self.sources)

    def draw(self, folder: Path) -> list[Path]:
        """Draw partitions, rules and activations into a folder; their paths.

        Raises:
            OSError: they cannot be written.
        """
        folder.mkdir(exist_ok=True)
        names = ("partitions", "rules", "activations")
        paths = [folder / f"{name}{self.subject.suffix}.png" for name in names]
        draw_partitions(self.readable, self.test_x, self.names, paths[0])
        draw_rules(self.readable, self.sources, self.names, paths[1])
        draw_activations(self.prediction, paths[2])
        return paths

    def why(self, inputs: Inputs) -> list[LocalExplanation]:
        """Why the rules predict what they predict for these."""
        rows = inputs.x.astype(np.float64)
        about = self.names, self.dataset.target_scaling
        return [local_explanation(self.model, self.rules, row, *about) for row in rows]


@dataclass(frozen=True)
class SharedImages:
    """What clients of FedXDS shared, beside what they held.

    Args:
        examples: for each client asked for and each class that it shared, its first image.
        pool: (K, classes) how many images of each class each client shared.
        classes: their names.
    """

    examples: tuple[Example, ...]
    pool: NDArray[np.int64]
    classes: tuple[str, ...]

    @classmethod
    def of(cls, run: Run, clients: Sequence[int]) -> SharedImages:
        """Of a finished run: these clients share once more, to the same bits on a like device.

        Raises:
            BadInput: the run is not finished, shared nothing, has no such client, or its data is
                not what it was.
        """
        method = run.experiment.method
        if not isinstance(method, FedXDS):
            raise RunFolderError(f"{run.path}: method.name={method.name} shares no masked images")
        again = replay(run)
        fed, state = again.fed, again.state
        assert isinstance(state, FedXDSState)
        if not len(state.labels):
            raise RunFolderError(f"{run.path}: nothing was shared (method.fraction=0)")
        for k in set(clients):
            insist_on_client(run, k)
        examples = []
        for k, items in method.share_again(fed, state, sorted(set(clients))).items():
            labels, first = np.unique(items["labels"], return_index=True)
            for label, i in zip(labels.tolist(), first.tolist(), strict=True):
                one = {name: items[name][i] for name in ("x", "heatmaps", "masks", "shared")}
                examples.append(Example(k, label, *one.values()))
        if not examples:
            raise RunFolderError(f"{run.path}: none of these clients shared an image")
        table = run.explanations
        pool = np.zeros((fed.num_clients, fed.num_classes), dtype=np.int64)
        pool[table["client"], table["class"]] = table["images"]
        return cls(tuple(examples), pool, again.dataset.classes)

    def draw(self, folder: Path) -> list[Path]:
        """Draw the images, and who shared how many of which class, into a folder; their paths.

        Raises:
            OSError: they cannot be written.
        """
        folder.mkdir(exist_ok=True)
        images, pool = folder / "shared_images.png", folder / "pool.png"
        draw_shared(self.examples, self.classes, images)
        draw_labels(self.pool, self.classes, pool)
        return [images, pool]


@dataclass(frozen=True)
class Mimicked:
    """A classifier of a run, and a tree that mimics it.

    Args:
        subject: the classifier.
        mimic: grown on what it predicts: for a client's model for the client's own images, for
            the global one for those of the central test set.
        embeddings: of images of the central test set, by the global and the client's model.
        labels: (m,) their true classes.
    """

    subject: ModelSnapshot
    mimic: Mimic
    embeddings: dict[str, Embedding]
    labels: NDArray[np.int64]

    @classmethod
    def of(cls, subject: ModelSnapshot) -> Mimicked:
        """Of a model of a run; settings are those of `method.xfed`, or its defaults.

        Raises:
            BadInput: the model is no classifier of numbers.
        """
        again, own, k = subject.again, subject.own, subject.client
        experiment, dataset, splits = again.experiment, again.dataset, again.splits
        if not (isinstance(own, Tensor) and dataset.classes and not dataset.words):
            raise RunFolderError(
                f"{again.run.path}: a tree mimics classifiers of images and tables, not "
                f"model.name={experiment.model.name} on data.name={experiment.data.name}"
            )
        fed, method = again.fed, experiment.method
        settings = method.xfed if isinstance(method, XPFL) else None
        if settings is None:
            few = max(1.0, (len(dataset.test_y) - 1) / 3)
            settings = Xfed(perplexity=min(Xfed().perplexity, few))
        rng = keyed_rng(experiment.seed, "explained", 0, k or 0)
        if k is None:
            rows = rng.permutation(len(dataset.test_y))[: settings.images]
            x = fed.prepare(dataset.test_x[rows], dataset.test_y[rows]).x
        else:
            rows = np.concatenate([splits.train[k], splits.unlabelled[k]])
            rows = rng.permutation(rows)[: settings.images]
            x = fed.prepare(dataset.x[rows], dataset.y[rows]).x
        model = subject.flat_model()
        mimic = Mimic.of(model, own, x, fed.num_classes, settings)
        drawn = rng.permutation(len(dataset.test_y))[: settings.images]
        test = fed.prepare(dataset.test_x[drawn], dataset.test_y[drawn])
        models: dict[str, Tensor] = {}
        if isinstance(model.module, Classifier):  # whose features are known
            if method.global_model(fed, again.state):
                models["global model"] = fed.tensor(again.state.weights)
            if k is not None:
                models[f"client {k}'s"] = own
        embeddings = {
            name: embedded(fed.model, w, test.x, settings, seed=0) for name, w in models.items()
        }
        return cls(subject, mimic, embeddings, dataset.test_y[drawn])

    def in_words(self) -> str:
        """How well the tree mimics the model."""
        mimic = self.mimic
        lines = [
            f"{self.subject.title}: a tree of {mimic.tree.leaves} leaves, {mimic.tree.depth} "
            f"deep, says what it predicts for {mimic.known} inputs: {mimic.fidelity:.1%} agree"
        ]
        if mimic.held_out_fidelity is not None:
            unseen = len(mimic.images) - mimic.known
            lines.append(f"of {unseen} that it has not seen {mimic.held_out_fidelity:.1%}")
        for name, embedding in self.embeddings.items():
            lines.append(f"t-SNE, {name}: KL {embedding.divergence:.4f} nats")
        return "\n  ".join(lines)

    def draw(self, folder: Path) -> list[Path]:
        """Draw the tree, where it and the model differ, and the embeddings; their paths.

        Raises:
            OSError: they cannot be written.
        """
        folder.mkdir(exist_ok=True)
        dataset, suffix, mimic = self.subject.dataset, self.subject.suffix, self.mimic
        paths = [folder / f"{n}{suffix}.png" for n in ("tree", "confusion", "embedding")]
        shape = None
        if len(dataset.shape) == 3:
            C, H, W = dataset.shape
            shape = (C, H, W)
        draw_tree(mimic.tree, dataset.classes, paths[0], shape)
        by_tree = mimic.tree.predict(mimic.images)
        counts = confusion(mimic.predicted, by_tree, len(dataset.classes))
        draw_confusion(counts, dataset.classes, paths[1])
        if not self.embeddings:
            return paths[:2]
        draw_embeddings(self.embeddings, self.labels, dataset.classes, paths[2])
        return paths


@dataclass(frozen=True)
class Rationales:
    """A model of a run which says by which words it decides.

    Args:
        subject: whose model.
        network: it, in evaluation.
    """

    subject: ModelSnapshot
    network: RationaleClassifier

    @classmethod
    def of(cls, subject: ModelSnapshot) -> Rationales:
        """Of a model of a run.

        Raises:
            BadInput: it chooses no words.
        """
        network = subject.network()
        if not isinstance(network, RationaleClassifier):
            again = subject.again
            raise RunFolderError(
                f"{again.run.path}: model.name={again.experiment.model.name} chooses no words"
            )
        return cls(subject, network)

    def scores(self) -> dict[str, float]:
        """Scores of the central test set, as of `Federation.evaluate`.

        Of tasks in turn, `loss` and `accuracy` alone.
        """
        again, own = self.subject.again, self.subject.own
        assert isinstance(own, Tensor)
        again.fed.begin_round(again.after)  # so that words are drawn as they were then
        return again.fed.evaluate(own.cpu().numpy())

    @torch.no_grad()
    def explain(self, inputs: Inputs) -> list[Chosen]:
        """By which words it decides about documents."""
        fed = self.subject.again.fed
        x = fed.prepare(inputs.x, np.zeros(len(inputs.x), np.int64)).x
        found = []
        for k, words in enumerate(inputs.words):
            with keyed_torch_rng(fed.seed, "explained", k, device=fed.device):
                z = self.network.features.select(x[k : k + 1])
            read = self.network.features.encode(x[k : k + 1], z)
            probabilities = self.network.head(read).softmax(dim=1)[0]
            decided = int(probabilities.argmax())
            found.append(
                Chosen(
                    words,
                    self.subject.dataset.classes[decided],
                    float(probabilities[decided]),
                    inputs.labels[k],
                    tuple(z[0, : len(words)].bool().tolist()),
                    inputs.marks[k],
                )
            )
        return found

    def draw(self, documents: Sequence[Chosen], folder: Path) -> list[Path]:
        """Draw documents (24 at most) with the words chosen and those marked; the path.

        Raises:
            OSError: it cannot be written.
        """
        folder.mkdir(exist_ok=True)
        path = folder / f"rationales{self.subject.suffix}.png"
        draw_rationales(documents[:MOST_DRAWN], path)
        return [path]


@dataclass(frozen=True)
class Attributed:
    """What decisions of a network owe to each part of its inputs.

    Args:
        subject: whose network.
        explainer: the attribution.
        inputs: n of them.
        relevance: (n, ...) signed, of pixels (channels are added up), features or words, for the
            class decided upon.
        decisions: that class, or the number predicted.
        probabilities: of the class; empty for a regression.
    """

    subject: ModelSnapshot
    explainer: str
    inputs: Inputs
    relevance: NDArray[np.float32]
    decisions: tuple[str, ...]
    probabilities: tuple[float, ...]

    @classmethod
    def of(cls, subject: ModelSnapshot, explainer: Attribution, inputs: Inputs) -> Attributed:
        """Of a model of a run.

        Raises:
            BadInput: it is rules, or a network that this attribution cannot explain.
        """
        network, fed, classes = subject.network(), subject.again.fed, subject.dataset.classes
        explainer.check(network)
        if isinstance(network, RationaleClassifier) and network.features.sampled:
            raise RunFolderError(
                "model.evaluate=sampled draws the words that it decides by; what an attribution "
                "says of it would be chance"
            )
        x = fed.prepare(inputs.x, np.zeros(len(inputs.x), np.int64)).x
        outputs = torch.from_numpy(logits(network, x))
        best = outputs.argmax(dim=1)
        rng = keyed_rng(fed.seed, f"explained/{explainer.name}")
        relevance = explainer.relevance(network, x, best.to(x.device), rng).cpu()
        if len(subject.dataset.shape) == 3:
            relevance = heatmap(relevance)
        if classes:
            chances = outputs.softmax(dim=1).amax(dim=1).tolist()
            decisions = tuple(classes[c] for c in best.tolist())
        else:
            values = subject.dataset.target_scaling.undo(outputs[:, 0].double().numpy())
            chances, decisions = [], tuple(f"{value:.6g}" for value in values)
        found = relevance.numpy()
        return cls(subject, explainer.name, inputs, found, decisions, tuple(chances))

    @property
    def titles(self) -> tuple[str, ...]:
        """«row 3: seven (98%), is nine» of each input."""
        chances = self.probabilities or (None,) * len(self.decisions)
        told = map(in_short, self.decisions, chances, self.inputs.labels)
        return tuple(f"{name}: {what}" for name, what in zip(self.inputs.names, told, strict=True))

    def in_words(self, most: int = 5) -> str:
        """What each decision owes most to: words or features; of an image, to how much of it.

        Args:
            most: words or features for it, and as many against it.
        """
        lines = [f"{self.subject.title}, {self.explainer}:"]
        for k, title in enumerate(self.titles):
            lines.append(f"\n{title}")
            own = self.relevance[k]
            if not own.any():
                lines.append("  nothing of it is of any relevance")
                continue
            if len(self.subject.dataset.shape) == 3:
                size = np.sort(np.abs(own).ravel())[::-1]
                half = int(np.searchsorted(size.cumsum(), size.sum() / 2)) + 1
                lines.append(f"  half of the relevance is in {half / size.size:.1%} of its pixels")
                continue
            own, parts = own.ravel(), self._parts(k)
            order = np.argsort(-own[: len(parts)], kind="stable").tolist()
            for about, some in (("for", order[:most]), ("against", order[::-1][:most])):
                told = [
                    f"{parts[i]} {own[i]:+.4g}"
                    for i in some
                    if (own[i] > 0) == (about == "for") and own[i]
                ]
                if told:
                    lines.append(f"  {about} it: {', '.join(told)}")
        return "\n".join(lines)

    def _parts(self, k: int) -> tuple[str, ...]:
        """What an input that is no image consists of."""
        data = self.subject.dataset
        if data.words:
            return self.inputs.words[k]
        if len(data.shape) == 1:
            return feature_names(data.shape[0], data.features)
        return tuple(f"x[{', '.join(map(str, place))}]" for place in np.ndindex(*data.shape))

    def draw(self, folder: Path) -> list[Path]:
        """Draw the inputs, the first ones if there are many, with what is owed to their parts.

        Returns:
            The path, in the folder.

        Raises:
            OSError: it cannot be written.
        """
        folder.mkdir(exist_ok=True)
        path = folder / f"{self.explainer}{self.subject.suffix}.png"
        data, x = self.subject.dataset, self.inputs.x[:MOST_DRAWN]
        titles, relevance = self.titles[:MOST_DRAWN], self.relevance[:MOST_DRAWN]
        if data.words:
            documents = [
                Weighed(
                    words,
                    self.decisions[k],
                    self.probabilities[k],
                    self.inputs.labels[k],
                    tuple(self.relevance[k, : len(words)].tolist()),
                )
                for k, words in enumerate(self.inputs.words[:MOST_DRAWN])
            ]
            draw_weighed(documents, path)
        elif len(data.shape) == 3:
            low, high = (0, 255) if data.x.dtype == np.uint8 else (data.x.min(), data.x.max())
            pixels = (x.astype(np.float32) - low) / ((high - low) or 1)
            captions = [title.replace(": ", "\n", 1) for title in titles]
            draw_relevances(list(pixels), list(relevance), captions, path)
        else:
            rows = relevance.reshape(len(x), -1).astype(np.float64)
            draw_bars(rows, self._parts(0), titles, path)
        return [path]
