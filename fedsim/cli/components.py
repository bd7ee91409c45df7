"""Commands about what an experiment file can hold."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from rich.table import Table

from fedsim.cli.console import app, out
from fedsim.errors import BadInput
from fedsim.registry import first_line, nearest

KINDS = {  # of components, and where their registries are
    "methods": "fedsim.methods",
    "datasets": "fedsim.data",
    "models": "fedsim.models",
    "partitions": "fedsim.data",
    "objectives": "fedsim.objectives",
    "attributions": "fedsim.explain.attribution",
    "explainers": "fedsim.explain",
}


@app.command("list")
def list_command(
    sort: Annotated[str, typer.Argument(help=f"One of: {', '.join(KINDS)}.", show_default=False)],
) -> None:
    """List what an experiment can name, with the keys that each takes and their defaults."""
    if sort not in KINDS:
        raise BadInput(f"there is no list of '{sort}'{nearest(sort, KINDS)}")
    registry = getattr(import_module(KINDS[sort]), sort)
    table = Table(box=None, pad_edge=False)
    for column in ("name", "keys", "what it is"):
        table.add_column(column)
    for name, component in registry.items():
        keys = []
        for key, field in component.model_fields.items():
            if key != registry.key:
                keys.append(key if field.is_required() else f"{key}={_plain(field.default)}")
        table.add_row(name, "\n".join(keys), first_line(component), end_section=True)
    out.print(table)
    out.print(f"\nand your own: {registry.key}: package.module:Name", markup=False)


def _plain(value: Any) -> str:
    return "" if value is None else str(value)
