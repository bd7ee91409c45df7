"""Crisp rules from the leaves of regression trees: a second, simple kind of rules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedsim.data.dataset import feature_names
from fedsim.data.encoding import OfCategory
from fedsim.models.model import models
from fedsim.models.rules import (
    Array,
    Condition,
    Prediction,
    Rule,
    RuleModel,
    Rules,
    check_table,
    of_category,
)

# Bounds of unbounded sides: finite, so that they can be sent like others.
LEAST, GREATEST = np.finfo(np.float32).min, np.finfo(np.float32).max


@models.register
class TreeRules(RuleModel):
    """Crisp interval rules: the leaves of each client's regression tree (scikit-learn).

        IF x1 > 0.25 AND x3 ≤ 0.5 THEN y = 0.4

    A rule base consists of `low` and `high` (R, F), where a rule holds if low < x ≤ high in every
    feature; `values` (R,); and `weights` (R,), the number of examples in the leaf. An input is in
    one leaf of each client's tree; the prediction is the mean over these leaves, weighted by the
    weights.

    Args:
        rules: largest number of leaves of a tree.
        min_samples: smallest number of examples in a leaf.
    """

    name: str = "tree_rules"
    rules: int = Field(16, ge=2)
    min_samples: int = Field(5, ge=1)

    def train(self, x: Array, y: Array, rng: np.random.Generator) -> Rules:
        from sklearn.tree import DecisionTreeRegressor

        check_table(x, y, feature_names(x.shape[-1]))
        tree = DecisionTreeRegressor(
            max_leaf_nodes=self.rules,
            min_samples_leaf=self.min_samples,
            random_state=int(rng.integers(2**31)),
        )
        tree = tree.fit(x, y).tree_
        low = np.full((tree.node_count, x.shape[1]), LEAST, np.float64)
        high = np.full_like(low, GREATEST)
        for node in range(tree.node_count):  # parents come before their children
            left, right = tree.children_left[node], tree.children_right[node]
            if left != right:
                for child in (left, right):
                    low[child], high[child] = low[node], high[node]
                high[left, tree.feature[node]] = tree.threshold[node]
                low[right, tree.feature[node]] = tree.threshold[node]
        leaves = np.flatnonzero(tree.children_left == tree.children_right)
        return {
            "low": low[leaves],
            "high": high[leaves],
            "values": tree.value[leaves, 0, 0],
            "weights": tree.weighted_n_node_samples[leaves],
        }

    def merge(self, bases: Sequence[Rules]) -> tuple[Rules, NDArray[np.int64]]:
        """All clients' rules; rules with equal intervals are merged and their examples added."""
        low, high, values, weights = (
            np.concatenate([b[name] for b in bases]) for name in bases[0]
        )
        boxes, rule = np.unique(np.hstack([low, high]), axis=0, return_inverse=True)
        total, weighted = np.zeros((2, len(boxes)), weights.dtype)
        np.add.at(total, rule, weights)
        np.add.at(weighted, rule, weights * values)
        low, high = np.hsplit(boxes, 2)
        merged = {"low": low, "high": high, "values": weighted / total, "weights": total}
        return merged, np.bincount(rule)

    def predict(self, rules: Rules, x: Array) -> Prediction:
        holds = np.ones((len(x), len(rules["weights"])), dtype=np.bool_)
        for f in range(x.shape[1]):
            holds &= (rules["low"][:, f] < x[:, f, None]) & (x[:, f, None] <= rules["high"][:, f])
        w = holds * rules["weights"].astype(np.float64)
        outputs = np.repeat(rules["values"].astype(np.float64)[None], len(x), axis=0)
        total = w.sum(axis=1)
        values = (w * outputs).sum(axis=1) / total
        firing, shares = holds.astype(np.float64), w / total[:, None]
        return Prediction(values, w.argmax(axis=1), firing, outputs, shares)

    def explain(self, rules: Rules, names: Sequence[str]) -> list[Rule]:
        def conditions(low: Array, high: Array) -> tuple[Condition, ...]:
            found = []
            for f, name in enumerate(names):
                bounds = (float(low[f]), float(high[f]))
                below, above = bounds[0] > LEAST, bounds[1] < GREATEST
                if below and above:
                    words = f"{bounds[0]:.6g} < {name} ≤ {bounds[1]:.6g}"
                elif below or above:
                    words = f"{name} > {bounds[0]:.6g}" if below else f"{name} ≤ {bounds[1]:.6g}"
                else:
                    continue
                category = None
                if isinstance(name, OfCategory) and below != above:
                    words, category = of_category(name, bool(below))
                within = partial(_within, *bounds)
                ends = (bounds[0] if below else None, bounds[1] if above else None)
                found.append(Condition(f, words, words, within, category, ends))
            return tuple(found)

        return [
            Rule(
                conditions(low, high),
                np.concatenate([[value], np.zeros(len(names))]),
                float(weight),
            )
            for low, high, value, weight in zip(*rules.values(), strict=True)
        ]


def _within(low: float, high: float, values: Array) -> Array:
    return ((low < values) & (values <= high)).astype(np.float64)
