"""Explanations of rationalisation models by selected words; similarity of clients' encoders."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.errors import ExperimentError
from fedsim.explain.explainer import (
    ExplainedData,
    ExplainedModel,
    Explanation,
    FeatureExplainer,
    explainers,
)
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

    name: str = "rationale"
    draws: ClassVar[bool] = True

    def check(self, model: ExplainedModel, data: ExplainedData) -> None:
        if not isinstance(model.network, RationaleClassifier):
            raise ExperimentError(f"model.name={model.section.name} does not select words")

    @torch.no_grad()
    def explain(
        self,
        model: ExplainedModel,
        data: ExplainedData,
        inputs: Inputs,
        rng: np.random.Generator,
    ) -> Explanation:
        assert isinstance(model.network, RationaleClassifier)
        features, x = model.network.features, data.prepare(inputs.x)
        found = []
        for k, (words, own) in enumerate(zip(inputs.words, input_rngs(rng, x), strict=True)):
            z = _selected(model.network, x[k : k + 1], own)
            probabilities = model.network.head(features.encode(x[k : k + 1], z)).softmax(dim=1)[0]
            decided = int(probabilities.argmax())
            found.append(
                Chosen(
                    words,
                    data.dataset.classes[decided],
                    float(probabilities[decided]),
                    inputs.labels[k],
                    tuple(z[0, : len(words)].bool().tolist()),
                    inputs.marks[k],
                )
            )
        suffix = f"{model.suffix}{inputs.suffix}"
        return Rationales(model.title, suffix, inputs.names, tuple(found), model.scores())

    @torch.no_grad()
    def relevances(
        self,
        model: ExplainedModel,
        data: ExplainedData,
        x: Tensor,
        y: Tensor,
        rng: np.random.Generator,
    ) -> NDArray[np.float32]:
        assert isinstance(model.network, RationaleClassifier)
        chosen = _selected(model.network.eval(), x, rng) * (x != 0)
        relevance: NDArray[np.float32] = chosen.float().cpu().numpy()
        return relevance


def _selected(network: RationaleClassifier, x: Tensor, rng: np.random.Generator) -> Tensor:
    """(n, L) which words are selected, which some networks sample."""
    with keyed_torch_rng(int(rng.integers(2**63)), "explained", device=x.device):
        return network.features.select(x)


@dataclass(frozen=True)
class Rationales(Explanation):
    """Documents with the words that a model selects.

    Args:
        title: of the model.
        suffix: for names of files.
        names: of the documents.
        documents: with the words.
        scores: scores of the model on the central test set; for a sequence of tasks, only `loss`
            and `accuracy`.
    """

    title: str
    suffix: str
    names: tuple[str, ...]
    documents: tuple[Chosen, ...]
    scores: Mapping[str, float]

    def text(self) -> str:
        """The scores, and the documents with the words marked."""
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
        """One row per document: the decision, and the selected words."""
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
        """Draw the (first) documents with the selected words."""
        path = picture(folder, f"rationales{self.suffix}")
        title = f"{self.title}: selected words{some(len(self.documents), 'documents')}"
        draw_rationales(self.documents[:MOST_DRAWN], path, title)
        return [path]


@torch.no_grad()
def encoder_similarity(networks: Sequence[RationaleClassifier], x: Tensor) -> dict[str, float]:
    """Similarity of clients' encoders: the mean linear CKA over all pairs (FedRNL, Fig. 2).

    A document is represented by the mean of an encoder's outputs for its words: generators read
    all words, predictors those that their own generator selects. If hardly any words are selected,
    predictors see only the lengths of documents, which makes them similar.

    Args:
        networks: two or more, on the documents' device, without sampling in evaluation.
        x: (n, L) documents, the same for all.

    Returns:
        `generator` and `predictor`, see `linear_cka`, and `chosen`, the mean share of selected
        words.
    """
    read: dict[str, list[NDArray[np.floating]]] = {"generator": [], "predictor": []}
    words, chosen = (x != 0).float()[:, :, None], []
    for network in networks:
        features = network.eval().features
        z = features.select(x)[:, :, None]
        chosen.append(float((z * words).sum() / words.sum()))
        for part, ways in (("generator", 1.0), ("predictor", z)):
            h = features.get_submodule(part)(features.words(x) * ways)
            mean = (h * words).sum(dim=1) / words.sum(dim=1).clamp(min=1)
            read[part].append(mean.cpu().numpy())
    pairs = list(itertools.combinations(range(len(networks)), 2))
    alike = {
        part: math.fsum(linear_cka(own[a], own[b]) for a, b in pairs) / len(pairs)
        for part, own in read.items()
    }
    return {**alike, "chosen": math.fsum(chosen) / len(chosen)}


def linear_cka(x: NDArray[np.floating], y: NDArray[np.floating]) -> float:
    """Similarity of two representations (n, D) and (n, E) of the same n examples, from 0 to 1.

    ‖Yᵀ·X‖² / (‖Xᵀ·X‖·‖Yᵀ·Y‖), Frobenius norms of centred columns (Kornblith et al. 2019).
    Invariant to rotation and scale. NaN if one is the same for all examples.
    """
    a, b = (v.astype(np.float64) - v.mean(axis=0, dtype=np.float64) for v in (x, y))
    across = np.square(b.T @ a).sum()
    own = math.sqrt(np.square(a.T @ a).sum()) * math.sqrt(np.square(b.T @ b).sum())
    differ = all(np.ptp(v, axis=0).any() for v in (x, y))  # by more than rounding
    return min(float(across / own), 1.0) if own and differ else math.nan
