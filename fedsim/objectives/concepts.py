"""Classification and regression by concepts that are learnt beside."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PrivateAttr
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from fedsim.data import Dataset
from fedsim.data.concepts import Concept, targets
from fedsim.errors import ExperimentError
from fedsim.objectives.classification import Classification
from fedsim.objectives.objective import Batch, Context, Metric, Objective, Totals, objectives
from fedsim.objectives.regression import Regression

CONCEPTS = "concepts"  # (n, J) among the facts about examples
INTERVENED = "intervened/"  # prefix of totals of outputs from true concepts

# (n, C) outputs; (n, J) predicted concepts; (n, C, J) weights of the head, the same for each.
Outputs = tuple[Tensor, Tensor, Tensor]


class _ByConcepts(Objective):
    """A task's loss + λ·Σ_j ℓ_j, and the task's scores and those of concepts.

    ℓ_j is the cross-entropy of a binary concept, and the squared error of a number, which is
    scaled to mean 0 and standard deviation 1; 0 where the concept is not known. λ is the model's.
    """

    _task: ClassVar[Objective]
    _concepts: tuple[Concept, ...] = PrivateAttr(())

    def check(self, data: Dataset) -> None:
        if not data.concepts:
            raise ExperimentError(
                f"objective.name={self.name} needs concepts, and the data have none; name columns "
                "of a table in data.concepts, or take data.name=shapes"
            )
        self._task.check(data)

    def fitted(self, data: Dataset) -> Self:
        found = self.model_copy()
        found._concepts = data.spec.concepts
        return found

    def facts(
        self, columns: Mapping[str, NDArray[Any]], rows: NDArray[np.int64] | slice
    ) -> dict[str, NDArray[Any]]:
        return {CONCEPTS: targets(self._concepts, columns, rows)}

    def num_outputs(self, data: Dataset) -> int:
        return self._task.num_outputs(data)

    def metrics(self, data: Dataset) -> tuple[Metric, ...]:
        own = self._task.metrics(data)
        first = next(metric for metric in own if metric.primary)
        binary = {concept.binary for concept in data.spec.concepts}
        return (
            *own,
            *([Metric("concept_accuracy", "accuracy of concepts")] if True in binary else []),
            *([Metric("concept_error", "error of concepts", "min")] if False in binary else []),
            Metric(f"intervened_{first.column}", f"{first.label} with true concepts", first.best),
        )

    def loss(self, network: Any, x: Tensor, y: Tensor, context: Context) -> Tensor:
        raw, true = network.features.raw(x), context[CONCEPTS]
        known = ~true.isnan()
        true = true.nan_to_num()
        binary = network.features.binary
        # Numbers are no targets of a cross-entropy, whose gradient would reach them.
        wrong = binary_cross_entropy_with_logits(raw, true * binary, reduction="none")
        of_concepts = torch.where(binary, wrong, (raw - true).square()) * known
        predicted = network.features.values(raw)
        if network.learning == "independent":
            predicted = torch.where(known, true, predicted.detach())
        elif network.learning == "sequential":
            predicted = predicted.detach()
        losses = self._task.loss(lambda _: network.head(predicted), x, y, {})  # type: ignore[arg-type]
        return losses + network.weight * of_concepts.sum(dim=1)

    def outputs(self, network: Any, x: Tensor) -> Outputs:
        predicted, W = network.features.values(network.features.raw(x)), network.head.weight
        return network.head(predicted), predicted, W.expand(len(x), *W.shape)

    def predictions(self, outputs: Outputs) -> Tensor:
        return outputs[0]

    def totals(self, outputs: Outputs, batch: Batch) -> Totals:
        """The task's, also of outputs from true concepts; of binary concepts `concepts_right` and
        `concepts_of`, of numbers `concepts_absolute` and `numbers_of`, where they are known.
        """
        logits, predicted, W = outputs
        true = batch.facts[CONCEPTS]
        known = ~true.isnan()
        corrected = torch.where(known, true - predicted, torch.zeros_like(predicted))
        binary = torch.tensor([c.binary for c in self._concepts], device=true.device) & known
        right = (predicted > 0.5) == (true > 0.5)
        errors = (predicted - true).abs()[~binary & known]
        intervened = self._task.totals(logits + corrected @ W[0].T, batch)
        return {
            **self._task.totals(logits, batch),
            **{f"{INTERVENED}{name}": total for name, total in intervened.items()},
            "concepts_right": int(right[binary].sum()),
            "concepts_of": int(binary.sum()),
            "concepts_absolute": float(errors.double().sum()),
            "numbers_of": len(errors),
        }

    def scores(self, totals: Totals) -> dict[str, float]:
        """The task's scores; those with true concepts, whose columns begin with `intervened_`."""
        parts = [name.removeprefix(INTERVENED) for name in totals if name.startswith(INTERVENED)]
        intervened = self._task.scores({name: totals[f"{INTERVENED}{name}"] for name in parts})
        found = self._task.scores({name: totals[name] for name in parts})
        found |= {f"intervened_{name}": score for name, score in intervened.items()}
        kinds = {concept.binary for concept in self._concepts}
        if True in kinds:
            n = totals["concepts_of"]
            found["concept_accuracy"] = totals["concepts_right"] / n if n else math.nan
        if False in kinds:
            n = totals["numbers_of"]
            found["concept_error"] = totals["concepts_absolute"] / n if n else math.nan
        return found


@objectives.register
class Concepts(_ByConcepts):
    """Classification by concepts: cross-entropy + λ·Σ_j ℓ_j, see `concept_bottleneck`.

    ℓ_j is the cross-entropy of a binary concept, and the squared error of a number, which is
    scaled to mean 0 and standard deviation 1; 0 where the concept is not known.

    Columns: those of classification; `concept_accuracy`, the share of known binary concepts that
    are predicted right; `concept_error`, the mean absolute error of known numbers, in their
    standard deviations; `intervened_accuracy` and `intervened_loss`, those of the outputs from
    the true concepts, where they are known, instead of the predicted ones.
    """

    name: str = "concepts"
    _task: ClassVar[Objective] = Classification()


@objectives.register
class ConceptRegression(_ByConcepts):
    """Regression by concepts: squared error + λ·Σ_j ℓ_j, with the columns of `concepts`.

    Columns: those of regression instead of classification, also with true concepts:
    `intervened_r2` and so on.
    """

    name: str = "concept_regression"
    _task: ClassVar[Objective] = Regression()
