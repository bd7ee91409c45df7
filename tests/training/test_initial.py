"""Initial weights from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import Tensor

from experiments import Finish, federation, interrupted, small_experiment
from fedsim import resume
from fedsim.errors import BadInput
from fedsim.results.folder import FINAL_WEIGHTS

SECTIONS: dict[str, Any] = {
    "partition": {"kind": "iid", "clients": 4},
    "train": {"rounds": 2},
}
LAYERS = {
    **{"features.1.weight": (32, 64), "features.1.bias": (32,)},
    **{"head.weight": (10, 32), "head.bias": (10,)},
}


def random_state() -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in LAYERS.items()}


def start_from(path: Path, **sections: Any) -> Any:
    train = {"rounds": 2, "initial_weights": str(path)}
    return small_experiment(**{**SECTIONS, **sections, "train": train})


def test_a_run_starts_from_the_end_of_another(finish: Finish) -> None:
    """With batch norm's statistics, and its count of batches."""
    model = {"name": "networks:normalised"}
    before = finish(**SECTIONS, model=model)
    fed = federation(start_from(before.path / FINAL_WEIGHTS, model=model))
    expected = load_file(before.path / FINAL_WEIGHTS)
    found = fed.server.model.named_arrays(fed.initial_weights())
    assert found.keys() == expected.keys()
    for name, layer in found.items():
        np.testing.assert_array_equal(layer, expected[name])


def test_state_dicts(tmp_path: Path) -> None:
    state = random_state()
    torch.save(state, tmp_path / "state.pt")
    save_file(state, tmp_path / "state.safetensors")
    expected = torch.cat([layer.reshape(-1) for layer in state.values()]).numpy()
    for name in ("state.pt", "state.safetensors"):
        fed = federation(start_from(tmp_path / name))
        np.testing.assert_array_equal(fed.initial_weights(), expected)


def test_a_file_that_has_changed_is_not_resumed_from(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save(random_state(), path)
    folder = interrupted(start_from(path), tmp_path / "runs", 1)
    torch.save(random_state(), path)
    with pytest.raises(BadInput, match="the data changed since the run started"):
        resume(folder)


def test_other_files(tmp_path: Path) -> None:
    state = random_state()
    torch.save({**state, "head.weight": torch.zeros(10, 16)}, tmp_path / "narrow.pt")
    save_file({**state, "neck.weight": torch.zeros(3)}, tmp_path / "more.safetensors")
    del state["head.weight"]
    save_file(state, tmp_path / "less.safetensors")
    (tmp_path / "words.pt").write_text("nothing")
    (tmp_path / "words.safetensors").write_text("nothing")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "module.pt")
    nan = {n: torch.full(shape, torch.nan) for n, shape in LAYERS.items()}
    save_file(nan, tmp_path / "nan.safetensors")
    for name, message in {
        "narrow.pt": r"'head.weight' has shape \(10, 16\), but the model's has \(10, 32\)",
        "more.safetensors": "the model has no layer 'neck.weight'",
        "less.safetensors": "lacks the model's layer 'head.weight'; it has ",
        "words.pt": "is not",
        "words.safetensors": "cannot be read as weights: SafetensorError",
        "list.pt": r"is not a state dict \(tensors by layer name\)",
        "module.pt": "is not a state dict, or contains more than tensors",
        "nan.safetensors": "'features.1.bias' has NaN or infinite weights",
        "missing.pt": "there is no such file",
    }.items():
        with pytest.raises(BadInput, match=f"{name}: {message}"):
            federation(start_from(tmp_path / name))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"features.1.weight": (6, 64)}, r"'features.1.weight' has shape \(6, 64\), but the"),
        ({"features.1.bias": None}, "lacks the model's layer 'features.1.base_layer.bias'; it"),
        ({"features.1.weight": None, "features.1.bias": None}, "lacks .* 'features.1.lora_A"),
        ({"features.1.lora_A.default.weight": (4, 64)}, "lacks .* 'features.1.lora_B"),
        ({"features.1.base_layer.bias": (32,)}, "'features.1.base_layer.bias' shares its"),
    ],
)
def test_other_networks_do_not_lie_below_adapters(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    state = {name: torch.rand(shape) for name, shape in (LAYERS | change).items() if shape}
    save_file(state, tmp_path / "plain.safetensors")
    with pytest.raises(BadInput, match=f"plain.safetensors: {told}"):
        federation(start_from(tmp_path / "plain.safetensors", adapters={"r": 4}))
