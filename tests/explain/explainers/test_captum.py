"""Captum's attributions and the SHAP family, against Captum by hand and exact Shapley values."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import shapley
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments import FOUR, KINDS, REVIEWS, Later, ran
from fedsim import explanations
from fedsim.analysis.replay import ModelSnapshot
from fedsim.explain.baselines import Background
from fedsim.explain.calls import by_words
from fedsim.explain.explainers import captum as ours
from fedsim.explain.explainers import explainers
from fedsim.explain.groups import group_parts
from fedsim.support.rng import torch_seed

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*words get random vectors",
    r"ignore:\s*Setting (forward, )?backward hooks",
    "ignore:Input Tensor",
)

attr: Any = Later("captum.attr")
Sections = dict[str, Any]
SUBJECTS: dict[str, Sections] = {
    "mlp": {"model": {"name": "mlp", "hidden": [8]}},
    "cnn": {"model": {"name": "cnn", "channels": [3, 4]}},
    "resnet8": {"model": {"name": "resnet8", "width": 2}},
    "vit": {"model": {"name": "vit", "patch": 2, "dim": 8, "depth": 2, "heads": 2}},
    "table": {
        "data": {"name": "synthetic", "shape": [4], "classes": 3, "samples": 80},
        "partition": FOUR,
        "model": {"name": "mlp", "hidden": [6]},
    },
    "text": KINDS["documents"],
    "reader": {**REVIEWS, "model": {"name": "transformer", "dim": 8, "depth": 1, "heads": 2}},
}
ROWS = [4, 7, 2]


@cache
def subject(kind: str) -> tuple[Any, Any, Tensor, Tensor]:
    """A trained model, its data, some inputs and their classes."""
    snapshot = ModelSnapshot.of(ran(**SUBJECTS[kind], train={"rounds": 1}))
    data = snapshot.data()
    return (
        snapshot.explained(),
        data,
        data.prepare(snapshot.dataset.test_x[ROWS]),
        torch.from_numpy(snapshot.dataset.test_y[ROWS]),
    )


def explain(kind: str, section: Sections, rng: int = 0) -> NDArray[np.float32]:
    model, data, x, y = subject(kind)
    return explainers.parse(section).each(model, data, x, y, np.random.default_rng(rng))


def alone(kind: str, section: Sections, k: int = 0) -> NDArray[np.float32]:
    """Of one input, from the stream `default_rng(5)`."""
    model, data, x, y = subject(kind)
    chosen = explainers.parse(section)
    rng = np.random.default_rng(5)
    return chosen.relevances(model, data, x[k : k + 1], y[k : k + 1], rng)[0]


def theirs(name: str, network: Any, x: Tensor, y: Tensor, **more: Any) -> Tensor:
    """What Captum itself says of the first input, from the same stream as `alone`."""
    with torch.random.fork_rng():
        rng = np.random.default_rng(5)
        np.random.seed(int(rng.integers(2**32)))
        torch.manual_seed(torch_seed(int(rng.integers(2**63)), "libraries"))
        made = getattr(attr, name)(network, **more.pop("by", {}))
        return made.attribute(x[:1].clone(), target=int(y[0]), **more)[0].detach()


@cache
@torch.no_grad()
def value(
    kind: str, k: int, there: tuple[int, ...], others: Tensor | None = None, words: int = 99
) -> float:
    """The mean logit of an input of which only some parts are left, written out."""
    model, data, x, y = subject(kind)
    found = []
    for other in torch.zeros_like(x[:1]) if others is None else others:
        if data.dataset.words:
            left = [int(token) for i, token in enumerate(x[k, :words]) if token and i in there]
            mixed = torch.tensor(left + [0] * (x.shape[1] - len(left)))
        else:
            own = group_parts(tuple(x.shape[1:]), 4, data.dataset.parts).index
            mixed = torch.where(torch.from_numpy(np.isin(own, there)), x[k], other)
        found.append(float(model.network(mixed[None])[0, y[k]].double()))
    return float(np.mean(found))


def by_part(kind: str, k: int, relevance: NDArray[Any]) -> NDArray[Any]:
    """(G,) the sum over each part's entries."""
    _, data, x, _ = subject(kind)
    if data.dataset.words:
        return relevance[: int((x[k] != 0).sum())]
    own = group_parts(tuple(x.shape[1:]), 4, data.dataset.parts).index
    return np.bincount(own.ravel(), relevance.ravel().astype(float))


@pytest.mark.parametrize("kind", ["mlp", "cnn", "resnet8", "vit", "table"])
@pytest.mark.parametrize("name", ["kernel_shap", "captum"])
def test_shapley_values_of_few_parts_are_exact(name: str, kind: str) -> None:
    more = {} if name == "kernel_shap" else {"method": "ShapleyValues"}
    found = explain(kind, {"name": name, **more})
    for k in range(2):
        exact = shapley(lambda there, k=k: value(kind, k, there), 4)
        of_parts = by_part(kind, k, found[k])
        np.testing.assert_allclose(of_parts, exact, rtol=1e-3, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("kind", ["text", "reader"])
def test_shapley_values_of_words(kind: str) -> None:
    model, data, x, y = subject(kind)
    short = x.clone()
    short[:, 5:] = 0
    chosen = explainers.parse({"name": "kernel_shap"})
    found = chosen.each(model, data, short, y, np.random.default_rng(0))
    exact = shapley(lambda there: value(kind, 0, there, words=5), 5)
    np.testing.assert_allclose(found[0, :5], exact, rtol=1e-3, atol=1e-5)
    assert not found[:, 5:].any()


@pytest.mark.parametrize("kind", ["mlp", "cnn", "resnet8", "vit", "table"])
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("KernelShap", {"n_samples": 9}),
        ("FeatureAblation", {}),
        ("ShapleyValueSampling", {"n_samples": 3}),
    ],
)
def test_parts_against_captum(kind: str, method: str, more: Sections) -> None:
    """Which by itself multiplies inputs with masks, instead of getting the masks as inputs."""
    model, data, x, y = subject(kind)
    section = {"name": "captum", "method": method, "arguments": more}
    if method == "KernelShap":  # by its own name, too
        short = {"name": "kernel_shap", "samples": 9}
        np.testing.assert_array_equal(alone(kind, short), alone(kind, section))
    found = by_part(kind, 0, alone(kind, section))
    own = torch.from_numpy(group_parts(tuple(x.shape[1:]), 4, data.dataset.parts).index)
    mask = own.expand(x.shape[1:])[None]
    with torch.no_grad():
        about = model.network, x, y
        expected = theirs(method, *about, baselines=0, feature_mask=mask, **more)
    each = np.array([float(expected[mask[0] == g][0]) for g in range(int(own.max()) + 1)])
    np.testing.assert_allclose(found, each, rtol=1e-3, atol=1e-5 * np.abs(each).max())


def test_lime_weighs_by_the_distance_of_parts() -> None:
    model, _, x, y = subject("table")
    more = {"n_samples": 40}
    found = alone("table", {"name": "captum", "method": "Lime", "arguments": more})
    cosine = nn.CosineSimilarity(dim=1)

    def similarity(_: Tensor, __: Tensor, there: Tensor, **___: Any) -> Tensor:
        distance = 1 - cosine(torch.ones(1, 4), there.float())
        return torch.exp(-(distance**2) / 2)

    by = {"similarity_func": similarity}
    with torch.no_grad():
        expected = theirs("Lime", model.network, x, y, by=by, baselines=0, **more)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


OF_ENTRIES: dict[str, Sections] = {
    "Saliency": {"abs": False},
    "InputXGradient": {},
    "IntegratedGradients": {"n_steps": 7, "method": "riemann_right"},
    "GradientShap": {"n_samples": 6, "stdevs": 0.1},
    "GuidedBackprop": {},
    "Deconvolution": {},
    "Occlusion": {},
    "DeepLift": {},
}
COMPARED = ("IntegratedGradients", "Occlusion", "DeepLift", "GradientShap")


OF_LAYERS = {"DeepLift": ("mlp", "table")}  # others call functions, or modules twice
OF_LAYERS |= dict.fromkeys(("GuidedBackprop", "Deconvolution"), ("mlp", "table", "cnn", "resnet8"))


@pytest.mark.parametrize(
    ("kind", "method"),
    [(kind, m) for m in OF_ENTRIES for kind in OF_LAYERS.get(m, ("table", "cnn", "vit"))],
)
def test_entries_against_captum(kind: str, method: str) -> None:
    model, _, x, y = subject(kind)
    more = dict(OF_ENTRIES[method])
    if method == "Occlusion":
        more["sliding_window_shapes"] = [1, 3, 3] if x.dim() == 4 else [2]
    found = alone(kind, {"name": "captum", "method": method, "arguments": more})
    if method == "Occlusion":
        more["sliding_window_shapes"] = tuple(more["sliding_window_shapes"])
    rows = torch.zeros_like(x[:1])
    if method in COMPARED:
        more["baselines"] = rows.repeat_interleave(2, 0) if method == "GradientShap" else rows
    expected = theirs(method, model.network, x, y, **more)
    expected = expected.sum(dim=0) if x.dim() == 4 else expected
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["text", "reader"])
@pytest.mark.parametrize("method", ["InputXGradient", "IntegratedGradients", "GradientShap"])
def test_documents_at_their_words_vectors(kind: str, method: str) -> None:
    model, _, x, y = subject(kind)
    mores: dict[str, Sections] = {"IntegratedGradients": {"n_steps": 5}}
    mores["GradientShap"] = {"n_samples": 5}
    more = mores.get(method, {})
    found = alone(kind, {"name": "captum", "method": method, "arguments": more})
    vectors, read = by_words("a test", model.network, x[:1])
    if method != "InputXGradient":
        count = 2 if method == "GradientShap" else 1
        more["baselines"] = torch.zeros_like(vectors).repeat(count, 1, 1)
    summed = torch.zeros(x.shape[1])
    summed[: vectors.shape[1]] = theirs(method, read, vectors, y, **more).sum(dim=1)
    np.testing.assert_allclose(found, summed.masked_fill(x[0] == 0, 0), rtol=1e-4, atol=1e-6)


def give(monkeypatch: pytest.MonkeyPatch, rows: Tensor) -> None:
    """Take some rows (m, ...) as the background, whatever the baseline."""
    background = Background(rows[:, None], np.ones(len(rows)))
    monkeypatch.setattr(ours.OfCaptum, "background", lambda *_: background)


class Written(nn.Module):
    """A network that calls functions, one module twice, and pools what ReLU returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.act, self.head = nn.ELU(), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        found = nn.functional.max_pool2d(self.first(x).relu_(), 2)
        found = found + self.act(self.second(self.act(found)))
        found = torch.sigmoid(nn.functional.leaky_relu(found, 0.3))
        return self.head(nn.functional.softplus(nn.functional.max_pool2d(found, 2)).flatten(1))


@pytest.mark.parametrize("kind", ["mlp", "cnn", "resnet8", "table", "written"])
@pytest.mark.parametrize("rows", [1, 3])
def test_deep_shap_is_complete(kind: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Captum is not by itself: of modules in a row, called twice, or functions."""
    model, data, x, y = subject("mlp" if kind == "written" else kind)
    network = model.network
    if kind == "written":
        torch.manual_seed(0)
        network = Written().eval()
        model = replace(model, network=network)
    others = torch.randn(rows, *x.shape[1:])
    give(monkeypatch, others)
    chosen = explainers.parse({"name": "deep_shap", "baseline": "mean"})
    found = chosen.each(model, data, x, y, np.random.default_rng(0))
    with torch.no_grad():
        change = network(x).gather(1, y[:, None])[:, 0] - network(others)[:, y].mean(dim=0)
    np.testing.assert_allclose(found.reshape(3, -1).sum(1), change, rtol=1e-3, atol=1e-5)


def test_a_background_of_several_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, x, y = subject("table")
    others = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    section = {"name": "kernel_shap", "baseline": "mean"}
    give(monkeypatch, others)
    found = explain("table", section)
    for k in range(3):
        exact = shapley(lambda there, k=k: value("table", k, there, others), 4)
        np.testing.assert_allclose(found[k], exact, rtol=1e-3, atol=1e-5)
    for method in ("IntegratedGradients", "DeepLift"):
        section = {"name": "captum", "method": method, "baseline": "mean"}
        together = alone("table", section)
        apart = []
        for row in others.split(1):
            give(monkeypatch, row)
            apart.append(alone("table", section))
        give(monkeypatch, others)
        np.testing.assert_allclose(together, np.mean(apart, axis=0), rtol=1e-4, atol=1e-6)
    many = {"name": "gradient_shap", "baseline": "mean", "samples": 4000}
    with torch.no_grad():
        logits = model.network(x)[0, y[0]] - model.network(others)[:, y[0]].mean()
    assert alone("table", many).sum() == pytest.approx(float(logits), abs=0.05)


NEEDED = {"Occlusion": {"arguments": {"sliding_window_shapes": [1, 2, 2]}}}
ALL: list[Sections] = [
    *({"name": name} for name in ("kernel_shap", "gradient_shap", "deep_shap")),
    {"name": "kernel_shap", "samples": 9},
    *({"name": "captum", "method": m, **NEEDED.get(m, {})} for m in ours.METHODS),
]


@pytest.mark.parametrize("section", ALL, ids=lambda s: s.get("method", s["name"]))
def test_neither_batch_mates_nor_order_nor_generators(section: Sections) -> None:
    model, data, x, y = subject("mlp")
    chosen = explainers.parse(section)
    torch.manual_seed(11)
    np.random.seed(11)
    state, numpys = torch.get_rng_state(), np.random.get_state()
    whole = chosen.each(model, data, x, y, np.random.default_rng(0))
    assert torch.equal(torch.get_rng_state(), state)
    after = np.random.get_state()
    assert np.array_equal(after[1], numpys[1])
    assert after[2:] == numpys[2:]
    turned = [2, 0, 1]
    other = chosen.each(model, data, x[turned], y[turned], np.random.default_rng(0))
    np.testing.assert_array_equal(other, whole[turned])
    one = chosen.each(model, data, x[1:2], y[1:2], np.random.default_rng(0))
    np.testing.assert_array_equal(one[0], whole[1])
    assert not any(m._forward_hooks or m._backward_hooks for m in model.network.modules())
    assert all(parameter.grad is None for parameter in model.network.parameters())


def test_all_of_captums_attributions_are_known() -> None:
    """Those of inputs that need nothing but a network, but for two that would mislead."""
    from captum import attr

    found = set()
    for name in attr.__all__:
        made = getattr(attr, name)
        if not (inspect.isclass(made) and issubclass(made, attr.Attribution)):
            continue
        if name.startswith(("Layer", "Neuron", "LLM", "RemoteLLM")) or name.endswith(
            "Attribution"
        ):
            continue
        needed = [
            key
            for key, one in inspect.signature(made).parameters.items()
            if one.default is one.empty and key not in ("forward_func", "model")
        ]
        if not needed:
            found.add(name)
    assert found - {"LRP", "FeaturePermutation"} == set(ours.METHODS)


def test_several_of_captum_in_a_run(tmp_path: Path) -> None:
    names = ["captum-DeepLift", "captum-FeatureAblation", "kernel_shap"]
    listed = [{"name": "captum", "method": m} for m in ("DeepLift", "FeatureAblation")]
    explain = {"explainers": [*listed, names[-1]], "inputs": 2, "scores": ["sparseness"]}
    done = ran(**SUBJECTS["mlp"], train={"rounds": 1}, explain=explain)
    assert set(done.explanations["explainer"]) == {*names}
    assert done.rounds["captum-DeepLift/client_sparseness"].notna().all()
    (found,) = explanations(done, "captum-DeepLift", row=0)
    assert "captum-DeepLift" in found.text()
    assert found.save(tmp_path)[0].name.startswith("captum-DeepLift-")
    (other,) = explanations(done, "{name: captum, method: Saliency}", row=0)
    assert "captum-Saliency" in other.text()


def test_models_of_arrays_and_features_of_several_columns(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    rows = [f"{'abc'[k % 3]},{k},{k % 2}" for k in range(80)]
    path.write_text("\n".join(["kind,size,y", *rows]))
    data = {"name": "table", "path": str(path), "label": "y", "categorical": ["kind"]}
    columns = ran(data=data, partition=FOUR, train={"rounds": 1})
    for done, name, features in (
        (ran(**KINDS["trees"], train={"rounds": 2}), "kernel_shap", 6),
        (columns, "kernel_shap", 2),
        (columns, "deep_shap", 2),
    ):
        snapshot, chosen = ModelSnapshot.of(done), explainers.parse({"name": name})
        model, of = snapshot.explained(), snapshot.data()
        x, network = of.prepare(snapshot.dataset.test_x[:2]), model.as_network()
        chosen.check(model, of)
        found = chosen.each(model, of, x, torch.tensor([1, 1]), np.random.default_rng(0))
        assert found.shape == (2, features)
        with torch.no_grad():
            change = network(x)[:, 1] - network(torch.zeros_like(x))[:, 1]
        np.testing.assert_allclose(found.sum(axis=1), change, rtol=1e-3, atol=1e-5)
