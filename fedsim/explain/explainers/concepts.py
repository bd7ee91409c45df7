"""Explanations of concept bottlenecks: the predicted concepts, and what each adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray

from fedsim.data import Dataset
from fedsim.data.concepts import Concept, targets
from fedsim.errors import ExperimentError
from fedsim.explain.explainer import (
    ExplainedData,
    ExplainedModel,
    Explainer,
    Explanation,
    explainers,
)
from fedsim.explain.explainers.shape_functions import of_scores
from fedsim.explain.inputs import Inputs
from fedsim.explain.pictures.canvas import MOST_DRAWN, picture, save, some
from fedsim.explain.pictures.concepts import Panel, draw_concepts
from fedsim.explain.pictures.images import as_pixels
from fedsim.models.concept_bottleneck import ConceptClassifier

Array = NDArray[np.float64]


@explainers.register
class ConceptContributions(Explainer):
    """The concepts that a concept bottleneck predicts, and what each adds to its decision.

    The score of a class is its logit less the mean of the others': the log-odds of two classes.
    That of a regression is the number. A concept c_j adds w_j·c_j to it; with the bias, this sums
    to the score of the class decided upon. Of rows of the test set whose true concepts are known,
    it also shows what these would add, and the decision that follows from them: the test-time
    intervention of the paper.

    Source: Koh et al. (ICML 2020), Sections 3 and 5.
    """

    name: str = "concepts"

    def check(self, model: ExplainedModel, data: ExplainedData) -> None:
        if not isinstance(model.network, ConceptClassifier):
            raise ExperimentError(
                f"model.name={model.section.name} predicts no concepts, as concept_bottleneck does"
            )

    @torch.no_grad()
    def explain(
        self, model: ExplainedModel, data: ExplainedData, inputs: Inputs, rng: Generator
    ) -> Explanation:
        network, dataset = model.network, data.dataset
        assert isinstance(network, ConceptClassifier)
        x, concepts = data.prepare(inputs.x), network.features.concepts
        predicted = network.features(x).double()
        true = torch.full_like(predicted, torch.nan)
        if inputs.rows:
            rows = np.array(inputs.rows)
            known = targets(concepts, dataset.test_columns, rows)
            true = torch.from_numpy(known).to(predicted)
        corrected = torch.where(true.isnan(), predicted, true)
        bias = network.head.bias.double()
        outputs, intervened = (
            network.contributions(c).sum(dim=1) + bias for c in (predicted, corrected)
        )
        decided = outputs.argmax(dim=1)
        each = torch.arange(len(x))
        adds, would = (
            of_scores(network.contributions(c))[each, :, decided].cpu().numpy()
            for c in (predicted, torch.where(true.isnan(), true, corrected))
        )
        base = of_scores(bias[None, None])[0, 0][decided].cpu().numpy()
        if not dataset.classes:
            scaling = dataset.target_scaling
            adds, would, base = adds * scaling.span, would * scaling.span, scaling.undo(base)
        return DecisionsByConcepts(
            model.title,
            f"{model.suffix}{inputs.suffix}",
            dataset,
            inputs,
            concepts,
            predicted.cpu().numpy(),
            true.cpu().numpy(),
            adds,
            would,
            base,
            _decisions(outputs, dataset),
            _decisions(intervened, dataset) if inputs.rows else (),
            model.scores(),
        )


def _decisions(outputs: torch.Tensor, data: Dataset) -> tuple[str, ...]:
    """What outputs (n, C) decide, in words."""
    if data.classes:
        return tuple(data.classes[c] for c in outputs.argmax(dim=1).tolist())
    return tuple(f"{y:.6g}" for y in data.target_scaling.undo(outputs[:, 0].cpu().numpy()))


@dataclass(frozen=True)
class DecisionsByConcepts(Explanation):
    """What predicted concepts add to decisions.

    Args:
        concepts: (J,).
        predicted, true: (n, J) as the model predicts them; NaN where they are not known.
        adds, would: (n, J) what each adds to the score of the decision, and what it would if it
            were true; NaN where it is not known.
        base: (n,) the score without concepts.
        decisions: (n,) in words.
        intervened: (n,) those from the true concepts, where they are known; or empty.
        scores: of the model on the central test set.
    """

    title: str
    suffix: str
    dataset: Dataset
    inputs: Inputs
    concepts: tuple[Concept, ...]
    predicted: Array
    true: Array
    adds: Array
    would: Array
    base: Array
    decisions: tuple[str, ...]
    intervened: tuple[str, ...]
    scores: Mapping[str, float]

    def _caption(self, k: int) -> str:
        label = self.inputs.labels[k]
        found = f"{self.inputs.names[k]}: predicted {self.decisions[k]}"
        found += "" if label is None else f", true {label}"
        if self.intervened:
            found += f"; with true concepts {self.intervened[k]}"
        return found

    def _order(self, k: int) -> list[int]:
        return np.argsort(-np.abs(self.adds[k]), kind="stable").tolist()

    def _told(self, k: int, j: int) -> str:
        """A concept with its value: `square 0.98 (true 1)`."""
        concept, true = self.concepts[j], self.true[k, j]
        of = [concept.mean + concept.std * value for value in (self.predicted[k, j], true)]
        found = f"{concept.name} {of[0]:.3g}"
        return found if np.isnan(true) else f"{found} (true {of[1]:.3g})"

    def text(self) -> str:
        lines = [f"{self.title}: what predicted concepts add to the {self._score}"]
        for name in ("concept_accuracy", "concept_error", *self._shown):
            if name in self.scores:
                lines.append(f"{name.replace('_', ' ')} on the test set: {self.scores[name]:.4f}")
        for k in range(len(self.decisions)):
            lines += [f"\n{self._caption(k)}", f"  {self.base[k]:+.3g} without concepts"]
            for j in self._order(k):
                line = f"  {self.adds[k, j] + 0.0:+.3g} {self._told(k, j)}"
                if not np.isnan(self.would[k, j]):
                    line += f"; with its true value {self.would[k, j] + 0.0:+.3g}"
                lines.append(line)
        return "\n".join(lines)

    @property
    def _shown(self) -> tuple[str, str]:
        first = "accuracy" if self.dataset.classes else "r2"
        return first, f"intervened_{first}"

    @property
    def _score(self) -> str:
        """What contributions sum to."""
        if not self.dataset.classes:
            return self.dataset.target or "number"
        if len(self.dataset.classes) == 2:
            return "log-odds of the decision"
        return "decision's logit less the others' mean"

    def rows(self) -> list[dict[str, float | int | str | None]]:
        """A record for each input and concept, the concept that adds most first."""
        return [
            {
                "input": self.inputs.names[k],
                "decision": self.decisions[k],
                "label": self.inputs.labels[k],
                "intervened": self.intervened[k] if self.intervened else None,
                "concept": self.concepts[j].name,
                "predicted": self._in_units(self.predicted, k, j),
                "true": self._in_units(self.true, k, j),
                "adds": float(self.adds[k, j]),
                "would_add": None if np.isnan(self.would[k, j]) else float(self.would[k, j]),
            }
            for k in range(len(self.decisions))
            for j in self._order(k)
        ]

    def _in_units(self, values: Array, k: int, j: int) -> float | None:
        concept, value = self.concepts[j], values[k, j]
        return None if np.isnan(value) else float(concept.mean + concept.std * value)

    def save(self, folder: Path) -> list[Path]:
        path = picture(folder, f"concepts{self.suffix}")
        images: Any = [None] * len(self.decisions)
        if len(self.dataset.shape) == 3:
            images = as_pixels(self.inputs.x[:MOST_DRAWN], self.dataset)
        panels = [
            Panel(
                self._caption(k),
                tuple(self._told(k, j) for j in self._order(k)),
                self.adds[k, self._order(k)],
                self.would[k, self._order(k)],
                image,
            )
            for k, image in enumerate(images[:MOST_DRAWN])
        ]
        title = f"{self.title}: what concepts add to the {self._score}"
        words = ("for the decision", "against it")
        if not self.dataset.classes:
            words = ("raises it", "lowers it")
        save(draw_concepts(panels, words), path, title + some(len(self.decisions), "inputs"))
        return [path]
