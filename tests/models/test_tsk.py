"""Takagi-Sugeno-Kang rules: the published model, and what the formulas say."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from experiments import examples
from fedsim.data.dataset import feature_names
from fedsim.errors import DataError
from fedsim.models.rules import Rules, quality
from fedsim.models.tsk import FILES, Tsk, read_published, write_published
from fedsim.objectives import Regression

RNG = np.random.default_rng(0)  # nothing is drawn from it: the seed of the clusters is fixed
ROOT = Path(os.environ.get("FEDSIM_DATA", "/nowhere"), "openfl_xai")
real = pytest.mark.skipif(not ROOT.is_dir(), reason="OpenFL-XAI's files are not at hand")
# The order in which the published model's collaborators were added up.
PUBLISHED_ORDER = (0, 4, 3, 1, 2)
Table = tuple[NDArray[np.float64], NDArray[np.float64]]


def table(part: str, folder: str = "") -> Table:
    x, y = (np.load(ROOT / "data" / folder / f"{name}_{part}.npy") for name in "Xy")
    return x, y


@pytest.fixture(scope="module")
def bases() -> list[Rules]:
    """What each collaborator learns, in float64."""
    return [Tsk().train(*table("train", f"col{k}"), RNG) for k in range(5)]


@pytest.fixture(scope="module")
def sent(bases: list[Rules]) -> list[Rules]:
    """The same as it travels."""
    return [{name: a.astype(np.float32) for name, a in base.items()} for base in bases]


@pytest.fixture(scope="module")
def published() -> Rules:
    return read_published(ROOT / "global_models" / "tsk")


def score(model: Tsk, rules: Rules, data: Table) -> dict[str, float]:
    return Regression().scores_of(model.predict(rules, data[0]).values, data[1])


@real
class TestThePublishedModel:
    """Acceptance values of the published program; test_openfl_xai.py has those of a whole run."""

    def test_rules_merged_in_any_order(self, sent: list[Rules], published: Rules) -> None:
        for order in itertools.permutations(range(5)):
            merged, sources = Tsk().merge([sent[k] for k in order])
            np.testing.assert_array_equal(merged["antecedents"], published["antecedents"])
            # In how many of the five bases each of the 25 antecedents is.
            assert sources.tolist() == [
                *(5, 1, 1, 1, 1, 4, 1, 3, 1, 3, 2, 1, 1),
                *(5, 3, 4, 2, 1, 1, 4, 4, 3, 3, 1, 4),
            ]
            # One unit in the last place of a weight of 0.044 is 3.7e-9.
            for name, atol in (("weights", 4e-9), ("consequents", 1e-4)):
                np.testing.assert_allclose(merged[name], published[name], rtol=0, atol=atol)

    def test_in_the_published_order_bit_for_bit(self, sent: list[Rules], published: Rules) -> None:
        merged, _ = Tsk().merge([sent[k] for k in PUBLISHED_ORDER])
        assert merged["weights"].dtype == merged["consequents"].dtype == np.float32
        assert merged["weights"].tobytes() == published["weights"].tobytes()
        found, expected = merged["consequents"], published["consequents"]
        large = np.abs(expected) > 1e-10  # the others would be 0 but for rounding
        assert np.abs(found.astype(float) - expected)[~large].max() <= 1e-10
        # Another processor may round one of the least squares' sums otherwise.
        assert (found[large] != expected[large]).sum() <= 2

    def test_predictions(self, published: Rules) -> None:
        x, y = table("test")
        found = Tsk().predict(published, x)
        assert found.values[-1] == pytest.approx(0.42924082724972834, abs=1e-12)
        assert y[-1] == 0
        assert found.deciding[-1] + 1 == 17
        first = [0.36653574, 0.00933534, -0.02862657, 0.64220762, 0.89279271]
        np.testing.assert_allclose(found.values[:5], first, rtol=0, atol=6e-9)
        assert (found.deciding[:5] + 1).tolist() == [16, 1, 1, 25, 25]
        assert found.values.sum() == pytest.approx(157.33995653, abs=6e-9)
        assert (found.firing == 0).all(axis=1).sum() == 83
        assert (found.firing > 0).sum(axis=1).mean() == pytest.approx(3.409465, abs=6e-7)
        assert np.bincount(found.deciding).tolist() == [  # how often each rule wins
            *(199, 8, 3, 7, 1, 5, 13, 10, 5, 13, 4, 7, 6),
            *(28, 4, 29, 3, 5, 13, 27, 74, 2, 6, 3, 11),
        ]

    def test_scores(self, bases: list[Rules], published: Rules) -> None:
        found = score(Tsk(), published, table("test"))
        assert found["rmse"] == pytest.approx(0.332633, abs=6e-7)
        assert found["mae"] == pytest.approx(0.20622, abs=6e-6)
        winner, average = Tsk(), Tsk(inference="average")
        tests = [table("test", f"col{k}") for k in range(5)]
        everything = union_of(tests)
        training = union_of([table("train", f"col{k}") for k in range(5)])
        together = Tsk().train(*training, RNG)
        assert len(together["weights"]) == 13
        assert score(Tsk(), together, everything)["r2"] == pytest.approx(0.241757, abs=6e-7)
        for model, rules, data, mse, r2 in (
            (winner, published, table("test"), 0.110645, 0.394484),
            (winner, published, tests[0], 0.206113, -0.183113),
            (winner, published, tests[1], 0.182081, -0.225182),
            (winner, published, tests[2], 0.110645, 0.394484),
            (winner, published, tests[3], 0.158611, 0.134429),
            (winner, published, tests[4], 0.06841, 0.630841),
            (winner, published, everything, 0.145387, 0.210178),
            (average, published, table("test"), 0.109622, 0.400083),
            (average, published, everything, 0.142565, 0.225508),
            (winner, bases[0], tests[0], 0.210348, -0.207423),
            (winner, bases[1], tests[1], 0.159926, -0.076107),
            (winner, bases[2], tests[2], 0.117613, 0.356347),
            (winner, bases[3], tests[3], 0.176604, 0.036242),
            (winner, bases[4], tests[4], 0.085822, 0.536883),
        ):
            found = score(model, rules, data)
            assert (found["loss"], found["r2"]) == pytest.approx((mse, r2), abs=6e-7)


def union_of(parts: list[Table]) -> Table:
    x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
    return x, y


def rows_of(n: int = 60, features: int = 3, seed: int = 0) -> Table:
    rng = np.random.default_rng(seed)
    x = rng.random((n, features))
    return x, np.sin(3 * x[:, 0]) + x[:, -1] ** 2


def memberships(values: Any, terms: int) -> Any:
    """How well each value fits each fuzzy set, along a further axis."""
    return np.maximum(0, 1 - np.abs(np.asarray(values)[..., None] * (terms - 1) - range(terms)))


def firing(antecedents: Any, x: Any, terms: int) -> Any:
    """(n, R) the products of memberships."""
    found = memberships(x, terms)
    return np.stack([found[:, range(len(a)), a].prod(axis=1) for a in antecedents], axis=1)


def slow_training(model: Tsk, x: Any, y: Any) -> tuple[Any, Any, Any]:
    """The same rules, as the formulas have them; consequents by the pseudo-inverse."""
    n, z = len(x), np.column_stack([x, y])
    U, change = np.random.RandomState(0).rand(n, model.rules), math.inf
    while change >= 0.005:
        U = U / U.sum(axis=1, keepdims=True)
        centres = (U**2).T @ z / (U**2).sum(axis=0)[:, None]
        inverse = 1 / ((z[:, None] - centres) ** 2).sum(axis=2)
        before, U = U, inverse / inverse.sum(axis=1, keepdims=True)
        change = math.sqrt(((U - before) ** 2).sum())
    antecedents = np.unique(memberships(centres[:, :-1], model.terms).argmax(axis=2), axis=0)
    w = firing(antecedents, x, model.terms)
    design, consequents = np.column_stack([np.ones(n), x]), []
    for own in w.T:
        root = np.diag(np.sqrt(own))
        consequents.append(np.linalg.pinv(root @ design, rcond=1e-13) @ (root @ y))
    errors = np.abs(design @ np.array(consequents).T - y[:, None])
    good = (w * (1 - (errors - errors.min()) / (errors.max() - errors.min()))).sum(axis=0)
    support, confidence = good / n, good / w.sum(axis=0)
    weights = 2 * support * confidence / (support + confidence)
    return antecedents, np.array(consequents), weights


@pytest.mark.parametrize("terms", [2, 3, 5])
def test_training_is_as_written_out(terms: int) -> None:
    model, (x, y) = Tsk(rules=8, terms=terms), rows_of()
    antecedents, consequents, weights = slow_training(model, x, y)
    found = model.train(x, y, RNG)
    np.testing.assert_array_equal(found["antecedents"], antecedents)
    np.testing.assert_allclose(found["consequents"], consequents, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(found["weights"], weights, rtol=1e-9)


def test_order_zero_is_the_mean_of_what_fires() -> None:
    model, (x, y) = Tsk(rules=8, order=0), rows_of()
    rules = model.train(x, y, RNG)
    assert rules["consequents"].shape == (len(rules["weights"]), 1)
    w = model.firing(rules["antecedents"], x)
    for j, (constant,) in enumerate(rules["consequents"]):
        assert constant == pytest.approx(np.average(y, weights=w[:, j]))
    found = model.predict(rules, x)
    np.testing.assert_array_equal(found.values, rules["consequents"][found.deciding, 0])


@pytest.mark.parametrize("inference", ["winner", "average"])
def test_prediction_is_as_written_out(inference: Any) -> None:
    model, (x, y) = Tsk(rules=8, inference=inference), rows_of()
    rules = model.train(x, y, RNG)
    # A test set scaled by the training set's range has values outside of it, too.
    x = np.concatenate([x, [[-0.25, 0.3, 0.9], [1.25, 1.1, -0.2]]])
    w = firing(rules["antecedents"].astype(int), x, 3)
    outputs = np.column_stack([np.ones(len(x)), x]) @ rules["consequents"].T
    winner = [max(range(len(own)), key=lambda j: (own[j], rules["weights"][j])) for own in w]
    expected = outputs[range(len(x)), winner]
    if inference == "average":
        fires = w.sum(axis=1) > 0
        expected[fires] = np.average(outputs[fires], axis=1, weights=w[fires])
    np.testing.assert_allclose(model.predict(rules, x).values, expected, rtol=1e-6)


def base(antecedents: Any, weights: Any, consequents: Any = None) -> Rules:
    A = np.array(antecedents, dtype=np.float32)
    if consequents is None:
        consequents = np.arange(len(A) * (A.shape[1] + 1)).reshape(len(A), -1)
    return {
        "antecedents": A,
        "consequents": np.array(consequents, dtype=np.float32),
        "weights": np.array(weights, dtype=np.float32),
    }


def test_ties_go_to_the_greater_weight_then_to_the_first() -> None:
    middle = np.array([[0.25]])  # half LOW, half MEDIUM
    for weights, winner in (((0.1, 0.2), 1), ((0.2, 0.1), 0), ((0.2, 0.2), 0)):
        found = Tsk().predict(base([[0], [1]], weights), middle)
        assert found.firing.tolist() == [[0.5, 0.5]]
        assert found.deciding[0] == winner


@pytest.mark.parametrize("inference", ["winner", "average"])
def test_where_no_rule_fires_the_weightiest_decides(inference: Any) -> None:
    rules = base([[0], [1]], [0.1, 0.2], [[1, 0], [2, 0]])
    found = Tsk(inference=inference).predict(rules, np.array([[1.0], [7.0], [-3.0]]))
    assert not found.firing.any()
    assert found.deciding.tolist() == [1, 1, 1]
    assert found.values.tolist() == [2, 2, 2]


@st.composite
def some_bases(draw: st.DrawFn) -> list[Rules]:
    F = draw(st.integers(1, 3))
    found = []
    for _ in range(draw(st.integers(1, 5))):
        rows = draw(
            st.lists(st.tuples(*[st.integers(0, 2)] * F), min_size=1, max_size=6, unique=True)
        )
        values = st.floats(-10, 10, width=32)
        consequents = draw(arrays(np.float32, (len(rows), F + 1), elements=values))
        weights = draw(
            arrays(
                np.float32, len(rows), elements=st.floats(0, 1, width=32, allow_subnormal=False)
            )
        )
        found.append(base(rows, weights, consequents))
    return found


@given(bases=some_bases())
def test_merging_is_the_weighted_mean(bases: list[Rules]) -> None:
    merged, sources = Tsk().merge(bases)
    A, C, w = (np.concatenate([b[name] for b in bases]).astype(float) for name in FILES)
    rows, number = np.unique(A, axis=0, return_inverse=True)
    np.testing.assert_array_equal(merged["antecedents"], rows)
    for j, consequent in enumerate(merged["consequents"]):
        same = number.ravel() == j
        total, count = w[same].sum(), same.sum()
        assert sources[j] == count
        assert merged["weights"][j] == pytest.approx(total / count, rel=1e-5, abs=1e-6)
        if total > 1e-3:  # below, what is lost to rounding counts
            expected = np.average(C[same], axis=0, weights=w[same])
            np.testing.assert_allclose(consequent, expected, rtol=1e-4, atol=1e-4)


def test_disjoint_antecedents_are_juxtaposed_untouched() -> None:
    one = base([[0, 2], [1, 0]], [0.3, 0.1], [[0.1, 0.7, 0.3], [1, 2, 3]])
    other = base([[0, 0]], [0.7], [[0.3, 0.9, 1e-7]])
    merged, sources = Tsk().merge([one, other])
    assert sources.tolist() == [1, 1, 1]
    for name in FILES:
        expected = np.concatenate([other[name], one[name]])
        assert merged[name].tobytes() == expected.tobytes()


def test_rules_without_any_weight_are_merged_plainly() -> None:
    merged, _ = Tsk().merge([base([[0]], [0], [[1, 2]]), base([[0]], [0], [[3, 6]])])
    assert merged["consequents"].tolist() == [[2, 4]]
    assert merged["weights"].tolist() == [0]


def test_bases_of_different_features_are_refused() -> None:
    with pytest.raises(DataError, match="different features or consequents: 1 and 2, 2 and 3"):
        Tsk().merge([base([[0]], [1]), base([[0, 1]], [1])])


def test_one_example() -> None:
    """One rule, which goes through the example; it is all that there is to support it."""
    x, y = np.array([[0.2, 0.9]]), np.array([0.7])
    rules = Tsk().train(x, y, RNG)
    assert rules["antecedents"].tolist() == [[0, 2]]
    assert Tsk().predict(rules, x).values == pytest.approx([0.7])
    w = (1 - 0.2 / 0.5) * (1 - 0.1 / 0.5)  # support w, confidence 1
    assert rules["weights"] == pytest.approx([2 * w / (w + 1)])


def test_a_constant_column_costs_nothing() -> None:
    """Its coefficient is the smallest that will do, and predictions are those without it."""
    x, y = rows_of(80, features=2)
    with_constant = np.column_stack([x, np.full(len(x), 1.0)])
    plain, wide = Tsk(rules=6).train(x, y, RNG), Tsk(rules=6).train(with_constant, y, RNG)
    assert set(wide["antecedents"][:, 2]) == {2}
    np.testing.assert_allclose(
        Tsk().predict(wide, with_constant).values, Tsk().predict(plain, x).values, atol=1e-6
    )
    # The constant and the coefficient of a column of ones share what one would have alone.
    np.testing.assert_allclose(wide["consequents"][:, 0], wide["consequents"][:, 3], atol=1e-8)


def test_a_rule_that_never_fires_weighs_nothing() -> None:
    """A centre may lie where each feature's set is that of some example, but of none together."""
    x = np.array([[0.0, 0.5], [0.5, 0.0], [1.0, 1.0]] * 10)
    y = np.arange(30.0)
    model = Tsk()
    w = model.firing(np.array([[0, 0], [2, 2]]), x)
    assert not w[:, 0].any()
    consequents = model._fit(w, x, y)
    assert not consequents[0].any()
    assert not Tsk(order=0)._fit(w, x, y)[0].any()
    outputs = np.column_stack([np.ones(30), x]) @ consequents.T
    support, confidence = quality(w, outputs, y)
    assert support[0] == confidence[0] == 0 < support[1]


BAD: list[tuple[Any, Any, str]] = [
    (np.array([[-0.1]]), np.zeros(1), r"input 'x1' is -0.1 in example 0; .*data.scale=minmax"),
    (np.array([[0.1]]), np.array([np.nan]), r"the target is nan in example 0"),
    (np.empty((0, 2)), np.empty(0), r"without examples"),
    (np.zeros((2, 2, 2)), np.zeros(2), r"a table of inputs .* shapes \(2, 2, 2\) and \(2,\)"),
    (np.zeros((2, 2)), np.zeros(3), r"shapes \(2, 2\) and \(3,\)"),
]


@pytest.mark.parametrize(("x", "y", "message"), BAD)
def test_what_cannot_be_learnt_from_is_refused(x: Any, y: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Tsk().train(x, y, RNG)


def test_names_of_features() -> None:
    assert feature_names(3) == ("x1", "x2", "x3")
    assert feature_names(2, ["a", "b"]) == ("a", "b")
    with pytest.raises(DataError, match="2 names for 3 features"):
        feature_names(3, ["a", "b"])


@examples(25)
@given(
    n=st.integers(1, 40),
    F=st.integers(1, 4),
    order=st.sampled_from([0, 1]),
    seed=st.integers(0, 2**32),
)
def test_whatever_is_learnt_is_finite(n: int, F: int, order: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.random((n, F)).round(int(rng.integers(0, 3))), rng.random(n).round(1)
    model = Tsk(rules=12, order=order)
    rules = model.train(x, y, rng)
    assert all(np.isfinite(array).all() for array in rules.values())
    assert (rules["weights"] >= 0).all()
    assert (rules["weights"] <= 1 + 1e-12).all()
    assert np.isfinite(model.predict(rules, x).values).all()


def test_clusters_of_each_clients_own() -> None:
    x, y = rows_of(200)
    model = Tsk(seed=None)
    one, again, other = (model.train(x, y, np.random.default_rng(s))["weights"] for s in (1, 1, 2))
    assert one.tobytes() == again.tobytes() != other.tobytes()


def test_the_published_layout_and_back(tmp_path: Path) -> None:
    model, (x, y) = Tsk(rules=8), rows_of()
    rules = model.train(x, y, RNG)
    write_published(tmp_path / "tsk", rules)
    assert sorted(p.name for p in (tmp_path / "tsk").iterdir()) == sorted(FILES.values())
    found = read_published(tmp_path / "tsk")
    for name, array in found.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, rules[name].astype(np.float32))
    np.testing.assert_allclose(
        model.predict(found, x).values, model.predict(rules, x).values, atol=1e-3
    )


@real
def test_published_files_are_written_as_they_were(tmp_path: Path, published: Rules) -> None:
    write_published(tmp_path, published)
    for file in FILES.values():
        original = (ROOT / "global_models" / "tsk" / file).read_bytes()
        assert (tmp_path / file).read_bytes() == original


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("weights", np.zeros(3), r"antecedents \(2, 1\), consequents \(2, 2\) and weights \(3,\)"),
        ("consequents", np.zeros((2, 3)), r"do not fit together; they must be \(R, F\)"),
        ("weights", np.array([np.nan, 1]), "values that are not finite"),
        ("weights", np.array(["a", "b"]), "contains <U1, not numbers"),
        ("antecedents", np.array([[0.5], [1]]), "antecedents must be indices of three fuzzy sets"),
        ("antecedents", np.array([[-1], [1]]), "antecedents must be indices of three fuzzy sets"),
        ("antecedents", np.array([[3], [1]]), "antecedents must be indices of three fuzzy sets"),
    ],
)
def test_files_that_are_no_rule_base(tmp_path: Path, name: str, array: Any, message: str) -> None:
    write_published(tmp_path, base([[0], [1]], [0.5, 0.5]))
    np.save(tmp_path / FILES[name], array)
    with pytest.raises(DataError, match=message):
        read_published(tmp_path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"TSK_global_model_rules_antec.npy: cannot be read: "):
        read_published(tmp_path)
    (tmp_path / FILES["antecedents"]).write_bytes(b"no array")
    with pytest.raises(DataError, match=r"antec.npy: cannot be read: "):
        read_published(tmp_path)
