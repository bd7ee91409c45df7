"""Folders of runs, grids and searches: making one, opening one, what must be true of it."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import platform
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from fedsim import atomic
from fedsim.errors import Damaged, ExperimentError, RunError, RunFolderError
from fedsim.experiment import Experiment
from fedsim.registry import importing

# Raised whenever a run folder of an earlier version can no longer be read.
FORMAT = 1
FINAL_WEIGHTS = "weights/final.safetensors"  # of a run's global model
PACKAGES = ("fedsim", "torch", "numpy", "ray", "pydantic", "scikit-learn", "pandas", "pyarrow")


class Folder:
    """A folder of results and its two descriptions: experiment and manifest.

    Attributes:
        path: of the folder.
        manifest: kind, version, packages, hardware, status.
    """

    kind: ClassVar[str]  # what lies in the folder: a run, a grid or a search

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest

    @classmethod
    def make(cls, path: Path, content: str, facts: Mapping[str, Any]) -> Self:
        """Make the folder of something that starts now.

        Args:
            content: of the experiment file.
            facts: what the manifest holds besides version, packages and hardware.

        Raises:
            RunFolderError: it cannot be made.
        """
        path = path.absolute()
        experiment = content.encode()
        manifest = {
            "format": FORMAT,
            "kind": cls.kind,
            "status": "running",
            "experiment_hash": _hash(experiment),
            "signature": _signature(experiment),
            **facts,
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "git_revision": _git_revision(),
            "python": platform.python_version(),
            "packages": {name: version(name) for name in PACKAGES},
            "hardware": hardware(),
        }
        try:
            path.mkdir(parents=True, exist_ok=True)
            atomic.write(path / "experiment.yaml", experiment)
        except OSError as error:
            raise RunFolderError(f"{path}: cannot be made: {error}") from error
        folder = cls(path, manifest)
        folder.update()
        return folder

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a folder.

        Raises:
            RunFolderError: it is not of this kind, was written by another version, or its
                experiment was edited.
        """
        path = Path(path).absolute()
        if not path.is_dir():
            raise RunFolderError(f"{path}: there is no such folder")
        try:
            manifest = json.loads((path / "manifest.json").read_text())
            written_by, expected = manifest["format"], manifest["experiment_hash"]
            kind = manifest.get("kind", "run")
            checksum = manifest.pop("checksum", None)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunFolderError(
                f"{path}: not a {cls.kind} folder (no readable manifest.json in it)"
            ) from error
        if written_by != FORMAT:
            raise RunFolderError(
                f"{path}: a {kind} folder of format {written_by}; this version of fedsim reads "
                f"format {FORMAT}"
            )
        if checksum not in (None, _hash(_as_json(manifest))):
            raise Damaged(f"{path / 'manifest.json'}: is damaged: its checksum is another one")
        if kind != cls.kind:
            raise RunFolderError(f"{path}: the folder of a {kind}, not of a {cls.kind}")
        try:
            content = (path / "experiment.yaml").read_bytes()
        except OSError as error:
            raise RunFolderError(f"{path}: its experiment.yaml is gone: {error}") from error
        _refuse_links(path)
        if _hash(content) != expected:
            raise RunFolderError(
                f"{path}: its experiment.yaml was edited after the {kind} started; undo that, or "
                f"start a new {kind} with it"
            )
        return cls(path, manifest)

    @property
    def trusted(self) -> bool:
        """Whether this user made the folder here, or said to trust it: see `trust`.

        The experiments of others are read, but nothing that they name is imported.
        """
        expected = _signature((self.path / "experiment.yaml").read_bytes())
        found = self.manifest.get("signature")
        return expected is not None and hmac.compare_digest(expected, str(found))

    def trust(self) -> None:
        """Trust the code that the experiment names, and those of runs below, from now on."""
        self.update(signature=_signature((self.path / "experiment.yaml").read_bytes()))
        for manifest in self.path.glob("*/**/manifest.json"):
            RunFolder.open(manifest.parent).trust()

    def alone(self) -> AbstractContextManager[None]:
        """Keep other processes off it, see `alone`."""
        return alone(self.path, f"another process carries out this {self.kind}")

    def update(self, **facts: Any) -> None:
        """Change the manifest, on disk as well.

        Raises:
            RunError: it cannot be written.
        """
        self.manifest.update(facts)
        checksum = _hash(_as_json(self.manifest))
        try:
            atomic.write(
                self.path / "manifest.json", _as_json({**self.manifest, "checksum": checksum})
            )
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written: {error}") from error

    @property
    def files(self) -> dict[str, str]:
        """Checksums of the tables and weights that it ended with, by path."""
        found: dict[str, str] = self.manifest.get("files", {})
        return found

    def damage(self) -> list[str]:
        """What is wrong with these files."""
        wrong = []
        for name, expected in self.files.items():
            path = self.path / name
            try:
                atomic.check(path, expected)
            except FileNotFoundError:
                wrong.append(f"{path}: is missing")
            except Damaged as damage:
                wrong.append(str(damage))
        return wrong


class RunFolder(Folder):
    """The folder of one run."""

    kind = "run"

    @cached_property
    def experiment(self) -> Experiment:
        """As resolved, complete. Building it imports the user's own components, if it names any.

        Raises:
            RunFolderError: a component that it names is not to be had here, or not to be trusted.
        """
        try:
            with importing(self.trusted):
                return Experiment.load(self.path / "experiment.yaml")
        except ExperimentError as error:
            raise RunFolderError(
                f"{self.path}: its experiment cannot be built: {error}"
            ) from error

    def rounds_otherwise(self) -> str | None:
        """What decides rounding and is another than at the start, in words; None if nothing."""
        before, now = self.manifest["hardware"], hardware()
        changed = [
            f"{name} {before[name]!r}, now {now[name]!r}"
            for name in ("processor", "capability")
            if name in before and before[name] != now[name]
        ]
        known = self.manifest["packages"]
        changed += [
            f"{name} {known[name]}, now {version(name)}"
            for name in ("torch", "numpy")
            if name in known and known[name] != version(name)
        ]
        return "; ".join(changed) or None

    def forget_result(self) -> None:
        """Of a run that is to be made anew because its tables or weights are damaged."""
        for name in ("result_hash", "files"):
            self.manifest.pop(name, None)

    @classmethod
    def create(cls, experiment: Experiment, path: Path, facts: Mapping[str, Any]) -> RunFolder:
        """Make the folder of a new run; see `make`."""
        return cls.make(path, experiment.to_yaml(), {"seed": experiment.seed, **facts})


def _refuse_links(folder: Path) -> None:
    """fedsim makes none: by one, a folder from elsewhere would have other files written or shown.

    Raises:
        RunFolderError: there is one.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            path = Path(entry.path)
            if entry.is_symlink():
                raise RunFolderError(
                    f"{path}: is a symbolic link, which no folder of fedsim's has; remove it"
                )
            # Runs of a grid are looked into when they are opened; client states are replaced and
            # removed by name, which no link misleads.
            is_run = (path / "manifest.json").exists()
            if entry.is_dir() and not is_run and path.parts[-2:] != ("weights", "clients"):
                _refuse_links(path)


@contextmanager
def alone(path: Path, refusal: str | None = None) -> Iterator[None]:
    """Keep other processes of this machine off a folder: two would overwrite each other's files.

    Args:
        refusal: what to say if another process is at it; if not given, wait until it is not.

    Raises:
        RunFolderError: another process is at it.
    """
    folder = os.open(path, os.O_RDONLY)  # the lock ends with the process, if not before
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | (fcntl.LOCK_NB if refusal else 0))
        except BlockingIOError:
            raise RunFolderError(f"{path}: {refusal}") from None
        yield
    finally:
        os.close(folder)


def new_path(out: str | Path, name: str) -> Path:
    """Where something that starts now leaves its results: `<out>/<name>/<id>`."""
    return Path(out, name, f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")


def hardware() -> dict[str, Any]:
    """What this machine computes with."""
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())],
    }


def _processor() -> str:
    """The model of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not on Linux
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _as_json(manifest: Mapping[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=2) + "\n").encode()


def _signature(experiment: bytes) -> str | None:
    """What this user signs an experiment with; None if there is nowhere to keep a key."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = home / "fedsim" / "key"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # made by another process meanwhile
                key_file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
                with open(key_file, "wb") as file:
                    file.write(secrets.token_bytes(32))
        key = path.read_bytes()
    except OSError:
        return None
    return hmac.new(key, experiment, "sha256").hexdigest()[:32]


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _git_revision() -> str | None:
    """The revision of the source that runs, if it is a git checkout."""
    here = Path(__file__).parents[2]
    if not (here / ".git").exists():  # installed, perhaps below a repository of the user's
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
