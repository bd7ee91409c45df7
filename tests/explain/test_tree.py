"""Trees that mimic a model: equal to a slow reference, readable, and drawn."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from fedsim.explain import tree as module
from fedsim.explain.pictures import trees as tree_figures
from fedsim.explain.pictures.canvas import save
from fedsim.explain.pictures.trees import draw_confusion, draw_tree
from fedsim.explain.tree import LEAF, Tree, build_tree, fidelity, pixel_names

NEIGHBOURS = [1.0, math.nextafter(1.0, 2), math.nextafter(math.nextafter(1.0, 2), 2)]
COLUMNS = st.sampled_from(
    [
        st.just(3.0),
        st.integers(0, 2).map(float),
        st.integers(-9, 9).map(float),
        st.floats(-1, 1),
        st.sampled_from(NEIGHBOURS),
        st.floats(allow_nan=False, allow_infinity=False),  # so great that sums overflow, or tiny
    ]
)


@st.composite
def tables(draw: st.DrawFn, most_rows: int = 25) -> tuple[Any, Any, int]:
    """x, y and the number of classes, not all of which need to be there."""
    n, classes = draw(st.integers(1, most_rows)), draw(st.integers(1, 4))
    kinds = draw(st.lists(COLUMNS, min_size=1, max_size=5))
    x = [draw(st.lists(kind, min_size=n, max_size=n)) for kind in kinds]
    if draw(st.booleans()):
        x.append(x[0])  # a feature that ties with another
    y = draw(st.lists(st.integers(0, classes - 1), min_size=n, max_size=n))
    return np.array(x).T, np.array(y), classes


# The reference: one cut at a time, and entropies as they are defined.


def bits(y: Any) -> float:
    counts = [k for k in np.bincount(y).tolist() if k]
    return -sum(k / len(y) * math.log2(k / len(y)) for k in counts)


def first_greatest(candidates: list[Any], measure: Any) -> Any:
    greatest = max(measure(c) for c in candidates)
    return next(c for c in candidates if measure(c) >= greatest - 1e-9)


def cut_of(f: int, x: Any, y: Any, least: int) -> Any:
    """(gain, ratio, feature, threshold) of the best gain; none if none is positive."""
    cuts = []
    for low, high in pairwise(np.unique(x[:, f]).tolist()):
        left = x[:, f] <= low
        if min(left.sum(), (~left).sum()) < least:
            continue
        gain = bits(y) - sum(side.mean() * bits(y[side]) for side in (left, ~left))
        middle = low / 2 + high / 2
        threshold = middle if low <= middle < high else low
        cuts.append((gain, gain / bits(left.astype(int)), f, threshold))
    best = first_greatest(cuts, lambda cut: cut[0]) if cuts else (0,)
    return best if best[0] > 1e-9 else None


def reference(x: Any, y: Any, classes: int, least: int) -> list[Any]:
    """(feature, threshold, counts) of each node, a node before its left and its right subtree."""
    counts = np.bincount(y, minlength=classes).tolist()
    cuts = [cut_of(f, x, y, least) for f in range(x.shape[1])] if max(counts) < len(y) else []
    cuts = [cut for cut in cuts if cut]
    if not cuts:
        return [(LEAF, 0.0, counts)]
    mean = sum(cut[0] for cut in cuts) / len(cuts)
    compared = [cut for cut in cuts if cut[0] >= mean - 1e-9]
    _, _, f, threshold = first_greatest(compared, lambda cut: cut[1])
    left = x[:, f] <= threshold
    below = [reference(x[side], y[side], classes, least) for side in (left, ~left)]
    return [(f, threshold, counts), *below[0], *below[1]]


def preorder(tree: Tree, node: int = 0) -> list[Any]:
    own = (int(tree.feature[node]), float(tree.threshold[node]), tree.counts[node].tolist())
    if tree.feature[node] == LEAF:
        assert tree.left[node] == tree.right[node] == LEAF
        return [own]
    left, right = int(tree.left[node]), int(tree.right[node])
    return [own, *preorder(tree, left), *preorder(tree, right)]


def same(one: Tree, other: Tree) -> bool:
    return all(array.tobytes() == vars(other)[name].tobytes() for name, array in vars(one).items())


def some(n: int = 300) -> tuple[Any, Any]:
    """Whole numbers from 0 to 7, and four classes that depend on some of them."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 8, (n, 6))
    return x, (x[:, 0] + (x[:, 1] > 4) * x[:, 2] + rng.integers(0, 2, n)) % 4


@given(table=tables(), least=st.integers(1, 3))
def test_equals_the_reference(table: tuple[Any, Any, int], least: int) -> None:
    x, y, classes = table
    tree = build_tree(x, y, classes, least)
    assert preorder(tree) == reference(x, y, classes, least)


def test_equals_the_reference_on_more_rows() -> None:
    x, y = some(150)
    tree = build_tree(x, y, 4)
    assert tree.depth > 4
    assert fidelity(tree, x, y) == (tree.predict(x) == y).mean()
    assert preorder(tree) == reference(x, y, 4, 2)


def test_nothing_gained_is_no_split() -> None:
    """Exclusive or, and shares that stay the same: gains are 0, or would be but for rounding."""
    x = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])
    assert build_tree(x, x.sum(axis=1) % 2, 2, 1).leaves == 1
    thirds = np.repeat([0, 1], [30, 60])[:, None]
    assert build_tree(thirds, np.arange(90) % 3, 3, 1).leaves == 1


def test_single_precision_falls_on_its_own_side() -> None:
    x = np.array([[np.float32(0.1)], [np.nextafter(np.float32(0.1), np.float32(1))]])
    assert x.dtype == np.float32
    tree = build_tree(x, np.array([0, 1]), 2, 1)
    assert tree.predict(x).tolist() == [0, 1]


@given(table=tables(), seed=st.integers(0, 2**31))
def test_the_order_of_the_rows_changes_nothing(table: tuple[Any, Any, int], seed: int) -> None:
    x, y, classes = table
    order = np.random.default_rng(seed).permutation(len(x))
    assert same(build_tree(x, y, classes), build_tree(x[order], y[order], classes))


def test_negative_zero_is_zero() -> None:
    x, y = np.array([[-0.0], [0.0], [5e-324]]), np.array([0, 0, 1])
    tree = build_tree(x, y, 2, 1)
    assert tree.leaves == 2
    assert same(tree, build_tree(x[[1, 0, 2]], y, 2, 1))


def test_features_looked_at_apart_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = some()
    together = build_tree(x, y, 4)
    monkeypatch.setattr(module, "_CELLS", 1)
    assert same(build_tree(x, y, 4), together)


def test_equally_frequent_classes() -> None:
    tree = build_tree(np.zeros((4, 1)), np.array([2, 1, 2, 1]), 3)
    assert tree.predict(np.ones((2, 1))).tolist() == [1, 1]
    assert tree.depth == 0


def test_names_of_pixels() -> None:
    assert pixel_names((1, 1, 2)) == ["pixel (0, 0)", "pixel (0, 1)"]
    assert pixel_names((3, 4, 5))[20 + 5 + 2] == "pixel (1, 2) of channel 1"


NAMES = ["T-shirt/top", "$5 or $6", "a class with a name that is far too long", "bag"]


def said(figure: Any) -> list[str]:
    """All texts of its axes, and its own."""
    return [text.get_text() for axes in figure.axes for text in axes.texts] + [
        text.get_text() for text in figure.texts
    ]


@pytest.mark.filterwarnings("error")
def test_the_drawn_tree_says_what_is_left_out() -> None:
    x, y = some(60)
    tree = build_tree(x, y, 4)
    texts = said(draw_tree(tree, NAMES, most_levels=3))
    assert f"feature {tree.feature[0]} ≤ {tree.threshold[0]:.4g}?" in texts
    assert "60 rows" in texts
    assert tree.depth > 3
    shown = sum(text.endswith(" rows") for text in texts)
    more = sum(int(text.split()[1]) for text in texts if text.startswith("…"))
    assert shown + more == len(tree.feature)
    assert f"Nodes left out here: {more}" in texts[-1]

    whole = said(draw_tree(tree, NAMES, most_levels=tree.depth + 1))
    assert sum(text.endswith(" rows") for text in whole) == len(tree.feature)
    assert not any(text.startswith("…") for text in whole)


def test_rows_tested_at_each_pixel() -> None:
    """Of two channels, summed."""
    x = np.zeros((8, 2 * 2 * 3), int)
    x[4:, 1] = 1
    x[[5, 7], 6 + 1] = 1
    x[[0, 1], 5] = 1
    y = np.array([0, 0, 1, 1, 2, 3, 2, 3])
    tree = build_tree(x, y, 4, 1)
    assert sorted(tree.feature[tree.feature != LEAF]) == [1, 5, 7]
    assert tree_figures._asked(tree, (2, 2, 3)).tolist() == [[0, 12, 0], [0, 0, 4]]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", [None, (1, 2, 3), (3, 2, 1)])
def test_pictures_of_trees(tmp_path: Path, shape: tuple[int, int, int] | None) -> None:
    x, y = some()
    tree = build_tree(x, y, 4)
    sizes = []
    for levels in (1, 3):
        save(draw_tree(tree, NAMES, shape=shape, most_levels=levels), tmp_path / "tree.png")
        picture = imread(tmp_path / "tree.png")
        assert picture.std() > 0.05
        sizes.append(picture.size)
    assert sizes[0] < sizes[1]


@pytest.mark.filterwarnings("error")
def test_pictures_of_a_leaf_and_of_many_classes(tmp_path: Path) -> None:
    x, y = some()
    save(draw_tree(build_tree(x, y * 0, 1), NAMES[:1], shape=(1, 2, 3)), tmp_path / "leaf.png")
    save(draw_tree(build_tree(x, y, 60), [str(c) for c in range(60)]), tmp_path / "many.png")
    assert imread(tmp_path / "leaf.png").size < imread(tmp_path / "many.png").size


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("classes", [1, 4, 60])
def test_pictures_of_confusion(tmp_path: Path, classes: int) -> None:
    names = [NAMES[c % 4] for c in range(classes)]
    matrix = np.arange(classes**2).reshape(classes, classes) + 1
    figure = draw_confusion(matrix, names)
    cells = [f"{count:,}" for count in matrix.ravel()]
    assert said(figure) == (cells if classes <= 40 else [])
    same, total = int(np.trace(matrix)), int(matrix.sum())
    assert figure.axes[0].get_title(loc="left").startswith(f"they agree on {same:,} of {total:,}")
    save(figure, tmp_path / "confusion.png")
    assert imread(tmp_path / "confusion.png").std() > 0.05
