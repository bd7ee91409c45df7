"""Explanations of rationalisation models by selected words."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from fedsim.errors import ExperimentError
from fedsim.explain import ExplainedData, ExplainedModel, Explanation
from fedsim.explain.explainer import FeatureExplainer, explainers
from fedsim.explain.inputs import Inputs
from fedsim.explain.pictures.canvas import MOST_DRAWN, picture, some
from fedsim.explain.pictures.documents import Chosen, draw_rationales
from fedsim.models.rationale import RationaleClassifier
from fedsim.support.rng import input_rngs, keyed_torch_rng


@explainers.register
class RationaleExplainer(FeatureExplainer):
    """The words that a rationalisation model selects for its decision, and their quality.

    The relevance of a word is 1 if it is selected, and 0 otherwise.
    """

    niche: ClassVar[bool] = True
    name: str = "rationale"
    draws: ClassVar[bool] = True

    def check(self, model: ExplainedModel, data: ExplainedData) -> None:
        if not isinstance(model.network, RationaleClassifier):
            raise ExperimentError(f"model.name={model.section.name} does not select words")

    @torch.no_grad()
    def explain(
        self, model: ExplainedModel, data: ExplainedData, inputs: Inputs, rng: Generator
    ) -> Explanation:
        assert isinstance(model.network, RationaleClassifier)
        features, x = model.network.features, data.prepare(inputs.x)
        found = []
        for k, (words, own) in enumerate(zip(inputs.words, input_rngs(rng, x), strict=True)):
            z = _selected(model.network, x[k : k + 1], own)
            probabilities = model.network.head(features.encode(x[k : k + 1], z)).softmax(dim=1)[0]
            decided = int(probabilities.argmax())
            about = data.dataset.classes[decided], float(probabilities[decided]), inputs.labels[k]
            chosen = tuple(z[0, : len(words)].bool().tolist())
            found.append(Chosen(words, *about, chosen, inputs.marks[k]))
        suffix = f"{model.suffix}{inputs.suffix}"
        return Rationales(model.title, suffix, inputs.names, tuple(found), model.scores())

    @torch.no_grad()
    def relevances(
        self, model: ExplainedModel, data: ExplainedData, x: Tensor, y: Tensor, rng: Generator
    ) -> NDArray[np.float32]:
        assert isinstance(model.network, RationaleClassifier)
        chosen = _selected(model.network.eval(), x, rng) * (x != 0)
        return chosen.float().cpu().numpy()


def _selected(network: RationaleClassifier, x: Tensor, rng: Generator) -> Tensor:
    """(n, L) which words are selected, which some networks sample."""
    with keyed_torch_rng(int(rng.integers(2**63)), "explained", device=x.device):
        return network.features.select(x)


@dataclass(frozen=True)
class Rationales(Explanation):
    """Documents with the words that a model selects, and its scores on the central test set."""

    title: str
    suffix: str
    names: tuple[str, ...]
    documents: tuple[Chosen, ...]
    scores: Mapping[str, float]

    def text(self) -> str:
        lines = [f"{self.title}, on the test set:"]
        for name in ("accuracy", "balanced_accuracy", "majority", "chosen"):
            if name in self.scores:
                lines.append(f"{name.replace('_', ' ')}: {self.scores[name]:.4f}")
        if "rationale_f1" in self.scores:
            f1, chance = self.scores["rationale_f1"], self.scores["chance_f1"]
            lines.append(
                f"F1 of selected words against marked ones {f1:.4f}, at random {chance:.4f}"
            )
        for name, found in zip(self.names, self.documents, strict=True):
            lines.append(f"\n{name}: {found.in_words()}")
        return "\n".join(lines)

    def rows(self) -> list[dict[str, float | int | str | None]]:
        return [
            {
                "input": name,
                "decision": found.decision,
                "probability": found.probability,
                "label": found.label,
                "chosen": " ".join(itertools.compress(found.words, found.chosen)),
            }
            for name, found in zip(self.names, self.documents, strict=True)
        ]

    def save(self, folder: Path) -> list[Path]:
        path = picture(folder, f"rationales{self.suffix}")
        title = f"{self.title}: selected words{some(len(self.documents), 'documents')}"
        draw_rationales(self.documents[:MOST_DRAWN], self.names[:MOST_DRAWN], path, title)
        return [path]
