"""Completeness: relevances that sum to the change of the output from the baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from networks import Written
from test_attention import CLASS, DOCUMENTS, reader, text_cnn
from test_attribution import examples, network, parse, rng, trained_resnet
from torch import Tensor, nn

from experiments import ran
from fedsim.errors import FedsimWarning
from fedsim.explain import ExplainedModel
from fedsim.explain.explainers import gradients
from fedsim.explain.explainers.gradients import IntegratedGradients
from fedsim.explain.scores.relevance import completeness_gap
from fedsim.models import models

Case = tuple[nn.Module, Tensor, Tensor]


def of_images(name: str, shape: tuple[int, ...], **fields: Any) -> Case:
    return network(name, shape, **fields).eval(), *examples(shape, 6)


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: of_images("mlp", (1, 8, 8), hidden=(32, 16)),
    "cnn": lambda: of_images("cnn", (1, 28, 28), channels=(4, 8)),
    "resnet8": lambda: (trained_resnet(), *examples((3, 16, 16), 6)),
    "table": lambda: of_images("mlp", (7,), hidden=(16,)),
    "vit": lambda: of_images("vit", (1, 8, 8), patch=4, dim=8, depth=2, heads=2),
    "text_cnn": lambda: (text_cnn(), DOCUMENTS, CLASS),
    "transformer": lambda: (reader(), DOCUMENTS, CLASS),
}


def gaps(explainer: IntegratedGradients, case: Case, found: Tensor) -> Any:
    """(n,) of each input, from zero."""
    net, x, y = case
    model = ExplainedModel(models.parse({"name": "mlp"}), "", 1, 0, network=net)
    end, start = explainer.endpoints(model, DATA, x, y)
    return completeness_gap(found.double().flatten(1).sum(1).numpy(), end, start)


DATA: Any = None  # baselines of zero do not ask for the data


class TestIntegratedGradients:
    @pytest.mark.parametrize("name", CASES)
    def test_are_as_complete_as_they_say(self, name: str) -> None:
        case, made = CASES[name](), IntegratedGradients()
        assert gaps(made, case, made.relevance(*case, rng())).max() <= 0.0101

    def test_of_every_target(self) -> None:
        case = CASES["transformer"]()
        for target in ("class", "centred", "outputs"):
            made = IntegratedGradients(target=target, tolerance=1e-3)
            assert gaps(made, case, made.relevance(*case, rng())).max() <= 1.01e-3

    @pytest.mark.parametrize("name", ["mlp", "cnn", "resnet8", "table", "vit"])
    def test_are_those_of_captum(self, name: str) -> None:
        from captum.attr import IntegratedGradients as Captum

        net, x, y = CASES[name]()
        for ours, theirs in {"gauss_legendre": "gausslegendre", "right": "riemann_right"}.items():
            expected = Captum(net).attribute(x, target=y, n_steps=30, method=theirs)
            found = parse("integrated_gradients", rule=ours, steps=30).relevance(net, x, y, rng())
            largest = float(expected.abs().max())
            torch.testing.assert_close(
                found.double(), expected.double(), rtol=1e-4, atol=1e-5 * largest
            )

    @pytest.mark.parametrize("degree", [2, 5, 11])
    def test_polynomials_are_integrated_exactly(self, degree: int) -> None:
        """f = (Σ w x)^d: R_j = x_j w_j (Σ w x)^(d − 1), by n points up to degree 2n."""

        power = Written(lambda _, x: ((x @ w) ** degree)[:, None])
        w, x = torch.tensor([1.0, -2.0, 0.5]), torch.randn(4, 3, generator=torch.manual_seed(0))
        expected = x * w * ((x @ w) ** (degree - 1))[:, None]
        y = torch.zeros(4, dtype=torch.int64)
        made = IntegratedGradients(steps=-(-degree // 2))
        torch.testing.assert_close(made.relevance(power, x, y, rng()), expected)
        torch.testing.assert_close(
            IntegratedGradients().relevance(power, x, y, rng()), expected, rtol=1e-4, atol=1e-5
        )

    @pytest.mark.parametrize("name", CASES)
    def test_do_not_depend_on_inputs_beside_them_in_any_bit(self, name: str) -> None:
        net, x, y = CASES[name]()
        made = IntegratedGradients()
        together = made.relevance(net, x, y, rng())
        backwards = made.relevance(net, x.flip(0), y.flip(0), rng()).flip(0)
        assert torch.equal(together, backwards)
        for k in range(len(x)):
            alone = made.relevance(net, x[k : k + 1], y[k : k + 1], rng())
            assert torch.equal(together[k], alone[0])

    def test_take_as_many_steps_as_each_input_needs(self) -> None:
        """A step is hard to integrate, a line is not."""
        step = Written(lambda _, x: torch.cat([x.sum(1, True), torch.sigmoid(60 * (x - 0.6))], 1))
        x, y = torch.ones(2, 1), torch.tensor([0, 1])
        whole = step(x)[[0, 1], y] - step(0 * x)[[0, 1], y]
        found = IntegratedGradients().relevance(step, x, y, rng())[:, 0]
        torch.testing.assert_close(found, whole, rtol=0.0101, atol=0)

    def test_say_if_no_number_of_steps_is_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gradients, "MOST", 16)
        net, x, y = CASES["resnet8"]()
        with pytest.warns(FedsimWarning, match=r"with 16 steps, relevances of some inputs are "):
            IntegratedGradients(tolerance=1e-7).relevance(net, x, y, rng())


def test_the_gap_of_changes_that_are_nearly_nothing() -> None:
    found = completeness_gap(*np.array([[3, 3, 0, 0], [2, 100, 0, -np.inf], [0, 100, 0, 0]]))
    assert found[:2].tolist() == [0.5, 0.15]  # of 2, and of a tenth of 200
    assert np.isnan(found[2:]).all()


def test_it_is_recorded_for_those_that_claim_it() -> None:
    names = ["integrated_gradients", "sage", "lrp", "gradient", "occlusion", "random"]
    explain = {"explainers": names, "inputs": 4, "clients": 2}
    found = ran(train={"rounds": 1}, explain=explain)
    of = found.explanations.groupby("explainer")["completeness_gap"]
    largest = of.max().dropna()
    assert set(largest.index) == {"integrated_gradients", "sage", "lrp"}
    assert largest["integrated_gradients"] <= 0.0101
    assert largest["sage"] < 1e-3
    columns = {c for c in found.rounds if c.endswith("completeness_gap")}
    assert {c.partition("/")[0] for c in columns} == {"integrated_gradients", "sage", "lrp"}
