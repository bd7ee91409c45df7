"""Writing files whole or not at all, and noticing later that one is no longer what was written."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from fedsim.errors import Damaged


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a new file to write aside, and rename it when it is written and on the disk.

    So nobody ever sees half a file. The file aside has a name that nobody can guess and is made
    here, so that no link is followed; a block that raises removes it.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    os.close(os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o666))
    try:
        yield aside
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


@contextmanager
def named(path: Path) -> Iterator[Path]:
    """Like `replacing`, for a path that a person names: what is no file is not replaced by one.

    A link is followed to its target. A pipe or a device is written to. A block's error about
    another file stays what it is.

    Raises:
        OSError: it cannot be written; nobody reads from the pipe; or it is a disk, or a folder.
    """
    path, of_another = Path(path), None
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.is_block_device():
            raise OSError(errno.EINVAL, "is a disk")
        target = Path(os.path.realpath(path))
        if target.is_symlink():  # in a circle
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        special = path.exists() and not path.is_file()
        with _piped(path) if special else replacing(target) as aside:
            try:
                yield aside
            except OSError as error:
                if error.filename is not None and str(error.filename) != str(aside):
                    of_another = error
                raise
    except OSError as error:
        if error is of_another:
            raise
        silent = error.errno == errno.ENXIO and path.is_fifo()
        why = "nobody reads from this pipe" if silent else error.strerror or str(error)
        raise OSError(error.errno, why, str(path)) from error


@contextmanager
def _piped(path: Path) -> Iterator[Path]:
    """Give a file to write, and copy it to a pipe or a device."""
    with TemporaryDirectory() as folder:
        aside = Path(folder, path.name)
        yield aside
        with aside.open("rb") as source:
            # A pipe without a reader is an error rather than waited for.
            handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(handle, True)
            with open(handle, "wb") as target:
                shutil.copyfileobj(source, target)


def write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    with replacing(path) as aside:
        aside.write_bytes(content)


def remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed had begun to write aside, in a folder and below."""
    for left in folder.rglob(".*.part"):
        if left.is_file() and not left.is_symlink():
            left.unlink()


def checksum(path: Path) -> str:
    """Of a file's bytes, to notice damage by; raises OSError if they cannot be read."""
    insist_on_file(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def insist_on_file(path: Path) -> None:
    """Raise OSError for what is no regular file: opening a pipe would wait for its other end."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path}: is not a regular file")


def check(path: Path, expected: str | None) -> None:
    """Insist that a file has a checksum; with None nothing is known of it.

    Raises:
        Damaged: it has another one.
        OSError: it cannot be read.
    """
    if expected is not None and checksum(path) != expected:
        raise Damaged(f"{path}: is damaged: its checksum does not match")
