"""One archive of a folder of results, for a reader elsewhere."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile, ZipInfo

from fedsim.config.file import RawConfig
from fedsim.errors import BadInput, RunError, RunFolderError
from fedsim.federation.checkpoint import Checkpoints
from fedsim.results import manifest as manifests
from fedsim.results.folder import FINAL_WEIGHTS, RunFolder, open_folder
from fedsim.results.verify import insist_on_whole
from fedsim.support import atomic

TIME = (1980, 1, 1, 0, 0, 0)  # of all files in an archive: the earliest that ZIP knows
MODE = 0o100644 << 16  # a regular file that everybody may read, where ZIP has it


@dataclass(frozen=True)
class Archive:
    """What was packed, and how many runs of a grid or a search did not finish, by their ends."""

    path: Path
    files: int
    sha256: str
    unfinished: Mapping[str, int]


def pack_results(folder: Path, path: Path | None = None) -> Archive:
    """Pack a run, a grid or a search whose files are all as they were written.

    The archive has all that a reader needs to verify, load, report and explain it. Of the
    checkpoints of a run it has the last, unless the experiment keeps all. The same folder gives
    the same bytes: nothing is compressed, because versions of zlib differ, and compression would
    save little of tables and weights.

    Args:
        path: of the archive, a .zip; by default named like the folder, in the working directory.
    """
    # realpath, unlike resolve, takes links in circles.
    folder = Path(os.path.realpath(manifests.meant(folder)))
    path = path or Path(f"{folder.name}.zip")
    if path.suffix != ".zip" or path.is_dir():
        raise BadInput(f"--out {path}: must be a .zip file")
    if Path(os.path.realpath(path)).is_relative_to(folder):
        raise BadInput(f"--out {path}: lies in the folder that is packed")
    opened = open_folder(folder)
    with opened.alone():
        insist_on_whole(folder)
        runs = [RunFolder.open(run) for run in manifests.runs_below(folder)]
        status = opened.manifest["status"]
        # That runs of a grid failed is part of its result.
        if status not in (("finished",) if opened.kind == "run" else ("finished", "failed")):
            raise RunFolderError(
                f"{opened.path}: the {opened.kind} is not finished ({status}), so there is no "
                f"result to be read; go on with: fedsim resume {opened.path}"
            )
        changed: dict[Path, bytes] = {}
        left_out: set[Path] = set()
        for run in [opened] if isinstance(opened, RunFolder) else runs:
            _leave_checkpoints(run, left_out, changed)
        files = {
            f"{folder.name}/{source.relative_to(folder).as_posix()}": changed.get(source, source)
            for source in _files(folder)
            if source not in left_out
        }
        try:
            with atomic.named(path) as aside:
                write_zip(aside, files)
                with aside.open("rb") as file:
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, UnicodeEncodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise RunError(f"{path}: cannot be written: {why}") from error
    ends = Counter(run.manifest["status"] for run in runs)
    del ends["finished"]
    return Archive(path, len(files), sha256, ends)


def _leave_checkpoints(run: RunFolder, left_out: set[Path], changed: dict[Path, bytes]) -> None:
    """Leave out, and out of the manifests, those that only going on with a run would need."""
    section = RawConfig.read(run.path / "experiment.yaml").content.get("checkpoint")
    keeps_all = isinstance(section, Mapping) and section.get("keep") == "all"
    weights = run.path / "weights"
    if keeps_all or not weights.is_dir():
        return
    checkpoints = Checkpoints(weights)
    last = checkpoints.rounds()[-1:]
    needed = {run.path / FINAL_WEIGHTS, *(file for t in last for file in checkpoints.files(t))}
    left_out.update(set(weights.rglob("*")) - needed)
    content = manifests.content({**run.manifest, "checkpoints": last})
    changed.update({run.path / name: content for name in manifests.NAMES})


def _files(folder: Path) -> list[Path]:
    """The regular files below a folder, in order, without hidden ones."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise RunFolderError(f"{path}: is not a regular file; remove it")
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            found.append(path)
    return found


def write_zip(
    target: Path, files: Mapping[str, Path | bytes], compression: int = ZIP_STORED
) -> None:
    """Write files, by their names, to an archive; the same content gives the same bytes."""
    with ZipFile(target, "w") as archive:
        for name, content in files.items():
            about = ZipInfo(name, TIME)
            about.external_attr, about.compress_type = MODE, compression
            if isinstance(content, bytes):
                archive.writestr(about, content)
                continue
            try:
                source = content.open("rb")
            except OSError as error:
                raise RunFolderError(f"{content}: cannot be read: {error.strerror}") from error
            with source:
                about.file_size = content.stat().st_size  # says whether 32 bits are enough
                with archive.open(about, "w") as entry:
                    shutil.copyfileobj(source, entry)
