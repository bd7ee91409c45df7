"""Rule models: what all of them must be, and crisp rules from trees."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import examples
from fedsim.data.dataset import Scaling
from fedsim.errors import DataError
from fedsim.explain.explainers.rules import (
    global_explanation,
    in_words,
    local_explanation,
    measures,
    scale_in_words,
)
from fedsim.models import RuleModel, models
from fedsim.models.rules import Condition, Rule, Rules, quality
from fedsim.models.tree_rules import TreeRules
from fedsim.models.tsk import Tsk

NAMES = [name for name, model in models.items() if issubclass(model, RuleModel)]
VARIANTS: list[dict[str, Any]] = [
    *({"name": name} for name in NAMES),
    {"name": "tsk", "order": 0, "terms": 5},
    {"name": "tsk", "inference": "average", "seed": None},
]
FEATURES = ("age", "height", "weight")
RNG = np.random.default_rng(0)


def rows_of(n: int = 80, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.random((n, len(FEATURES)))
    return x, x[:, 0] ** 2 - 0.3 * x[:, 2]


@pytest.fixture(params=VARIANTS, ids=lambda v: "-".join(map(str, v.values())), scope="module")
def model(request: pytest.FixtureRequest) -> RuleModel:
    found = models.parse(request.param)
    assert isinstance(found, RuleModel)
    return found


@pytest.fixture(scope="module")
def bases(model: RuleModel) -> list[Rules]:
    """What four clients learn."""
    return [train(model, seed) for seed in range(4)]


def train(model: RuleModel, seed: int = 0, n: int = 80) -> Rules:
    return model.train(*rows_of(n, seed), np.random.default_rng(seed))


def sent(rules: Rules) -> Rules:
    """As they travel; they cannot be changed."""
    found = {name: array.astype(np.float32) for name, array in rules.items()}
    for array in found.values():
        array.flags.writeable = False
    return found


class TestEveryRuleModel:
    def test_learns(self, model: RuleModel) -> None:
        x, y = rows_of(400)
        x.flags.writeable = y.flags.writeable = False
        rules = model.train(x, y, np.random.default_rng(0))
        errors = model.predict(rules, x).values - y
        assert np.mean(errors**2) < 0.3 * np.var(y)

    def test_rules_are_the_same_again_and_can_be_sent(
        self, model: RuleModel, bases: list[Rules]
    ) -> None:
        rules, again = bases[0], train(model)
        R = len(rules["weights"])
        assert R >= 1
        for name, array in rules.items():
            assert array.tobytes() == again[name].tobytes()
            assert len(array) == R
            assert np.isfinite(array.astype(np.float32)).all()
        assert pickle.loads(pickle.dumps(model)) == model

    def test_each_example_is_predicted_by_itself(
        self, model: RuleModel, bases: list[Rules]
    ) -> None:
        rules, R = bases[0], len(bases[0]["weights"])
        x = np.concatenate([rows_of(20)[0], [[-5.0, 0.5, 9.0], [1.1, -0.1, 0.5]]])
        found = model.predict(rules, x)
        assert np.isfinite(found.values).all()  # also outside of the range
        assert found.values.shape == found.deciding.shape == (22,)
        assert found.firing.shape == found.outputs.shape == (22, R)
        assert ((found.firing >= 0) & (found.firing <= 1)).all()
        assert ((found.deciding >= 0) & (found.deciding < R)).all()
        for array in (found.values, found.firing, found.outputs):
            assert array.dtype == np.float64
        alone = [model.predict(rules, row[None]).values[0] for row in x]
        np.testing.assert_allclose(found.values, alone, rtol=1e-12)

    def test_merging_one_base_leaves_its_predictions(
        self, model: RuleModel, bases: list[Rules]
    ) -> None:
        """Sent by one client, or by two."""
        x, _ = rows_of(50)
        for base, times in ((bases[0], 1), (sent(bases[0]), 2)):
            merged, sources = model.merge([base] * times)
            assert sources.tolist() == [times] * len(base["weights"])
            np.testing.assert_allclose(
                model.predict(merged, x).values,
                model.predict(base, x).values,
                rtol=1e-9,
                atol=1e-12 if times == 1 else 1e-4,
            )

    def test_merging_in_another_order_is_the_same_but_for_rounding(
        self, model: RuleModel, bases: list[Rules]
    ) -> None:
        travelled = [sent(base) for base in bases]
        one, sources = model.merge(travelled)
        other, again = model.merge(travelled[::-1])
        np.testing.assert_array_equal(sources, again)
        for name in one:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=1e-4)
        # Every base is counted once for each of its rules.
        assert sources.sum() == sum(len(base["weights"]) for base in bases)
        assert sources.max() <= len(bases)

    def test_what_is_explained_is_what_is_computed(
        self, model: RuleModel, bases: list[Rules]
    ) -> None:
        rules, x = bases[0], rows_of(30)[0]
        found = model.predict(rules, x)
        explained = model.explain(rules, FEATURES)
        assert len(explained) == len(rules["weights"])
        for j, rule in enumerate(explained):
            held = [c.membership(x[:, c.feature]) for c in rule.conditions]
            np.testing.assert_allclose(np.prod(held, axis=0), found.firing[:, j], atol=1e-12)
            output = rule.consequent[0] + x @ rule.consequent[1:]
            np.testing.assert_allclose(output, found.outputs[:, j], atol=1e-9)
            assert rule.weight == rules["weights"][j]
            for condition in rule.conditions:
                assert FEATURES[condition.feature] in condition.words

    def test_few_or_equal_examples(self, model: RuleModel) -> None:
        for n in (1, 2, 3):
            rules = train(model, n=n)
            assert all(np.isfinite(array).all() for array in rules.values())
            assert np.isfinite(model.predict(rules, rows_of(9)[0]).values).all()
        x, y = np.full((12, 3), 0.25), np.full(12, 0.6)
        rules = model.train(x, y, np.random.default_rng(0))
        assert model.predict(rules, x).values == pytest.approx(y)

    @pytest.mark.parametrize("value", [np.nan, np.inf, 1.01, -0.01])
    def test_refuses_what_is_no_input(self, model: RuleModel, value: float) -> None:
        x, y = rows_of(5)
        x[3, 1] = value
        with pytest.raises(DataError, match=r"^input 'x2' is \S+ in example 3"):
            model.train(x, y, np.random.default_rng(0))


@examples(20)
@given(seed=st.integers(0, 1000), rules=st.integers(2, 20), n=st.integers(1, 60))
def test_the_rules_of_a_tree_are_the_tree(seed: int, rules: int, n: int) -> None:
    from sklearn.tree import DecisionTreeRegressor

    x, y = rows_of(n, seed)
    model = TreeRules(rules=rules, min_samples=2)
    base = model.train(x, y, np.random.default_rng(seed))
    tree = DecisionTreeRegressor(
        max_leaf_nodes=rules,
        min_samples_leaf=2,
        random_state=int(np.random.default_rng(seed).integers(2**31)),
    ).fit(x, y)
    x, _ = rows_of(200, seed + 1)
    found = model.predict(base, x)
    np.testing.assert_allclose(found.values, tree.predict(x))
    assert (found.firing.sum(axis=1) == 1).all()
    assert base["weights"].sum() == n


def test_trees_together_are_their_mean_by_leaf_size() -> None:
    model = TreeRules(rules=4)
    bases = [train(model, seed) for seed in range(3)]
    merged, sources = model.merge(bases)
    assert (sources == 1).all()
    x, _ = rows_of(50)
    inside = [
        ((base["low"] < x[:, None]) & (x[:, None] <= base["high"])).all(axis=2) for base in bases
    ]
    values, weights = (
        [own @ base[name] for own, base in zip(inside, bases, strict=True)]
        for name in ("values", "weights")
    )
    expected = np.average(values, axis=0, weights=weights)
    np.testing.assert_allclose(model.predict(merged, x).values, expected)


def test_equal_leaves_become_one() -> None:
    everything = {"low": np.full((1, 2), -9.0), "high": np.full((1, 2), 9.0)}
    one = {**everything, "values": np.array([1.0]), "weights": np.array([30.0])}
    other = {**everything, "values": np.array([4.0]), "weights": np.array([10.0])}
    merged, sources = TreeRules().merge([one, other])
    assert sources.tolist() == [2]
    assert merged["values"].tolist() == [1.75]
    assert merged["weights"].tolist() == [40]


def test_a_leaf_in_words() -> None:
    x = np.linspace(0, 1, 40)[:, None]
    rules = TreeRules(rules=3).train(x, (x[:, 0] > 0.5) + 2.0 * (x[:, 0] > 0.8), RNG)
    words = sorted(in_words(rule, ["dose"]) for rule in TreeRules().explain(rules, ["dose"]))
    assert words == [
        "IF 0.5 < dose ≤ 0.807692 THEN y = 1",
        "IF dose > 0.807692 THEN y = 3",
        "IF dose ≤ 0.5 THEN y = 0",
    ]


def hand_made() -> tuple[Tsk, Rules]:
    """IF a is LOW AND b is HIGH THEN y = 0.5 + 2a; IF a is HIGH AND b is MEDIUM THEN y = 1 - b."""
    return Tsk(), {
        "antecedents": np.array([[0, 2], [2, 1]]),
        "consequents": np.array([[0.5, 2.0, 1e-17], [1.0, 0.0, -1.0]]),
        "weights": np.array([0.2, 0.3]),
    }


def test_a_rule_in_words() -> None:
    model, rules = hand_made()
    one, other = (in_words(rule, ["a", "b"], "rate") for rule in model.explain(rules, ["a", "b"]))
    assert one == "IF a is LOW AND b is HIGH THEN rate = 0.5 + 2·a"  # 1e-17 is rounding
    assert other == "IF a is HIGH AND b is MEDIUM THEN rate = 1 - 1·b"


@pytest.mark.parametrize(
    "words",
    [
        ["LOW", "HIGH"],
        ["LOW", "MEDIUM", "HIGH"],
        ["VERY LOW", "LOW", "HIGH", "VERY HIGH"],
        ["VERY LOW", "LOW", "MEDIUM", "HIGH", "VERY HIGH"],
        [f"SET {s}" for s in range(1, 7)],
    ],
)
def test_words_for_fuzzy_sets(words: list[str]) -> None:
    T = len(words)
    rules = {"antecedents": np.arange(T)[:, None], "consequents": np.zeros((T, 1))}
    found = Tsk(terms=T).explain({**rules, "weights": np.ones(T)}, ["a"])
    assert [rule.conditions[0].words for rule in found] == [f"a is {word}" for word in words]


def test_a_local_explanation_adds_up() -> None:
    model, rules = hand_made()
    why = local_explanation(model, rules, np.array([0.2, 0.9]), ["a", "b"])
    assert (why.number, why.active) == (1, 1)
    assert why.memberships == pytest.approx([0.6, 0.8])
    assert why.firing == pytest.approx(0.48)
    assert why.contributions == pytest.approx([0.5, 0.4, 0])
    assert why.contributions.sum() == pytest.approx(why.output) == pytest.approx(why.prediction)
    text = why.in_words(["a", "b"], "rate")
    assert text.splitlines() == [
        "rate = 0.9, by rule 1: it fires with strength 0.48",
        "  its conditions, of inputs in [0, 1], and how well they hold:",
        "    a is LOW   0.600   a = 0.2",
        "    b is HIGH  0.800   b = 0.9",
        "  its output, 0.9, is the sum of:",
        "          +0.5   constant",
        "          +0.4   2 × a (0.2)",
    ]


def test_a_local_explanation_in_the_target_s_own_units() -> None:
    model, rules = hand_made()
    for x in ([0.2, 0.9], [0.9, 0.5]):
        plain = local_explanation(model, rules, np.array(x), ["a", "b"])
        why = local_explanation(model, rules, np.array(x), ["a", "b"], Scaling(70.0, 20.0))
        assert why.prediction == pytest.approx(70 + 20 * plain.prediction)
        assert (
            why.contributions.sum() == pytest.approx(why.output) == pytest.approx(why.prediction)
        )
        assert why.contributions[1:] == pytest.approx(20 * plain.contributions[1:])
    assert scale_in_words("y", Scaling(70.0, 20.0)) == (
        "in the rules y is scaled, 0 for 70 and 1 for 90"
    )
    assert scale_in_words("y", Scaling()) == ""


def test_a_local_explanation_where_no_rule_fires() -> None:
    model, rules = hand_made()
    why = local_explanation(model, rules, np.array([0.2, 0.1]), ["a", "b"])
    assert (why.number, why.firing, why.active) == (2, 0, 0)
    assert why.in_words(["a", "b"]).startswith(
        "y = 0.9, by rule 2: no rule fires, so the rule with the greatest weight decides\n"
    )


def test_a_local_explanation_of_an_average() -> None:
    _, rules = hand_made()
    rules["antecedents"][1] = [1, 1]
    x = np.array([0.2, 0.8])  # fires 0.6·0.6 and 0.4·0.4
    why = local_explanation(Tsk(inference="average"), rules, x, ["a", "b"])
    assert why.active == 2
    assert why.prediction == pytest.approx((0.36 * 0.9 + 0.16 * 0.2) / 0.52)
    text = why.in_words(["a", "b"])
    assert "it fires with strength 0.36, 1 other(s) also fire" in text
    assert "(the mean of all rules that fire; alone it says 0.9)" in text


def test_the_global_explanation_and_its_measures() -> None:
    model, rules = hand_made()
    x = np.array([[0.2, 0.9], [0.9, 0.6], [0.1, 0.1], [0.0, 1.0]])
    y = np.array([0.9, 0.5, 0.0, 0.5])
    found = model.predict(rules, x)
    sources = np.array([3, 1])
    explained = model.explain(rules, ["a", "b"])
    rows = global_explanation(explained, found, y, sources, ["a", "b"])
    assert [row["rule"] for row in rows] == [2, 1]  # the weightiest first
    second, first = rows
    assert first["fires"] == 0.5
    assert first["decides"] == 0.5
    assert second["fires"] == 0.25
    assert second["decides"] == 0.5  # once because no rule fires
    assert (first["sources"], first["conditions"]) == (3, 2)
    support, confidence = quality(found.firing, found.outputs, y)
    assert first["support"] == support[0]
    assert first["confidence"] == confidence[0]
    assert measures(explained, found, sources) == {
        "rules": 2,
        "rule_length": 2,
        "coverage": 0.75,
        "active_rules": 0.75,
        "shared_rules": 1,
        "sources": 2,
    }


def test_support_and_confidence_as_written_out() -> None:
    rng = np.random.default_rng(3)
    firing, outputs, y = rng.random((9, 4)), rng.random((9, 4)), rng.random(9)
    errors = abs(outputs - y[:, None])
    good = (firing * (errors.max() - errors) / np.ptp(errors)).sum(axis=0)
    support, confidence = quality(firing, outputs, y)
    np.testing.assert_allclose(support, good / 9)
    np.testing.assert_allclose(confidence, good / firing.sum(axis=0))


def test_fits_that_are_exact_but_for_rounding() -> None:
    y = np.array([0.3, 0.7])
    outputs = np.array([[0.3, 0.3 + 1e-16], [0.7 - 1e-16, 0.7]])
    support, confidence = quality(np.ones((2, 2)), outputs, y)
    assert support.tolist() == confidence.tolist() == [1, 1]


def test_a_rule_without_conditions() -> None:
    assert in_words(Rule((), np.array([0.25, 0.0]), 1.0), ["a"]) == "y = 0.25"
    nothing = Rule((), np.array([0.0, 0.0]), 1.0)
    assert in_words(nothing, ["a"]) == "y = 0"
    always = Condition(0, "a is any", "any", np.ones_like)
    assert in_words(Rule((always,), np.zeros(2), 1.0), ["a"]) == "IF a is any THEN y = 0"
