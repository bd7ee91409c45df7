"""What all commands share: the application, the terminal, common arguments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

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
OutFolder = Annotated[Path, typer.Option("--out", help="Where runs lie.")]


def size(count: float) -> str:
    """Bytes as a person reads them."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"


def short(path: Path) -> str:
    """A path as a person would type it from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
