"""The manifest of a folder of results: what it holds, and reading and writing it.

It is written twice, so that a folder can still be read when one of the two is damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedsim.errors import Damaged, RunFolderError
from fedsim.objectives import Metric
from fedsim.support import atomic
from fedsim.support.words import short

NAMES = ("manifest.json", "manifest.copy.json")
# What tells a run from others: its experiment with the seed, its data, how they are dealt out.
OF_A_RUN = ("experiment_hash", "data_hash", "partition_hash")
FORMAT = 2  # raised whenever a folder of an earlier version can no longer be read

Status = Literal["running", "finished", "interrupted", "failed", "stopped"]


def _stays_within(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError("must be a path within the folder")
    return path


def _date(word: str) -> str:
    if word and datetime.fromisoformat(word).tzinfo is None:
        raise ValueError("must be a date with a time zone")
    return word


def _one_is_primary(metrics: list[Metric] | None) -> list[Metric] | None:
    if metrics is not None and sum(metric.primary for metric in metrics) != 1:
        raise ValueError("one of them must be primary")
    return metrics


Inner = Annotated[str, AfterValidator(_stays_within)]
Count = Annotated[int, Field(ge=1)]


class Hardware(BaseModel):
    machine: str | None = None
    processor: str | None = None
    capability: str | None = None
    variables: dict[str, str] = {}
    cpus: int | None = None
    gpus: list[str] = []


class Manifest(BaseModel):
    """What is known of any folder; what came with later versions may be missing.

    After its process was killed its status is still `running`. The signature is over the content
    of its experiment.yaml, of the user who made or trusts the folder; `files` are checksums of the
    tables and weights it ended with, by path.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    format: int
    kind: str = "run"
    status: Status
    error: str | None = None
    experiment: str | None = None
    experiment_hash: str
    signature: str | None = None
    files: dict[Inner, str] = {}
    created: Annotated[str, AfterValidator(_date)] = ""
    git_revision: str | None = None
    python: str | None = None
    packages: dict[str, str] = {}
    hardware: Hardware = Hardware()


class RunManifest(Manifest):
    """What is known of a run besides.

    Args:
        clients_per_step: trained side by side; known from the first round on.
        halved: after which round there was no memory for more, and how many it had been.
        session: of the search or grid in which it failed last.
        last: what a trial that was stopped early had come to.
        stopped_after: the round after which early stopping ended it.
        contributions: what was found out of clients' contributions at its end, by column.
        continues: the run from whose end it went on: its `folder`, `round` and `result_hash`.
    """

    seed: Annotated[int, Field(ge=0)]
    data_hash: str = ""
    partition_hash: str = ""
    clients: Count
    client_names: list[str] = []
    actors: Annotated[int, Field(ge=0)] | None = None
    clients_per_step: Count | None = None
    halved: list[tuple[Annotated[int, Field(ge=0)], Count]] = []
    server_device: str | None = None
    metrics: Annotated[list[Metric] | None, AfterValidator(_one_is_primary)] = None
    explained: list[Metric] = []
    map_shape: list[Annotated[int, Field(gt=0)]] | None = None
    checkpoints: list[Annotated[int, Field(ge=0)]] = []
    wall_seconds: float = 0.0
    result_hash: str = ""
    mlflow_run: str = ""
    wandb_run: str = ""
    session: str = ""
    last: dict[str, float] = {}
    stopped_after: Count | None = None
    contributions: dict[str, float] = {}
    continues: dict[str, str | int] | None = None

    @model_validator(mode="after")
    def _says_how_it_was_made(self) -> RunManifest:
        if self.result_hash and self.clients_per_step is None:
            raise ValueError("clients_per_step is missing beside result_hash")
        return self


class Cell(BaseModel):
    """A run of a grid, as the grid's manifest has it at its end."""

    cell: dict[str, Any]
    seed: Annotated[int, Field(ge=0)]
    folder: Inner
    status: Status | Literal["missing"]
    error: str | None = None


class SweepManifest(Manifest):
    """What is known of a grid or a search besides.

    Relative paths in its experiment start from `started_in`, the folder of the command.
    """

    name: str
    started_in: str = ""


class GridManifest(SweepManifest):
    """What is known of a grid besides."""

    axes: list[str]
    baseline: dict[str, Any] | None = None
    target: float | None = None
    cells: list[Cell] = []


class SearchManifest(SweepManifest):
    """What is known of a search besides."""

    objectives: dict[str, Literal["max", "min"]]
    space: list[str]


def clients_per_step(manifest: Mapping[str, Any], t: int) -> int:
    """V of round t, by the manifest of a run that has chosen it."""
    before = (V for after, V in manifest.get("halved", ()) if t <= after)
    return int(next(before, manifest["clients_per_step"]))


def halved(manifest: Mapping[str, Any], done: int) -> dict[str, Any]:
    """What a run's manifest holds once V is halved, from the round after round `done` on."""
    V = clients_per_step(manifest, done + 1)
    before = [[after, more] for after, more in manifest.get("halved", ()) if after <= done]
    return {"clients_per_step": V // 2, "halved": [*before, [done, V]]}


def is_at(folder: Path) -> bool:
    return any((folder / name).exists() for name in NAMES)


def runs_below(folder: Path) -> list[Path]:
    return sorted({path.parent for path in folder.glob("*/**/manifest*.json")})


def latest_first(folder: Path, kind: str | None = None) -> list[Path]:
    """Folders of results (of a kind) below another one or its sub-folders, the latest first.

    Those of which none can be read any more count, too.
    """
    for pattern in ("*/manifest*.json", "*/*/manifest*.json", "*/*/*/manifest*.json"):
        found = {path.parent for path in folder.glob(pattern)}
        fitting = [path for path in found if not kind or kind_of(path) in (kind, None)]
        if fitting:  # their names begin with when they were started
            return sorted(fitting, key=lambda path: (path.name, path), reverse=True)
    return []


def meant(path: str | Path, kind: str | None = None) -> Path:
    """The folder of results that a path names: its own, or else the latest below it."""
    folder = Path(path)
    if not os.path.isdir(folder):  # also if no folder can have such a name
        raise RunFolderError(f"{folder.absolute()}: there is no such folder")
    below = [] if is_at(folder) else latest_first(folder, kind)
    return below[0] if below else folder


def kind_of(folder: Path) -> str | None:
    """What lies in a folder; None if no results do."""
    for name in NAMES:
        with suppress(OSError, ValueError):
            return str(_parse(folder / name).get("kind", "run"))
    return None


def read(folder: Path, kind: str, schema: type[Manifest]) -> tuple[dict[str, Any], list[str]]:
    """Read the manifest of a folder, or its copy; and what was wrong if that is used."""
    wrong: list[str] = []
    for name in NAMES:
        try:
            return _read(folder / name, kind, schema), wrong
        except FileNotFoundError:
            wrong.append(f"{folder / name}: is missing")
        except Damaged as damage:
            wrong.append(str(damage))
    if all(line.endswith("is missing") for line in wrong):
        raise RunFolderError(f"{folder}: not a {kind} folder (no readable {NAMES[0]} in it)")
    raise Damaged(wrong[1] if wrong[0].endswith("is missing") else wrong[0])


def damage_of_copy(
    folder: Path, kind: str, schema: type[Manifest], manifest: Mapping[str, Any]
) -> list[str]:
    """What is wrong with the copy of a folder's manifest, which may be a moment older."""
    path = folder / NAMES[1]
    try:
        copy = _read(path, kind, schema)
        if any(copy.get(key) != manifest.get(key) for key in OF_A_RUN):
            return [f"{path}: is the manifest of another {kind}"]
    except FileNotFoundError:
        return [f"{path}: is missing"]
    except RunFolderError as damage:
        return [str(damage)]
    return []


def write(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest of a folder, and its copy."""
    written = content(manifest)
    for name in NAMES:
        atomic.write(folder / name, written)


def content(manifest: Mapping[str, Any]) -> bytes:
    """A manifest without checksum as JSON, and the checksum of all this as the last key."""
    above = _as_json(manifest)
    return above.removesuffix(b"\n}\n") + f',\n  "checksum": "{hash_of(above)}"\n}}\n'.encode()


def hash_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _read(path: Path, kind: str, schema: type[Manifest]) -> dict[str, Any]:
    try:
        manifest = _parse(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise Damaged(f"{path}: is damaged: {error}") from error
    found = manifest.get("kind", "run")
    if manifest.get("format") != FORMAT and isinstance(manifest.get("format"), int):
        raise RunFolderError(
            f"{path.parent}: a {found} folder of format {manifest['format']}; this version of "
            f"fedsim reads format {FORMAT}"
        )
    checksum = manifest.pop("checksum", None)
    if checksum not in (None, hash_of(_as_json(manifest))):
        raise Damaged(f"{path}: is damaged: its checksum does not match")
    if found != kind:
        below = latest_first(path.parent, kind)
        hint = f"; did you mean {short(below[0])}?" if below else ""
        raise RunFolderError(f"{path.parent}: the folder of a {found}, not of a {kind}{hint}")
    try:
        schema.model_validate_json(json.dumps(manifest))
    except ValidationError as error:
        first = error.errors()[0]
        what = (".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, "))
        raise Damaged(f"{path}: is damaged: {': '.join(filter(None, what))}") from None
    return manifest


def _parse(path: Path) -> dict[str, Any]:
    """A file's JSON. Raises ValueError if it is none, or no mapping."""
    try:
        atomic.insist_on_file(path)
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("too many levels") from error
    if not isinstance(manifest, dict):
        raise ValueError("it is not a mapping")
    return manifest


def _as_json(manifest: Mapping[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=2) + "\n").encode()
