"""What all commands share: the application, the terminal, common arguments."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedsim.errors import RunError
from fedsim.explain.words import short as short
from fedsim.units import size as size

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Explainable federated learning, simulated on Ray.",
)
# No emoji: «:100:» is a line number, not a pictogram.
out = Console(
    highlight=False,
    soft_wrap=True,
    emoji=False,
    width=None if sys.stdout.isatty() else 160,  # a file or a pipe has no width of its own
)
err = Console(stderr=True, soft_wrap=True, emoji=False)

File = Annotated[Path, typer.Argument(help="An experiment file (YAML).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="section.key=value, as many as you like.", show_default=False),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Run the code that the experiment of a folder from elsewhere names."
    ),
]
OutFolder = Annotated[Path, typer.Option("--out", help="Where runs lie.")]


@contextmanager
def writing() -> Iterator[None]:
    """Within, files that cannot be written are one message.

    Raises:
        RunError: it names the file.
    """
    try:
        yield
    except OSError as error:
        raise RunError(f"{error.filename}: cannot be written: {error.strerror}") from error


def say_written(paths: Iterable[Path]) -> None:
    """Say where files have been written."""
    for path in paths:
        out.print(f"written: {short(path.absolute())}", markup=False)
