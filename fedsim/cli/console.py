"""Shared by all commands: the application, the terminal, common arguments."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

import fedsim
from fedsim.errors import BadInput, RunError
from fedsim.support.words import CONTROL, visible
from fedsim.support.words import duration as duration
from fedsim.support.words import short as short
from fedsim.support.words import size as size

UsageError = typer.BadParameter.__base__  # click's, which typer vendors


class _Commands(TyperGroup):
    """Adds suggestions to usage errors."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter:
            raise
        except UsageError as error:  # type: ignore[misc]
            if advice := _what_was_meant(error):
                raise BadInput(advice) from None
            raise


def _what_was_meant(error: Any) -> str:
    """A suggestion for an experiment's key written as an option, or for too many folders."""
    command = error.ctx and error.ctx.command
    if command is None:
        return ""
    known = {parameter.name for parameter in command.params}
    option = getattr(error, "option_name", "")
    if option.startswith("--") and "overrides" in known:
        key = option.lstrip("-").replace("-", "_")
        words = iter(sys.argv)
        value = next((next(words, "") for word in words if word == option), "") or "VALUE"
        given = f"{key_of(key)}={value}"
        return f"{error.format_message()}; keys of the experiment take no dashes: {given}"
    if "folder" in known and error.format_message().startswith("Got unexpected extra argument"):
        first = error.ctx.params.get("folder")
        what = f"fedsim {command.name} takes one folder"
        return what if first is None else f"{what}; {first.parent} means the latest below it"
    return ""


def key_of(name: str) -> str:
    """The `section.key` of a key's name, if it is unambiguous."""
    from fedsim.experiment import COMPONENTS, Experiment
    from fedsim.training import Train

    if name in Experiment.model_fields:
        return name
    if name in Train.model_fields:
        return f"train.{name}"
    having = {
        section: sum(name in component.model_fields for _, component in registry.items())
        for section, registry in COMPONENTS.items()
    }
    section = max(having, key=having.__getitem__)
    if having[section]:
        return f"{section}.{name}"
    for section, field in Experiment.model_fields.items():
        if name in getattr(field.annotation, "model_fields", {}):
            return f"{section}.{name}"
    return f"section.{name}"


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _Terminal(Console):
    """Prints strings as they are: names and messages may come from the files of others."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)


# No emoji: ":100:" is a line number.
out = _Terminal(
    highlight=False,
    soft_wrap=True,
    emoji=False,
    markup=False,
    width=None if sys.stdout.isatty() else 160,  # files and pipes have no width
)
err = _Terminal(stderr=True, highlight=False, soft_wrap=True, emoji=False, markup=False)

File = Annotated[Path, typer.Argument(help="An experiment file (YAML).")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value; can be repeated.")]
FolderArgument = Annotated[
    Path, typer.Argument(help="Folder of a run, grid or search; of one with several the latest.")
]
RunArgument = Annotated[
    Path, typer.Argument(help="A run's folder; of one with several runs the latest.")
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
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version)
    ] = False,
) -> None:
    """Explainable federated learning, simulated on Ray."""


def latest(folder: Path, kind: str | None = None, trust: bool = False) -> Path:
    """The given folder of results, or the latest below it, which is named on stderr."""
    from fedsim.results.folder import open_folder
    from fedsim.results.manifest import latest_first, meant

    found = meant(folder, kind)
    if found != folder:
        count, what = len(latest_first(folder, kind)), kind or "result"
        several = f" of {count} {what}s" if count > 1 else f" {what}"
        err.print(f"{folder}: the latest{several}, {found.relative_to(folder)}")
    if trust:
        open_folder(found).trust()
    return found


def print_table(
    columns: Sequence[str],
    rows: Iterable[Iterable[Any]],
    *,
    right: Container[str] = (),
    whole: Container[str] = (),
    header: bool = True,
) -> None:
    """Print a table without trailing spaces."""
    table = Table(box=None, pad_edge=False, show_header=header)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        table.add_column(column, justify=justify, no_wrap=column in whole, overflow="fold")
    for row in rows:
        table.add_row(*row)
    with out.capture() as capture:
        out.print(table)
    lines = [line.rstrip() for line in capture.get().split("\n")[:-1]]
    out.file.write("\n".join([*lines, ""]))  # as it is: in a terminal it has styles


def print_json(content: Any) -> None:
    """Print strict JSON for scripts, with null for numbers that are not finite."""
    text = json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False)
    typer.echo(CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


@contextmanager
def writing() -> Iterator[None]:
    """Context in which files that cannot be written are one error message."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{error.filename}: cannot be written: {error.strerror}") from error


def say_written(paths: Iterable[Path]) -> None:
    for path in paths:
        out.print(f"written: {short(path.absolute())}")
