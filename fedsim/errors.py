"""What can go wrong, as a small tree. Every message says what, where, and what to do.

A `FedsimError` is meant for a person: the command line prints its message without a traceback.
`BadInput` and its children are refused before a run starts or a file is written (exit code 2);
`RunError` and its children end a run that had started (exit code 1).
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import ClassVar


class FedsimError(Exception):
    """Root of all errors that fedsim raises on purpose."""

    exit_code = 1


class BadInput(FedsimError):
    """What was asked for cannot be done; nothing has been started or written."""

    exit_code = 2


class ExperimentError(BadInput):
    """An experiment file, or an override, that does not fit the schema."""


class DataError(BadInput):
    """Data that is missing, unreadable, mislabelled, or cannot be partitioned as asked."""


class NotInstalled(BadInput):
    """Something that takes a package which is not installed."""


class ClusterError(BadInput):
    """Actors that can never be placed on the nodes at hand."""


class RunFolderError(BadInput):
    """A run folder that is not one, is of another version, or was edited."""


class Damaged(RunFolderError):
    """A file of a run folder that is missing, or no longer what was written."""


class RunError(FedsimError):
    """A run that started and could not go on.

    Attributes:
        resumable: whether it may end otherwise when it is resumed as it is.
    """

    resumable: ClassVar[bool] = True


class ClientError(RunError):
    """A client function that raised, or sent what cannot be aggregated.

    Carries the client's id, the round and the phase (the function's name), so that the step can
    be made again alone.
    """

    def __init__(self, client: int, round: int, phase: str, cause: str) -> None:
        super().__init__(client, round, phase, cause)  # the arguments, so that it pickles
        self.client, self.round, self.phase, self.cause = client, round, phase, cause

    def __str__(self) -> str:
        return f"client {self.client}, round {self.round}, {self.phase}: {self.cause}"


class MethodError(RunError):
    """A function that the server carries out, of a method or an objective, which raised."""


class Diverged(RunError):
    """Training whose numbers have become too large, infinite or NaN; a resumed run ends alike."""

    resumable = False

    def __init__(self, round: int, what: str) -> None:
        super().__init__(round, what)  # the arguments, so that it pickles
        self.round, self.what = round, what

    def __str__(self) -> str:
        return f"training diverged in round {self.round}: {self.what}; lower the learning rate"


class UnknownObjective(RunError):
    """An objective of a search that is no column of its runs' rounds; all trials would fail."""

    resumable = False


class StateLost(RunError):
    """Kept client states went down with a node; the run falls back to its last checkpoint."""


class StackTooLarge(RunError):
    """There is no memory to train so many clients at once; the run goes on with half as many."""


def in_one_line(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    words = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def in_own_code(error: BaseException) -> str:
    """An error in one line, with the place where code outside of libraries raised it."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename
    ]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return in_one_line(error) + place


class FedsimWarning(UserWarning):
    """Something that is carried out as asked for, and probably not as meant."""
