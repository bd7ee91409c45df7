"""The exceptions of fedsim. Every message says what went wrong, where, and what to do.

A `FedsimError` is meant for users: the command line prints its message without a traceback.
`BadInput` and its subclasses are raised before a run starts or a file is written (exit code 2);
`RunError` and its subclasses end a run that had started (exit code 1).
"""

from __future__ import annotations

import sysconfig
import traceback
import warnings
from pathlib import Path
from typing import ClassVar


class FedsimError(Exception):
    """Root of all errors that fedsim raises on purpose.

    Attributes:
        advice: how to go on, which the command line prints below the message.
        hopeless: whether every trial of a search would fail like the one that raised it.
    """

    exit_code = 1
    advice = ""
    hopeless = False


class BadInput(FedsimError):
    """The request is invalid; nothing has been started or written."""

    exit_code = 2


class ExperimentError(BadInput):
    """An experiment file or an override does not fit the schema."""


class DataError(BadInput):
    """Data are missing, unreadable, mislabelled, or cannot be partitioned as requested."""


class NotInstalled(BadInput):
    """A package that is required here is not installed."""


class ClusterError(BadInput):
    """Actors can never be placed on the available nodes."""


class RunFolderError(BadInput):
    """A folder is not a run folder, is of another version, or was edited."""


class Damaged(RunFolderError):
    """A file of a run folder is missing or has changed since it was written."""


class RunError(FedsimError):
    """A run started and could not continue.

    Attributes:
        resumable: whether the run may succeed when it is resumed unchanged.
    """

    resumable: ClassVar[bool] = True


class ClientError(RunError):
    """A client function raised an exception, or sent something that cannot be aggregated.

    Carries the client's id, the round and the phase (the function's name), so that the step can be
    repeated in isolation.
    """

    def __init__(self, client: int, round: int, phase: str, cause: str) -> None:
        super().__init__(client, round, phase, cause)  # the arguments, so that it pickles
        self.client, self.round, self.phase, self.cause = client, round, phase, cause

    def __str__(self) -> str:
        return f"client {self.client}, round {self.round}, {self.phase}: {self.cause}"


class MethodError(RunError):
    """A function of a method or an objective raised an exception on the server."""


class Diverged(RunError):
    """Training has diverged to huge, infinite or NaN values; resuming ends in the same way."""

    resumable = False

    def __init__(self, round: int, what: str) -> None:
        super().__init__(round, what)  # the arguments, so that it pickles
        self.round, self.what = round, what

    def __str__(self) -> str:
        return f"training diverged in round {self.round}: {self.what}; lower the learning rate"


class NobodyAnswers(RunError):
    """Conditions leave no client that answers in a round; the round changes nothing."""

    def __init__(self, round: int, why: str) -> None:
        super().__init__(round, why)  # the arguments, so that it pickles
        self.round, self.why = round, why

    def __str__(self) -> str:
        return f"round {self.round} changes nothing: {self.why}"


class UnknownObjective(RunError):
    """An objective of a search is no column of its runs' rounds; all trials would fail."""

    resumable = False
    hopeless = True


class StateLost(RunError):
    """Kept client states were lost with a node; the run falls back to its last checkpoint."""


class StackTooLarge(RunError):
    """Too little memory for so many clients at once; the run continues with half as many."""


def in_one_line(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    words = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def in_own_code(error: BaseException) -> str:
    """An error in one line, with the place in the user's own code where it was raised, if any."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)
    ]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return in_one_line(error) + place


def _is_own(file: str) -> bool:
    """Whether a file is the user's: of neither fedsim, nor Python, nor an installed package."""
    libraries = (str(Path(__file__).parent), sysconfig.get_path("stdlib"))
    return "site-packages" not in file and not file.startswith((*libraries, "<frozen "))


class FedsimWarning(UserWarning):
    """Something is done as requested, but probably not as intended."""


def warn(text: str) -> None:
    """Warn of something, at the place where the caller was called."""
    warnings.warn(text, FedsimWarning, stacklevel=3)
