"""Trees from sums, against XGBoost on the same bins."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from experiments import examples
from fedsim.models.arrays import Arrays
from fedsim.models.bins import count_keys, encode, even_cuts, find_cuts, keys_of, values_of
from fedsim.models.boosted_trees import (
    LEAF,
    TREES,
    BoostedTrees,
    Gradients,
    appended,
    histograms,
    leaf_of,
    places,
    raw_scores,
)

Array = NDArray[Any]
finite = st.floats(-(2.0**100), 2.0**100, width=32)


def cuts_of(x: Array, bins: int) -> Arrays:
    return find_cuts(partial(count_keys, x), x.shape[1], bins)


def summed(tree: Arrays, nodes: Any, codes: Array, cuts: Arrays, g: Array, h: Array) -> Array:
    return histograms(places(leaf_of(tree, codes.T), nodes), len(nodes), codes, cuts, g, h)


def some(seed: int, n: int = 60, features: int = 3) -> tuple[Array, NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    x = np.round(rng.normal(size=(n, features)), 1).astype(np.float32)
    return x, (x[:, 0] * x[:, 1] + rng.normal(0, 0.2, n) > 0).astype(np.int64)


@examples(50)
@given(hnp.arrays(np.float32, 20, elements=finite))
def test_keys_are_in_the_order_of_floats(x: Array) -> None:
    keys = keys_of(x)
    np.testing.assert_array_equal(np.sign(keys[:, None] - keys), np.sign(x[:, None] - x))
    np.testing.assert_array_equal(values_of(keys), x)


@examples(50)
@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 80), st.just(2)), elements=finite), st.data()
)
def test_bins_are_quantiles_and_the_same_for_any_division(x: Array, data: Any) -> None:
    bins = data.draw(st.integers(2, 9))
    parts = np.array_split(x, data.draw(st.integers(1, 4)))
    cuts = cuts_of(x, bins)
    divided = find_cuts(lambda *asked: sum(count_keys(p, *asked) for p in parts), 2, bins)  # type: ignore[return-value,arg-type]
    for name, array in cuts.items():
        np.testing.assert_array_equal(array, divided[name])
    codes = encode(x, cuts)
    for f, column in enumerate(x.T):
        edges = cuts["edges"][cuts["starts"][f] - f : cuts["starts"][f + 1] - f - 1]
        assert len(edges) < bins
        assert (np.diff(edges) > 0).all()
        np.testing.assert_array_equal(codes[f], (column[:, None] >= edges).sum(axis=1))
        assert (cuts["low"][f], cuts["high"][f]) == (column.min(), column.max())
        held = np.bincount(codes[f])
        # At most the bin itself, a quarter, and what cannot be divided.
        _, equal = np.unique(column, return_counts=True)
        assert held.max() <= max(equal.max(), 1) + 1.25 * len(x) / bins + 1


def test_cuts_of_few_whole_numbers_are_half_way_between() -> None:
    x = np.repeat(np.float32([[-0.0], [0.0], [1], [2], [7]]), 9, axis=0)
    cuts = cuts_of(x, 8)
    assert cuts["edges"].tolist() == [0.5, 1.5, 4.5]
    assert (cuts["low"].item(), cuts["high"].item()) == (0, 7)
    assert even_cuts(0, 1, 2, 4)["edges"].tolist() == [0.25, 0.5, 0.75] * 2
    neighbours = np.float32([[1.0], [np.nextafter(np.float32(1), np.float32(2))]])
    assert encode(neighbours, cuts_of(neighbours, 2)).tolist() == [[0, 1]]


def grown_by_hand(
    model: BoostedTrees, x: Array, cuts: Arrays, g: Array, h: Array
) -> dict[int, tuple[int, float, float]]:
    """A tree by loops over examples: feature, threshold and value of each node."""
    found: dict[int, tuple[int, float, float]] = {}

    def visit(node: int, rows: Array, depth: int) -> None:
        G, H = g[rows].sum(), h[rows].sum()
        best: tuple[float, int, float] = (0.0, LEAF, 0.0)
        for f in range(x.shape[1]) if depth < model.depth else ():
            for edge in cuts["edges"][cuts["starts"][f] - f : cuts["starts"][f + 1] - f - 1]:
                left = rows & (x[:, f] < edge)
                right = rows & ~left
                gain = -model.gamma
                for part, sign in ((left, 1), (right, 1), (rows, -1)):
                    if h[part].sum() + model.lam > 0:
                        gain += sign * g[part].sum() ** 2 / (h[part].sum() + model.lam)
                least = min(h[left].sum(), h[right].sum())
                if least >= model.min_child_weight and least > 0 and gain > best[0] + 1e-12:
                    best = gain, f, float(edge)
        found[node] = best[1], best[2], -model.eta * G / (H + model.lam)
        if best[1] != LEAF:
            left = rows & (x[:, best[1]] < best[2])
            visit(2 * node + 1, left, depth + 1)
            visit(2 * node + 2, rows & ~left, depth + 1)

    visit(0, np.ones(len(x), np.bool_), 0)
    return found


@examples(10)
@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.sampled_from([{}, {"gamma": 0.5}, {"lam": 0.3}, {"min_child_weight": 4.0}]),
    st.sampled_from([0, 2, 3]),
)
def test_a_tree_is_that_of_loops_over_examples(
    seed: int, depth: int, settings: dict[str, float], classes: int
) -> None:
    model = BoostedTrees(depth=depth, bins=6, **settings)  # type: ignore[arg-type]
    x, y = some(seed)
    y = y + (x[:, 2] > 1) if classes == 3 else y
    cuts = cuts_of(x, model.bins)
    f = np.random.default_rng(seed).normal(size=(classes if classes > 2 else 1, len(x)))
    of = Gradients(y, classes)
    g, h = of(f)
    tree = model.boost(g, h, encode(x, cuts), cuts)
    for c in range(len(f)):
        feature, threshold, value = (tree[n][0, c] for n in ("feature", "threshold", "value"))
        for node, (own, edge, w) in grown_by_hand(model, x, cuts, g[c], h[c]).items():
            assert (feature[node], threshold[node]) == (own, np.float32(edge)), node
            assert value[node] == pytest.approx(w, rel=1e-5, abs=1e-7)
        leaves = leaf_of(tree, x)[c]
        assert (feature[leaves] == LEAF).all()
        np.testing.assert_allclose(
            tree["cover"][0, c][np.unique(leaves)],
            [h[c][leaves == leaf].sum() for leaf in np.unique(leaves)],
            rtol=1e-5,
        )


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_other_answers_are_asked_again_and_give_the_same_tree(classes: int) -> None:
    """Where subtraction does not hold, as others have answered."""
    model, (x, y) = BoostedTrees(depth=4, bins=8), some(0)
    cuts = cuts_of(x, model.bins)
    codes, C = encode(x, cuts), 3 if classes == 3 else 1
    g, h = Gradients(y, classes)(np.zeros((C, len(x))))
    calls = []

    def ask(changes: bool, tree: Arrays, nodes: Any) -> tuple[Array, Any]:
        calls.append(len(nodes))
        who = frozenset([len(calls) if changes else 0])
        return summed(tree, nodes, codes, cuts, g, h), who

    once = model.grow(partial(ask, False), cuts, C)
    few = sum(calls)
    calls.clear()
    again = model.grow(partial(ask, True), cuts, C)
    assert few < sum(calls)
    for name, array in once.items():
        np.testing.assert_array_equal(array, again[name])


def test_gradients_are_those_of_the_losses() -> None:
    rng, d, w = np.random.default_rng(0), 1e-4, np.array([2.0, 1, 3, 0.5, 4])
    for classes in (0, 2, 3):
        C = 3 if classes == 3 else 1
        f, y = rng.normal(size=(C, 5)), rng.integers(0, max(classes, 2), 5)

        def loss(f: Array, classes: int = classes, y: Array = y) -> Array:
            if not classes:
                return (f[0] - y) ** 2 / 2
            logits = np.stack([np.zeros(5), f[0]]) if classes == 2 else f
            return np.log(np.exp(logits).sum(axis=0)) - logits[y, np.arange(5)]

        g, h = Gradients(y, classes, w)(f)
        for c in range(C):
            e = d * (np.arange(C) == c)[:, None]
            up, down = w * loss(f + e), w * loss(f - e)
            np.testing.assert_allclose(g[c], (up - down) / (2 * d), atol=1e-6)
            second = (up + down - 2 * w * loss(f)) / d**2 * (2 if classes == 3 else 1)
            np.testing.assert_allclose(h[c], second, atol=1e-4)


def test_scores_are_continued() -> None:
    (x, y), model = some(1, 300), BoostedTrees(depth=3)
    cuts, of, trees = cuts_of(x, model.bins), Gradients(y, 2), model.empty(2)
    for _ in range(5):
        trees = appended(trees, model.boost(*of(raw_scores(trees, x)), encode(x, cuts), cuts))
    first = {n: a[:2] if a.ndim == 3 else a for n, a in trees.items()}
    whole = raw_scores(trees, x)
    np.testing.assert_array_equal(raw_scores(trees, x, raw_scores(first, x), 2), whole)
    np.testing.assert_array_equal(raw_scores(trees, x[7:8]), whole[:, 7:8])
    outputs = BoostedTrees().outputs(trees, x)
    np.testing.assert_allclose(outputs[:, 1] - outputs[:, 0], whole[0])
    np.testing.assert_array_equal(raw_scores(BoostedTrees().empty(2), x), 0 * whole)


@pytest.mark.parametrize(
    "settings", [{}, {"gamma": 3.0}, {"lam": 0.3, "eta": 0.1}, {"min_child_weight": 9.0}]
)
@pytest.mark.parametrize("classes", [0, 2, 3])
def test_a_tree_is_xgboosts_on_the_same_bins(classes: int, settings: dict[str, float]) -> None:
    xgboost: Any = pytest.importorskip("xgboost")
    rng = np.random.default_rng(classes)
    x = rng.normal(size=(600, 5)).astype(np.float32)
    y = x[:, 0] * x[:, 1] + x[:, 2] + rng.normal(0, 0.5, 600)
    y = np.digitize(y, np.arange(1, classes) - classes / 2) if classes else y
    model = BoostedTrees(depth=5, bins=16, **settings)  # type: ignore[arg-type]
    cuts = cuts_of(x, model.bins)
    codes, f = encode(x, cuts), np.zeros((3 if classes == 3 else 1, 600))
    g, h = Gradients(y, classes)(f)
    tree = model.boost(g, h, codes, cuts)
    objective = {0: "reg:squarederror", 2: "binary:logistic", 3: "multi:softprob"}[classes]
    booster = xgboost.train(
        {
            **{"objective": objective, "tree_method": "hist", "max_bin": 256, "nthread": 1},
            **({"num_class": 3} if classes == 3 else {}),
            **{"max_depth": model.depth, "eta": model.eta, "lambda": model.lam},
            **{"gamma": model.gamma, "min_child_weight": model.min_child_weight},
            "base_score": 0.5 if classes else 0,
        },
        xgboost.DMatrix(codes.T.astype(np.float32), y),
        1,
    )
    splits = 0
    for c, dump in enumerate(booster.get_dump(dump_format="json", with_stats=True)):
        feature, threshold, value, cover = (tree[name][0, c] for name in TREES)
        held = np.bincount(leaf_of(tree, x)[c], h[c], minlength=len(cover))
        np.testing.assert_allclose(held, np.where(feature == LEAF, cover, 0), rtol=1e-5)
        nodes = [(0, json.loads(dump))]
        for node, theirs in nodes:
            assert cover[node] == pytest.approx(theirs["cover"], rel=1e-4)
            if "leaf" in theirs:
                assert feature[node] == LEAF
                assert value[node] == pytest.approx(theirs["leaf"], rel=1e-3, abs=1e-6)
                continue
            own = int(feature[node])
            assert f"f{own}" == theirs["split"]
            edges = cuts["edges"][cuts["starts"][own] - own :]
            assert threshold[node] == edges[int(theirs["split_condition"]) - 1]
            nodes += zip((2 * node + 1, 2 * node + 2), theirs["children"], strict=True)
            splits += 1
    assert splits > 3
