"""Initial weights from a file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from fedsim.errors import DataError
from fedsim.models.adapters import below_adapter, of_adapter
from fedsim.models.weights import read_weights, tensors_of


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
    read, known = read_weights(path), tensors_of(network.state_dict())
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
