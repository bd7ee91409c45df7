"""The contract of explainers: one of a user's own, what each one refuses, rows of all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from own_explainer import GradientNorm

import fedsim.analysis.explanations as analysis
import fedsim.cli.explain as command
from experiments import KINDS, NUMBERS, Finish, Say, ran
from fedsim.analysis.replay import ModelSnapshot
from fedsim.errors import BadInput
from fedsim.explain import Explainer
from fedsim.explain.explainers import explainers
from fedsim.explain.explainers.mimic import TreeExplainer
from fedsim.explain.inputs import Inputs
from fedsim.methods import methods
from fedsim.models import models
from fedsim.results.report.comparison import ReportData
from fedsim.results.report.explanations import explanations
from fedsim.testing import check_explainer


def test_an_explainer_of_ones_own(finish: Finish, say: Say) -> None:
    name = "own_explainer:GradientNorm"
    assert explainers.find(name) is GradientNorm
    done = finish(**NUMBERS, train={"rounds": 2, "optimizer": {"lr": 0.01}})
    text = say.printed("explain", str(done.path), "--explainer", name, "--row", "3")
    subject = ModelSnapshot.of(done)
    (row,) = subject.explain(GradientNorm(), Inputs.of_rows(subject.dataset, [3])).rows()
    assert text.startswith(f"the global model after round 2, row 3: {row['norm']:.4f}\nwritten: ")
    picture = done.path / "explanations" / "norms.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    ((_, _, pictures),) = explanations(ReportData([done.path]))
    assert [picture.words for picture in pictures] == ["norms"]
    text = say.printed("explain", str(done.path), "--explainer", name)
    assert re.match(
        r"no row was chosen: explaining rows 0, (\d+, ){6}\d+ of the test set, which are evenly "
        "spread\n\nthe global model after round 2, row 0: ",
        text,
    )


def test_all_keep_the_contract() -> None:
    done = ran(**KINDS["images"], train={"rounds": 2})
    checked, little = 0, {"tree": {"images": 100, "perplexity": 5, "iterations": 300}}
    for name, component in explainers.items():
        explainer: Explainer = component(**little.get(name, {}))
        try:
            check_explainer(explainer, done, None if explainer.whole_run else 3)
        except BadInput:
            continue
        checked += 1
    assert checked >= 6


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
        for _, component in registry.items():
            assert not re.search(rf"\b{component.__name__}\b", source)
