"""Data sets that were given as Python objects: `Experiment(data=dataset)`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data.dataset import ARRAYS, BY_NAME, Dataset, check_trainable
from fedsim.data.encoding import UNSCALED, Feature, Preprocessing, Scaling
from fedsim.data.sources import files
from fedsim.errors import DataError
from fedsim.support import atomic

_SCALINGS = ("scaling", "target_scaling")
_PLAIN = tuple(
    field.name for field in fields(Dataset) if field.name not in (*ARRAYS, *BY_NAME, *_SCALINGS)
)  # words, numbers and flags
# Written where they say something.
_FURTHER = ("encoding", "preprocessing", "client_column", "tokenizer", "padding", "concepts")


def keep(dataset: Dataset) -> dict[str, str]:
    """Write a data set where `FromPython` finds it, and return the `data` section that names it.

    Raises:
        DataError: its inputs stay in files of their own, its arrays do not go together, or it
            cannot be written.
    """
    check_trainable(dataset, "data")
    arrays = {name: np.asarray(getattr(dataset, name)) for name in ARRAYS}
    for field in BY_NAME:
        arrays |= {f"{field}/{name}": v for name, v in getattr(dataset, field).items()}
    for field in _SCALINGS:
        scaling = getattr(dataset, field)
        if scaling is not UNSCALED:
            arrays[f"{field}/low"] = np.asarray(scaling.low)
            arrays[f"{field}/span"] = np.asarray(scaling.span)
            if scaling.zero:
                arrays[f"{field}/zero"] = np.array(scaling.zero)
            if scaling.fill is not None:
                arrays[f"{field}/fill"] = scaling.fill
    plain = {name: getattr(dataset, name) for name in _PLAIN}
    plain = {name: v for name, v in plain.items() if v or name not in _FURTHER}
    arrays["plain"] = np.array(json.dumps(plain, default=asdict))
    arrays = {k: v.astype(str) if v.dtype.kind == "O" else v for k, v in arrays.items()}
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    found = digest.hexdigest()[:16]
    path = _path(found, None)
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic.replacing(path) as aside, aside.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise DataError(f"{path}: the data cannot be written: {error}") from error
    return {"name": "from_python", "hash": found}


def _path(found: str, root: Path | None) -> Path:
    return files.data_root(root) / "arrays" / f"{found}.npz"


def kept(hash: str, root: Path | None) -> Dataset:
    """What `keep` has written, by the hash of its content."""
    path = _path(hash, root)
    if not path.exists():
        raise DataError(
            f"{path}: is missing: the data were arrays in Python; make the experiment with "
            "them again, or copy this file from where the run was made"
        )
    with files.reading(path), np.load(path, allow_pickle=False) as archive:
        arrays = {key: archive[key] for key in archive.files}
    plain: dict[str, Any] = json.loads(str(arrays.pop("plain")))
    found: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
    found |= {field: {} for field in BY_NAME}
    found["encoding"] = tuple(_feature(one) for one in plain.get("encoding", ()))
    found["preprocessing"] = plain.get("preprocessing") and Preprocessing(**plain["preprocessing"])
    for key, array in arrays.items():
        field, _, name = key.partition("/")
        if name:
            found.setdefault(field, {})[name] = array
        else:
            found[field] = array
    for field in _SCALINGS:
        given = found.get(field, {})
        given |= {"zero": str(given["zero"])} if "zero" in given else {}
        found[field] = Scaling(**given) if given else UNSCALED
    return Dataset(**found)


def _feature(plain: dict[str, Any]) -> Feature:
    parts: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
    return Feature(**parts)
