"""One model explained and scored: every score as its function has it, relevances in slow loops."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from networks import Written, look_at
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.data import Dataset
from fedsim.data.dataset import feature_names
from fedsim.explain import ExplainedData, ExplainedModel
from fedsim.explain.explainer import FeatureExplainer
from fedsim.explain.explainers import explainers
from fedsim.explain.explainers.mimic import Mimic, TreeExplainer
from fedsim.explain.explainers.rules import RulesExplainer
from fedsim.explain.scores import faithfulness
from fedsim.explain.scores import relevance as scores
from fedsim.explain.scores.measure import Explained, ExplainedInputs, measure
from fedsim.explain.scores.randomisation import agreement, all_random
from fedsim.explain.scores.road import road
from fedsim.explain.section import SCORES, Explain
from fedsim.explain.tree import LEAF, build_tree
from fedsim.models import Classifier, RuleModel, models
from fedsim.models.rules import Rules
from fedsim.support.rng import input_rngs, keyed_rng

Pieces = tuple[ExplainedModel, ExplainedData, ExplainedInputs]

CLASSES, SEED, ROUND, CLIENT = 3, 5, 2, 1
LENGTHS = (6, 4, 1, 5, 0)  # words of the documents
WIDE = {"table": (5,), "series": (3, 2), "grey": (1, 4, 5), "colours": (3, 4, 5)}
NETWORKS = [*WIDE, "documents", "regression"]
RULES: dict[str, dict[str, Any]] = {
    "winner": {"name": "tsk", "rules": 6, "fuzziness": 1.2},
    "average": {"name": "tsk", "rules": 6, "fuzziness": 1.2, "inference": "average"},
    "tree_rules": {"name": "tree_rules", "rules": 7},
}


class Given(FeatureExplainer):
    """Relevances that the test gives."""

    name: str = "given"
    what: Any

    def explain(self, *about: Any) -> Any:
        raise NotImplementedError

    def relevances(self, *about: Any) -> Any:
        return self.what


def raw(kind: str, n: int = 5) -> NDArray[Any]:
    rng = np.random.default_rng(1)
    if kind == "documents":
        x = rng.integers(1, 9, (n, 6)).astype(np.int32)
        return x * (np.arange(6) < np.resize(LENGTHS, n)[:, None])
    if kind in RULES or kind == "regression":
        return rng.random((n, 4))
    return rng.standard_normal((n, *WIDE[kind])).astype(np.float32)


@cache
def trained_rules(kind: str) -> tuple[RuleModel, Rules]:
    model = models.parse(RULES[kind])
    assert isinstance(model, RuleModel)
    x = np.random.default_rng(0).random((90, 4))
    y = x[:, 0] ** 2 - 0.3 * x[:, 2] + 0.5 * x[:, 1] * x[:, 3]
    bases = [model.train(x[k::2], y[k::2], np.random.default_rng(k)) for k in range(2)]
    return model, model.merge(bases)[0]


@cache
def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "documents":
        return Written(
            lambda net, x: net.last((net.vectors(x) * (x != 0)[:, :, None]).flatten(1)),
            vectors=nn.Embedding(9, 4),
            last=nn.Linear(24, CLASSES),
        ).eval()
    if kind == "regression":
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).eval()
    first: nn.Module
    if len(WIDE[kind]) == 3:
        first, size = nn.Conv2d(WIDE[kind][0], 4, 3, padding=1), 80
    else:
        first, size = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(WIDE[kind]), 6)), 6
    features = nn.Sequential(first, nn.ReLU(), nn.Dropout(0.5), nn.Flatten())
    return Classifier(features, nn.Linear(size, CLASSES)).eval()


def pieces(kind: str, n: int = 5) -> Pieces:
    """A model of a kind, its data, and n inputs of which two sorts of parts are known."""
    rng, x = np.random.default_rng(2), raw(kind, n)
    classes = () if kind in RULES or kind == "regression" else ("a", "b", "c")
    y = rng.integers(0, CLASSES, n) if classes else rng.random(n)
    words = tuple("abcdefghi") if kind == "documents" else ()
    parts = x[:, 0] if x.ndim == 4 else x
    truth = {name: (rng.random(parts.shape) < 0.4) & (parts != 0) for name in ("signal", "noise")}
    dataset = Dataset(x, y, x, y, classes, words=words, truth=truth)
    section, rules = (
        trained_rules(kind) if kind in RULES else (models.parse({"name": "mlp"}), None)
    )
    net = None if kind in RULES else network(kind)
    model = ExplainedModel(section, "", ROUND, SEED, CLIENT, network=net, arrays=rules)

    def as_inputs(x: NDArray[Any]) -> Tensor:
        found = torch.from_numpy(np.ascontiguousarray(x))
        return found if words else found.float()

    data = ExplainedData(dataset, as_inputs)
    targets = torch.from_numpy(y)
    return model, data, ExplainedInputs(np.arange(n), as_inputs(x), targets, truth)


def scored(
    about: Pieces, explainer: Any, names: Sequence[str] = (), target: str = "decision"
) -> Explained:
    able = [name for name, s in SCORES.items() if s.about in ("input", "truth") and not s.of]
    lacking = {
        "numbers": bool(about[1].dataset.words),
        "images": about[2].x.dim() != 4,
        "weights": about[0].network is None,
    }
    for needed, absent in lacking.items():
        able = [name for name in able if not (absent and getattr(SCORES[name], needed))]
    section = Explain(explainers=[explainer], scores=names or able, target=target)
    return measure(section, section.explainers[0], *about)


def by_hand(about: Pieces, explainer: Any, target: str = "decision") -> dict[str, Any]:
    """What the functions of the scores say, asked one by one; and of documents, singly."""
    model, data, inputs = about
    (made,) = Explain(explainers=[explainer]).explainers
    ask, x = model.as_network(), inputs.x
    classes = bool(data.dataset.classes)

    @torch.no_grad()
    def outputs(z: Tensor) -> Tensor:
        return ask(z).double()

    decided = outputs(x).argmax(dim=1)
    if target == "label" and classes:
        decided = inputs.y

    def logit(z: Tensor) -> Tensor:
        return torch.stack([row[decided[i % len(x)]] for i, row in enumerate(outputs(z))])

    def value(z: Tensor) -> Tensor:
        if not classes:
            return -(logit(z) - logit(x).repeat(len(z) // len(x))).abs()
        rows = enumerate(outputs(z).exp())
        return torch.stack([row[decided[i % len(x)]] / row.sum() for i, row in rows])

    def relevances(
        z: Tensor, purpose: str = f"explain/{made.name}", model: ExplainedModel = model
    ) -> NDArray[np.float64]:
        streams = input_rngs(keyed_rng(SEED, purpose, ROUND, CLIENT), x)
        rows = [slice(i, i + 1) for i in range(len(x))] if made.draws else [slice(None)]
        maps = [
            made.relevances(model, data, z[row], decided[row], streams[i])
            for i, row in enumerate(rows)
        ]
        return np.float64(np.concatenate(maps).reshape(len(x), -1))

    told = relevances(x)
    R, again = told, relevances(x, f"explain/{made.name}/again")
    words = [int((row != 0).sum()) if data.dataset.words else R.shape[1] for row in x]

    def singly(score: Callable[..., Any], *of_parts: NDArray[Any]) -> list[float]:
        return [
            score(*(a[i : i + 1, : words[i]] for a in of_parts))[0] if words[i] else math.nan
            for i in range(len(x))
        ]

    # Where no part is more relevant than another, each score has its line of chance.
    sizes = R if classes else abs(R)
    alike = np.array([n > 1 and np.ptp(row[:n]) == 0 for row, n in zip(sizes, words, strict=True)])
    made_random = [
        replace(model, network=all_random(model.network, SEED, draw, ROUND, CLIENT))
        for draw in range(3)
        if model.network is not None
    ]
    of_random = [relevances(x, model=one) for one in made_random]
    again, *of_random = (np.where(alike[:, None], 0, one) for one in (again, *of_random))
    R = np.where(alike[:, None], 0, R)

    def rngs(name: str) -> list[np.random.Generator]:
        return input_rngs(keyed_rng(SEED, f"explain/{name}"), x)

    truth = {kind: where.reshape(len(x), -1) for kind, where in inputs.truth.items()}
    ranked = R if classes else abs(R)
    curves = {
        "deletion": faithfulness.deletion_curve(value, x, ranked, rng=rngs("deletion")),
        "insertion": faithfulness.insertion_curve(value, x, ranked, rng=rngs("insertion")),
    }
    found: dict[str, Any] = {
        **{name: faithfulness.area(curve) for name, curve in curves.items()},
        **{
            name: getattr(faithfulness, name)(value, x, ranked, rng=rngs(name))
            for name in ("comprehensiveness", "sufficiency", "selectivity")
        },
        "monotonicity": faithfulness.monotonicity(value, x, ranked),
        "sparseness": singly(scores.sparseness, R),
        "effective_parts": singly(scores.effective_parts, R),
        "repeatability": singly(scores.cosine, R, again),
    }
    if of_random:
        by_draw = [singly(agreement, R, one) for one in of_random]
        chance = [math.sqrt(2 / math.pi / max(n - 1, 1)) if n > 2 else math.nan for n in words]
        found["randomisation"] = np.where(alike, chance, np.mean(by_draw, axis=0))
    if x.dim() == 4:
        spread = np.array([float(row.max()) - float(row.min()) for row in x])
        found["road"] = road(value, x, ranked, noise=0.01 * spread, rng=rngs("road"))
    for kind, where in truth.items():
        for name in ("relevance_mass", "relevance_rank", "pointing_game"):
            found[f"{name}_{kind}"] = singly(getattr(scores, name), ranked, where)
    if not data.dataset.words:
        spread = np.array([float(row.max()) - float(row.min()) for row in x])
        wide = [len(x), *[1] * (x.dim() - 1)]
        shape = (len(x), *x.shape[2:]) if x.dim() == 4 else x.shape

        def changed(added: Tensor) -> Tensor:
            """Whole pixels, in all channels."""
            return logit(x + (added.unsqueeze(1) if x.dim() == 4 else added))

        Phi = torch.from_numpy(R).reshape(shape)
        sigma = 0.1 * spread.reshape(wide[: len(shape)])
        about_parts = changed, torch.zeros(shape), Phi, sigma, 10, rngs("infidelity")
        found["infidelity"] = faithfulness.infidelity(*about_parts)
        radius = 0.02 * spread.reshape(wide)
        asked = (lambda z: torch.from_numpy(relevances(z))), x, radius, 10, rngs("sensitivity")
        found["sensitivity"] = np.where(alike, math.sqrt(2), faithfulness.sensitivity(*asked))
    return {"relevance": told, "curves": curves, "scores": found}


class TestScores:
    @pytest.mark.parametrize("explainer", ["occlusion", "occlusion, of labels", "random", "own"])
    @pytest.mark.parametrize("kind", [*NETWORKS, *RULES])
    def test_are_those_of_their_functions(self, kind: str, explainer: str) -> None:
        """A number has no label; its explanation is of the prediction."""
        about, given = pieces(kind), {"name": explainer}
        if explainer.startswith("occlusion"):
            given = {"name": "occlusion", "size": 2}  # type: ignore[dict-item]
        if explainer == "own":  # what is of this kind of models alone
            given["name"] = "rules" if kind in RULES else "gradient"
            if kind == "documents":
                given = {"name": "occlusion"}
        target = "label" if "labels" in explainer else "decision"
        made = scored(about, given, target=target)
        expected = by_hand(about, given, target)
        np.testing.assert_array_equal(made.relevance, np.float32(expected["relevance"]))
        assert made.scores.keys() == expected["scores"].keys()
        for name, values in expected["scores"].items():
            np.testing.assert_allclose(made.scores[name], values, rtol=1e-9, atol=1e-12)
            assert made.scores[name].shape == (len(values),)
        assert made.curves.keys() == expected["curves"].keys()
        for name, curve in expected["curves"].items():
            np.testing.assert_allclose(made.curves[name], curve, rtol=1e-9, atol=1e-12)
        present = faithfulness.present(about[2].x)
        np.testing.assert_array_equal(made.present, present)
        assert made.inputs.tolist() == list(range(len(present)))
        assert made.seconds > 0

    def test_are_those_asked_for(self) -> None:
        made = scored(pieces("table"), "random", ["sufficiency", "pointing_game", "drift"])
        assert [*made.scores] == ["sufficiency", "pointing_game_signal", "pointing_game_noise"]
        assert not made.curves
        assert [*scored(pieces("table"), "random", ["insertion"]).curves] == ["insertion"]

    def test_what_lowers_a_number_is_as_relevant_as_what_raises_it(self) -> None:
        model, data, inputs = pieces("regression", n=1)
        linear = nn.Linear(4, 1, bias=False)
        linear.weight.data = torch.tensor([[2.0, -8.0, 1.0, 0.0]])
        about = replace(model, network=linear), data, replace(inputs, x=torch.ones(1, 4))
        made = scored(about, "gradient_x_input", ["deletion", "insertion"])
        # -8 is the first to go, then 2; and each of four parts is five of 20 steps
        assert made.curves["deletion"][0, ::5].tolist() == [0, -8, -6, -5, -5]
        assert made.curves["insertion"][0, ::5].tolist() == [-5, -3, -1, 0, 0]


class TestMapsThatSayNothing:
    @pytest.mark.parametrize("kind", ["table", "documents"])
    def test_that_are_not_finite_or_all_alike(self, kind: str) -> None:
        """They change none of the scores of other inputs."""
        about = pieces(kind)
        usual = np.random.default_rng(0).standard_normal(tuple(about[2].x.shape))
        usual[(about[2].x == 0).numpy()] = 0
        expected = scored(about, Given(what=usual))
        alike = np.where(about[2].x[1] != 0, 0.5, 0)
        for wrong in ([np.nan, *usual[1, 1:]], [-np.inf, *usual[1, 1:]], alike):
            what = usual.copy()
            what[1] = wrong
            made = scored(about, Given(what=what))
            assert made.scores.keys() == expected.scores.keys()
            rest = [0, *range(2, len(usual))]
            for name, values in made.scores.items():
                unknown = np.isnan(expected.scores[name][1])  # no part is in the truth
                assert np.isnan(values[1]) == (wrong is not alike or unknown), name
                np.testing.assert_array_equal(values[rest], expected.scores[name][rest])
            for name, curve in made.curves.items():
                assert np.isnan(curve[1]).all() == (wrong is not alike)
                np.testing.assert_array_equal(curve[rest], expected.curves[name][rest])
        nowhere = scored(about, Given(what=np.full_like(usual, np.nan))).scores
        some = faithfulness.present(about[2].x).any(axis=1)  # an empty document has no relevances
        assert all(np.isnan(values[some]).all() for values in nowhere.values())


@pytest.mark.parametrize("name", ["gradient", "gradcam", "lrp", "sage", "tree"])
def test_networks_are_left_as_they_were(name: str) -> None:
    model, data, inputs = pieces("colours")
    net: Any = copy.deepcopy(model.network)
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    before, drawn, x = look_at(net), torch.get_rng_state(), inputs.x.clone()
    scored((replace(model, network=net), data, inputs), name)
    assert look_at(net) == before
    assert all((parameter.grad == 0.5).all() for parameter in net.parameters())
    assert torch.equal(inputs.x, x)
    assert not inputs.x.requires_grad
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.is_grad_enabled()


class TestRules:
    @pytest.mark.parametrize("kind", RULES)
    def test_are_terms_and_shares_of_constants(self, kind: str) -> None:
        model, data, inputs = pieces(kind, 20)
        found = relevances_of(RulesExplainer(), (model, data, inputs))
        section, rules = trained_rules(kind)
        read = section.explain(rules, feature_names(4))
        weight = sum(rule.weight for rule in read)
        base = sum(rule.weight * rule.consequent[0] for rule in read) / weight
        asked = [{c.feature for c in rule.conditions} for rule in read]
        for x, own in zip(inputs.x.double().numpy(), found, strict=True):
            shares = np.array(
                [math.prod(float(c.membership(x[c.feature])) for c in r.conditions) for r in read]
            )
            if kind == "winner" or not shares.any():
                best = max(range(len(read)), key=lambda j: (shares[j], read[j].weight, -j))
                shares = np.eye(len(read))[best]
            elif kind == "tree_rules":
                shares *= [rule.weight for rule in read]
            expected = np.zeros(4)
            for share, rule, of in zip(shares / shares.sum(), read, asked, strict=True):
                constant = (rule.consequent[0] - base) / max(len(of), 1)
                expected += share * (rule.consequent[1:] * x + constant * np.isin(range(4), [*of]))
            np.testing.assert_allclose(own, expected, atol=1e-6)

    @pytest.mark.parametrize("kind", RULES)
    def test_occlusion_is_what_the_prediction_loses(self, kind: str) -> None:
        about = pieces(kind, 6)
        section, rules = trained_rules(kind)
        x = about[2].x.double().numpy()
        found = relevances_of(explainers.parse({"name": "occlusion"}), about)
        whole = section.predict(rules, x).values
        for f in range(4):
            without = section.predict(rules, np.where(np.arange(4) == f, 0, x)).values
            np.testing.assert_allclose(found[:, f], whole - without, atol=1e-6)


def relevances_of(explainer: Any, about: Pieces) -> NDArray[np.float32]:
    model, data, inputs = about
    decided = torch.zeros(len(inputs.x), dtype=torch.int64)
    found = explainer.relevances(model, data, inputs.x, decided, np.random.default_rng(0))
    assert found.dtype == np.float32
    return np.asarray(found)


class TestTrees:
    @pytest.mark.parametrize("seed", range(2))
    def test_contributions_are_those_of_a_walk(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        x, y = rng.integers(0, 6, (60, 4)).astype(float), rng.integers(0, 3, 60)
        tree = build_tree(x, np.where(x[:, 1] > 2, 0, y), 3)
        asked, classes = rng.integers(-1, 7, (30, 4)).astype(float), rng.integers(0, 3, 30)
        found = tree.contributions(asked, classes)
        assert tree.depth > 2
        shares = tree.counts / tree.counts.sum(axis=1, keepdims=True)
        for row, c, own, told in zip(asked, classes, found, tree.predict(asked), strict=True):
            expected, node = np.zeros(4), 0
            while (f := tree.feature[node]) != LEAF:
                below = (tree.left if row[f] <= tree.threshold[node] else tree.right)[node]
                expected[f] += shares[below, c] - shares[node, c]
                node = below
            np.testing.assert_allclose(own, expected, atol=1e-12)
            assert told == tree.counts[node].argmax()

    def test_of_a_single_leaf_are_nothing(self) -> None:
        tree = build_tree(np.zeros((3, 2)), np.ones(3, int), 2)
        assert not tree.contributions(np.ones((4, 2)), np.array([0, 1, 0, 1])).any()

    def test_relevances_add_up_channels(self) -> None:
        model, data, inputs = pieces("colours", 12)
        explainer, decided = TreeExplainer(), torch.arange(12) % CLASSES
        rng = keyed_rng(0, "drawn")
        found = explainer.relevances(model, data, inputs.x, decided, rng)
        assert found.shape == (12, 4, 5)
        order = keyed_rng(0, "drawn").permutation(12)
        assert model.network is not None
        mimic = Mimic.of(model.network, inputs.x[order], CLASSES, explainer.held_out)
        parts = mimic.tree.contributions(inputs.x.flatten(1).numpy(), decided.numpy())
        expected = parts.reshape(12, 3, 4, 5).sum(axis=1)
        np.testing.assert_allclose(found, expected, atol=1e-6)
        assert found.any()

    def test_a_tree_is_held_against_always_the_commonest_class(self) -> None:
        predicted = np.array([2, 2, 2, 1, 1, 2, 1, 1])
        images = predicted[:, None].astype(np.float32)
        mimic = Mimic(build_tree(images[:5], predicted[:5], 3), images, predicted, 5)
        assert mimic.measures()["held_out_fidelity"] == 1
        assert mimic.measures()["held_out_majority"] == 1 / 3
        none_held_out = Mimic(mimic.tree, images[:5], predicted[:5], 5)
        assert set(none_held_out.measures()) == {"fidelity", "depth", "leaves"}

    def test_usual_perplexities_are_below_what_is_embedded(self) -> None:
        model, data, _ = pieces("table", 60)
        explainer = TreeExplainer(images=25, iterations=300)
        explainer.check(model, data)
        found = explainer.explain(model, data, None, keyed_rng(0, "drawn"))  # type: ignore[arg-type]
        assert found.rows()[0]["divergence, client 1's"] > 0


class TestDocuments:
    def test_random_ones_are_of_words_alone(self) -> None:
        about = pieces("documents", 40)
        found = relevances_of(explainers.parse({"name": "random"}), about)
        words = about[2].x.numpy() != 0
        assert (np.abs(found) <= 1).all()
        np.testing.assert_array_equal(found != 0, words)
        assert (found < 0).any()
        assert (found > 0).any()
