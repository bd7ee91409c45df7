"""The rules that a run came to, with the data to explain them on.

final = FinalRules.of(fedsim.load(path))
print(final.explain_row(0).in_words(final.names))
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsim.data import Dataset
from fedsim.errors import RunFolderError
from fedsim.explain.figures import draw_activations, draw_partitions, draw_rules
from fedsim.explain.rules import LocalExplanation, local_explanation
from fedsim.launch import same_data
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
