"""Explanations of boosted trees: TreeSHAP, and the trees in words."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedsim.data import Dataset
from fedsim.errors import ExperimentError
from fedsim.explain.explainer import (
    ExplainedData,
    ExplainedModel,
    Explainer,
    Explanation,
    explainers,
)
from fedsim.explain.explainers.attribution import OfDecision, heatmap
from fedsim.explain.groups import by_feature
from fedsim.explain.inputs import Inputs
from fedsim.explain.tree import Conditions
from fedsim.models.arrays import Arrays
from fedsim.models.bins import Array, Floats
from fedsim.models.boosted_trees import LEAF, BoostedTrees, rows_of
from fedsim.support.extras import require

Bounds = tuple[float | None, float | None]


def _check(name: str, model: ExplainedModel, instead: str = "") -> None:
    """Refuse models without trees."""
    if not isinstance(model.section, BoostedTrees):
        raise ExperimentError(
            f"explainer {name}: explains boosted trees; model.name={model.section.name} is "
            f"a {model.section.kind}{instead}"
        )


@explainers.register
class TreeShap(OfDecision):
    """TreeSHAP: exact Shapley values of a tree ensemble's raw score.

    The score is the logit of the explained class, or the predicted number. With features outside
    a set S, a tree's score is the mean over both children of nodes that test them, weighted by
    their cover (the sum of hessians of the training examples; "path-dependent"). A feature gets
    its Shapley value of this, so the relevances of an input sum to its score minus the expected
    score, that without any feature. Those of the entries of one feature are added up, as are
    those of a pixel's channels. XGBoost computes them, in 32-bit floats.

    Source: Lundberg et al., "From Local Explanations to Global Understanding with Explainable AI
    for Trees", Nature Machine Intelligence 2 (2020), Algorithm 2.
    """

    name: str = "tree_shap"
    complete: ClassVar[bool] = True

    def check(self, model: ExplainedModel, data: ExplainedData) -> None:
        _check(self.name, model, "; for others: kernel_shap")
        require("xgboost", f"TreeSHAP ({self.name})")

    def relevances(
        self, model: ExplainedModel, data: ExplainedData, x: Tensor, y: Tensor, rng: Generator
    ) -> NDArray[np.float32]:
        assert model.arrays is not None
        phi, _ = tree_shap(model.arrays, rows_of(x.cpu().numpy()))
        classes, decided = int(model.arrays["classes"][0]), y.cpu().numpy()
        if classes > 2:
            own = phi[decided, np.arange(len(x))]
        else:
            own = phi[0] * (np.where(decided, 0.5, -0.5)[:, None] if classes else 1)
        found = torch.from_numpy(own.astype(np.float32).reshape(x.shape))
        return by_feature(heatmap(found), data.dataset.parts).numpy()

    def endpoints(
        self, model: ExplainedModel, data: ExplainedData, x: Tensor, y: Tensor
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The score of the row, and the expected one."""
        assert model.arrays is not None
        _, expected = tree_shap(model.arrays, rows_of(x.cpu().numpy()))
        classes, decided = int(model.arrays["classes"][0]), y.cpu().numpy()
        start = expected[decided] if classes > 2 else np.full(len(x), expected[0])
        if classes == 2:
            start = start * np.where(decided, 0.5, -0.5)
        return super().endpoints(model, data, x, y)[0], start


def tree_shap(trees: Arrays, x: Floats) -> tuple[Array, Array]:
    """TreeSHAP of an ensemble's scores of rows (n, F).

    Returns:
        (C, n, F) the Shapley values, and (C,) the expected scores: with the values of a row, they
        sum to its score.
    """
    import xgboost

    T, C, _ = trees["feature"].shape
    base: Array = trees["base"]
    if not T:
        return np.zeros((C, *x.shape)), base
    booster = xgboost.Booster()
    booster.load_model(bytearray(json.dumps(_as_xgboost(trees, x.shape[1])).encode()))
    found = booster.predict(xgboost.DMatrix(x), pred_contribs=True).astype(np.float64)
    found = found.reshape(len(x), C, -1).swapaxes(0, 1)
    return found[:, :, :-1], base + found[:, 0, -1]


def _as_xgboost(trees: Arrays, features: int) -> dict[str, Any]:
    """An ensemble as XGBoost's JSON model, without `base`."""
    T, C, _ = trees["feature"].shape
    flat = {name: trees[name].reshape(T * C, -1) for name in ("feature", "threshold", "value")}
    # Of the leaves alone: with noise, the children's do not add up to the parent's.
    inner, cover = flat["feature"] != LEAF, np.maximum(trees["cover"].reshape(T * C, -1), 1e-30)
    for node in range(inner.shape[1] // 2 - 1, -1, -1):
        both = cover[:, 2 * node + 1] + cover[:, 2 * node + 2]
        cover[:, node] = np.where(inner[:, node], both, cover[:, node])
    found = []
    for number in range(T * C):
        feature = flat["feature"][number]
        nodes, parent = [0], [2**31 - 1]  # those that are reached, in ascending order
        left, right = [], []
        for place, node in enumerate(nodes):  # which grows
            left.append(len(nodes) if inner[number, node] else -1)
            right.append(len(nodes) + 1 if inner[number, node] else -1)
            if inner[number, node]:
                nodes += [2 * node + 1, 2 * node + 2]
                parent += [place, place]
        count = len(nodes)
        found.append(
            {
                "base_weights": flat["value"][number, nodes].tolist(),
                **{f"categories{name}": [] for name in ("", "_nodes", "_segments", "_sizes")},
                "default_left": [0] * count,
                "id": number,
                "left_children": left,
                "loss_changes": [0.0] * count,
                "parents": parent,
                "right_children": right,
                "split_conditions": np.where(
                    inner[number, nodes],
                    flat["threshold"][number, nodes],
                    flat["value"][number, nodes],
                ).tolist(),
                "split_indices": np.maximum(feature[nodes], 0).tolist(),
                "split_type": [0] * count,
                "sum_hessian": cover[number, nodes].tolist(),
                "tree_param": {
                    "num_deleted": "0",
                    "num_feature": str(features),
                    "num_nodes": str(count),
                    "size_leaf_vector": "1",
                },
            }
        )
    multiple = {"name": "multi:softprob", "softmax_multiclass_param": {"num_class": str(C)}}
    single = {"name": "reg:squarederror", "reg_loss_param": {"scale_pos_weight": "1"}}
    return {
        "learner": {
            "attributes": {},
            "feature_names": [],
            "feature_types": [],
            "gradient_booster": {
                "model": {
                    "gbtree_model_param": {
                        "num_parallel_tree": "1",
                        "num_trees": str(T * C),
                    },
                    "iteration_indptr": list(range(0, T * C + 1, C)),
                    "tree_info": list(range(C)) * T,
                    "trees": found,
                },
                "name": "gbtree",
            },
            "learner_model_param": {
                "base_score": "0",
                "boost_from_average": "0",
                "num_class": str(C if C > 1 else 0),
                "num_feature": str(features),
                "num_target": "1",
            },
            "objective": multiple if C > 1 else single,
        },
        "version": [2, 1, 0],
    }


@explainers.register
class Leaves(Explainer):
    """The leaves of the first trees in words: the conditions, and what each adds to the score.

    Features have their names and own units. Scores are log-odds of the second of two classes, the
    logit of one of several classes, or the predicted number.

    Args:
        most: number of trees in the text.
    """

    name: str = "leaves"
    takes_inputs: ClassVar[bool] = False
    most: int = Field(3, ge=1)

    def check(self, model: ExplainedModel, data: ExplainedData) -> None:
        _check(self.name, model)

    def explain(
        self, model: ExplainedModel, data: ExplainedData, inputs: Inputs, rng: Generator
    ) -> Explanation:
        assert model.arrays is not None
        return LeavesInWords(model.title, model.arrays, data.dataset, self.most)


@dataclass(frozen=True)
class Leaf:
    """A leaf in words.

    Args:
        round: of its tree, counted from 1.
        of: the class or number whose score it adds to.
        conditions: such as "age < 54.5 and thal ≥ 6.5"; empty for a tree of one leaf.
        value: what it adds to the score.
        cover: its sum of hessians.
    """

    round: int
    of: str
    conditions: str
    value: float
    cover: float

    def __str__(self) -> str:
        return f"{self.conditions or 'always'} → {self.value + 0.0:+.4g}"


@dataclass(frozen=True)
class LeavesInWords(Explanation):
    """All leaves of an ensemble.

    Args:
        title: the model's title.
        trees: the ensemble.
        dataset: the data that it was learnt from.
        most: number of trees in the text.
    """

    title: str
    trees: Arrays
    dataset: Dataset
    most: int

    def leaves(self, number: int) -> list[Leaf]:
        """The leaves of a tree, from left to right; trees are counted round by round, from 0."""
        round, c = divmod(number, self.trees["feature"].shape[1])
        feature, threshold, value, cover = (
            self.trees[name][round, c] for name in ("feature", "threshold", "value", "cover")
        )
        scale = 1.0 if self.dataset.classes else float(self.dataset.target_scaling.span)
        found = []

        def visit(node: int, bounds: dict[int, Bounds]) -> None:
            f = int(feature[node])
            if f == LEAF:
                words = " and ".join(
                    self._conditions.words(g, *both) for g, both in bounds.items()
                )
                leaf = float(value[node]) * scale
                found.append(Leaf(round + 1, self._of(c), words, leaf, float(cover[node])))
                return
            (low, high), own = bounds.get(f, (None, None)), float(threshold[node])
            visit(2 * node + 1, {**bounds, f: (low, own)})
            visit(2 * node + 2, {**bounds, f: (own, high)})

        visit(0, {})
        return found

    @cached_property
    def _conditions(self) -> Conditions:
        return Conditions(self.dataset, "<", "≥")

    def _of(self, c: int) -> str:
        """What a round's tree c adds to."""
        classes = self.dataset.classes
        if not classes:
            return self.dataset.target or "y"
        return classes[1 if len(classes) == 2 else c]

    def text(self) -> str:
        """The first trees, a line for each leaf."""
        T, C, _ = self.trees["feature"].shape
        begin = [f"{value + 0.0:+.4g} ({self._of(c)})" for c, value in enumerate(self._base)]
        lines = [f"{self.title}: {T * C} tree(s); scores start from {', '.join(begin)}"]
        for number in range(min(self.most, T * C)):
            leaves = self.leaves(number)
            lines.append(f"\ntree {number + 1}, for {leaves[0].of}:")
            lines += [f"  {leaf}" for leaf in leaves]
        if self.most < T * C:
            lines.append(f"\n… and {T * C - self.most} more; --most shows more")
        return "\n".join(lines)

    @property
    def _base(self) -> list[float]:
        base: Array = self.trees["base"]
        if not self.dataset.classes:
            base = self.dataset.target_scaling.undo(base)
        return base.tolist()

    def rows(self) -> list[dict[str, float | int | str | None]]:
        """The leaves of all trees."""
        T, C, _ = self.trees["feature"].shape
        return [
            {
                "tree": number + 1,
                "round": leaf.round,
                "of": leaf.of,
                "conditions": leaf.conditions,
                "value": leaf.value,
                "cover": leaf.cover,
            }
            for number in range(T * C)
            for leaf in self.leaves(number)
        ]

    def save(self, folder: Path) -> list[Path]:
        """No pictures."""
        return []
