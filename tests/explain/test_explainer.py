"""The contract of explainers: one of a user's own, what each one refuses, rows of all."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_explainer import GradientNorm

import fedsim.analysis.explanations as analysis
import fedsim.cli.explain as command
from experiments import Say, small_experiment
from fedsim import Run, run
from fedsim.analysis.replay import ModelSnapshot, explain_run
from fedsim.config.registry import Registry
from fedsim.errors import BadInput
from fedsim.explain import Explainer
from fedsim.explain.explainers import explainers
from fedsim.explain.explainers.mimic import TreeExplainer
from fedsim.explain.explainers.shared_images import SharedImagesExplainer
from fedsim.explain.explainers.tasks import TasksExplainer
from fedsim.explain.inputs import Inputs
from fedsim.methods import methods
from fedsim.models import models
from fedsim.results.report.comparison import ReportData
from fedsim.results.report.explanations import explanations
from fedsim.testing import check_explainer

Finish = Callable[..., Run]
TABLE: dict[str, Any] = {
    "data": {"name": "friedman"},
    "partition": {"kind": "iid", "clients": 4},
    "train": {"rounds": 2, "optimizer": {"lr": 0.01}},
}


def test_an_explainer_of_ones_own(finish: Finish, say: Say) -> None:
    name = "own_explainer:GradientNorm"
    assert explainers.find(name) is GradientNorm
    done = finish(**TABLE)
    code, text, _ = say("explain", str(done.path), "--explainer", name, "--row", "3")
    assert code == 0
    subject = ModelSnapshot.of(done)
    (row,) = subject.explain(GradientNorm(), Inputs.of_rows(subject.dataset, [3])).rows()
    assert text.startswith(f"the global model after round 2, row 3: {row['norm']:.4f}\nwritten: ")
    picture = done.path / "explanations" / "norms.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    ((_, _, pictures),) = explanations(ReportData([done.path]))
    assert [picture.words for picture in pictures] == ["norms"]
    code, text, _ = say("explain", str(done.path), "--explainer", name)
    assert code == 0
    assert re.match(
        r"no row was chosen: explaining rows 0, (\d+, ){6}\d+ of the test set, which are evenly "
        "spread\n\nthe global model after round 2, row 0: ",
        text,
    )


def test_a_tree_mimics_classifiers(finish: Finish, say: Say) -> None:
    done = finish(**TABLE)
    code, text, complaint = say("explain", str(done.path), "--explainer", "tree")
    assert (code, text) == (2, "")
    assert complaint == (
        "error: a tree mimics classifiers of images and tables, and the target y is a number\n"
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(small_experiment(train={"rounds": 2}), tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--explainer", "tasks"], "its clients do not learn a sequence"),
        (["--explainer", "shared_images"], "its method does not share masked images"),
        (
            ["--explainer", "tasks", "--round", "1"],
            "explainer tasks explains the run as a whole, not one round",
        ),
        (
            ["--explainer", "tasks", "--client", "1"],
            "explainer tasks explains the run as a whole, not one client",
        ),
        (
            ["--explainer", "tree", "--row", "1"],
            "explainer tree takes none: a surrogate decision tree",
        ),
        (["--most", "3"], "most is not a setting of explainer integrated_gradients"),
        (["--explainer", "own_explainer:nothing"], "explainer own_explainer:nothing: "),
        (["--explainer", "own_explainer:Norms"], "it must be a class that extends Explainer"),
    ],
)
def test_what_does_not_apply(done: Run, say: Say, words: list[str], message: str) -> None:
    code, text, complaint = say("explain", str(done.path), *words)
    assert (code, text) == (2, "")
    assert message in complaint


def test_all_keep_the_contract(done: Run) -> None:
    checked, little = 0, {"tree": {"images": 100, "perplexity": 5, "iterations": 300}}
    for name, component in explainers.items():
        explainer: Explainer = component(**little.get(name, {}))
        try:
            check_explainer(explainer, done, None if explainer.whole_run else 3)
        except BadInput:
            continue
        checked += 1
    assert checked >= 6


def test_rows_of_runs_as_a_whole(finish: Finish) -> None:
    shared = finish(
        method={"name": "fedxds", "warmup_rounds": 1},
        model={"name": "cnn", "channels": [4, 4]},
        train={"rounds": 3},
    )
    rows = explain_run(shared, SharedImagesExplainer()).rows()
    labels = np.bincount(shared.experiment.data.load().y, minlength=10)
    assert [sum(int(row[str(c)] or 0) for row in rows) for c in range(10)] == labels.tolist()
    in_turn = finish(
        partition={"kind": "own_tasks", "tasks": [[["0", "1"], ["2", "3"]]] * 2},
        train={"rounds": 2},
    )
    found = explain_run(in_turn, TasksExplainer()).rows()
    assert [(row["client"], row["task"]) for row in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_who_says_which_is_usual() -> None:
    usual = {name: model.explainer for name, model in models.items()}
    assert (usual["mlp"], usual["text_cnn"]) == ("integrated_gradients", "occlusion")
    assert (usual["tsk"], usual["rationale"]) == ("rules", "rationale")
    method: Any = methods.parse({"name": "xpfl", "xfed": {"images": 50, "perplexity": 5}})
    assert method.explainer() == TreeExplainer(images=50, perplexity=5)
    method = methods.parse({"name": "fedxds", "attribution": {"name": "occlusion", "size": 2}})
    assert method.explainer() is method.attribution
    assert methods.parse({"name": "fedavg"}).explainer() is None


def test_the_core_names_no_explainer() -> None:
    source = "".join(Path(module.__file__).read_text() for module in (command, analysis))
    for registry in (explainers, methods, models):
        assert isinstance(registry, Registry)
        for _, component in registry.items():
            assert component.__name__ not in source
