"""The command line.

Its modules do not import torch, Ray or pandas: each command imports what it needs when it runs, so
that help and completion are fast.
"""

from __future__ import annotations

import errno
import sys
import warnings
from pathlib import Path
from typing import TextIO

from fedsim.cli import clients as _clients
from fedsim.cli import components as _components
from fedsim.cli import explain as _explain
from fedsim.cli import jobs as _jobs
from fedsim.cli import look as _look
from fedsim.cli import new as _new
from fedsim.cli import results as _results
from fedsim.cli import runs as _runs
from fedsim.cli.console import app, err
from fedsim.cli.signals import orderly_end
from fedsim.config.modules import search_last
from fedsim.errors import FedsimError, FedsimWarning
from fedsim.support.words import visible

__all__ = ["app", "main"]
del _clients, _components, _explain, _jobs, _look, _new, _results, _runs

PANELS = {  # of the help: their commands, the usual first
    "Run": ["run", "resume", "continue", "grid", "tune"],
    "Prepare": ["new", "list", "data", "doctor", "schema"],
    "Look at results": ["ls", "view", "report", "compare"],
    "Explain": ["explain", "clusters", "drifts"],
    "Clients and privacy": ["contributions", "influence", "unlearn", "attack"],
    "Check and share": ["verify", "pack", "merge"],
    "Clusters": ["submit", "jobs", "fetch", "stop"],
}
_ORDER = [name for names in PANELS.values() for name in names]
app.registered_commands.sort(key=lambda command: _ORDER.index(str(command.name)))
for _command in app.registered_commands:
    _command.rich_help_panel = next(p for p, names in PANELS.items() if _command.name in names)

MOST_LINES = 6  # lines of a message
MOST_CHARACTERS = 500  # characters of a line


def main() -> None:
    """Run the command line; errors for users become one message and an exit code."""
    search_last(str(Path.cwd()))
    with orderly_end(), warnings.catch_warnings():
        warnings.showwarning = _warn
        try:
            app(prog_name="fedsim")  # also for `python -m fedsim`
        except FedsimError as error:
            err.print(f"error: {_shortened(str(error))}")
            if error.advice:
                err.print(error.advice)
            sys.exit(error.exit_code)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            name = _shortened(str(error.filename))
            err.print(f"error: {name}: the name is too long")
            sys.exit(2)


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show fedsim's warnings in one line, others as Python does."""
    if category is FedsimWarning:
        err.print(f"warning: {message}")
    else:
        told = warnings.formatwarning(message, category, filename, lineno, line)
        sys.stderr.write(visible(told))


def _shortened(message: str) -> str:
    half = MOST_CHARACTERS // 2  # the end may be important
    lines = [
        line if len(line) <= MOST_CHARACTERS else f"{line[:half]} … {line[-half:]}"
        for line in message.splitlines()
    ]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES - 1 :] = [f"… and {len(lines) - MOST_LINES + 1} more"]
    return "\n".join(lines)
