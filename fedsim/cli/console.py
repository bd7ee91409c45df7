"""Shared by all commands: the application, the terminal, common arguments."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import fedsim
from fedsim.errors import RunError
from fedsim.words import short as short
from fedsim.words import size as size

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
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
    typer.Argument(help="section.key=value; can be repeated.", show_default=False),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Allow a folder from elsewhere to run the code that its experiment names."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
OutFolder = Annotated[Path, typer.Option("--out", help="Folder of all runs.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(f"fedsim {fedsim.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_print_version),
    ] = False,
) -> None:
    """Explainable federated learning, simulated on Ray."""


def print_json(content: Any) -> None:
    """Print what a script reads: strict JSON, in which numbers that are not finite are null."""
    typer.echo(json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False))


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


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
