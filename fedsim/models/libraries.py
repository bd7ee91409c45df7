"""Networks that other libraries build: timm's and torchvision's, by their names there."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import ConfigDict, model_validator
from torch import Tensor, nn

from fedsim.config.pretrained import Pretrained, folder_of
from fedsim.config.registry import located, nearest, unfit
from fedsim.data import Dataset
from fedsim.errors import DataError, ExperimentError, FedsimError, in_one_line, warn
from fedsim.models.model import Classifier, Model, image_shape, models
from fedsim.models.weights import read_weights
from fedsim.support.extras import require


class LibraryModel(Model):
    """A network of another library: its last linear layer is `head`, the rest is `features`.

    `features.model` is the library's network with an identity in place of that layer, whose name
    is `features.head`.
    """

    def outside(self, network: nn.Module, layer: str) -> str:
        body: Any = network.get_submodule("features")
        return str(body.head) if layer == "head" else layer.removeprefix("features.model.")


def normalised(data: Dataset, key: str, mean: Sequence[float], std: Sequence[float]) -> Dataset:
    """Images as pretrained weights expect them, instead of the data set's own normalisation.

    `mean` and `std` are of pixels in [0, 1], one each or one for each channel; those of grey
    images are the means over the channels. `key` names the weights in messages.

    Raises:
        ExperimentError: they are of another number of channels.
    """
    if len(data.shape) != 3:
        return data  # refused where the network is built
    if (*mean, *std) == (*(data.mean or [0.0] * len(mean)), *(data.std or [1.0] * len(std))):
        return data
    if data.x.dtype != np.uint8:
        warn(
            f"{key}: was trained on pixels of mean {mean} and standard deviation {std}; the data "
            "are numbers, not pixels from 0 to 255, and reach it as they are"
        )
        return data
    channels = data.shape[0]
    if channels == 1:
        mean, std = (sum(mean) / len(mean),), (sum(std) / len(std),)
    if len(mean) not in (1, channels) or len(std) != len(mean):
        raise ExperimentError(
            f"{key}: was trained on images of {len(mean)} channels; the data's have {channels}"
        )
    return replace(data, mean=tuple(mean), std=tuple(std))


class Body(nn.Module):
    """What a network of a library computes for its last linear layer, (B, D)."""

    def __init__(self, model: nn.Module, head: str) -> None:
        super().__init__()
        self.model, self.head = model, head

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class _Named(LibraryModel):
    """A network of images by its name in a library.

    Further keys of the section are keyword arguments of the library's factory, such as
    `patch_size`; channels and classes follow the data. The last linear layer is new, drawn from
    the run's seed.

    Args:
        pretrained: begin with the weights that the library fetches for this name.
        checkpoint: begin with weights of a file, safetensors or a state dict saved by
            `torch.save`, with the library's names; or of a folder with a `model.safetensors`, of
            one within an installed package, `package:module/folder`, or of a name on the Hub.
            Images are normalised as `pretrained_cfg` of a config.json beside it says, or else as
            the library says for this name.
    """

    model_config = ConfigDict(extra="allow")

    library: ClassVar[str]
    ours: ClassVar[Sequence[str]]  # arguments of the factory that are not the user's

    name: str
    pretrained: bool = False
    checkpoint: Pretrained | None = None

    @model_validator(mode="after")
    def _is_known(self) -> _Named:
        if self.pretrained and self.checkpoint is not None:
            problem = unfit("model.pretrained has weights as well; set one")
            raise located(self.name, "checkpoint", problem, self.checkpoint)
        for key in self.model_extra or {}:
            if key in self.ours:
                problem = unfit(
                    "weights come from pretrained or checkpoint, the rest from the data"
                )
                raise located(self.name, key, problem, (self.model_extra or {})[key])
        if find_spec(self.library) is not None and self.own_name not in (known := self._known()):
            near = nearest(self.own_name, known)
            if "did you mean" not in near:
                near = f"; {self.library}.list_models() lists them"
            problem = unfit(f"{self.library} has no model of images '{self.own_name}'{near}")
            raise located(self.name, "name", problem, self.name)
        return self

    @property
    def own_name(self) -> str:
        """The name in the library."""
        return self.name.partition(":")[2]

    @abstractmethod
    def _known(self) -> Iterable[str]:
        """The names that the library knows."""

    @abstractmethod
    def _made(self, channels: int, outputs: int, state: dict[str, Tensor] | None) -> nn.Module:
        """The library's network, with the weights of a state if there is one."""

    @abstractmethod
    def _usual(self) -> tuple[Sequence[float], Sequence[float]] | None:
        """Mean and standard deviation of pixels for the library's weights of this name."""

    @abstractmethod
    def _fetched(self) -> Path:
        """The file of the library's own weights."""

    @abstractmethod
    def _size(self, model: nn.Module) -> str:
        """Which images a network takes, as the end of a message."""

    def _file(self) -> Path | None:
        if self.pretrained:
            require(self.library, f"model.name={self.name}")
            return self._fetched()
        if self.checkpoint is None:
            return None
        if (path := Path(self.checkpoint)).is_file():
            return path
        folder = folder_of("model.checkpoint", self.checkpoint, "a file of weights")
        if not (path := folder / "model.safetensors").is_file():
            raise DataError(f"model.checkpoint={self.checkpoint}: has no model.safetensors")
        return path

    def files(self) -> tuple[Path, ...]:
        path = self._file()
        return () if path is None else (path,)

    def takes(self, data: Dataset) -> Dataset:
        if (path := self._file()) is None:
            return data
        require(self.library, f"model.name={self.name}")
        given = _config(path)
        usual = (given["mean"], given["std"]) if {"mean", "std"} <= given.keys() else self._usual()
        return data if usual is None else normalised(data, f"model.name={self.name}", *usual)

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        channels, height, width = image_shape(self.name, shape, smallest=1)
        require(self.library, f"model.name={self.name}")
        path = self._file()
        state = None if path is None else read_weights(path)
        try:
            model = self._made(channels, outputs, state)
        except (FedsimError, MemoryError):
            raise
        except Exception as error:  # of many types
            raise ExperimentError(f"model.name={self.name}: {self._explained(error)}") from error
        if getattr(model, "aux_logits", False):
            raise ExperimentError(
                f"model.name={self.name} has further outputs in training; set "
                "model.aux_logits=false"
            )
        try:
            name = _last_layer(model.eval(), torch.zeros(1, *shape))
        except Exception as error:  # of many types
            raise ExperimentError(
                f"model.name={self.name} does not take images of {channels}×{height}×{width}: "
                f"{in_one_line(error).rstrip('.')}{self._size(model)}"
            ) from error
        if name is None:
            raise ExperimentError(
                f"model.name={self.name} does not end in a linear layer, which methods call the "
                "head; build it in a function of yours (package.module:function)"
            )
        D = model.get_submodule(name).in_features
        model.set_submodule(name, nn.Identity())
        assert isinstance(D, int)
        return Classifier(Body(model, name), nn.Linear(D, outputs)).train()

    def _explained(self, error: Exception) -> str:
        """A problem of the library's factory in one line."""
        words = in_one_line(error)
        if "loading state_dict" in words:
            words = (
                f"the weights are of another network: {str(error).splitlines()[1].strip():.200}"
            )
        unknown = re.search(r"unexpected keyword argument '(\w+)'", words)
        if unknown is None or unknown[1] not in (self.model_extra or {}):
            return words
        return f"the library takes no model.{unknown[1]} here ({words})"

    def save(self, network: nn.Module, folder: Path, data: Dataset) -> None:
        body: Any = network.get_submodule("features")
        body.model.set_submodule(body.head, network.get_submodule("head"))
        super().save(body.model, folder, data)
        C = data.shape[0]
        about = {
            "mean": [*data.mean] or [0.0] * C,
            "std": [*data.std] or [1.0] * C,
            "input_size": [*data.shape],
            "num_classes": len(data.classes),
            "label_names": [*data.classes],
        }
        found = {
            "architecture": self.own_name.partition(".")[0],
            "num_classes": len(data.classes),
            "model_args": {"in_chans": C, **(self.model_extra or {})},
            "pretrained_cfg": about,
        }
        (folder / "config.json").write_text(json.dumps(found, indent=2), "utf-8")


def _config(path: Path) -> dict[str, Any]:
    """`pretrained_cfg` of the config.json beside a file of weights; empty for none."""
    beside = path.parent / "config.json"
    if not beside.is_file():
        return {}
    try:
        found = json.loads(beside.read_text("utf-8"))
        about: dict[str, Any] = dict(found.get("pretrained_cfg", {}))
        return about
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{beside}: cannot be read: {in_one_line(error)}") from error


@torch.no_grad()
def _last_layer(model: nn.Module, x: Tensor) -> str | None:
    """The name of the linear layer that computes a network's outputs; None if none does."""
    outputs: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        return lambda module, inputs, found: outputs.update({name: found})

    linear = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    hooks = [module.register_forward_hook(note(name)) for name, module in linear]
    try:
        found = model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return next((name for name, each in outputs.items() if each is found), None)


@models.library
class Timm(_Named):
    """A network of timm (PyTorch Image Models), `timm:vit_tiny_patch16_224`."""

    library: ClassVar[str] = "timm"
    ours: ClassVar[Sequence[str]] = (
        *("num_classes", "in_chans", "pretrained_cfg", "pretrained_cfg_overlay"),
        *("checkpoint_path", "cache_dir", "scriptable", "exportable", "no_jit"),
    )

    name: str

    def _known(self) -> Iterable[str]:
        import timm

        return {*timm.list_models(), *timm.list_models(pretrained=True)}

    def _made(self, channels: int, outputs: int, state: dict[str, Tensor] | None) -> nn.Module:
        import timm

        loaded: dict[str, Any] = {"num_classes": outputs}
        if state is not None:
            heads = timm.get_pretrained_cfg(self.own_name).classifier
            head = f"{heads if isinstance(heads, str) else heads[0]}.weight"
            weight = state.get(head)
            if weight is None:
                raise DataError(
                    f"model.name={self.name}: the weights lack the last layer, '{head}'"
                )
            # With its own classes, as timm takes any weights for others.
            loaded["num_classes"] = len(weight)
            about = {"state_dict": state, "num_classes": len(weight), "label_offset": 0}
            loaded |= {"pretrained": True, "pretrained_cfg_overlay": about | {"source": ""}}
        with _written_out():
            return timm.create_model(
                self.own_name, in_chans=channels, **loaded, **(self.model_extra or {})
            )

    def _usual(self) -> tuple[Sequence[float], Sequence[float]] | None:
        import timm

        found = timm.get_pretrained_cfg(self.own_name)
        return None if found is None else (found.mean, found.std)

    def _fetched(self) -> Path:
        import timm

        found = timm.get_pretrained_cfg(self.own_name)
        if found is None or not found.hf_hub_id:
            raise DataError(f"model.pretrained: timm has no weights on the Hub for {self.name}")
        advice = "a file of weights as model.checkpoint instead"
        return folder_of("model.pretrained", found.hf_hub_id, advice) / "model.safetensors"

    def _size(self, model: nn.Module) -> str:
        patches: Any = getattr(model, "patch_embed", None)
        size = getattr(patches, "img_size", None)
        if size is None:
            about: Any = model
            if not about.pretrained_cfg.get("fixed_input_size"):
                return ""
            size = about.pretrained_cfg["input_size"][1:]
        return f"; it takes {size[0]}×{size[1]}, and model.img_size sets another size"


@contextmanager
def _written_out() -> Iterator[None]:
    """Context in which timm builds attention of single operations, with modules for hooks."""
    from timm.layers import set_fused_attn, use_fused_attn

    fused, experimental = use_fused_attn(), use_fused_attn(experimental=True)
    set_fused_attn(False)
    try:
        yield
    finally:
        set_fused_attn(fused, experimental)


@models.library
class Torchvision(_Named):
    """A network of torchvision, `torchvision:resnet18`.

    For images of other channels than 3, the first convolution is new; of pretrained weights, grey
    images get the sum over its channels.
    """

    library: ClassVar[str] = "torchvision"
    ours: ClassVar[Sequence[str]] = ("num_classes", "weights", "progress", "weights_backbone")

    name: str

    def _known(self) -> Iterable[str]:
        from torchvision import models as library

        found: list[str] = library.list_models(module=library)
        return found

    def _made(self, channels: int, outputs: int, state: dict[str, Tensor] | None) -> nn.Module:
        from torchvision import models as library

        keywords = self.model_extra or {}
        model: nn.Module = library.get_model(self.own_name, num_classes=outputs, **keywords)
        modules = dict(model.named_modules())
        name, first = next((n, m) for n, m in modules.items() if isinstance(m, nn.Conv2d))
        if state is None:
            if channels != first.in_channels:
                model.set_submodule(name, _of_channels(first, channels))
            return model
        if hasattr(model, "transform_input") and "transform_input" not in keywords:
            raise ExperimentError(
                f"model.name={self.name}: set model.transform_input, true for torchvision's own "
                "weights"
            )
        weight = state.get(f"{name}.weight", first.weight)
        trained = weight.shape[1] if weight.dim() == 4 else first.in_channels
        if channels not in (1, trained):
            raise ExperimentError(
                f"model.name={self.name}: was trained on images of {trained} channels; the data's "
                f"have {channels}"
            )
        if trained != first.in_channels:
            first = _of_channels(first, trained)
            model.set_submodule(name, first)
        *_, (head, last) = ((n, m) for n, m in modules.items() if isinstance(m, nn.Linear))
        classes = len(state.get(f"{head}.weight", last.weight))
        model.set_submodule(head, nn.Linear(last.in_features, classes))
        _load(model, state, f"model.name={self.name}")
        if trained != channels:
            grey = _of_channels(first, channels)
            grey.weight.data = first.weight.data.sum(dim=1, keepdim=True)
            grey.bias = first.bias
            model.set_submodule(name, grey)
        return model

    def _usual(self) -> tuple[Sequence[float], Sequence[float]] | None:
        how = self._weights().transforms()
        return how.mean, how.std

    def _weights(self) -> Any:
        from torchvision import models as library

        return library.get_model_weights(self.own_name).DEFAULT

    def _fetched(self) -> Path:
        url = self._weights().url
        folder = Path(torch.hub.get_dir(), "checkpoints")
        path = folder / url.rpartition("/")[2]
        if not path.is_file():
            try:
                torch.hub.load_state_dict_from_url(
                    url, progress=False, check_hash=True, weights_only=True
                )
            except Exception as error:  # of many types
                raise DataError(
                    f"model.pretrained: {url} cannot be fetched ({type(error).__name__}); without "
                    f"the network, put that file into {folder}, or name a file of weights as "
                    "model.checkpoint instead"
                ) from error
        return path

    def _size(self, model: nn.Module) -> str:
        size = getattr(model, "image_size", None)
        if size is not None:
            return f"; it takes {size}×{size}, and model.image_size sets another size"
        height, width = self._weights().meta["min_size"]
        return f"; it takes {height}×{width} or more"


def _load(model: nn.Module, state: dict[str, Tensor], what: str) -> None:
    """Load weights, all of them and no others; batch norm's counts may be missing."""
    known: Any = model.state_dict()
    for name in (*known, *state):
        if name not in known:
            problem = "is no layer of it"
        elif name not in state:
            problem = "is missing"
        else:
            problem = "has another shape"
            if known[name].shape == state[name].shape:
                continue
        if not name.endswith("num_batches_tracked"):
            raise DataError(f"{what}: the weights are of another network: '{name}' {problem}")
    known.update(state)  # it has the versions of layers, which safetensors do not
    model.load_state_dict(known)


def _of_channels(first: nn.Conv2d, channels: int) -> nn.Conv2d:
    """A new convolution like another one, for images of so many channels."""
    settings: Any = {"stride": first.stride, "padding": first.padding}
    sides: Any = first.kernel_size
    return nn.Conv2d(channels, first.out_channels, sides, bias=first.bias is not None, **settings)
