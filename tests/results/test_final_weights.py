"""The final weights are the whole model, and only files that are a model's are loaded into it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from experiments import Finish, federation, ran, small_experiment, with_method
from fedsim.analysis.replay import ModelSnapshot
from fedsim.errors import BadInput, RunFolderError
from fedsim.launch.prepare import prepare
from fedsim.models import Classifier
from fedsim.results.folder import FINAL_WEIGHTS


class Odd(nn.Module):
    """A network with whatever a flat vector of trained weights does not hold."""

    def __init__(self, shape: tuple[int, ...], outputs: int, part: str) -> None:
        super().__init__()
        n = math.prod(shape)
        self.body, self.head = nn.Linear(n, 16), nn.Linear(16, outputs)
        self.part = part
        if part == "frozen":
            self.body.requires_grad_(False)
        elif part == "wide":  # of another type, and not contiguous
            wide = torch.randn(16, 16, dtype=torch.bfloat16).T
            self.wide = nn.Parameter(wide, requires_grad=False)
        elif part == "tied":
            self.second = nn.Linear(n, 16)
            self.second.weight = self.body.weight
        elif part == "scalar":
            self.scale = nn.Parameter(torch.tensor(1.5))
        elif part == "integers":
            self.register_buffer("order", torch.randperm(n))
            self.register_buffer("mask", torch.rand(16) < 0.5)
        elif part == "infinite":
            self.hide = nn.Parameter(torch.tensor([0.0] * 15 + [-math.inf]), requires_grad=False)
        elif part == "norm":
            self.norm = nn.BatchNorm1d(16, momentum=None)
        elif part == "one buffer":
            self.norms = nn.ModuleList([nn.BatchNorm1d(16), nn.BatchNorm1d(16)])
            self.norms[1].running_mean = self.norms[0].running_mean
        elif part == "weight norm":
            nn.utils.parametrizations.weight_norm(self.body)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.part == "integers":
            x = x[:, self.order]
        h = self.body(x)
        if self.part == "tied":
            h = h - self.second(x) / 2
        elif self.part == "wide":
            h = h @ self.wide.float()
        elif self.part == "scalar":
            h = h * self.scale
        elif self.part == "integers":
            h = h * self.mask
        elif self.part == "infinite":
            h = h + self.hide
        elif self.part == "norm":
            h = self.norm(h)
        elif self.part == "one buffer":
            h = self.norms[0](h) + self.norms[1](-h)
        return self.head(h.relu())


ODD = (
    *("plain", "frozen", "wide", "tied", "scalar", "integers", "infinite"),
    *("norm", "one buffer", "weight norm"),
)


def odd(part: str, **train: Any) -> dict[str, Any]:
    model = {"name": f"{__name__}:Odd", "part": part}
    return {"model": model, "train": {"rounds": 2, **train}}


@pytest.mark.parametrize("part", ODD)
def test_final_weights_are_the_model(part: str, finish: Finish) -> None:
    done = finish(**odd(part))
    again = ModelSnapshot.of(done)
    dataset = again.dataset
    x = torch.tensor(dataset.test_x)
    expected = again.network()(x)
    accuracy = (expected.argmax(1).numpy() == dataset.test_y).mean()
    assert done.rounds["accuracy"].iloc[-1] == pytest.approx(accuracy)

    torch.manual_seed(5)
    fresh = Odd(dataset.shape, 10, part)
    assert not torch.equal(fresh.eval()(x), expected)
    weights = done.weights()
    assert {n: t.shape for n, t in weights.items()} == {
        n: t.shape for n, t in fresh.state_dict().items()
    }
    fresh.load_state_dict(weights)
    assert torch.equal(fresh.eval()(x), expected)
    assert done.num_parameters == sum(p.numel() for p in fresh.parameters())

    other = federation(
        small_experiment(**odd(part, initial_weights=str(done.path / FINAL_WEIGHTS)), seed=9)
    )
    scores = other.evaluate(other.initial_weights())
    assert scores["loss"] == done.rounds["loss"].iloc[-1]
    flat = torch.cat([t.flatten() for t in weights.values() if t.dtype == torch.float32])
    state = again.again.state.weights
    assert torch.equal(flat[: len(state)], torch.tensor(state))


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("frozen", {"body.weight": None}, "lacks the model's layer 'body.weight'; it has "),
        ("integers", {"order": None}, "lacks the model's layer 'order'; it has "),
        (
            "tied",
            {"body.weight": None, "second.weight": None},
            "lacks the model's layer 'body.weight'",
        ),
        (
            "tied",
            {"body.weight": torch.ones(16, 64)},
            "'body.weight' shares its weights with another layer of the model, but has other",
        ),
        ("scalar", {"scale": torch.ones(1)}, r"'scale' has shape \(1,\), but the model's has \("),
        ("integers", {"order": torch.rand(64)}, "'order' is of torch.float32, but the model's of"),
        ("plain", {"head.bias": torch.ones(10).int()}, "'head.bias' is of torch.int32, but the "),
        ("plain", {"hide": torch.ones(16)}, "the model has no layer 'hide'"),
        ("infinite", {"hide": torch.full((16,), torch.inf)}, "'hide' has NaN or infinite weights"),
        ("plain", dict.fromkeys(Odd((8, 8), 10, "plain").state_dict()), "lacks .*; it has none"),
        # Of two names of a layer, and of batch norm, torch needs no more either.
        ("tied", {"second.weight": None}, None),
        ("norm", {"norm.num_batches_tracked": None}, None),
    ],
)
def test_a_file_that_is_not_of_the_model(
    part: str, change: dict[str, Tensor | None], message: str | None, tmp_path: Path
) -> None:
    state = {n: t.clone() for n, t in Odd((8, 8), 10, part).state_dict().items()} | change
    path = tmp_path / "some.safetensors"
    save_file({n: t for n, t in state.items() if t is not None}, path)
    experiment = small_experiment(**odd(part, initial_weights=str(path)))
    if message is None:
        prepare(experiment)
        return
    with pytest.raises(BadInput, match=f"^{path}: {message}"):
        prepare(experiment)


class Unsaved(nn.Module):
    """A network with a tensor that its state dict lacks, or that is not of float32."""

    def __init__(self, shape: tuple[int, ...], outputs: int, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(math.prod(shape), outputs)
        factor = torch.ones(()) if how == "constant" else torch.rand(())
        if how in ("buffer", "constant"):
            self.register_buffer("factor", factor, persistent=False)
        elif how == "attribute":
            self.factor = factor
        else:
            self.layer.to(getattr(torch, how))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.flatten(1).to(self.layer.weight.dtype))
        return y.float() * getattr(self, "factor", 1)


def test_a_network_whose_weights_are_not_the_model() -> None:
    name, drawn = f"{__name__}:Unsaved", "'factor' is drawn at random and not part of the state d"
    for how, message in {
        **{"buffer": drawn, "attribute": drawn},
        "float16": "'layer.weight' is of torch.float16, and weights are trained and sent in",
    }.items():
        with pytest.raises(BadInput, match=f"^model.name={name}: {message}"):
            prepare(small_experiment(model={"name": name, "how": how}))
    prepare(small_experiment(model={"name": name, "how": "constant"}))


def test_without_a_global_model_it_says_so() -> None:
    done = ran(**with_method("ifca", train={"rounds": 1}))
    with pytest.raises(RunFolderError, match="holds no weights, because the run's method has no "):
        done.weights()
    with pytest.raises(BadInput, match=r"lacks the model's layer '.*'; it has none"):
        prepare(small_experiment(train={"initial_weights": str(done.path / FINAL_WEIGHTS)}))


def part_frozen(shape: tuple[int, ...], outputs: int) -> nn.Module:
    features = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 8))
    features[1].requires_grad_(False)
    return Classifier(features, nn.Linear(8, outputs))


def test_an_encoder_brings_its_frozen_layers(finish: Finish) -> None:
    model = {"name": f"{__name__}:part_frozen"}
    path = finish(model=model, train={"rounds": 1}).path / FINAL_WEIGHTS
    sections = with_method("fedaux", model=model, method={"encoder": str(path)})
    sections["seed"] = 8
    with pytest.raises(BadInput, match=r"method.encoder: .* not the frozen 'features.1.weight'"):
        prepare(small_experiment(**sections))
    sections["train"] = {"initial_weights": str(path)}
    prepare(small_experiment(**sections))
    assert np.isfinite(load_file(path)["features.1.weight"]).all()
