"""Folders of runs, grids and searches: making one, opening one, what must be true of it."""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import platform
import secrets
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Self

from fedsim.config.file import from_yaml
from fedsim.config.registry import importing
from fedsim.errors import Damaged, ExperimentError, RunError, RunFolderError
from fedsim.experiment import Experiment
from fedsim.federation.checkpoint import Checkpoints
from fedsim.results import manifest as manifests
from fedsim.support import atomic
from fedsim.support.hardware import hardware
from fedsim.support.version import __version__

FINAL_WEIGHTS = "weights/final.safetensors"  # of a run's global model
REFERENCE = "reference.safetensors"  # maps of the reference of its explanations
LABELS = "labels.parquet"  # who holds which labels
PACKAGES = ("torch", "numpy", "ray", "pydantic", "scikit-learn", "pandas", "pyarrow")


class ResultsFolder:
    """A folder of results and its two descriptions: experiment and manifest.

    Attributes:
        path: of the folder.
        manifest: see the class that `schema` names.
        repaired: what was wrong with the two when it was opened, and has been made good.
    """

    kind: ClassVar[str]  # what lies in the folder: a run, a grid or a search
    schema: ClassVar[type[manifests.Manifest]]

    def __init__(self, path: Path, manifest: dict[str, Any], repaired: Sequence[str] = ()) -> None:
        self.path, self.manifest, self.repaired = path, manifest, list(repaired)

    @classmethod
    def make(cls, path: Path, content: str, facts: Mapping[str, Any]) -> Self:
        """Make the folder of something that starts now, with further `facts` in its manifest."""
        path = path.absolute()
        experiment = content.encode()
        manifest = {
            "format": manifests.FORMAT,
            "kind": cls.kind,
            "status": "running",
            "experiment": content,
            "experiment_hash": manifests.hash_of(experiment),
            "signature": _signature(experiment),
            **facts,
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "git_revision": _git_revision(),
            "python": platform.python_version(),
            # fedsim's own not from its metadata, which jobs and checkouts may lack.
            "packages": {"fedsim": __version__, **{name: version(name) for name in PACKAGES}},
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
        """Open a folder, or the latest of this kind below it (`runs/NAME`).

        Raises:
            RunFolderError: it is not of this kind, was written by another version, its
                experiment was edited, or it is damaged beyond what its copies can mend.
        """
        path = manifests.meant(path, cls.kind).absolute()
        manifest, wrong = manifests.read(path, cls.kind, cls.schema)
        _refuse_links(path, cls.kind != "run")
        return cls(path, manifest, [*wrong, *_put_experiment_back(path, manifest, cls.kind)])

    @property
    def trusted(self) -> bool:
        """Whether this user made the folder here, or said to trust it: see `trust`.

        The experiments of others are read, but nothing that they name is imported.
        """
        expected = _signature((self.path / "experiment.yaml").read_bytes())
        found = self.manifest.get("signature")
        return expected is not None and hmac.compare_digest(expected, str(found))

    def trust(self) -> None:
        """Allow a folder from elsewhere to import the code that its experiment names, from now on.

        This includes the runs of a grid or a search. Read that code first. Folders that you made
        yourself need no trust.
        """
        self.update(signature=_signature((self.path / "experiment.yaml").read_bytes()))
        for path in manifests.runs_below(self.path):
            RunFolder.open(path).trust()

    def alone(self) -> AbstractContextManager[None]:
        return alone(self.path, f"another process carries out this {self.kind}")

    def update(self, **facts: Any) -> None:
        self.manifest.update(facts)
        with self.writing():
            manifests.write(self.path, self.manifest)
        self.repaired = []

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Name the folder in errors of writing its files."""
        try:
            yield
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written: {error}") from error

    @property
    def files(self) -> dict[str, str]:
        found: dict[str, str] = self.manifest.get("files", {})
        return found

    def damage(self) -> list[str]:
        """What is wrong with these files, and was wrong with its two descriptions."""
        copy = manifests.damage_of_copy(self.path, self.kind, self.schema, self.manifest)
        wrong = [*self.repaired, *copy]
        for name, expected in self.files.items():
            path = self.path / name
            try:
                atomic.check(path, expected)
            except FileNotFoundError:
                wrong.append(f"{path}: is missing")
            except (OSError, Damaged) as damage:
                wrong.append(str(damage))
        return wrong


class RunFolder(ResultsFolder):
    """The folder of one run."""

    kind = "run"
    schema = manifests.RunManifest

    @cached_property
    def experiment(self) -> Experiment:
        """As resolved, complete. Building it imports the user's own components, if any."""
        try:
            with importing(self.trusted):
                return Experiment.load(self.path / "experiment.yaml")
        except ExperimentError as error:
            raise RunFolderError(
                f"{self.path}: its experiment cannot be built: {error}"
            ) from error

    def checkpoints(self, keep: str = "last") -> Checkpoints:
        """Its checkpoints, which say that they are of this run."""
        about = [self.manifest.get(key) for key in manifests.OF_A_RUN]
        known = self.manifest.get("checkpoints", ())
        run = manifests.hash_of(json.dumps(about).encode())
        return Checkpoints(self.path / "weights", keep, known, run)

    def rounds_otherwise(self) -> str | None:
        """What decides rounding and is another than at the start, in words; None if nothing."""
        before, now = self.manifest.get("hardware", {}), hardware()
        changed = [
            f"{name} {before[name]!r}, now {now[name]!r}"
            for name in ("processor", "capability", "variables")
            if name in before and before[name] != now[name]
        ]
        known = self.manifest.get("packages", {})
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
        folder = cls.make(path, experiment.to_yaml(), {"seed": experiment.seed, **facts})
        # Built anew, as from the file, whose reading takes a quarter of a tiny run.
        folder.experiment = Experiment.from_dict(experiment.model_dump(mode="json"))
        return folder


class GridFolder(ResultsFolder):
    """The folder of a grid."""

    kind = "grid"
    schema = manifests.GridManifest


class SearchFolder(ResultsFolder):
    """The folder of a search."""

    kind = "search"
    schema = manifests.SearchManifest


def open_folder(path: str | Path) -> ResultsFolder:
    """Open the folder of a run, a grid or a search, or the latest below it (`runs/NAME`)."""
    path = manifests.meant(path).absolute()
    kind = manifests.kind_of(path)
    for folder in (RunFolder, GridFolder, SearchFolder):
        if folder.kind == kind:
            return folder.open(path)
    if manifests.is_at(path):
        return RunFolder.open(path)  # which says what is wrong with its manifest
    raise RunFolderError(
        f"{path}: not the folder of a run, a grid or a search (no readable manifest.json in it)"
    )


def _put_experiment_back(folder: Path, manifest: Mapping[str, Any], kind: str) -> list[str]:
    """Write a missing or damaged experiment.yaml again; returns what was wrong with it."""
    path = folder / "experiment.yaml"
    try:
        atomic.insist_on_file(path)
        content = path.read_bytes()
        if manifests.hash_of(content) == manifest["experiment_hash"]:
            return []
        readable = isinstance(from_yaml(content), dict)
        wrong = f"{path}: is damaged"
    except FileNotFoundError:
        readable, wrong = False, f"{path}: is missing"
    except (OSError, ExperimentError) as error:
        why = type(error).__name__ if isinstance(error, OSError) else error
        readable, wrong = False, f"{path}: is damaged: {why}"
    original = (manifest.get("experiment") or "").encode()
    if manifests.hash_of(original) != manifest["experiment_hash"]:
        original = b""
    if readable:
        remedy = "; remove it to have it put back" if original else ""
        raise RunFolderError(
            f"{folder}: its experiment.yaml was edited after the {kind} started (or is damaged"
            f"{remedy}); undo that, or start a new {kind} with it"
        )
    if not original:
        raise Damaged(wrong)
    try:
        atomic.write(path, original)
    except OSError as error:
        raise RunFolderError(f"{wrong}, and cannot be put back: {error}") from error
    return [f"{wrong}; it has been put back"]


def _refuse_links(folder: Path, of_runs: bool) -> None:
    """fedsim makes none: by one, a folder from elsewhere would have other files written or shown.

    Nor does it make pipes and devices, which a reader would wait for.
    """
    for path in folder.iterdir():
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:  # a driver has replaced or removed it meanwhile
            continue
        what = ""
        if stat.S_ISLNK(mode):
            what = "a symbolic link, which no folder of fedsim's has"
        elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            what = "neither a file nor a folder, and fedsim makes nothing else"
        if what:
            raise RunFolderError(f"{path}: is {what}; remove it")
        # Runs of a grid or search are looked into when they are opened, each by itself; client
        # states are replaced and removed by name, which no link misleads.
        client_states = path.parts[-2:] == ("weights", "clients")
        if stat.S_ISDIR(mode) and not client_states and not (of_runs and manifests.is_at(path)):
            with suppress(FileNotFoundError, NotADirectoryError):  # as above
                _refuse_links(path, of_runs)


@contextmanager
def alone(path: Path, refusal: str | None = None) -> Iterator[None]:
    """Keep other processes of this machine off a folder: two would overwrite each other's files.

    Where another one is at it, raise the refusal; without any, wait.
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


version = cache(metadata.version)  # of a package; reading it takes milliseconds


@cache
def _git_revision() -> str | None:
    here = Path(__file__).parents[2]
    if not (here / ".git").exists():  # installed, perhaps below a repository of the user's
        return None
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
