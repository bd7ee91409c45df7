"""What a run explains, with the data to explain it on.

final = FinalRules.of(fedsim.load(path))
print(final.explain_row(0).in_words(final.names))

shared = SharedImages.of(fedsim.load(path), clients=[0, 1])
shared.draw(folder)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsim.data import Dataset
from fedsim.data.labels import draw_labels
from fedsim.errors import RunFolderError
from fedsim.explain.figures import draw_activations, draw_partitions, draw_rules
from fedsim.explain.images import Example, draw_shared
from fedsim.explain.rules import LocalExplanation, local_explanation
from fedsim.launch import reopen, same_data
from fedsim.methods.fedxds import FedXDS, FedXDSState
from fedsim.models import RuleModel, Rules
from fedsim.models.rules import Array, Prediction, Rule, feature_names
from fedsim.results.folder import RunFolder
from fedsim.results.run import Run
from fedsim.simulate import prepare


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
            if not 0 <= k < fed.num_clients:
                raise RunFolderError(
                    f"there is no client {k}; there are {fed.num_clients}, counted from 0"
                )
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
