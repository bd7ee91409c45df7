"""`fedsim new`: files to start from."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

from fedsim.cli.console import app, out, say_written, writing
from fedsim.config.registry import nearest
from fedsim.errors import BadInput

TEMPLATES = Path(__file__).with_name("templates")
KINDS = ("method", "model", "data", "explainer", "experiment")
FILES = ("{}.py", "{}.yaml", "test_{}.py")  # made from the templates of these names


@app.command("new")
def new_command(
    kind: Annotated[
        str,
        typer.Argument(
            help=f"One of: {', '.join(KINDS)}.",
            autocompletion=lambda incomplete: [k for k in KINDS if k.startswith(incomplete)],
        ),
    ],
    name: Annotated[str, typer.Argument(help="Name of the component and its files.")],
) -> None:
    """Create a template of a method, model, data set, explainer or experiment, with a test."""
    if kind not in KINDS:
        raise BadInput(f"there is no template '{kind}'{nearest(kind, KINDS)}")
    if not _fits(name):
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
        better = re.sub(r"\W+", "_", words, flags=re.ASCII).strip("_")
        hint = better if _fits(better) else f"my_{better}".rstrip("_")
        raise BadInput(
            f"'{name}' cannot be the name of a Python module: lower-case letters, digits and _; "
            f"for example {hint}"
        )
    files = {TEMPLATES / file.format(kind): Path(file.format(name)) for file in FILES}
    files = {template: path for template, path in files.items() if template.exists()}
    for path in files.values():
        if path.exists():
            raise BadInput(f"{path}: exists; nothing was written")
    if importlib.util.find_spec(name) is not None:
        raise BadInput(f"'{name}' is the name of an installed module; choose another one")
    title = "".join(part.capitalize() for part in name.split("_"))
    with writing():
        for template, path in files.items():
            text = template.read_text(encoding="utf-8")
            with path.open("x", encoding="utf-8") as file:
                file.write(text.replace("template", name).replace("Template", title))
    say_written(files.values())
    out.print(f"\nto run it:\n  fedsim run {name}.yaml")
    if Path(f"test_{name}.py") in files.values():
        out.print(f"to test it:\n  python -m pytest test_{name}.py")


def _fits(name: str) -> bool:
    return bool(re.fullmatch(r"[a-z][a-z0-9_]*", name)) and not keyword.iskeyword(name)
