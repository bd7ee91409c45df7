"""Networks of timm and torchvision: the libraries' own, by their names there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from torch import Tensor, nn

from experiments import Later, by_day, small_experiment
from fedsim import Dataset, Run
from fedsim.analysis.merging import merge
from fedsim.analysis.replay import ModelSnapshot
from fedsim.errors import BadInput, DataError, ExperimentError
from fedsim.federation.context import scaled
from fedsim.launch.prepare import prepare
from fedsim.models import Classifier
from fedsim.models.libraries import _written_out
from fedsim.results.records import hashes

library: Any = Later("torchvision.models")
VIT: dict[str, Any] = {
    "name": "timm:vit_tiny_patch16_224",
    **{"img_size": 8, "patch_size": 4, "depth": 1, "embed_dim": 24, "num_heads": 2},
}
SHUFFLE: dict[str, Any] = {"name": "torchvision:shufflenet_v2_x0_5"}
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def timm() -> Any:
    return pytest.importorskip("timm")


def named(model: dict[str, Any]) -> dict[str, Any]:
    """The section, if its library is installed."""
    if model["name"].startswith("timm:"):
        timm()
    return model


def sections(model: dict[str, Any], **given: Any) -> dict[str, Any]:
    return {
        "data": {"name": "digits", "subset": 0.1},
        "model": named(model),
        "partition": {"kind": "iid", "clients": 3},
        "train": {"rounds": 1, "batch_size": 8, "optimizer": {"lr": 0.1}},
        **given,
    }


def coloured(channels: int = 3, pixels: bool = True) -> Dataset:
    """Images of 32×32 pixels of three classes."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (30, channels, 32, 32), dtype=np.uint8)
    given: Any = x if pixels else x.astype(np.float32) / 255
    return Dataset.of(given, np.arange(30) % 3)


def built(data: Dataset, **model: Any) -> tuple[Dataset, Classifier]:
    given = sections(model)
    data, _, spec = prepare(small_experiment(**{**given, "data": data}))
    network = spec.build_model()
    assert isinstance(network, Classifier)
    return data, network.eval()


def whole(network: Classifier) -> nn.Module:
    """The library's network, with the head of ours."""
    body: Any = network.features
    body.model.set_submodule(body.head, network.head)
    return body.model


@pytest.mark.parametrize("name", ["timm:test_vit", "timm:test_efficientnet", SHUFFLE["name"]])
def test_the_network_is_the_library_s(name: str) -> None:
    named({"name": name})
    keywords: dict[str, Any] = {"img_size": 32} if name == "timm:test_vit" else {}
    data, network = built(coloured(), name=name, **keywords)
    x = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        found = network(x)
        own = name.partition(":")[2]
        if name.startswith("timm:"):
            theirs = timm().create_model(own, num_classes=3, **keywords)
        else:
            theirs = library.get_model(own, num_classes=3)
        theirs.load_state_dict(whole(network).state_dict())
        torch.testing.assert_close(found, theirs.eval()(x), rtol=1e-4, atol=1e-5)
    assert network.head.out_features == len(data.classes) == 3


def test_channels_follow_the_data() -> None:
    for channels in (1, 2, 3):
        _, network = built(coloured(channels), **SHUFFLE)
        first: Any = next(m for m in network.modules() if isinstance(m, nn.Conv2d))
        assert first.in_channels == channels
        assert network(torch.rand(2, channels, 32, 32)).shape == (2, 3)


def test_weights_of_a_file(tmp_path: Path) -> None:
    """With the classes and the normalisation that they were trained with."""
    torch.manual_seed(3)
    theirs = library.shufflenet_v2_x0_5(num_classes=7).eval()
    path = tmp_path / "weights.safetensors"
    save_file(theirs.state_dict(), path)
    data, network = built(coloured(), checkpoint=str(path), **SHUFFLE)
    assert (data.mean, data.std) == IMAGENET
    pixels = torch.from_numpy(np.asarray(data.x[:5]))
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in IMAGENET)
    with torch.no_grad():
        theirs.fc = nn.Identity()
        expected = theirs((pixels / 255 - mean) / std)
        found = network.features(scaled(data, pixels))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_grey_images_of_pretrained_weights(tmp_path: Path) -> None:
    """As the same image in three channels of the mean normalisation."""
    theirs = library.shufflenet_v2_x0_5(num_classes=7).eval()
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    data, network = built(coloured(1), checkpoint=str(tmp_path), **SHUFFLE)
    x = torch.rand(4, 1, 32, 32)
    theirs.fc = nn.Identity()
    with torch.no_grad():
        torch.testing.assert_close(
            network.features(x), theirs(x.expand(4, 3, 32, 32)), rtol=1e-4, atol=1e-5
        )
    assert data.mean == pytest.approx((np.mean(IMAGENET[0]),))
    with pytest.raises(ExperimentError, match=r"trained on images of 3 channels; the data's have"):
        built(coloured(2), checkpoint=str(tmp_path), **SHUFFLE)


def test_weights_of_timm(tmp_path: Path) -> None:
    """Positions are interpolated, colours summed, as timm itself does."""
    torch.manual_seed(3)
    saved = timm().create_model("test_vit", num_classes=7)
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    given = {"name": "timm:test_vit", "img_size": 32, "checkpoint": str(tmp_path)}
    data, network = built(coloured(1), **given)
    assert data.mean == (0.5,)
    overlay = {"file": str(tmp_path / "model.safetensors"), "num_classes": 7}
    with _written_out():
        theirs = timm().create_model(
            "test_vit",
            pretrained=True,
            pretrained_cfg_overlay=overlay,
            **{"img_size": 32, "in_chans": 1, "num_classes": 7},
        )
    theirs.reset_classifier(0)
    inputs = torch.rand(4, 1, 32, 32)
    with torch.no_grad():
        assert torch.equal(network.features(inputs), theirs.eval()(inputs))


def test_a_config_beside_the_weights_says_how_images_are_normalised(tmp_path: Path) -> None:
    theirs = library.shufflenet_v2_x0_5(num_classes=7)
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    config = tmp_path / "config.json"
    config.write_text('{"pretrained_cfg": {"mean": [0.1, 0.2, 0.3], "std": [1, 1, 1]}}')
    data, _ = built(coloured(), checkpoint=str(tmp_path), **SHUFFLE)
    assert (data.mean, data.std) == ((0.1, 0.2, 0.3), (1, 1, 1))
    config.write_text("[1")
    with pytest.raises(DataError, match=r"config\.json: cannot be read: JSONDecodeError"):
        built(coloured(), checkpoint=str(tmp_path), **SHUFFLE)


def test_numbers_are_not_normalised(tmp_path: Path) -> None:
    save_file(library.shufflenet_v2_x0_5().state_dict(), tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"the data are numbers, not pixels from 0 to 255"):
        data, _ = built(coloured(pixels=False), checkpoint=str(tmp_path), **SHUFFLE)
    assert data.mean == ()


def test_pretrained_weights_of_torchvision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    url = library.get_model_weights("shufflenet_v2_x0_5").DEFAULT.url
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", refuse)
    line = (
        r"^model\.pretrained: https://.* cannot be fetched \(OSError\); without the network, put"
    )
    with pytest.raises(DataError, match=line):
        built(coloured(), pretrained=True, **SHUFFLE)
    path = tmp_path / "checkpoints" / url.rpartition("/")[2]
    path.parent.mkdir()
    theirs = library.shufflenet_v2_x0_5()
    torch.save(theirs.state_dict(), path)
    data, network = built(coloured(), pretrained=True, **SHUFFLE)
    assert data.mean == IMAGENET[0]
    found = network.features.state_dict()["model.conv1.0.weight"]
    assert torch.equal(found, theirs.conv1[0].weight)


def refuse(*_: Any, **__: Any) -> None:
    raise OSError


def test_a_name_on_the_hub_without_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    line = r"^model\.pretrained=timm/test_vit\.\S+: there is .* without the network, name a file"
    with pytest.raises(DataError, match=line):
        built(coloured(), name="timm:test_vit", img_size=32, pretrained=True)
    with pytest.raises(DataError, match=r"^model\.checkpoint=timm/no: .* name a file of weights$"):
        built(coloured(), checkpoint="timm/no", **SHUFFLE)


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("vit_tini_patch16_224", {}, "timm has no .*; did you mean 'vit_tiny_patch16_"),
        ("test_vit.no_such_weights", {}, r"timm has no .* 'test_vit\.no_such_weights'"),
        ("zzz", {}, r"'zzz'; timm\.list_models\(\) lists them$"),
        ("test_vit", {"wide": 3}, r"the library takes no model\.wide here \(TypeErr"),
        ("vit_tiny_patch16_224", {"depth": 1}, "; it takes 224×224, and model.img_size sets"),
    ],
)
def test_bad_sections_of_timm(name: str, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        built(coloured(), **named({"name": f"timm:{name}", **keys}))


def test_bad_weights(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    given = {"checkpoint": str(path), **SHUFFLE}
    state = library.shufflenet_v2_x0_5().state_dict()

    def said(found: dict[str, Tensor], line: str) -> None:
        save_file(found, path)
        with pytest.raises(BadInput, match=line):
            built(coloured(), **given)

    less = {k: v for k, v in state.items() if k != "conv1.0.weight"}
    said(less, r"the weights are of another network: 'conv1\.0\.weight' is missing$")
    said({**state, "more": torch.zeros(2)}, r": 'more' is no layer of it$")
    said({**state, "conv1.0.weight": torch.zeros(2)}, r"'conv1\.0\.weight' has another shape$")
    path.write_bytes(b"no weights")
    with pytest.raises(DataError, match=r"cannot be read as weights: SafetensorError"):
        built(coloured(), **given)
    with pytest.raises(DataError, match=r"has no model\.safetensors$"):
        built(coloured(), checkpoint=str(tmp_path), **SHUFFLE)
    pickled = tmp_path / "weights.pth"
    torch.save({"model": state}, pickled)
    with pytest.raises(DataError, match="is not a state dict"):
        built(coloured(), checkpoint=str(pickled), **SHUFFLE)


def test_bad_weights_of_timm(tmp_path: Path) -> None:
    state = timm().create_model("test_vit").state_dict()
    given = {"name": "timm:test_vit", "img_size": 32, "checkpoint": str(tmp_path)}
    path = tmp_path / "model.safetensors"
    for lost, line in (
        ("head.weight", "lack the last layer"),
        ("norm.weight", "another network: Missing key"),
    ):
        save_file({k: v for k, v in state.items() if k != lost}, path)
        with pytest.raises(BadInput, match=line):
            built(coloured(), **given)


@pytest.mark.parametrize(
    "method", by_day(["fedavg", "fedex_lora", "flora", "ffa_lora"], ["fedex_lora"])
)
def test_adapters_and_stacks(method: str, finish: Callable[..., Run]) -> None:
    given = sections(VIT, method={"name": method}, adapters={"r": 2})
    alone, stacked = (
        finish(**given, engine={"kind": "local", "clients_per_step": size}) for size in (1, 3)
    )
    for name, layer in alone.weights().items():
        torch.testing.assert_close(stacked.weights()[name], layer, rtol=1e-3, atol=1e-5)


def test_the_hash_of_data_is_that_of_the_weights_too(tmp_path: Path) -> None:
    found = set()
    for seed in (0, 1):
        torch.manual_seed(seed)
        save_file(library.shufflenet_v2_x0_5().state_dict(), tmp_path / "model.safetensors")
        experiment = small_experiment(**sections({**SHUFFLE, "checkpoint": str(tmp_path)}))
        found.add(hashes(*prepare(experiment)[:2], experiment)["data_hash"])
    assert len(found) == 2


@pytest.mark.parametrize("method", ["fedavg", "fedex_lora"])
def test_merged_networks_are_read_by_timm(
    method: str, finish: Callable[..., Run], tmp_path: Path
) -> None:
    given = sections(VIT, method={"name": method}, adapters={"r": 2})
    run = finish(**given)
    merge(run, tmp_path / "merged")
    model = ModelSnapshot.of(run)
    x = torch.rand(4, 1, 8, 8)
    theirs = timm().create_model(f"local-dir:{tmp_path / 'merged'}", pretrained=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(x), model.network()(x), atol=1e-5, rtol=0)
    assert theirs.pretrained_cfg["label_names"] == [*model.dataset.classes]
    data, network = built(model.dataset, checkpoint=str(tmp_path / "merged"), **VIT)
    theirs.reset_classifier(0)
    with torch.no_grad():
        torch.testing.assert_close(network.features(x), theirs(x), atol=1e-5, rtol=0)
    assert torch.equal(scaled(data, x * 2), x * 2)  # as it was trained


def test_merged_networks_are_read_by_torchvision(
    finish: Callable[..., Run], tmp_path: Path
) -> None:
    run = finish(**sections(SHUFFLE))
    merge(run, tmp_path / "merged")
    model = ModelSnapshot.of(run)
    _, network = built(model.dataset, checkpoint=str(tmp_path / "merged"), **SHUFFLE)
    x = torch.rand(4, 1, 8, 8)
    before: Any = model.network()
    with torch.no_grad():
        torch.testing.assert_close(network.features(x), before.features(x), atol=1e-5, rtol=0)
