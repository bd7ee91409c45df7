"""Networks: what all of them must be, their sizes, and their weights as one vector."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from experiments import KINDS, REVIEWS, by_day
from fedsim import Run
from fedsim.errors import ExperimentError
from fedsim.models import ArrayModel, Classifier, Model, models
from fedsim.training import FlatModel

CPU = torch.device("cpu")
CLASSES = 7
SHAPES = [(1, 8, 8), (3, 16, 20), (16,)]
SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"hidden": [8, 5]},
    "cnn": {"channels": [2, 3]},
    "xpfl_student": {"channels": [2, 3]},
    "resnet8": {"width": 2},
    "vit": {"dim": 8, "depth": 1, "heads": 2},
    "nam": {"hidden": [4, 3]},
}
OF_ROWS = {"mlp", "nam"}
NETWORKS = [
    name
    for name, model in models.items()
    if model.inputs == "numbers" and not issubclass(model, ArrayModel)
]


def make(name: str, **fields: Any) -> Model:
    model: Model = models.parse({"name": name, **fields})
    return model


def build(name: str, shape: tuple[int, ...], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make(name, **SMALL[name]).build(shape, CLASSES)


def size(module: nn.Module) -> tuple[int, int]:
    """Parameters, and buffer entries that belong to the weights."""
    saved = module.state_dict()
    buffers = sum(
        b.numel() for n, b in module.named_buffers() if n in saved and b.is_floating_point()
    )
    return sum(p.numel() for p in module.parameters()), buffers


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (name, shape)
        for name in NETWORKS
        for shape in SHAPES
        if (name in OF_ROWS and len(shape) == 1) or (name != "nam" and len(shape) == 3)
    ],
)
class TestEveryModel:
    """Beside what `fedsim.testing.check_model` asks of them."""

    def test_is_a_classifier_that_starts_from_torch_s_random_state(
        self, name: str, shape: tuple[int, ...]
    ) -> None:
        one, other = (build(name, shape, seed) for seed in (0, 1))
        x = torch.randn(3, *shape)
        assert one(x).shape == (3, CLASSES)
        assert isinstance(one, Classifier)
        assert torch.equal(one.eval()(x), one.head(one.features(x)))
        assert not torch.equal(one.head.weight, other.head.weight)  # type: ignore[union-attr, arg-type]

    def test_travels_as_a_vector(self, name: str, shape: tuple[int, ...]) -> None:
        plain = build(name, shape)
        x, y = torch.randn(8, *shape), torch.arange(8) % CLASSES
        plain(x)  # so that batch norm has statistics of its own
        sender = FlatModel(copy.deepcopy(plain), CPU)
        receiver = FlatModel(build(name, shape, seed=1), CPU)
        weights = sender.weights()
        assert (weights.dtype, weights.shape) == (np.float32, (receiver.size,))
        assert (receiver.num_parameters, receiver.size) == (size(plain)[0], sum(size(plain)))
        receiver.load(torch.from_numpy(weights))
        weights[:] = 0  # a copy, not the vector itself
        assert torch.equal(receiver.module.eval()(x), plain.eval()(x))
        loss = nn.functional.cross_entropy(plain(x), y)
        expected = torch.autograd.grad(loss, list(plain.parameters()))
        for _ in range(2):  # a second gradient does not add to the first
            found = sender.gradient(nn.functional.cross_entropy(sender.module.eval()(x), y))
            torch.testing.assert_close(found, torch.cat([g.reshape(-1) for g in expected]))


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in OF_ROWS])
def test_models_of_images_refuse_other_inputs(name: str) -> None:
    with pytest.raises(ExperimentError, match=rf"^model\.name={name} takes images .*16,"):
        build(name, (16,))


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters", "buffers"),
    [
        ("mlp", (1, 28, 28), 10, 199_210, 0),
        ("cnn", (1, 28, 28), 10, 18_378, 0),
        ("xpfl_student", (1, 28, 28), 10, 31_594, 0),
        ("xpfl_student", (3, 32, 32), 10, 36_074, 0),
        ("resnet8", (3, 32, 32), 10, 4_903_242, 5_760),
        ("resnet8", (3, 32, 32), 100, 4_949_412, 5_760),
        ("resnet8", (3, 64, 64), 200, 5_000_712, 5_760),
    ],
)
def test_sizes_of_the_papers(
    name: str, shape: tuple[int, ...], classes: int, parameters: int, buffers: int
) -> None:
    module = make(name).build(shape, classes)
    assert size(module) == (parameters, buffers)
    flat = FlatModel(module, CPU)
    assert (flat.num_parameters, flat.size) == (parameters, parameters + buffers)


def test_mlp_without_hidden_layers_is_linear() -> None:
    module = make("mlp", hidden=[]).build((2, 3), 4)
    x = torch.randn(5, 2, 3)
    expected = x.reshape(5, 6) @ module.head.weight.T + module.head.bias  # type: ignore[union-attr, operator]
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("padding", ["auto", 0, 1, 2, 3])
def test_cnn_takes_images_down_to_the_size_it_names(padding: int | str) -> None:
    def outcome(side: int) -> str:
        try:
            logits = make("cnn", padding=padding).build((1, side, side), 10)
        except ExperimentError as error:
            assert f"the data's are {side}×{side}" in str(error)  # noqa: PT017
            return "refused"
        assert logits(torch.zeros(2, 1, side, side)).shape == (2, 10)
        return "built"

    outcomes = [outcome(side) for side in range(1, 20)]
    smallest = outcomes.index("built")
    assert outcomes == ["refused"] * smallest + ["built"] * (19 - smallest)
    assert smallest + 1 == {"auto": 4, 0: 16, 1: 10, 2: 4, 3: 4}[padding]


NAM = {"name": "nam", "hidden": [8, 4], "dropout": 0.2, "feature_dropout": 0.2}
TRANSFORMER = {"name": "transformer", "dim": 8, "depth": 2, "heads": 2, "dropout": 0.2}
STACKED: dict[str, dict[str, Any]] = {
    "nam": {**KINDS["table"], "model": NAM},
    "vit": {**KINDS["images"], "model": {**TRANSFORMER, "name": "vit", "dropout": 0.0}},
    "concepts": {
        "data": {"name": "shapes", "samples": 240, "test_samples": 60},
        "model": {"name": "concept_bottleneck"},
    },
    "transformer": {**REVIEWS, "model": TRANSFORMER},
    "transformer of vectors": {**REVIEWS, "model": {**TRANSFORMER, "embeddings": "vectors"}},
}


@pytest.mark.filterwarnings("ignore:.*words get random vectors")
@pytest.mark.parametrize(
    "optimizer", by_day([{"lr": 0.1}, {"name": "adam", "lr": 0.003}], [{"lr": 0.1}])
)
@pytest.mark.parametrize("name", STACKED)
def test_stacks_come_to_the_same(
    finish: Callable[..., Run], name: str, optimizer: dict[str, Any]
) -> None:
    train = {"rounds": 1, "batch_size": 8, "optimizer": optimizer}
    alone, stacked = (
        finish(**STACKED[name], train=train, engine={"clients_per_step": V}) for V in (1, 4)
    )
    assert (alone.manifest["clients_per_step"], stacked.manifest["clients_per_step"]) == (1, 4)
    for layer, tensor in alone.weights().items():
        most = 1e-2 * optimizer["lr"]
        torch.testing.assert_close(stacked.weights()[layer], tensor, rtol=0, atol=most)


def anything(shape: tuple[int, ...], classes: int, **keywords: Any) -> nn.Module:
    return nn.Linear(shape[0], classes, **keywords)


def test_functions_take_keywords() -> None:
    assert size(make(f"{__name__}:anything", bias=False).build((4,), 5)) == (4 * 5, 0)
    assert size(make(f"{__name__}:anything").build((4,), 5)) == (4 * 5 + 5, 0)
    made = make(f"{__name__}:anything", bias=False)
    assert made.model_dump() == {"name": f"{__name__}:anything", "bias": False}
    assert size(make("own_mistakes:net", width=2).build((4,), 5)) == (4 * 2 + 2 + 2 * 5 + 5, 0)


def with_batch_norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def test_the_vector_holds_buffers_and_no_counter() -> None:
    plain = with_batch_norm()
    flat = FlatModel(copy.deepcopy(plain), CPU)
    assert (flat.num_parameters, flat.size) == (4 * 3 + 3 + 3 + 3 + 3 * 2 + 2, 29 + 6)
    assert flat.has_batch_norm
    assert not FlatModel(nn.Linear(1, 1), CPU).has_batch_norm
    state = {k: v for k, v in plain.state_dict().items() if v.is_floating_point()}
    views = flat.named(flat.vector)
    assert views.keys() == state.keys()
    assert all(torch.equal(views[k], state[k]) for k in state)
    of_parameters = flat.named(flat.vector[: flat.num_parameters])
    assert of_parameters.keys() == dict(plain.named_parameters()).keys()
    flat.module(torch.randn(5, 4))
    torch.testing.assert_close(views["1.running_mean"], flat.module[1].running_mean)  # type: ignore[index]
    views["2.bias"].fill_(7)
    assert flat.module[2].bias.tolist() == [7, 7]  # type: ignore[index]
    assert flat.module[1].num_batches_tracked == 1  # type: ignore[index]
    flat.load(torch.zeros(flat.size))
    assert flat.module[1].num_batches_tracked == 0  # type: ignore[index]


def test_parts_have_names_and_lie_side_by_side() -> None:
    layers = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    flat = FlatModel(nn.ModuleDict({"a": layers, "b": nn.Linear(2, 2)}), CPU)
    assert flat.part("a") == slice(0, 75)
    assert flat.part("b") == slice(75, 81)
    assert flat.part("a.2.bias") == slice(72, 75)
    with pytest.raises(ValueError, match="the network has no 'c' with contiguous"):
        flat.part("c")


def test_frozen_parameters_stay_and_are_not_sent() -> None:
    plain = with_batch_norm()
    plain[0].requires_grad_(False)
    flat = FlatModel(copy.deepcopy(plain), CPU)
    assert (flat.num_parameters, flat.size) == (3 + 3 + 3 * 2 + 2, 14 + 6)
    flat.load(torch.zeros(flat.size))
    assert torch.equal(flat.module[0].weight, plain[0].weight)  # type: ignore[index]


def test_shared_parameters_are_sent_once() -> None:
    layer = nn.Linear(3, 3, bias=False)
    flat = FlatModel(nn.Sequential(layer, layer), CPU)
    assert flat.size == 9
    flat.load(2 * torch.eye(3).reshape(-1))
    assert flat.module(torch.ones(1, 3)).tolist() == [[4, 4, 4]]


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(3, affine=False, track_running_stats=False),
        nn.BatchNorm1d(3, momentum=None),
        nn.GRU(3, 3, batch_first=True),
    ],
    ids=["no statistics", "cumulative statistics", "recurrent"],
)
def test_other_layers(layer: nn.Module) -> None:
    flat, x = FlatModel(copy.deepcopy(layer), CPU), torch.randn(5, 3)
    torch.testing.assert_close(flat.module(x), layer(x))
    assert flat.size == sum(size(layer))
