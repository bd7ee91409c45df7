"""Weights in files, whoever has written them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedsim.errors import DataError, in_one_line


def read_weights(path: Path) -> dict[str, Tensor]:
    """The layers of a file by name: safetensors, or a state dict saved by `torch.save`.

    Raises:
        DataError: it is neither.
    """
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
    if not isinstance(found, Mapping) or len(layers := tensors_of(found)) < len(found):
        raise DataError(f"{path}: is not a state dict (tensors by layer name)")
    return layers


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state dict, which may hold a module's extra state besides."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}
