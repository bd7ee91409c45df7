"""Classification of documents by the words that a model selects."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.data import Dataset
from fedsim.objectives.classification import Classification, Forward
from fedsim.objectives.objective import Batch, Context, Metric, Totals, objectives

# Logits for all words, for selected words and for the rest; and the selection (n, L).
Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


@objectives.register
class Rationales(Classification):
    """Rationalisation: cross-entropy plus sparsity and continuity of the selected words.

    Loss: weight·CE + λ_s·|Σz / Σm − α| + λ_c·mean |z_t − z_{t−1}|, z the selection and m the
    positions of words (z of padding counts); the last two terms are computed over the batch and
    are the same for all of its documents. α, λ_s, λ_c and the weight are set in the model.

    Columns: those of classification; `balanced_accuracy`, the mean over classes; `majority`, the
    share of the largest class, which is the accuracy of a constant prediction; `chosen`, the share
    of words that is selected; `comprehensiveness`, the drop in probability of the predicted class
    when only the other words are read; `sufficiency`, the drop when only the selected words are
    read. If annotated words are known, `rationale_precision`, `rationale_recall` and
    `rationale_f1` over all words of all documents, and `chance_f1`, the F1 of as many randomly
    selected words, 2gs/(g + s) for shares g annotated and s selected, s at most 1.
    """

    name: str = "rationales"

    def metrics(self, data: Dataset) -> tuple[Metric, ...]:
        found = (
            *super().metrics(data),
            Metric("balanced_accuracy", "balanced accuracy", sliced=True),
            Metric("comprehensiveness", "comprehensiveness"),
            Metric("sufficiency", "sufficiency", best="min"),
        )
        if "signal" not in data.truth:
            return found
        return (
            *found,
            Metric("rationale_f1", "rationale F1", sliced=True),
            Metric("chance_f1", "rationale F1 of random words", sliced=True),
        )

    def loss(self, network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
        return self.forward(network, x, y).losses

    def forward(self, network: Any, x: Tensor, y: Tensor) -> Forward:
        z = network.features.select(x)
        encoded = network.features.encode(x, z)
        chosen = z.sum() / (x != 0).sum().clamp(min=1)
        penalty = network.sparsity * (chosen - network.features.share).abs()
        if x.shape[1] > 1:
            penalty = penalty + network.continuity * (z[:, 1:] - z[:, :-1]).abs().mean()
        logits = network.head(encoded)
        losses = network.weight * self.weighted(cross_entropy(logits, y, reduction="none"), y)
        return Forward(losses + penalty, encoded, logits)

    def outputs(self, network: Any, x: Tensor) -> Outputs:
        z = network.features.select(x)
        full, chosen, rest = (
            network.head(network.features.encode(x, words))
            for words in (torch.ones_like(z), z, 1 - z)
        )
        return full, chosen, rest, z

    def predictions(self, outputs: Outputs) -> Tensor:
        """Logits (n, C) for the selected words."""
        return outputs[1]

    def totals(self, outputs: Outputs, batch: Batch) -> Totals:  # type: ignore[override]
        """Sums over documents: `words` and `chosen` places; `full`, `chosen_only`, `rest_only`,
        the probability of the class decided upon by these words; by class c `right/c` and `of/c`;
        with marks `gold`, how many words are marked, and `hit`, how many of them were chosen.
        """
        *logits, z = outputs
        y = batch.y
        if batch.labels is not None:
            known = torch.tensor(batch.labels, device=y.device)
            logits, y = [own[:, known] for own in logits], torch.searchsorted(known, y)
        totals: Totals = super().totals(logits[1], Batch(batch.x, y))
        probabilities = [own.softmax(dim=1) for own in logits]
        decided = probabilities[1].argmax(dim=1, keepdim=True)
        for name, own in zip(("full", "chosen_only", "rest_only"), probabilities, strict=True):
            totals[name] = float(own.gather(1, decided).double().sum())
        right = y[decided.flatten() == y]
        for c in range(logits[0].shape[1]):
            totals[f"right/{c}"] = int((right == c).sum())
            totals[f"of/{c}"] = int((y == c).sum())
        totals["words"] = int((batch.x != 0).sum())
        totals["chosen"] = float(z.double().sum())
        if (marks := batch.facts.get("signal")) is not None:
            totals["gold"] = int(marks.sum())
            totals["hit"] = int((z.bool() & marks).sum())
        return totals

    def scores(self, totals: Totals) -> dict[str, float]:
        words = max(totals["words"], 1)
        counts = {key: n for key, n in totals.items() if key.startswith("of/") and n}
        documents = totals["n"]
        recalls = [totals[key.replace("of/", "right/")] / n for key, n in counts.items()]
        found = super().scores(totals) | {
            "balanced_accuracy": sum(recalls) / len(recalls),
            "majority": max(counts.values()) / documents,
            "chosen": totals["chosen"] / words,
            "comprehensiveness": (totals["full"] - totals["rest_only"]) / documents,
            "sufficiency": (totals["full"] - totals["chosen_only"]) / documents,
        }
        if "gold" in totals:
            hit, chosen, gold = totals["hit"], totals["chosen"], totals["gold"]
            g, s = gold / words, min(chosen / words, 1.0)
            found |= {
                "rationale_precision": hit / chosen if chosen else 0.0,
                "rationale_recall": hit / gold if gold else 0.0,
                "rationale_f1": 2 * hit / (chosen + gold) if chosen + gold else 0.0,
                "chance_f1": 2 * g * s / (g + s) if g + s else 0.0,
            }
        return found

    def weight_scores(self, weights: Callable[[], Mapping[str, NDArray[Any]]]) -> dict[str, float]:
        """`encoder_distance`, ‖θ_e − φ_e‖ of generator and predictor, if they are separate."""
        own, other = "features.generator.", "features.predictor."
        layers = weights()
        squares = [
            np.square(layer - layers[own + name.removeprefix(other)], dtype=np.float64).sum()
            for name, layer in layers.items()
            if name.startswith(other)
        ]
        return {"encoder_distance": math.sqrt(math.fsum(squares))} if squares else {}
