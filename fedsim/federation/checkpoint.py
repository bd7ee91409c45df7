"""Checkpoints: a server state and all kept client states, in files that run no code when read.

    weights/round-000010.safetensors     the server's state, and which client states belong to it
    weights/clients/17-000008.safetensors    client 17's state as of round 8

A client's state is written once, in the first checkpoint after it changed. Each file has a
checksum of its content; a checkpoint names its run, its round and the checksums of the client
states that belong to it. One that is damaged, or whole but of another run or round, is skipped,
and the one before it is used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedsim.errors import Damaged, RunError
from fedsim.federation.engine import Handle
from fedsim.federation.runner import RoundRunner
from fedsim.support import atomic

S = TypeVar("S")
Arrays = dict[str, NDArray[np.generic]]

Check = Callable[[int, dict[str, Any]], None]

_CHECKPOINT = re.compile(r"round-(\d{6,})\.safetensors")
_CLIENT_STATE = r"\d+-\d{6,}\.safetensors"


def pack(tree: Any, arrays: Arrays) -> Any:
    """Nested dicts, lists, tuples, arrays and scalars as JSON; arrays go into `arrays`.

    Raises:
        TypeError: it contains anything else.
    """
    if isinstance(tree, np.ndarray):
        key = str(len(arrays))
        arrays[key] = np.asarray(tree, order="C")  # scalars stay 0-d
        return {"array": key}
    if isinstance(tree, np.generic) and tree.dtype.kind not in "biuf":
        return tree.item()
    if isinstance(tree, np.generic):  # keep its type, on which rounding depends
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
    """The inverse of `pack`."""
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


def write_tree(path: Path, tree: Any) -> str:
    """Write nested dicts, lists, arrays and scalars to a file, with a checksum.

    Returns:
        The checksum.

    Raises:
        RunError: it contains anything else.
    """
    arrays: Arrays = {}
    try:
        packed = json.dumps(pack(tree, arrays))
    except TypeError as error:
        raise RunError(f"{path.name}: cannot be saved: {error}") from error
    checksum = _checksum(packed, arrays)
    atomic.write(path, save(arrays, metadata={"tree": packed, "checksum": checksum}))
    return checksum


def read_tree(path: Path, checksum: str | None = None) -> Any:
    """Read a file that `write_tree` wrote.

    Args:
        checksum: that of the content that is wanted; any if not given.

    Raises:
        Damaged: the file is missing or was changed, or is another one.
    """
    try:
        atomic.insist_on_file(path)
        with safe_open(path, framework="numpy") as file:
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            packed, expected = (file.metadata()[key] for key in ("tree", "checksum"))
    except FileNotFoundError as error:
        raise Damaged(f"{path}: is missing") from error
    except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
        raise Damaged(f"{path}: is damaged: {error}") from error
    if _checksum(packed, arrays) != expected:
        raise Damaged(f"{path}: is damaged: its checksum does not match")
    if checksum not in (None, expected):
        raise Damaged(f"{path}: is whole, but another file than the checkpoint's")
    try:
        return unpack(json.loads(packed), arrays)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise Damaged(f"{path}: is damaged: it has no checkpoint's structure") from error


def hash_of(chain: str, fields: Mapping[str, Any]) -> str:
    """A hash of a chain of records and the fields of a state."""
    arrays: Arrays = {}
    digest = hashlib.sha256(chain.encode())
    digest.update(json.dumps(pack(fields, arrays)).encode())
    for array in arrays.values():
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def _checksum(packed: str, arrays: Arrays) -> str:
    digest = hashlib.sha256(packed.encode())
    for key, array in sorted(arrays.items()):
        digest.update(f"{key} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:32]


class _Content(BaseModel):
    """The content of a checkpoint's file.

    Args:
        state: the fields of the server's state.
        clients: the file of each kept client state, by the client's id.
        checksums: of these files' content.
        progress: what the training loop saved.
        run: which run it is of, see `Checkpoints`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    round: int
    state: dict[str, Any]
    clients: dict[int, Annotated[str, Field(pattern=f"^{_CLIENT_STATE}$")]]
    checksums: dict[int, str]
    progress: dict[str, Any]
    run: str

    @model_validator(mode="after")
    def _has_all_checksums(self) -> _Content:
        if list(self.clients) != list(self.checksums):
            raise ValueError("a client state has no checksum")
        return self


@dataclasses.dataclass(frozen=True)
class Checkpoint(Generic[S]):
    """A run after a round.

    Attributes:
        round: the last finished round.
        state: the server's state.
        progress: what the training loop saved with it.
    """

    round: int
    state: S
    progress: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: their folder.
        keep: `last` keeps two of them, `all` every one.
        known: the rounds whose checkpoints should exist; `latest` and `damage` report missing
            ones.
        run: what tells the run from others; checkpoints that name another one are damage.

    Attributes:
        run: as given.
        skipped: what is wrong with each damaged checkpoint that `latest` skipped.
    """

    def __init__(
        self, folder: Path, keep: str = "last", known: Sequence[int] = (), run: str = ""
    ) -> None:
        self._folder, self._keep, self._known, self.run = folder, keep, known, run
        self._clients = folder / "clients"
        self._written: dict[int, tuple[Handle, str, str]] = {}  # with its file and checksum
        # Client states that the last two checkpoints refer to.
        self._latest: set[str] = set()
        self._before: set[str] = set()
        self.skipped: list[str] = []

    def save(self, t: int, state: Any, runner: RoundRunner, progress: Mapping[str, Any]) -> None:
        """Write the server's state after round t, a dataclass, and all kept client states.

        Args:
            progress: what else the training loop needs to continue (JSON).
        """
        self._clients.mkdir(parents=True, exist_ok=True)
        for id, handle in runner.states().items():
            before = self._written.get(id)
            if before is None or before[0] is not handle:
                name = f"{id}-{t:06d}.safetensors"
                checksum = write_tree(self._clients / name, runner.fetch(handle))
                self._written[id] = (handle, name, checksum)
        kept = {id: self._written[id][1:] for id in runner.states()}
        content = _Content(
            round=t,
            state={f.name: getattr(state, f.name) for f in dataclasses.fields(state)},
            clients={id: name for id, (name, _) in kept.items()},
            checksums={id: checksum for id, (_, checksum) in kept.items()},
            progress=dict(progress),
            run=self.run,
        )
        write_tree(self.path(t), dict(content))
        self._known = ()
        self._before, self._latest = self._latest, set(content.clients.values())

    def path(self, t: int) -> Path:
        """The file of the checkpoint after round t."""
        return self._folder / f"round-{t:06d}.safetensors"

    def rounds(self) -> list[int]:
        """Rounds that have a checkpoint."""
        names = (path.name for path in self._folder.glob("*"))
        return sorted(int(found[1]) for name in names if (found := _CHECKPOINT.fullmatch(name)))

    def kept(self) -> list[int]:
        """Rounds whose checkpoints `prune` keeps."""
        return self.rounds()[-2:] if self._keep == "last" else self.rounds()

    def files(self, t: int) -> list[Path]:
        """The files of the checkpoint after round t: its own and those of client states.

        Raises:
            Damaged: it cannot be read, or is not the run's.
        """
        return [self.path(t), *(self._clients / name for name in self.read(t).clients.values())]

    def prune(self) -> None:
        """Remove all but the last two checkpoints, unless all are kept."""
        if self._keep != "last":
            return
        for round in set(self.rounds()) - set(self.kept()):
            self.path(round).unlink()
        for path in self._clients.iterdir():
            known = re.fullmatch(_CLIENT_STATE, path.name)
            if known and path.name not in self._latest | self._before:
                path.unlink()

    def latest(
        self,
        template: S,
        runner: RoundRunner,
        until: float = math.inf,
        check: Check = lambda t, progress: None,
    ) -> Checkpoint[S] | None:
        """Restore the latest checkpoint that is not damaged; None if there is none.

        The runner takes over the kept client states.

        Args:
            template: a state of the method, whose dataclass is filled.
            until: ignore later checkpoints.
            check: (round, progress), raises `Damaged` if other files of the checkpoint are
                damaged.
        """
        for t in sorted({*self.rounds(), *self._known}, reverse=True):
            if t > until:
                continue
            try:
                content = self.read(t)
                check(t, content.progress)
                state = self._state(t, template, content.state)
                states = {
                    id: read_tree(self._clients / name, content.checksums[id])
                    for id, name in content.clients.items()
                }
            except Damaged as damage:
                self.skipped.append(str(damage))
                continue
            runner.restore(states)
            handles = runner.states()
            self._written = {
                id: (handles[id], name, content.checksums[id])
                for id, name in content.clients.items()
            }
            self._latest = set(content.clients.values())
            return Checkpoint(t, state, content.progress)
        runner.restore({})
        self._written, self._latest = {}, set()
        return None

    def read(self, t: int) -> _Content:
        """The content of the checkpoint after round t.

        Raises:
            Damaged: it cannot be read, or is not the run's.
        """
        path = self.path(t)
        try:
            content = _Content.model_validate(read_tree(path))
        except ValidationError as error:
            raise Damaged(f"{path}: is damaged: it does not contain a checkpoint") from error
        if content.round != t:
            raise Damaged(f"{path}: is the checkpoint of round {content.round}, not of {t}")
        if self.run and content.run != self.run:
            raise Damaged(
                f"{path}: is a checkpoint of another run, with another experiment, seed or data"
            )
        return content

    def _state(self, t: int, template: S, fields: Mapping[str, Any]) -> S:
        """The server's state with these fields, whose types are those of the template's."""
        assert dataclasses.is_dataclass(template)
        expected = {f.name: getattr(template, f.name) for f in dataclasses.fields(template)}
        fit = fields.keys() == expected.keys() and all(
            isinstance(fields[name], np.ndarray) and fields[name].dtype == value.dtype
            for name, value in expected.items()
            if isinstance(value, np.ndarray) and fields[name] is not None
        )
        if not fit or np.shape(fields["weights"]) != np.shape(expected["weights"]):
            raise Damaged(f"{self.path(t)}: is damaged: it contains the state of another method")
        return dataclasses.replace(template, **fields)  # type: ignore[type-var]

    def drop_after(self, t: int) -> None:
        """Remove the (damaged) checkpoints after round t."""
        self._known = ()
        for round in self.rounds():
            if round > t:
                self.path(round).unlink()

    def damage(self, check: Check = lambda t, progress: None) -> list[str]:
        """What is wrong with the checkpoints; for `check` see `latest`."""
        wrong: dict[str, None] = {}  # a dict removes duplicates
        known: set[tuple[str, str]] = set()  # checkpoints share client states
        for t in sorted({*self.rounds(), *self._known}):
            try:
                content = self.read(t)
                check(t, content.progress)
            except Damaged as damage:
                wrong[str(damage)] = None
                continue
            for key in zip(content.clients.values(), content.checksums.values(), strict=True):
                if key in known:
                    continue
                known.add(key)
                try:
                    read_tree(self._clients / key[0], key[1])
                except Damaged as damage:
                    wrong[str(damage)] = None
        return list(wrong)
