"""An input's explanation and its scores do not depend on the inputs beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from experiments import CHOOSER, KINDS, Say, by_day, ran
from fedsim import Run, explanations
from fedsim.analysis.replay import ModelSnapshot
from fedsim.explain.explainer import FeatureExplainer
from fedsim.explain.explainers import explainers
from fedsim.explain.explainers.attributed import Attributed
from fedsim.explain.explainers.attribution import Attribution
from fedsim.explain.explainers.gradients import Gradient
from fedsim.explain.explainers.rationales import RationaleExplainer, Rationales
from fedsim.explain.inputs import Inputs
from fedsim.explain.scores.measure import ExplainedInputs, measure
from fedsim.explain.section import SCORES, Explain
from fedsim.support.rng import input_rngs, keyed_rng

ROWS = [7, 3, 3]


class Jitter(Attribution):
    """A user's own, which draws as it pleases: first something common, then by input."""

    name: str = f"{__name__}:Jitter"

    def relevance(
        self, network: nn.Module, x: Tensor, y: Tensor, rng: np.random.Generator
    ) -> Tensor:
        scale = rng.random()
        return torch.from_numpy(scale * rng.standard_normal(tuple(x.shape))).float()


class NoisyGradient(Gradient):
    """One of fedsim's own, made to draw."""

    name: str = f"{__name__}:NoisyGradient"

    def relevance(
        self, network: nn.Module, x: Tensor, y: Tensor, rng: np.random.Generator
    ) -> Tensor:
        noise = torch.from_numpy(rng.uniform(0.5, 1.5, tuple(x.shape))).float()
        return super().relevance(network, x, y, rng) * noise.sum(1)


OF_NETWORKS = ["smoothgrad", "random", "sage", "gradient", "occlusion", "lrp", "tree"]
OF_NETWORKS += ["captum", "deep_shap", "gradient_shap", "kernel_shap"]
OF_TRANSFORMERS = ["attention_rollout", "attn_lrp", "gradcam"]
OF_TABLES = ["shape_functions"]
OWN = [f"{__name__}:{each.__name__}" for each in (Jitter, NoisyGradient)]
EACH = [*OF_NETWORKS, *OF_TRANSFORMERS, *OF_TABLES, *OWN]
# By day those that draw numbers, fit a model, cut inputs into parts, and look into a network.
BY_DAY = ("sage", "tree", "occlusion", "captum", "attn_lrp", *OF_TABLES, *OWN)


@pytest.fixture(scope="module")
def done() -> Run:
    return ran(train={"rounds": 1})


@pytest.fixture(scope="module")
def snapshot(done: Run) -> ModelSnapshot:
    return ModelSnapshot.of(done)


@pytest.fixture(scope="module")
def of_transformer() -> ModelSnapshot:
    model = {"name": "vit", "patch": 2, "dim": 8, "depth": 2, "heads": 2}
    return ModelSnapshot.of(ran(model=model, train={"rounds": 1}))


@pytest.fixture(scope="module")
def of_table() -> ModelSnapshot:
    model = {"name": "nam", "hidden": [6, 4]}
    return ModelSnapshot.of(ran(**KINDS["table"], model=model, train={"rounds": 1}))


def test_every_explainer_of_parts_is_here() -> None:
    known = {n for n, each in explainers.items() if issubclass(each, FeatureExplainer)}
    of_others = {"rules", "rationale", "integrated_gradients", "gradient_x_input", "tree_shap"}
    assert known - of_others <= {*OF_NETWORKS, *OF_TRANSFORMERS, *OF_TABLES}


@pytest.mark.parametrize("name", by_day(EACH, BY_DAY))
def test_scores_and_maps_of_an_input(
    name: str, snapshot: ModelSnapshot, of_transformer: ModelSnapshot, of_table: ModelSnapshot
) -> None:
    snapshot = of_transformer if name in OF_TRANSFORMERS else snapshot
    snapshot = of_table if name in OF_TABLES else snapshot
    data, about = snapshot.dataset, snapshot.data()
    (chosen,) = Explain(explainers=[name]).explainers
    images = len(data.shape) == 3
    fit = {n for n, s in SCORES.items() if s.about == "input" and s.fits(chosen)}
    wanted = [n for n in SCORES if n in fit and (images or not SCORES[n].images)]
    section = Explain(explainers=[name], scores=wanted)

    def measured(rows: list[int]) -> Any:
        x, y = about.prepare(data.test_x[rows]), torch.from_numpy(data.test_y[rows])
        inputs = ExplainedInputs(np.array(rows), x, y)
        return measure(section, chosen, snapshot.explained(), about, inputs)

    together, by_row = measured(ROWS), {row: measured([row]) for row in {*ROWS}}
    for k, row in enumerate(ROWS):
        alone = by_row[row]
        largest = np.abs(alone.relevance).max()
        np.testing.assert_allclose(
            together.relevance[k], alone.relevance[0], rtol=0, atol=1e-5 * largest
        )
        if name in ("smoothgrad", "random", "sage", "gradient_shap", OWN[0]):
            np.testing.assert_array_equal(together.relevance[k], alone.relevance[0])
        for score, values in together.scores.items():
            own = alone.scores[score]
            np.testing.assert_allclose(values[k], own[0], rtol=1e-3, atol=1e-6, err_msg=score)


@pytest.mark.parametrize("name", ["smoothgrad", "sage", *OWN])
def test_by_row_by_rows_or_by_content(name: str, done: Run, say: Say) -> None:
    data = ModelSnapshot.of(done).dataset
    np.save("some.npy", (16 * data.test_x[[5, 7]]).astype(data.x.dtype))
    maps = {}
    for how, asked in {
        "alone": {"row": 7},
        "first": {"row": [7, 3]},
        "last": {"row": [*range(5), 7]},
        "by hand": {"input": Inputs.of_arrays(data.test_x[[7]], "mine")},
        "from a file": {"input": "some.npy"},
    }.items():
        (found,) = explanations(done, name, **asked)  # type: ignore[arg-type]
        assert isinstance(found, Attributed)
        maps[how] = found.relevance[0 if how in ("alone", "first", "by hand") else -1]
    for how, found in maps.items():
        np.testing.assert_array_equal(found, maps["alone"], err_msg=how)


def test_inputs_have_streams_of_their_own() -> None:
    x = torch.rand(3, 2, 2)
    first, second, third = (own.random() for own in input_rngs(keyed_rng(0, "a"), x))
    assert len({first, second, third}) == 3
    swapped = [own.random() for own in input_rngs(keyed_rng(0, "a"), x[[2, 0, 1]])]
    assert swapped == [third, first, second]
    assert input_rngs(keyed_rng(1, "a"), x)[0].random() != first


@pytest.mark.filterwarnings("ignore:.*words get random vectors")
def test_samples_of_words() -> None:
    """A model that samples the words that it reads."""
    sampling = {**KINDS["rationales"], "model": {**CHOOSER, "evaluate": "sampled"}}
    done = ran(**sampling, train={"rounds": 1})
    together = explanations(done, "rationale", row=[4, 2, 6])[0].rows()
    for k, row in enumerate([4, 2, 6]):
        (alone,) = explanations(done, "rationale", row=row)[0].rows()
        assert alone["chosen"] == together[k]["chosen"]
    model = ModelSnapshot.of(done)
    found, last = model.explain(RationaleExplainer()), done.rounds.iloc[-1]
    assert isinstance(found, Rationales)
    assert {name: last[name] for name in found.scores} == found.scores
    x = model.data().prepare(model.dataset.test_x[[4, 2, 6]])
    about = model.explained(), model.data()
    y = torch.zeros(3, dtype=torch.int64)
    whole = RationaleExplainer().each(*about, x, y, keyed_rng(0, "a"))
    alone = RationaleExplainer().each(*about, x[1:2], y[1:2], keyed_rng(0, "a"))
    np.testing.assert_array_equal(whole[1], alone[0])


def test_a_slight_change_keeps_the_stream(snapshot: ModelSnapshot) -> None:
    """Or sensitivity would measure the noise of sampling."""
    about, x = snapshot.data(), snapshot.dataset.test_x[:2]
    inputs = ExplainedInputs(np.arange(2), about.prepare(x), torch.zeros(2, dtype=torch.int64))
    section = Explain(explainers=["random"], scores=["sensitivity", "repeatability"])
    model = replace(snapshot.explained(), round=3)
    found = measure(section, section.explainers[0], model, about, inputs).scores
    assert found["sensitivity"].tolist() == [0, 0]
    assert (found["repeatability"] < 0.9).all()
