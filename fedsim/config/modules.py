"""The folder of the command: the user's modules, `module:Name`, and relative paths start there."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

FOLDER = "FEDSIM_MODULES"  # variable: the folder of the command, for processes of Ray


def search_last(folder: str | None) -> None:
    """Look for modules in a folder after everything else.

    Python and Ray would have the working directory first, where a file may bear the name of a
    library: and it may be a folder from elsewhere.

    Args:
        folder: if None, there is none.
    """
    if folder:
        sys.path[:] = [path for path in sys.path if path not in ("", folder)] + [folder]


def search_here_last() -> None:
    """In a process of Ray: look last in the folder that the command was given in."""
    search_last(os.environ.get(FOLDER))


def enter(folder: str) -> None:
    """In an actor: work in the folder of the command, if this node has it.

    Ray starts actors in a working directory of its own, and Ray Tune in one for each trial.
    """
    search_last(folder)
    with suppress(OSError):
        os.chdir(folder)
