"""What a run explains, with the data to explain it on.

final = FinalRules.of(fedsim.load(path))
print(final.explain_row(0).in_words(final.names))

shared = SharedImages.of(fedsim.load(path), clients=[0, 1])
shared.draw(folder)

Rationales.of(fedsim.load(path)).explain("a lovely golden head").in_words()

personal = PersonalModel.of(fedsim.load(path), client=0)
personal.mimic.tree.path(personal.mimic.images[0], pixel_names(personal.shape))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim.data import Dataset
from fedsim.data.labels import draw_labels
from fedsim.data.text import encode, tokenise
from fedsim.errors import RunFolderError
from fedsim.explain.embedding import Embedding, draw_embeddings
from fedsim.explain.figures import draw_activations, draw_partitions, draw_rules
from fedsim.explain.highlight import Chosen, draw_rationales
from fedsim.explain.images import Example, draw_shared
from fedsim.explain.rules import LocalExplanation, local_explanation
from fedsim.explain.tree import confusion, draw_confusion, draw_tree
from fedsim.federation import Federation
from fedsim.launch import same_data
from fedsim.methods.fedxds import FedXDS, FedXDSState
from fedsim.methods.method import needs_classifier
from fedsim.methods.xpfl import XPFL, Mimic, Xfed, embedded
from fedsim.models import RuleModel, Rules
from fedsim.models.rationale import Rationaliser
from fedsim.models.rules import Array, Prediction, Rule, feature_names
from fedsim.remade import reopen
from fedsim.results.folder import RunFolder
from fedsim.results.run import Run
from fedsim.simulate import prepare
from fedsim.streams import numpy_stream


@dataclass(frozen=True)
class FinalRules:
    """The global rules at the end of a run.

    Args:
        model: what kind of rules they are.
        rules: R of them.
        sources: (R,) how many clients' bases each comes from.
        dataset: what they were learnt from.
    """

    model: RuleModel
    rules: Rules
    sources: NDArray[np.int64]
    dataset: Dataset

    @classmethod
    def of(cls, run: Run) -> FinalRules:
        """Of a finished run.

        Raises:
            BadInput: it is not finished, it has no global rules, or its data is not what it was.
        """
        arrays = {name: tensor.numpy() for name, tensor in run.weights().items()}
        experiment = run.experiment
        if not isinstance(experiment.model, RuleModel):
            raise RunFolderError(
                f"{run.path}: model.name={experiment.model.name} is a network; what is explained "
                "is rules"
            )
        if not arrays:
            raise RunFolderError(
                f"{run.path}: method.name={experiment.method.name} leaves no global rules"
            )
        dataset, holdings, _ = prepare(experiment)
        same_data(RunFolder.open(run.path), dataset, holdings)
        rules = run.explanations
        last = rules[rules["round"] == rules["round"].max()].sort_values("rule")
        return cls(experiment.model, arrays, last["sources"].to_numpy(), dataset)

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

    def predict(self) -> Prediction:
        """What the rules make of the central test set."""
        return self.model.predict(self.rules, self.test_x)

    def explain(self) -> list[Rule]:
        """The rules, in their order."""
        return self.model.explain(self.rules, self.names)

    def draw(self, folder: Path) -> list[Path]:
        """Draw partitions, rules and activations into a folder; their paths.

        Raises:
            OSError: they cannot be written.
        """
        folder.mkdir(exist_ok=True)
        paths = [folder / f"{name}.png" for name in ("partitions", "rules", "activations")]
        rules = self.explain()
        draw_partitions(rules, self.test_x, self.names, paths[0])
        draw_rules(rules, self.sources, self.names, paths[1])
        draw_activations(self.predict(), paths[2])
        return paths

    def explain_row(self, row: int) -> LocalExplanation:
        """Why the rules predict what they predict for a row of the central test set.

        Raises:
            RunFolderError: there is no such row.
        """
        if not 0 <= row < len(self.dataset.test_y):
            raise RunFolderError(
                f"there is no row {row} in the test set; it has {len(self.dataset.test_y)}, "
                "counted from 0"
            )
        return local_explanation(self.model, self.rules, self.test_x[row], self.names)


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
        again = reopen(run)
        fed, state = again.fed, again.state
        assert isinstance(state, FedXDSState)
        if not len(state.labels):
            raise RunFolderError(f"{run.path}: nothing was shared (method.fraction=0)")
        for k in set(clients):
            _refuse_unknown(k, fed)
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
class PersonalModel:
    """A client's personal model at the end of a run of XPFL, and a tree that mimics it.

    Args:
        client: whose.
        mimic: grown on what the model predicts for the client's images.
        embeddings: of images of the central test set, by the global and the personal model.
        labels: (m,) their true classes.
        shape: (C, H, W).
        classes: their names.
    """

    client: int
    mimic: Mimic
    embeddings: dict[str, Embedding]
    labels: NDArray[np.int64]
    shape: tuple[int, ...]
    classes: tuple[str, ...]

    @classmethod
    def of(cls, run: Run, client: int) -> PersonalModel:
        """Of a finished run; settings are those of `method.xfed`, or its defaults.

        Raises:
            BadInput: the run is not finished, has no such client, or no personal model of it, or
                its data is not what it was.
        """
        method = run.experiment.method
        if not isinstance(method, XPFL):
            raise RunFolderError(f"{run.path}: method.name={method.name} has no personal models")
        again = reopen(run)
        needs_classifier(method.name, again.setup.build_model())
        fed, dataset, holdings = again.fed, again.dataset, again.holdings
        _refuse_unknown(client, fed)
        states = fed.states()
        if client not in states:
            raise RunFolderError(f"client {client} was in no cohort, and has no personal model")
        settings = method.xfed or Xfed()
        own = fed.tensor(fed.fetch(states[client])["weights"])
        rng = numpy_stream(run.experiment.seed, "explained", 0, client)
        rows = np.concatenate([holdings.train[client], holdings.unlabelled[client]])
        rows = rng.permutation(rows)[: settings.images]
        x = fed.prepare(dataset.x[rows], dataset.y[rows]).x
        mimic = Mimic.of(fed.model, own, x, fed.num_classes, settings)
        drawn = rng.permutation(len(dataset.test_y))[: settings.images]
        test = fed.prepare(dataset.test_x[drawn], dataset.test_y[drawn])
        models = {"global model": fed.tensor(again.state.weights), "personal": own}
        embeddings = {
            name: embedded(fed.model, w, test.x, settings, seed=0) for name, w in models.items()
        }
        labels = dataset.test_y[drawn]
        return cls(client, mimic, embeddings, labels, dataset.shape, dataset.classes)

    def in_words(self) -> str:
        """How well the tree mimics the model."""
        mimic = self.mimic
        lines = [
            f"client {self.client}: a tree of {mimic.tree.leaves} leaves, {mimic.tree.depth} "
            f"deep, says what its model predicts for {mimic.known} of its images: "
            f"{mimic.fidelity:.1%} agree"
        ]
        if mimic.held_out_fidelity is not None:
            unseen = len(mimic.images) - mimic.known
            lines.append(f"of {unseen} images that it has not seen {mimic.held_out_fidelity:.1%}")
        for name, embedding in self.embeddings.items():
            lines.append(f"t-SNE, {name}: KL {embedding.divergence:.4f} nats")
        return "\n  ".join(lines)

    def draw(self, folder: Path) -> list[Path]:
        """Draw the tree, where it and the model differ, and the embeddings; their paths.

        Raises:
            OSError: they cannot be written.
        """
        folder.mkdir(exist_ok=True)
        paths = [folder / f"{n}-{self.client}.png" for n in ("tree", "confusion", "embedding")]
        shape = None
        if len(self.shape) == 3:
            C, H, W = self.shape
            shape = (C, H, W)
        mimic = self.mimic
        draw_tree(mimic.tree, self.classes, paths[0], shape)
        by_tree = mimic.tree.predict(mimic.images)
        counts = confusion(mimic.predicted, by_tree, len(self.classes))
        draw_confusion(counts, self.classes, paths[1])
        draw_embeddings(self.embeddings, self.labels, self.classes, paths[2])
        return paths


@dataclass(frozen=True)
class Rationales:
    """The global model at the end of a run, which says by which words it decides.

    Args:
        network: with its final weights, in evaluation.
        dataset: what it was trained for.
    """

    network: Rationaliser
    dataset: Dataset

    @classmethod
    def of(cls, run: Run) -> Rationales:
        """Of a finished run.

        Raises:
            BadInput: it is not finished, its model chooses no words, or its data is not what it
                was.
        """
        again = reopen(run)
        model = again.fed.model
        if not isinstance(model.module, Rationaliser):
            raise RunFolderError(
                f"{run.path}: model.name={run.experiment.model.name} chooses no words"
            )
        model.load(again.fed.tensor(again.state.weights))
        model.module.eval()
        return cls(model.module, again.dataset)

    def explain(self, text: str) -> Chosen:
        """By which words it decides about a text."""
        tokens = tokenise(text)
        x = encode([tokens], self.dataset.words, self.dataset.shape[0])
        return self._chosen(x[0] if x.shape[1] else np.zeros(1, np.int32), tokens)

    def tested(self, row: int) -> Chosen:
        """By which words it decides about a document of the central test set.

        Raises:
            RunFolderError: there is no such row.
        """
        data = self.dataset
        if not 0 <= row < len(data.test_y):
            raise RunFolderError(
                f"there is no row {row} in the test set; it has {len(data.test_y)}, counted from 0"
            )
        x = data.test_x[row]
        words = [data.words[token] for token in x.tolist() if token]
        label = data.classes[data.test_y[row]]
        marked = () if data.marks is None else tuple(data.marks[row, : len(words)].tolist())
        return self._chosen(x, words, marked, label)

    @torch.no_grad()
    def _chosen(
        self,
        x: NDArray[np.generic],
        words: Sequence[str],
        marked: tuple[bool, ...] = (),
        label: str | None = None,
    ) -> Chosen:
        document = torch.tensor(x[None].astype(np.int32))
        z = self.network.features.choice(document)
        read = self.network.features.read(document, z)
        probabilities = self.network.head(read).softmax(dim=1)[0]
        decided = int(probabilities.argmax())
        shown = tuple(words)[: len(x)]
        return Chosen(
            shown,
            tuple(z[0, : len(shown)].bool().tolist()),
            marked,
            self.dataset.classes[decided],
            float(probabilities[decided]),
            label,
        )

    def draw(self, rows: Sequence[int], folder: Path) -> list[Path]:
        """Draw test documents, with the words chosen and those marked, into a folder; the path.

        Raises:
            OSError: it cannot be written.
        """
        folder.mkdir(exist_ok=True)
        path = folder / "rationales.png"
        draw_rationales([self.tested(row) for row in rows], path)
        return [path]


def _refuse_unknown(client: int, fed: Federation) -> None:
    if not 0 <= client < fed.num_clients:
        raise RunFolderError(
            f"there is no client {client}; there are {fed.num_clients}, counted from 0"
        )
