"""TreeSHAP against all subsets of features, and trees in words."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import shapley

from experiments import FEW, ran, with_method
from fedsim import Run
from fedsim.analysis.replay import ModelSnapshot
from fedsim.data import Dataset
from fedsim.data.dataset import Scaling
from fedsim.data.encoding import Feature
from fedsim.explain import ExplainedData
from fedsim.explain.explainers import explainers
from fedsim.explain.explainers.trees import LeavesInWords, tree_shap
from fedsim.explain.inputs import Inputs
from fedsim.explain.tree import Conditions
from fedsim.models.arrays import Arrays
from fedsim.models.boosted_trees import LEAF, BoostedTrees, raw_scores
from fedsim.testing import check_explainer

TWO: dict[str, Any] = {"name": "synthetic", "samples": 400, "shape": [6], "classes": 2}
MANY: dict[str, Any] = {**TWO, "classes": 3}
NUMBER: dict[str, Any] = {"name": "friedman", "samples": 200, "test_samples": 60, "features": 5}


def learnt(data: dict[str, Any], **sections: Any) -> Run:
    return ran(
        **with_method("hist_trees", data=data, train={"rounds": 6}, **sections),
        partition={"kind": "iid", "clients": 3},
    )


def expected(trees: Arrays, c: int, x: Any, known: set[int]) -> float:
    """The score of class c if some features are known, by recursion."""

    def visit(feature: Any, threshold: Any, value: Any, cover: Any, node: int) -> float:
        f, left, right = feature[node], 2 * node + 1, 2 * node + 2
        if f == LEAF:
            return float(value[node])
        of = [visit(feature, threshold, value, cover, child) for child in (left, right)]
        if f in known:
            return of[int(x[f] >= threshold[node])]
        return float((cover[left] * of[0] + cover[right] * of[1]) / cover[node])

    own = [trees[n][:, c] for n in ("feature", "threshold", "value", "cover")]
    return float(trees["base"][c]) + sum(visit(*tree, 0) for tree in zip(*own, strict=True))


@pytest.mark.parametrize("data", [TWO, MANY, NUMBER], ids=["two", "many", "number"])
class TestTreeShap:
    @pytest.fixture
    def found(self, data: dict[str, Any]) -> ModelSnapshot:
        pytest.importorskip("xgboost")
        return ModelSnapshot.of(learnt(data))

    def test_values_are_shapleys(self, found: ModelSnapshot) -> None:
        trees: Any = found.own
        x = np.asarray(found.dataset.test_x[:3], np.float32)
        phi, base = tree_shap(trees, x)
        C, n, F = phi.shape
        for c, i in np.ndindex(C, n):
            worth = cache(lambda known, c=c, i=i: expected(trees, c, x[i], {*known}))
            assert base[c] == pytest.approx(worth(()), abs=1e-5)
            np.testing.assert_allclose(phi[c, i], shapley(worth, F), atol=1e-4)

    def test_they_sum_to_the_output_less_the_expected_one(self, found: ModelSnapshot) -> None:
        trees: Any = found.own
        x = torch.as_tensor(np.asarray(found.dataset.test_x, np.float32))
        outputs = found.explained().as_network()(x).double().numpy()
        decided = outputs.argmax(axis=1)
        explainer: Any = explainers.parse({"name": "tree_shap"})
        maps = explainer.relevances(
            found.explained(), found.data(), x, torch.from_numpy(decided), np.random.default_rng(0)
        )
        assert maps.shape == x.shape
        _, base = tree_shap(trees, x.numpy())
        of_class = outputs[np.arange(len(x)), decided]
        if len(found.dataset.classes) == 2:
            base = np.stack([-base[0], base[0]]) / 2
        np.testing.assert_allclose(maps.sum(axis=1), of_class - base[decided], atol=1e-4)
        about = found.explained(), found.data(), x, torch.from_numpy(decided)
        end, start = explainer.endpoints(*about)
        np.testing.assert_allclose(end, of_class, atol=1e-5)
        np.testing.assert_allclose(start, base[decided], atol=1e-5)

    def test_keeps_the_contract(self, data: dict[str, Any]) -> None:
        for name in ("leaves", "tree_shap"):
            if name == "tree_shap":
                pytest.importorskip("xgboost")
            check_explainer(explainers.parse({"name": name}), learnt(data))


def test_noise_on_covers_changes_no_sum() -> None:
    """Children's covers do not add up to their parent's, of which some are below 0."""
    pytest.importorskip("xgboost")
    privacy = {"clip": 40.0, "noise_multiplier": 0.2}
    with_noise = with_method("hist_trees", data=TWO, train={"rounds": 6}, privacy=privacy)
    with_noise["method"]["range"] = [-4, 4]
    found = ModelSnapshot.of(ran(**with_noise, partition={"kind": "iid", "clients": 3}))
    trees: Any = {name: array.copy() for name, array in found.own.items()}  # type: ignore[union-attr]
    trees["cover"][1, 0] *= -1
    x = np.asarray(found.dataset.test_x[:5], np.float32)
    phi, base = tree_shap(trees, x)
    scores = raw_scores(trees, x)
    np.testing.assert_allclose(phi.sum(axis=2) + base[:, None], scores, atol=1e-4)
    # Expected scores are means of leaves, so between the least and the greatest of each tree.
    leaves = np.where(trees["feature"] == LEAF, trees["value"], 0)
    low, high = leaves.min(axis=2).sum(axis=0), leaves.max(axis=2).sum(axis=0)
    assert low < base - trees["base"] < high


def test_no_trees_no_shares() -> None:
    pytest.importorskip("xgboost")
    empty = BoostedTrees().empty(3, np.array([1.0, 2.0, 3.0]))
    phi, base = tree_shap(empty, np.zeros((2, 4), np.float32))
    assert not phi.any()
    assert phi.shape == (3, 2, 4)
    assert base.tolist() == [1, 2, 3]


def test_it_is_usual_and_explains_images_by_pixels() -> None:
    pytest.importorskip("xgboost")
    images = with_method("xgb_bagging", data=FEW, train={"rounds": 2})
    maps = ran(**images, explain={"inputs": 3, "maps": True}).maps
    assert set(maps["explainer"]) == {"tree_shap", "random"}
    assert np.stack(maps["relevance"].tolist()).reshape(-1, 8, 8).any()
    assert set(maps["model"]) == {"global", "cohort"}


# -- words


def ensemble() -> tuple[Arrays, Dataset]:
    """One tree of three leaves on a table whose columns are scaled."""
    model = BoostedTrees(depth=2)
    trees = {**model.empty(2), "base": np.array([-0.25])}
    for name in ("feature", "threshold", "value", "cover"):
        trees[name] = np.zeros((1, 1, 7), trees[name].dtype)
    trees["feature"][:] = LEAF
    trees["feature"][0, 0, [0, 1, 4]] = [0, 1, 0]
    trees["threshold"][0, 0, [0, 1, 4]] = [0.5, 0.25, 0.1]
    trees["value"][0, 0, [2, 3]] = [-0.4, 0.31]
    trees["feature"][0, 0, 4] = LEAF
    trees["value"][0, 0, 4] = 0.02
    trees["cover"][0, 0, :5] = [8, 5, 3, 4, 1]
    x = np.zeros((4, 2), np.float32)
    data = Dataset(
        *(x, np.array([0, 1, 0, 1]), x, np.array([0, 1, 0, 1]), ("well", "ill")),
        features=("age", "thal"),
        scaling=Scaling(np.array([29.0, 3.0]), np.array([48.0, 4.0])),
    )
    return trees, data


def test_leaves_are_told_in_the_units_of_the_files() -> None:
    trees, data = ensemble()
    found = LeavesInWords("the global model", trees, data, 3)
    assert found.text() == (
        "the global model: 1 tree(s); scores start from -0.25 (ill)\n"
        "\n"
        "tree 1, for ill:\n"
        "  age < 53 and thal < 4 → +0.31\n"
        "  age < 53 and thal ≥ 4 → +0.02\n"
        "  age ≥ 53 → -0.4"
    )
    assert [row["cover"] for row in found.rows()] == [4, 1, 3]


def test_conditions_on_columns_of_a_table() -> None:
    """Categories by their words, an entry each; dates as dates."""
    kinds = (
        Feature("age", unit="years"),
        Feature("thal", "one_hot", codes=("3", "7"), words=("normal", "reversible")),
        Feature("grade", "ordinal", codes=("a", "b", "c"), words=("low", "medium", "high")),
        Feature("day", "date", indicator=True),
    )
    x, y = np.zeros((4, 7), np.float32), np.array([0, 1, 0, 1])
    names = tuple(kind.name for kind in kinds)
    data = Dataset(x, y, x, y, ("well", "ill"), features=names, encoding=kinds)
    told = Conditions(data, "<", "≥").words
    assert told(0, 40.5, 54.5) == "40.5 years ≤ age < 54.5 years"
    assert told(2, 0.5, None) == "thal = reversible"
    assert told(1, None, 0.5) == "thal ≠ normal"
    assert told(4, 0.5, None) == "grade ≥ medium"
    assert told(4, None, 1.5) == "grade < high"
    assert told(5, None, 365.5) == "day < 1971-01-02"
    assert told(6, None, 0.5) == "day ≠ (blank)"
    told = Conditions(data).words
    assert told(4, 0.5, None) == "grade > low"
    assert told(4, None, 1.0) == "grade ≤ medium"
    assert told(5, None, 365.5) == "day ≤ 1971-01-01"


def test_entries_of_a_feature_are_added_up() -> None:
    pytest.importorskip("xgboost")
    model = ModelSnapshot.of(learnt(TWO))
    kinds = (
        *(Feature(name) for name in "abc"),
        Feature("d", "one_hot", codes=("0", "1"), words=("0", "1")),
    )
    data = replace(model.dataset, features=(*"abcd",), encoding=kinds)
    x, y = torch.from_numpy(model.dataset.test_x[:5]), torch.zeros(5, dtype=torch.int64)
    explainer: Any = explainers.parse({"name": "tree_shap"})
    rng = np.random.default_rng(0)
    alone, together = (
        explainer.relevances(model.explained(), about, x, y, rng)
        for about in (model.data(), ExplainedData(data, model.data().prepare))
    )
    np.testing.assert_allclose(together[:, :3], alone[:, :3])
    np.testing.assert_allclose(together[:, 3], alone[:, 3:].sum(axis=1), rtol=1e-5)


@pytest.mark.parametrize("data", [MANY, NUMBER, FEW])
def test_leaves_add_up_to_the_scores(data: dict[str, Any]) -> None:
    """Each example is in one leaf of each tree, which the words tell."""
    model = ModelSnapshot.of(learnt(data))
    explainer: Any = explainers.parse({"name": "leaves"})
    found = model.explain(explainer, Inputs.of_rows(model.dataset, []))
    trees: Any = model.own
    x = model.dataset.scaling.undo(np.asarray(model.dataset.test_x[:20], np.float64))
    x = x.reshape(20, -1)
    entries: Any = found._conditions._entries  # type: ignore[attr-defined]
    names = {name: f for f, (name, _) in enumerate(entries)}
    scores = np.repeat(trees["base"][:, None], 20, axis=1)
    span = 1 if model.dataset.classes else float(model.dataset.target_scaling.span)
    C = len(trees["base"])
    told = re.compile(r"(?:(\S+) ≤ )?(.+?)(?: < (\S+)| ≥ (\S+))?")
    for row in found.rows():
        holds = np.ones(20, np.bool_)
        for condition in filter(None, str(row["conditions"]).split(" and ")):
            low, name, high, least = told.fullmatch(condition).groups()  # type: ignore[union-attr]
            column = x[:, names[name]]
            holds &= (column >= float(low or least or -np.inf)) & (column < float(high or np.inf))
        scores[(int(row["tree"]) - 1) % C][holds] += float(row["value"]) / span  # type: ignore[arg-type]
    own = raw_scores(
        trees, np.asarray(model.data().prepare(model.dataset.test_x[:20])).reshape(20, -1)
    )
    # Thresholds are told in five digits, which may be on the other side of a value.
    assert np.isclose(scores, own, atol=1e-4).mean() > 0.9
