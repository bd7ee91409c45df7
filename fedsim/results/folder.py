"""The folder of a run: making one, opening one, and what must be true of it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import secrets
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedsim import atomic
from fedsim.errors import ExperimentError, RunError, RunFolderError
from fedsim.experiment import Experiment

# Raised whenever a run folder of an earlier version can no longer be read.
FORMAT = 1
PACKAGES = ("fedsim", "torch", "numpy", "ray", "pydantic", "scikit-learn", "pandas", "pyarrow")


class RunFolder:
    """The folder `runs/<name>/<id>/` and its two descriptions: experiment and manifest.

    Attributes:
        path: of the folder.
        manifest: version, packages, hardware, seeds, hashes, status.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest

    @cached_property
    def experiment(self) -> Experiment:
        """As resolved, complete. Building it imports the user's own components, if it names any.

        Raises:
            RunFolderError: a component that it names is not to be had here.
        """
        try:
            return Experiment.load(self.path / "experiment.yaml")
        except ExperimentError as error:
            raise RunFolderError(
                f"{self.path}: its experiment cannot be built: {error}"
            ) from error

    @classmethod
    def create(cls, experiment: Experiment, out: Path, facts: dict[str, Any]) -> RunFolder:
        """Make the folder of a new run.

        Args:
            out: where runs lie.
            facts: what the manifest holds besides version, packages and hardware.
        """
        id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        path = (out / experiment.name / id).absolute()
        try:
            (path / "weights").mkdir(parents=True)
        except OSError as error:
            raise RunFolderError(f"{path}: cannot be made: {error}") from error
        content = experiment.to_yaml().encode()
        manifest = {
            "format": FORMAT,
            "status": "running",
            "experiment_hash": _hash(content),
            "seed": experiment.seed,
            **facts,
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "git_revision": _git_revision(),
            "python": platform.python_version(),
            "packages": {name: version(name) for name in PACKAGES},
            "hardware": {
                "machine": platform.machine(),
                "cpus": os.cpu_count(),
                "gpus": [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())],
            },
        }
        folder = cls(path, manifest)
        atomic.write(path / "experiment.yaml", content)
        folder.update()
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open the folder of a run.

        Raises:
            RunFolderError: it is not one, was written by another version, or its experiment was
                edited.
        """
        path = Path(path).absolute()
        if not path.is_dir():
            raise RunFolderError(f"{path}: there is no such folder")
        try:
            manifest = json.loads((path / "manifest.json").read_text())
            written_by, expected = manifest["format"], manifest["experiment_hash"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunFolderError(
                f"{path}: not a run folder (no readable manifest.json in it)"
            ) from error
        if written_by != FORMAT:
            raise RunFolderError(
                f"{path}: a run folder of format {written_by}; this version of fedsim reads "
                f"format {FORMAT}"
            )
        try:
            content = (path / "experiment.yaml").read_bytes()
        except OSError as error:
            raise RunFolderError(f"{path}: its experiment.yaml is gone: {error}") from error
        if _hash(content) != expected:
            raise RunFolderError(
                f"{path}: its experiment.yaml was edited after the run started; undo that, or "
                "start a new run with it"
            )
        return cls(path, manifest)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes of this machine off the run: two would overwrite checkpoints.

        Raises:
            RunFolderError: another process is at it.
        """
        folder = os.open(self.path, os.O_RDONLY)  # the lock ends with the process, if not before
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunFolderError(
                    f"{self.path}: another process carries out this run"
                ) from None
            yield
        finally:
            os.close(folder)

    def update(self, **facts: Any) -> None:
        """Change the manifest, on disk as well.

        Raises:
            RunError: it cannot be written.
        """
        self.manifest.update(facts)
        content = json.dumps(self.manifest, indent=2) + "\n"
        try:
            atomic.write(self.path / "manifest.json", content.encode())
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written: {error}") from error


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
