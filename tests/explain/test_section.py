"""The `explain` section: what it refuses and in which words, and what it chooses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from own_relevances import Slopes
from torch import Tensor, nn

from experiments import Say, small_experiment
from fedsim import Experiment, Run, resume, run
from fedsim.conditions.explaining import Explanations
from fedsim.config.file import RawConfig
from fedsim.data import Dataset, datasets, load_dataset
from fedsim.errors import BadInput, ExperimentError, RunError
from fedsim.explain.explainer import FeatureExplainer
from fedsim.explain.explainers import explainers
from fedsim.explain.explainers.occlusion import Occlusion
from fedsim.explain.section import SCORES, Explain
from fedsim.launch.prepare import prepare
from fedsim.simulate import Progress

Sections = dict[str, Any]

TABLE: Sections = {
    "data": {"name": "synthetic", "shape": [4], "classes": 3, "samples": 60, "test_samples": 20},
    "partition": {"kind": "iid", "clients": 4},
    "model": {"name": "mlp", "hidden": [4]},
    "train": {"rounds": 3, "batch_size": 15},
}
REVIEWS: Sections = {
    "data": {"name": "planted_reviews", "reviews": 8, "test_reviews": 5, "dimension": 3},
    "partition": {"kind": "iid", "clients": 2},
    "model": {"name": "text_cnn", "kernels": [1], "filters": 2, "hidden": 3},
}
REGRESSION: Sections = {
    "data": {"name": "friedman", "samples": 60, "test_samples": 20, "features": 5},
    "partition": {"kind": "iid", "clients": 2},
    "model": {"name": "mlp", "hidden": [4]},
}
RULES: Sections = {
    **REGRESSION,
    "model": {"name": "tree_rules"},
    "method": {"name": "openfl_xai"},
    "train": {"rounds": 1},
}
ABLE = ", ".join(name for name, e in explainers.items() if issubclass(e, FeatureExplainer))


class Torn(nn.Module):
    """Two branches that are joined where nobody sees it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.one, self.other = (nn.Linear(inputs, outputs) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.one(x) * self.other(x)
        return found


def torn(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Torn(shape[0], classes)


@cache
def loaded(sort: str) -> Dataset:
    about = {"table": TABLE, "documents": REVIEWS, "regression": REGRESSION}[sort]
    return load_dataset(datasets.parse(about["data"]))


def images(*truth: str) -> Dataset:
    """Twelve of two channels, and which of their pixels are of some kinds."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (12, 2, 4, 5), dtype=np.uint8), np.arange(12) % 2
    kinds = {kind: rng.random((12, 4, 5)) < 0.3 for kind in truth}
    return Dataset(x, y, x[::-1], y[::-1], ("cat", "dog"), truth=kinds)


def resolved(sections: Sections, dataset: Dataset, **explain: Any) -> Explain:
    """The section as a run has it."""
    usual = {"explainers": ["random"], "inputs": 3, "every": 1}
    made = small_experiment(**sections, explain={**usual, **explain})
    (condition,) = prepare(made, dataset)[2].conditions
    assert isinstance(condition, Explanations)
    return condition.section


def built(**explain: Any) -> Explain:
    return RawConfig({"explainers": ["gradient"], **explain}).build(Explain)


# what it refuses, by the section as a file has it


WRONG = {
    "explainers: [gradiant]": "explainers.name: unknown explainer 'gradiant'; did you mean "
    "'gradient'?",
    "explainers: [xyz]": "explainers.name: unknown explainer 'xyz'; known: "
    + ", ".join(name for name, _ in explainers.items()),
    "explainers: ['nowhere:Mine']": "explainers.name: explainer 'nowhere:Mine' cannot be imported"
    ": no module 'nowhere' in these folders, nor installed",
    "explainers: [tasks]": "explainers: explainer 'tasks' does not assign a number to each part "
    f"of an input; those that do: {ABLE}",
    "explainers: ['own_explainer:GradientNorm']": "explainers: explainer "
    "'own_explainer:GradientNorm' does not assign a number to each part of an input; those that "
    f"do: {ABLE}",
    "explainers: [smoothgrad, {name: smoothgrad, samples: 3}]": "explainers: 'smoothgrad' is named"
    " twice",
    "explainers: []": "explainers: is an empty list; name at least one",
    "explainers: gradient": "explainers: must be a list, not 'gradient'",
    "explainers: [{name: occlusion, sise: 2}]": "explainers.sise: unknown key; did you mean "
    "'size'?",
    "explainers: [{name: sage, permutations: 0}]": "explainers.permutations: must be greater than "
    "or equal to 1, not 0",
    "scores: [delition]": "scores: unknown score 'delition'; did you mean 'deletion'?",
    "scores: [qqqqqqqqqq]": "scores: unknown score 'qqqqqqqqqq'; known: "
    + ", ".join(sorted(SCORES)),
    "scores: [drift, deletion, drift]": "scores: 'drift' is named twice",
    "of: []": "of: is an empty list; name at least one",
    "of: [everyone]": "of.0: must be 'global', 'cohort' or 'personal', not 'everyone'",
    "every: 0": "every: must be greater than or equal to 1, not 0",
    "inputs: 0": "inputs: must be greater than or equal to 1, not 0",
    "clients: 0": "clients: must be greater than or equal to 1, not 0",
    "top_k: 0": "top_k: must be greater than or equal to 1, not 0",
    "inputs_from: train": "inputs_from: must be 'test' or 'own', not 'train'",
    "target: truth": "target: must be 'decision' or 'label', not 'truth'",
    "evry: 2": "evry: unknown key; did you mean 'every'?",
    "{inputs_from: own, of: [global]}": "of: the global model has no own inputs; set inputs_from: "
    "test",
    "{inputs_from: own, slice: taste}": "slice: slices are of the central test set; set "
    "inputs_from: test",
    **{
        f"{{inputs_from: own, scores: [{name}]}}": f"scores: {name} needs inputs of the central "
        "test set; set inputs_from: test"
        for name in ("relevance_mass", "agreement", "global_agreement", "reference_agreement")
    },
    "{of: [cohort], scores: [global_agreement]}": "scores: global_agreement needs the global model"
    " among `of`",
    "{clients: 1, scores: [agreement]}": "scores: agreement is between clients; set clients to 2 "
    "or more",
    **{
        f"{{of: [global], scores: [{name}]}}": f"scores: {name} needs models of clients among "
        "`of`: cohort or personal"
        for name in ("agreement", "global_agreement")
    },
    "{inputs_from: own, reference: centralised}": "reference: is explained on common inputs; set "
    "inputs_from: test",
    "{reference: centralised, scores: [deletion]}": "reference: has no effect without "
    "reference_agreement among `scores`",
    "scores: [reference_agreement]": "scores: reference_agreement needs `reference`: centralised, "
    "or a run",
    "share: {noise: -1}": "share.noise: must be greater than or equal to 0, not -1",
    "share: {poisoned: 1.5}": "share.poisoned: must be less than or equal to 1, not 1.5",
    "share: {aggregation: meen}": "share.aggregation: must be 'mean', 'quality' or 'median', not "
    "'meen'",
    "{inputs_from: own, share: {}}": "share: clients share explanations of common inputs; set "
    "inputs_from: test",
    **{
        f"{{of: [{of}], share: {{}}}}": "share: is of the global model by clients'; set of: "
        "[global, cohort]"
        for of in ("global", "cohort", "global, personal")
    },
    "{scores: [deletion], share: {aggregation: quality}}": "share: aggregation=quality needs "
    "insertion among `scores`",
}


@pytest.mark.parametrize(("explain", "line"), WRONG.items())
def test_what_is_wrong_is_one_line(explain: str, line: str) -> None:
    with pytest.raises(ExperimentError) as refused:
        small_experiment(**TABLE, explain={"explainers": ["gradient"], **yaml.safe_load(explain)})
    said = re.sub(r"( in) /\S+(, /\S+)*,", r"\1 these folders,", str(refused.value))
    assert said == f"experiment: explain.{line}"


TREES = "explainers: tree: a tree mimics classifiers of images and tables, and "
UNTRAINED = (
    "of: clients of this method do not train models; set of: [global], use scores of that model "
    "only, and no `share`"
)
KINDS: dict[str, Sections] = {
    **{"table": TABLE, "reviews": REVIEWS, "regression": REGRESSION, "rules": RULES},
    "local": {**TABLE, "method": {"name": "local"}},
    "centralised": {**TABLE, "method": {"name": "centralised"}},
    "torn": {**TABLE, "model": {"name": "test_section:torn"}},
    "sampled": {**REVIEWS, "model": {"name": "rationale", "hidden": 3, "evaluate": "sampled"}},
}
IMPOSSIBLE: dict[str, dict[str, str]] = {
    "table": {
        "scores: [relevance_mass]": "scores: relevance_mass: the data set does not mark the "
        "signal in inputs; data.name=shortcut and planted_reviews do",
        "{scores: [drift], every: 3}": "scores: drift: models are explained only once, after the "
        "last round; lower explain.every",
        "scores: [road]": "scores: road: fills pixels from those beside them, and the data are no "
        "images",
        "inputs: 21": "inputs=21: the test set has 20",
        "slice: taste": "slice=taste: the test set has no such slice",
        "top_k: 5": "top_k=5: inputs have 4 parts",
        "of: [personal]": "of: clients of this method keep no personal models; set of: [cohort]",
        "explainers: [{name: tree, perplexity: 20}]": "explainers: tree: perplexity=20: must be "
        "below the number of inputs that are embedded, 20",
        "explainers: [rules]": "explainers: rules: model.name=mlp is a network, and has no rules",
        "share: {}": "share: models with different decisions are not comparable; set "
        "explain.target: label",
    },
    "reviews": {
        "{explainers: [occlusion], scores: [infidelity]}": "scores: infidelity: needs "
        "floating-point inputs, and the data are documents",
        "{explainers: [occlusion], scores: [sensitivity]}": "scores: sensitivity: needs "
        "floating-point inputs, and the data are documents",
        "{slice: taste, inputs: 6}": "inputs=6: slice taste has 5",
        "slice: tast": "slice=tast: the test set has no such slice; known: appearance, aroma, "
        "palate, taste",
        "explainers: [gradient]": "explainers: gradient: attribution gradient: needs inputs of "
        "floating point, such as images; these are documents; for documents: occlusion, "
        "attention_rollout, attn_lrp, gradient_x_input, integrated_gradients",
        "explainers: [sage]": "explainers: sage: sage needs floating-point inputs; for documents: "
        "occlusion",
        "explainers: [tree]": f"{TREES}the inputs are documents",
        "explainers: [rationale]": "explainers: rationale: model.name=text_cnn does not select "
        "words",
    },
    "regression": {
        "explainers: [tree]": f"{TREES}the target y is a number",
        "explainers: [sage]": "explainers: sage: sage explains the loss of a class, and the "
        "target here is a number",
    },
    "rules": {
        "scores: [randomisation]": "scores: randomisation: needs a network, whose weights can be "
        "random; model.name=tree_rules is a rule model",
        "explainers: [integrated_gradients]": "explainers: integrated_gradients: attribution "
        "integrated_gradients explains networks; model.name=tree_rules is a rule model",
        "explainers: [tree]": f"{TREES}model.name=tree_rules is a rule model",
    },
    "local": {
        "scores: [global_agreement]": "scores: global_agreement: there is no global model, or no "
        "client's model, to compare",
        "of: [global, cohort]": "of: the method has no global model; set of: [cohort]",
        "{share: {}, target: label}": "share: the method has no global model to explain",
    },
    "centralised": {
        "of: [cohort]": UNTRAINED,
        "inputs_from: own": UNTRAINED,
        "scores: [agreement]": UNTRAINED,
        "{share: {}, target: label}": UNTRAINED,
    },
    "torn": {
        "explainers: [random, lrp]": "explainers: lrp: attribution lrp: the network calls "
        "torch.Tensor.mul itself, where no rule applies. Use a module, for sums a canonizer that "
        "converts them to a zennit.layer.Sum (attribution field canonizer: package.module:Name); "
        "or attn_lrp, gradient, gradient_x_input, smoothgrad or integrated_gradients"
    },
    "sampled": {
        "explainers: [occlusion]": "explainers: occlusion: model.evaluate=sampled samples the "
        "words that it reads, so an attribution would be random"
    },
}


@pytest.mark.parametrize(
    ("kind", "explain", "line"),
    [(kind, *lines) for kind, refused in IMPOSSIBLE.items() for lines in refused.items()],
)
def test_what_the_data_the_method_or_the_model_cannot_have(
    kind: str, explain: str, line: str
) -> None:
    given = {"explainers": ["random"], "inputs": 3, **yaml.safe_load(explain)}
    with pytest.raises(BadInput) as refused:
        prepare(small_experiment(**KINDS[kind], explain=given))
    assert str(refused.value) == f"explain.{line}"


def test_where_clients_train_nothing_the_global_model_alone_is_explained(tmp_path: Path) -> None:
    explain = {"explainers": ["random"], "inputs": 3, "scores": ["deletion", "agreement"]}
    lines: list[Progress] = []
    one = small_experiment(**TABLE, method={"name": "centralised"}, explain=explain)
    done = run(one, tmp_path, lines.append)
    assert [metric.column for metric in done.explained] == ["random/deletion"]
    assert done.rounds["random/deletion"].notna().any()
    assert lines[0] == "clients do not train models with method.name=centralised"


def test_a_check_of_ones_own_that_fails() -> None:
    made = small_experiment(**TABLE, explain={"explainers": ["own_relevances:Refuses"]})
    line = r"^explain\.explainers: own_relevances:Refuses: KeyError: .* \(own_relevances\.py, line"
    with pytest.raises(ExperimentError, match=line):
        prepare(made)


def test_the_command_names_the_line_before_the_start(say: Say) -> None:
    sections = {**TABLE, "method": {"name": "fedavg"}, "engine": {"kind": "local"}}
    lines = [f"{key}: {json.dumps(section)}" for key, section in sections.items()]
    explain = ["explain:", "  explainers: [gradient]", "  inputs_from: own", "  slice: taste"]
    Path("small.yaml").write_text("\n".join([*lines, *explain]))
    assert say("run", "small.yaml") == (
        *(2, ""),
        "error: small.yaml:10: explain.slice: slices are of the central test set; set inputs_from:"
        " test\n",
    )
    assert not Path("runs").exists()


# what it leaves open


USUAL = {"deletion", "insertion", "comprehensiveness", "sufficiency"} | {
    *("sparseness", "effective_parts", "agreement", "global_agreement", "drift")
}
AGREEING = {"agreement", "global_agreement"}
LOCATED = {"relevance_mass", "relevance_rank", "pointing_game"}
LOCAL = KINDS["local"]


class TestDefaults:
    @pytest.mark.parametrize(
        ("sections", "data", "explain", "of", "lacking"),
        [
            (TABLE, "table", {}, "both", LOCATED),
            (REGRESSION, "regression", {}, "both", LOCATED),
            (TABLE, (), {}, "both", LOCATED),
            (TABLE, ("signal", "shortcut"), {}, "both", set()),
            (REVIEWS, "documents", {}, "both", set()),
            (TABLE, ("signal",), {"of": ["global"]}, "global", AGREEING),
            (TABLE, ("signal",), {"of": ["cohort"]}, "cohort", {"global_agreement"}),
            (TABLE, ("signal",), {"inputs_from": "own"}, "cohort", AGREEING | LOCATED),
            (TABLE, ("signal",), {"clients": 1}, "both", {"agreement"}),
            (LOCAL, ("signal",), {}, "cohort", {"global_agreement"}),
            (LOCAL, ("signal",), {"reference": "centralised"}, "cohort", {"global_agreement"}),
            (LOCAL, ("signal",), {"inputs_from": "own"}, "cohort", AGREEING | LOCATED),
        ],
    )
    def test_whose_and_which_scores(
        self, sections: Sections, data: Any, explain: Sections, of: str, lacking: set[str]
    ) -> None:
        dataset = loaded(data) if isinstance(data, str) else images(*data)
        found = resolved(sections, dataset, **explain)
        assert found.of == (("global", "cohort") if of == "both" else (of,))
        beside = {"reference_agreement"} if "reference" in explain else set()
        possible = (USUAL | LOCATED | beside) - lacking
        assert found.scores == tuple(name for name in SCORES if name in possible)

    def test_what_is_asked_for_stays(self) -> None:
        asked = {"of": ["personal"], "scores": ["repeatability", "deletion"]}
        found = resolved(LOCAL, loaded("table"), **asked)
        assert found.of == ("personal",)
        assert found.scores == ("repeatability", "deletion")

    def test_due_at_multiples_and_at_the_end(self) -> None:
        assert [t for t in range(1, 12) if built(every=4).due(t, 11)] == [4, 8, 11]
        assert [t for t in range(1, 4) if built(every=5).due(t, 3)] == [3]

    def test_columns(self) -> None:
        data = images("signal", "shortcut")
        found = resolved(TABLE, data, scores=["deletion", "pointing_game", "agreement", "drift"])
        assert [(m.column, m.best) for m in found.metrics(data)] == [
            ("random/deletion", "min"),
            ("random/pointing_game_signal", "max"),
            ("random/pointing_game_shortcut", "min"),
            *((f"random/drift_{how}", "min") for how in ("rank", "top_k", "cosine")),
            ("random/client_deletion", "min"),
            ("random/client_pointing_game_signal", "max"),
            ("random/client_pointing_game_shortcut", "min"),
            *((f"random/client_agreement_{how}", "max") for how in ("rank", "top_k", "cosine")),
            *((f"random/client_drift_{how}", "min") for how in ("rank", "top_k", "cosine")),
        ]


# what it chooses


class TestInputs:
    def test_depend_on_the_seed_alone(self) -> None:
        data = loaded("table")
        first = built(inputs=6).rows(data, seed=3)
        again = built(inputs=6, explainers=["random"], every=2, clients=1).rows(data, seed=3)
        np.testing.assert_array_equal(first, again)
        assert len(set(first.tolist())) == 6
        assert (np.diff(first) > 0).all()
        assert set(first.tolist()) <= set(range(20))
        assert not np.array_equal(first, built(inputs=6).rows(data, seed=4))

    def test_all_there_are(self) -> None:
        assert built(inputs=20).rows(loaded("table"), 0).tolist() == list(range(20))

    def test_of_a_slice(self) -> None:
        data = loaded("documents")
        found = built(inputs=4, slice="aroma").rows(data, 0)
        assert set(data.test_columns["aspect"][found]) == {"aroma"}
        assert len(set(found.tolist())) == 4

    @pytest.mark.parametrize("fraction", [0.0, 0.4])
    def test_of_a_clients_own(self, fraction: float) -> None:
        partition = {"kind": "iid", "clients": 4, "test_fraction": fraction}
        made = small_experiment(**{**TABLE, "partition": partition})
        _, splits, _ = prepare(made, loaded("table"))
        held = splits.test if fraction else splits.train
        for k in range(4):
            rows = built(inputs=4, inputs_from="own").own_rows(splits, k, seed=0)
            assert len(set(rows.tolist())) == 4
            assert set(rows.tolist()) <= set(held[k].tolist())
            all_of_them = built(inputs=1000, inputs_from="own").own_rows(splits, k, seed=0)
            assert sorted(all_of_them) == sorted(held[k])
            np.testing.assert_array_equal(all_of_them[:4], rows)


class TestClients:
    @given(
        st.integers(1, 12).flatmap(
            lambda K: st.tuples(st.just(K), st.sets(st.integers(0, K - 1)), st.integers(1, 13))
        ),
        st.integers(0, 5),
        st.randoms(),
    )
    def test_the_first_of_one_order_of_all(
        self, about: tuple[int, set[int], int], seed: int, random: Any
    ) -> None:
        K, cohort, number = about
        section = built(clients=number)
        # Chosen among all with ever more places, they come in one order.
        order: list[int] = []
        for n in range(1, K + 1):
            (new,) = set(built(clients=n).choose(range(K), K, seed)) - set(order)
            order.append(new)
        expected = sorted([k for k in order if k in cohort][:number])
        shuffled = [*cohort]
        random.shuffle(shuffled)
        assert section.choose(shuffled, K, seed) == expected


def test_a_round_trip_through_yaml(tmp_path: Path) -> None:
    explain = {
        "explainers": ["gradient", {"name": "occlusion", "size": 2}, "own_relevances:Slopes"],
        "of": ["cohort"],
        "scores": ["deletion", "drift"],
        "maps": True,
        "top_k": 2,
    }
    made = small_experiment(**TABLE, explain=explain)
    assert made.explain is not None
    assert made.explain.explainers[1:] == (Occlusion(size=2), Slopes())
    (tmp_path / "whole.yaml").write_text(made.to_yaml())
    assert Experiment.load(tmp_path / "whole.yaml") == made
    assert Experiment.from_dict(made.model_dump(mode="json")) == made
    changed = Experiment.load(tmp_path / "whole.yaml", ["explain.every=2", "explain.scores=null"])
    assert changed.explain is not None
    assert (changed.explain.every, changed.explain.scores) == (2, None)


# an explainer of one's own


def test_one_of_ones_own_is_as_good_as_any(finish: Callable[..., Run]) -> None:
    name = "own_relevances:Slopes"
    explain = {"explainers": ["gradient", name], "inputs": 4, "every": 2}
    done = finish(**TABLE, explain={**explain, "scores": ["deletion", "drift", "agreement"]})
    found = [
        frame.drop(columns="explainer").reset_index(drop=True)
        for _, frame in done.explanations.groupby("explainer")
    ]
    assert set(done.explanations["explainer"]) == {"gradient", name}
    assert found[0].equals(found[1])
    assert done.rounds[f"{name}/deletion"].equals(done.rounds["gradient/deletion"])


def test_one_that_fails_ends_the_run_which_can_go_on(tmp_path: Path) -> None:
    (tmp_path / "wrong").touch()
    raises = {"name": "own_relevances:Raises", "file": str(tmp_path / "wrong")}
    explain = {"explainers": [raises], "inputs": 4, "every": 2}
    # Whoever is left out when it fails itself, it is not for what explains it.
    train = {**TABLE["train"], "on_client_error": "skip"}
    made = small_experiment(**{**TABLE, "train": train}, explain=explain, checkpoint={"every": 1})
    line = (
        r"^round 2: explainer own_relevances:Raises, client \d's model: ZeroDivisionError: too "
        r"little \(own_relevances\.py, line \d+\)$"
    )
    with pytest.raises(RunError, match=line) as failed:
        run(made, tmp_path / "runs")
    assert re.search(line, str(failed.value))
    (folder,) = (tmp_path / "runs" / "small").iterdir()
    (tmp_path / "wrong").unlink()
    lines: list[Any] = []
    again = resume(folder, lines.append)
    assert lines[0] == "continuing after round 1"
    assert again.result_hash == run(made, tmp_path / "runs").result_hash


def test_one_that_gives_other_numbers_than_asked_for(tmp_path: Path) -> None:
    explain = {"explainers": ["own_relevances:OneForEach"], "inputs": 4, "every": 1}
    line = r"explainer own_relevances:OneForEach, .*: relevances must have the shape \(4, 4\), not"
    with pytest.raises(RunError, match=line):
        run(small_experiment(**TABLE, explain=explain), tmp_path / "runs")
