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


def load_weights(path: Path, network: nn.Module) -> None:
    """Load a file of weights into a network.

    Args:
        path: safetensors, such as a run's `weights/final.safetensors`, or a state dict saved by
            `torch.save`, with the network's names of layers. Frozen parameters and integer buffers
            may be missing; they stay as they are.

    Raises:
        DataError: the file cannot be read, or its layers are not those of the network.
    """
    found, known = _read(path), network.state_dict()
    needed = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    needed += [n for n, b in network.named_buffers() if n in known and b.is_floating_point()]
    for name in needed:
        if name not in found:
            raise DataError(
                f"{path}: lacks the model's layer '{name}'; it has {', '.join([*found][:3])}"
            )
    for name, layer in found.items():
        if name not in known:
            raise DataError(f"{path}: the model has no layer '{name}'")
        if layer.shape != known[name].shape:
            raise DataError(
                f"{path}: '{name}' has shape {tuple(layer.shape)}, but the model's has "
                f"{tuple(known[name].shape)}"
            )
        if not bool(torch.isfinite(layer).all()):
            raise DataError(f"{path}: '{name}' has NaN or infinite weights")
    network.load_state_dict(found, strict=False)


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
    if not isinstance(found, Mapping) or not all(isinstance(v, Tensor) for v in found.values()):
        raise DataError(f"{path}: is not a state dict (tensors by layer name)")
    layers: Mapping[str, Tensor] = found
    return layers
