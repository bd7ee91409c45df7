"""Commands that describe the components and keys of experiment files."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel
from pydantic_core import PydanticCustomError
from rich.text import Text

import fedsim
from fedsim.cli.console import AsJson, app, out, print_json, print_table
from fedsim.config.registry import first_line, nearest, summary
from fedsim.errors import BadInput
from fedsim.support.words import visible

if TYPE_CHECKING:
    from fedsim.config.registry import Config, Registry

KINDS = {  # kinds of components: their registry and description
    "methods": ("fedsim.methods", "federated algorithms"),
    "datasets": ("fedsim.data", "data sets, and readers of your own files"),
    "models": ("fedsim.models", "network architectures, rule models, trees"),
    "partitions": ("fedsim.data", "ways to divide data among clients"),
    "objectives": ("fedsim.objectives", "losses and metrics"),
    "attributions": ("fedsim.explain.explainers.attribution", "relevance maps of networks"),
    "explainers": ("fedsim.explain.explainers", "explanations of models and of runs"),
    "codecs": ("fedsim.conditions.codecs", "compression of updates and models: uplink, downlink"),
    "aggregators": ("fedsim.conditions.aggregators", "rules to aggregate clients' updates by"),
    "attacks": ("fedsim.conditions.adversaries", "what adversaries among the clients do"),
    "unlearning": ("fedsim.analysis.unlearning", "ways to make a finished run forget clients"),
}


DESCRIBED = {kind: what for kind, (_, what) in KINDS.items()}
DESCRIBED["metrics"] = "additional scores: evaluate.metrics"


def registered(kind: str) -> list[str]:
    """Names of built-in components of a kind, for completion."""
    pattern = rf'^@{kind}\.register\n(?:@.+\n)*class .+:\n(?:    .*\n|\n)*?    \w+: str = "(\w+)"'
    sources = Path(fedsim.__file__).parent.rglob("*.py")
    return sorted(
        name for source in sources for name in re.findall(pattern, source.read_text(), re.M)
    )


def complete_method(incomplete: str) -> list[str]:
    return [name for name in registered("methods") if name.startswith(incomplete)]


def complete_explainer(incomplete: str) -> list[str]:
    return [name for name in registered("explainers") if name.startswith(incomplete)]


def complete_unlearning(incomplete: str) -> list[str]:
    return [name for name in registered("unlearning") if name.startswith(incomplete)]


def _complete_name(context: typer.Context, incomplete: str) -> list[str]:
    kind = context.params.get("kind")
    return [name for name in registered(kind) if name.startswith(incomplete)] if kind else []


@app.command("list")
def list_command(
    kind: Annotated[
        str | None,
        typer.Argument(
            help=f"One of: {', '.join(DESCRIBED)}.",
            autocompletion=lambda incomplete: [
                (kind, what) for kind, what in DESCRIBED.items() if kind.startswith(incomplete)
            ],
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Argument(help="A component's name.", autocompletion=_complete_name)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the available components; with a name, show its documentation and its keys."""
    if kind is None:
        if as_json:
            from fedsim.objectives.metrics import KNOWN_METRICS

            names = {kind: registered(kind) for kind in KINDS}
            print_json({**names, "metrics": sorted(KNOWN_METRICS)})
            return
        commands = [(f"fedsim list {kind}", what) for kind, what in DESCRIBED.items()]
        print_table(("command", "what"), commands, header=False)
        return
    if kind == "metrics" and name is None:
        _list_metrics(as_json)
        return
    if kind not in KINDS:
        if kind == "metrics":
            raise BadInput("metrics have no keys; fedsim list metrics describes them")
        raise BadInput(f"there is no list of '{kind}'{nearest(kind, DESCRIBED)}")
    registry: Registry[Any] = getattr(import_module(KINDS[kind][0]), kind)
    if name is not None:
        try:
            component = registry.find(name)
        except PydanticCustomError as error:
            raise BadInput(error.message()) from None
        _show_component(name, component, registry.key, as_json)
        return
    if as_json:
        print_json([{"name": n, "description": first_line(c)} for n, c in registry.items()])
        return
    rows: list[tuple[str, Text]] = []
    usual_first = sorted(registry.items(), key=lambda item: item[1].niche)
    first_niche = next((name for name, component in usual_first if component.niche), None)
    for name, component in usual_first:
        if name == first_niche:
            rows.append(("", Text("\nfor certain problems or papers:", "bold")))
        keys = []
        for key, field in component.model_fields.items():
            if key != registry.key:
                default = field.get_default(call_default_factory=True)
                keys.append(key if field.is_required() else f"{key}={_plain(default)}")
        what = Text(visible(first_line(component)))
        rows.append((name, what.append(f"\n{', '.join(keys)}", "dim") if keys else what))
    print_table(("name", "what it is, and its keys"), rows, whole=("name",))
    out.print(f"\nand your own: {registry.key}: package.module:Name")


def _list_metrics(as_json: bool) -> None:
    from fedsim.objectives.metrics import KNOWN_METRICS

    if as_json:
        print_json([{"name": n, "description": w} for n, w in sorted(KNOWN_METRICS.items())])
        return
    print_table(("name", "what it is"), sorted(KNOWN_METRICS.items()))
    out.print("\nand your own: package.module:function of (outputs, targets)")


def _show_component(name: str, component: type[Config], key: str, as_json: bool) -> None:
    from fedsim.cli.schema import component_schema, type_in_words

    schema = component_schema(component)
    if as_json:
        print_json(schema)
        return
    out.print(f"{name} ({component.__module__}.{component.__qualname__})\n")
    out.print(summary(component))
    rows = []
    required = schema.get("required", [])
    for each, node in schema["properties"].items():
        if each != key:
            default = "(required)" if each in required else _plain(node.get("default", ""))
            words = type_in_words(node, schema["$defs"])
            rows.append((each, words, default, node.get("description", "")))
    if rows:
        out.print("")
        print_table(("key", "type", "default", "meaning"), rows)


def _plain(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):  # a component, or a section
        return str(value.get("name", "{…}"))
    return "null" if value is None else str(value)


@app.command("schema")
def schema_command() -> None:
    """Print the JSON schema of experiment files, for completion and checks in editors."""
    from fedsim.cli.schema import experiment_schema

    print_json(experiment_schema())
