"""Where the user's own modules, `module:Name`, are found: beside their files, after libraries."""

from __future__ import annotations

import os
import sys

FOLDER = "FEDSIM_MODULES"  # variable: where they are, for processes of Ray


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
