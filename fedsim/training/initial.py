"""Initial weights from a file."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedsim.errors import DataError, in_one_line
from fedsim.models.adapters import below_adapter, of_adapter


def load_weights(path: Path, network: nn.Module) -> None:
    """Load a file of weights into a network.

    Args:
        path: safetensors, such as a run's `weights/final.safetensors`, or a state dict saved by
            `torch.save`, with the network's names of layers. Of layers that share their weights
            one is enough, and batch norm's count of batches may be missing. Of a network with
            adapters, either all but what lies below them, or the network without them.

    Raises:
        DataError: the file cannot be read, or its layers are not those of the network.
    """
    read, known = _read(path), _layers(network.state_dict())
    places = {name: name if name in known else below_adapter(name) for name in read}
    found = {places[name]: layer for name, layer in read.items()}
    for name, layer in read.items():
        if (own := known.get(places[name])) is None:
            raise DataError(f"{path}: the model has no layer '{name}'")
        if layer.shape != own.shape:
            raise DataError(
                f"{path}: '{name}' has shape {tuple(layer.shape)}, but the model's has "
                f"{tuple(own.shape)}"
            )
        if layer.is_floating_point() != own.is_floating_point():
            raise DataError(
                f"{path}: '{name}' is of {layer.dtype}, but the model's of {own.dtype}"
            )
        if not bool((torch.isfinite(layer) | (layer == own)).all()):  # a mask may be -inf
            raise DataError(f"{path}: '{name}' has NaN or infinite weights")
    given = {known[name].data_ptr() for name in found if known[name].numel()}
    frozen, adapters = set(getattr(network, "backbone", ())), {*filter(of_adapter, known)}
    optional = next((part for part in (frozen, adapters) if part.isdisjoint(found)), set())
    for name in network.load_state_dict(found, strict=False).missing_keys:
        if name not in optional and (name not in known or known[name].data_ptr() not in given):
            has = f"it has {', '.join([*read][:3])}" if read else "it has none"
            raise DataError(f"{path}: lacks the model's layer '{name}'; {has}")
    for name, layer in read.items():
        own = known[places[name]]
        if not torch.equal(own, layer.to(own)):
            raise DataError(
                f"{path}: '{name}' shares its weights with another layer of the model, but "
                "has other ones in the file"
            )


def _read(path: Path) -> Mapping[str, Tensor]:
    """The layers of a file, by name."""
    try:
        if path.suffix == ".safetensors":
            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file") from None
    except pickle.UnpicklingError as error:
        raise DataError(f"{path}: is not a state dict, or contains more than tensors") from error
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read as weights: {in_one_line(error)}") from error
    if not isinstance(found, Mapping) or len(layers := _layers(found)) < len(found):
        raise DataError(f"{path}: is not a state dict (tensors by layer name)")
    return layers


def _layers(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state dict, which may hold a module's extra state besides."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}
