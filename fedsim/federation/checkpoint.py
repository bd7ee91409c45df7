"""Checkpoints: a server state and all kept client states, in files that run no code when read.

    weights/round-000010.safetensors     the server's state, and which client states belong to it
    weights/clients/17-000008.safetensors    client 17's state as of round 8

A client's state is written once, in the first checkpoint after it changed.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedsim import atomic
from fedsim.errors import RunError, RunFolderError
from fedsim.federation.engine import Handle
from fedsim.federation.federation import Federation

S = TypeVar("S")
Arrays = dict[str, NDArray[np.generic]]


def pack(tree: Any, arrays: Arrays) -> Any:
    """A nest of dicts, lists, tuples, arrays and scalars as JSON; arrays go into `arrays`.

    Raises:
        TypeError: something else is in it.
    """
    if isinstance(tree, np.ndarray):
        key = str(len(arrays))
        arrays[key] = np.asarray(tree, order="C")  # which keeps scalars scalars
        return {"array": key}
    if isinstance(tree, np.generic) and tree.dtype.kind not in "biuf":
        return tree.item()
    if isinstance(tree, np.generic):  # not a plain number: its type decides how it rounds
        return {"scalar": pack(np.asarray(tree), arrays)}
    if isinstance(tree, Mapping):
        return {"dict": [[pack(k, arrays), pack(v, arrays)] for k, v in tree.items()]}
    if isinstance(tree, tuple):
        return {"tuple": [pack(part, arrays) for part in tree]}
    if isinstance(tree, list):
        return [pack(part, arrays) for part in tree]
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise TypeError(
        f"a state may hold arrays, numbers, strings, None, and dicts, lists and tuples of them; "
        f"not {type(tree).__name__}"
    )


def unpack(packed: Any, arrays: Mapping[str, NDArray[np.generic]]) -> Any:
    """The nest that `pack` was given."""
    if isinstance(packed, list):
        return [unpack(part, arrays) for part in packed]
    if isinstance(packed, dict):
        if "scalar" in packed:
            return unpack(packed["scalar"], arrays)[()]
        if "array" in packed:
            return arrays[packed["array"]]
        if "tuple" in packed:
            return tuple(unpack(part, arrays) for part in packed["tuple"])
        return {unpack(k, arrays): unpack(v, arrays) for k, v in packed["dict"]}
    return packed


def _write(path: Path, tree: Any) -> None:
    arrays: Arrays = {}
    try:
        packed = pack(tree, arrays)
    except TypeError as error:
        raise RunError(f"{path.name}: cannot be saved: {error}") from error
    atomic.write(path, save(arrays, metadata={"tree": json.dumps(packed)}))


def _read(path: Path) -> Any:
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            packed = json.loads(file.metadata()["tree"])
    except (OSError, SafetensorError, TypeError, KeyError, json.JSONDecodeError) as error:
        raise RunFolderError(f"{path}: not a checkpoint: {error}") from error
    return unpack(packed, arrays)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they lie.
        keep: `last` of them, or `all`.
    """

    def __init__(self, folder: Path, keep: str = "last") -> None:
        self._folder, self._keep = folder, keep
        self._clients = folder / "clients"
        self._clients.mkdir(parents=True, exist_ok=True)
        self._written: dict[int, tuple[Handle, str]] = {}

    def save(self, t: int, state: Any, fed: Federation, progress: Mapping[str, Any]) -> None:
        """Write the server's state after round t, a dataclass, and all kept client states.

        Args:
            progress: what else the loop of the run needs to go on (JSON).
        """
        names = {}
        for id, handle in fed.states().items():
            before = self._written.get(id)
            if before is None or before[0] is not handle:
                name = f"{id}-{t:06d}.safetensors"
                _write(self._clients / name, fed.fetch(handle))
                self._written[id] = (handle, name)
            names[id] = self._written[id][1]
        fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
        _write(
            self._folder / f"round-{t:06d}.safetensors",
            {"round": t, "state": fields, "clients": names, "progress": dict(progress)},
        )
        if self._keep == "last":
            self._prune(t, set(names.values()))

    def _prune(self, t: int, used: set[str]) -> None:
        for path in self._folder.glob("round-*.safetensors"):
            if path.name != f"round-{t:06d}.safetensors":
                path.unlink()
        for path in self._clients.iterdir():
            if path.name not in used:
                path.unlink()

    def latest(
        self, template: S, fed: Federation, until: float = math.inf
    ) -> tuple[int, S, dict[str, Any]] | None:
        """The round, server state and progress of the latest checkpoint; None if there is none.

        The federation takes over the kept client states.

        Args:
            template: a state of the method, which gives the dataclass to fill.
            until: the last round that is wanted.

        Raises:
            RunFolderError: the files cannot be read.
        """
        paths = [
            path
            for path in sorted(self._folder.glob("round-*.safetensors"))
            if int(path.stem.removeprefix("round-")) <= until
        ]
        if not paths:
            fed.restore({})
            return None
        content = _read(paths[-1])
        fed.restore({id: _read(self._clients / name) for id, name in content["clients"].items()})
        handles = fed.states()
        self._written = {id: (handles[id], name) for id, name in content["clients"].items()}
        state = dataclasses.replace(template, **content["state"])  # type: ignore[type-var]
        return content["round"], state, content["progress"]
