"""Against other libraries, where they are installed: none is a requirement, and some need others'
versions of what fedsim uses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments import WHOLE, small_experiment
from fedsim.analysis.drifts import Adwin
from fedsim.data import Dataset, partitions
from fedsim.explain.calls import Calls, function, is_activation
from fedsim.explain.explainers.attribution import attributions
from fedsim.explain.scores.faithfulness import area, monotonicity, selectivity
from fedsim.explain.scores.road import road
from fedsim.models.transformer import Vit

pytestmark = pytest.mark.night


class TestQuantus:
    @pytest.fixture
    def quantus(self) -> Any:
        return pytest.importorskip("quantus")

    @pytest.fixture
    def asked(self, request: pytest.FixtureRequest) -> dict[str, Any]:
        """What Quantus takes; some of its scores want images of one channel."""
        torch.manual_seed(0)
        C = 2 if request.function.__name__ == "test_selectivity" else 1
        network = nn.Sequential(nn.Flatten(), nn.Linear(C * 64, 3)).eval()
        x, rng = torch.randn(4, C, 8, 8), np.random.default_rng(1)
        found = {"model": network, "x_batch": x.numpy(), "softmax": True, "channel_first": True}
        y, maps = network(x).argmax(dim=1).numpy(), rng.standard_normal((4, 1, 8, 8))
        return {**found, "y_batch": y, "a_batch": maps}

    usual: Any = {"normalise": False, "disable_warnings": True}  # noqa: RUF012

    def of_ours(self, asked: dict[str, Any]) -> tuple[Any, Tensor, Any]:
        """The probability of the class decided upon, inputs, and relevances of their pixels."""
        network, y = asked["model"], torch.from_numpy(asked["y_batch"])

        def value(x: Tensor) -> Tensor:
            chances: Tensor = network(x).softmax(dim=1)
            return chances[torch.arange(len(x)), y.repeat(len(x) // len(y))]

        return value, torch.from_numpy(asked["x_batch"]), asked["a_batch"].reshape(4, -1)

    def test_selectivity(self, quantus: Any, asked: dict[str, Any]) -> None:
        theirs = quantus.Selectivity(patch_size=2, perturb_baseline=0.0, **self.usual)(**asked)
        value, x, maps = self.of_ours(asked)
        curves = np.concatenate([value(x).detach().numpy()[:, None], np.array(theirs)], axis=1)
        np.testing.assert_allclose(selectivity(value, x, maps, side=2), area(curves), rtol=1e-5)

    def test_monotonicity(self, quantus: Any, asked: dict[str, Any]) -> None:
        spearman = quantus.similarity_func.correlation_spearman
        theirs = quantus.MonotonicityCorrelation(
            **{"nr_samples": 1, "features_in_step": 1, "perturb_baseline": 0.0, "abs": True},
            **{"similarity_func": spearman, **self.usual},
        )
        found = monotonicity(*self.of_ours(asked))
        np.testing.assert_allclose(found, theirs(**asked), atol=1e-3)

    def test_road(self, quantus: Any, asked: dict[str, Any]) -> None:
        """Theirs is the share of inputs whose decision stays; they round pixels down."""
        theirs = quantus.ROAD(percentages=[10, 30, 50], noise=0, **self.usual)(**asked)
        network, y = asked["model"], torch.from_numpy(asked["y_batch"])

        def stays(x: Tensor) -> Tensor:
            found: Tensor = network(x).argmax(dim=1) == y.repeat(len(x) // len(y))
            return found.double()

        _, x, maps = self.of_ours(asked)
        shares = [int(64 * share) / 64 for share in (0.1, 0.3, 0.5)]
        found = road(stays, x, maps, shares, noise=0)
        assert found.mean() == pytest.approx(np.mean([*theirs.values()]))


def test_attn_lrp_is_that_of_its_authors() -> None:
    """Whose functions hand relevances on in the place of gradients."""
    lxt = pytest.importorskip("lxt.explicit.functional")
    identity = pytest.importorskip("lxt.explicit.rules").identity
    tiny = 1e-12  # their stabiliser
    theirs = {
        "linear": lambda x, w, b=None: lxt.linear_epsilon(x, w, b, tiny),
        "matmul": lambda a, b: lxt.matmul(a, b, False, tiny),
        "add": lambda a, b: lxt.add2(a, b, False, tiny),
        "div": lambda a, b: lxt.mul2(a, 1 / b),
        "softmax": lambda a, dim: lxt.softmax(a, dim),
        "gelu": lambda a, **_: identity(functional.gelu, a),
        "layer_norm": lambda a, _, weight, bias, eps: lxt.layer_norm(a, weight, bias, eps),
    }

    class Theirs(Calls):
        def call(self, func: Any, *args: Any, **kwargs: Any) -> Any:
            if any(is_activation(a) for a in args):
                func = theirs.get(function(func), func)
            return func(*args, **kwargs)

    torch.manual_seed(1)
    network = Vit(dim=8, depth=2, heads=2, patch=4).build((2, 8, 8), 3)
    network = network.double().eval().requires_grad_(False)
    x, y = torch.randn(3, 2, 8, 8, dtype=torch.double).requires_grad_(), torch.tensor([2, 0, 1])
    with Theirs():
        logits = network(x)
    logits.backward(logits.detach() * functional.one_hot(y, 3))
    explainer: Any = attributions.parse({"name": "attn_lrp"})
    found = explainer.relevance(network, x.detach(), y, np.random.default_rng(0))
    torch.testing.assert_close(found, x.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("levels", [(0, 0.6), (0, 0.3), (0.1, 0.1), (0.6, 0)])
def test_adwin_forgets_what_river_s_forgets(levels: tuple[float, float]) -> None:
    river = pytest.importorskip("river.drift")
    for seed in range(5):
        every = {"clock": 1, "grace_period": 1, "min_window_length": 1, "max_buckets": 10**6}
        theirs, ours = river.ADWIN(delta=0.01, **every), Adwin(0.01)
        values = np.random.default_rng(seed).beta(2, 2, size=120) * 0.4 + np.repeat(levels, 60)
        for value in values.tolist():
            theirs.update(value)
            ours.add(np.array([value]))
            assert len(ours.window) == theirs.width
            if theirs.drift_detected:  # then it begins again
                break


@pytest.mark.parametrize(
    ("fields", "name", "arguments"),
    [
        (
            {"kind": "dirichlet", "alpha": 0.1, "min_samples": 1, "clients": 20},
            *("DirichletPartitioner", (20, "label", 0.1, 1, False, True, 0)),
        ),
        (
            {"kind": "pathological", "classes_per_client": 3, "clients": 20},
            *("PathologicalPartitioner", (20, "label", 3, "deterministic")),
        ),
        ({"kind": "iid", "clients": 20}, "IidPartitioner", (20,)),
        ({"kind": "natural", "column": "writer"}, "NaturalIdPartitioner", ("writer",)),
    ],
)
def test_counts_are_those_of_flower_datasets(
    fields: dict[str, Any], name: str, arguments: tuple[Any, ...]
) -> None:
    theirs = getattr(pytest.importorskip("flwr_datasets.partitioner"), name)(*arguments)
    digits = small_experiment(data=WHOLE).data.load()
    writer = np.arange(len(digits.y)) % 20
    data = Dataset.of(digits.x, digits.y, digits.test_x, digits.test_y, writer=writer)
    rows = {"row": np.arange(len(data.y)), "label": data.y, "writer": writer}
    theirs.dataset = pytest.importorskip("datasets").Dataset.from_dict(rows)
    parts = [np.array(theirs.load_partition(k)["row"]) for k in range(20)]
    shares = partitions.parse(fields).split(data, np.random.default_rng(0))
    if fields["kind"] == "iid":  # who holds what is drawn
        assert sorted(map(len, shares)) == sorted(map(len, parts))
        return
    found, expected = (
        np.stack([np.bincount(data.y[part], minlength=10) for part in all_of_them])
        for all_of_them in (shares, parts)
    )
    if fields["kind"] == "natural":  # of groups the order is free
        assert {frozenset(share) for share in shares} == {frozenset(part) for part in parts}
    if fields["kind"] != "dirichlet":  # so is who holds which class; how it is cut is not
        found, expected = np.sort(found, axis=0), np.sort(expected, axis=0)
    np.testing.assert_array_equal(found, expected)
